"""Tests that tokens that are emitted together (accepted drafts) form one message."""

from __future__ import annotations

import json
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from simkv.core.request import Request
from simkv.metrics.prometheus_metrics import FOLDER
from simkv.serve.partial_reply import Reply
from tests.serve.running_server import scenario, serving


def ends(reply: Reply) -> list[int]:
    """Return the last token count of each available message."""
    found = [0]
    while found[-1] < reply.tokens:
        found.append(reply.message(found[-1]))
    return found[1:]


def test_late_reader_gets_separate_messages() -> None:
    reply, engine = Reply(Request(0, 5, 20)), object()
    for tokens in (1, 3, 1, 1, 2):
        reply.add_tokens(0.0, engine, tokens)
    assert ends(reply) == [1, 4, 5, 6, 8]
    reply.add_tokens(0.0, engine, 4)
    assert [reply.message(8), reply.tokens] == [12, 12]


def test_tokens_repeated_by_other_replica_are_not_resent() -> None:
    reply = Reply(Request(0, 5, 20))
    reply.add_tokens(0.0, "first", 3)
    for tokens in (1, 4, 1):
        reply.add_tokens(0.0, "second", tokens)
    assert ends(reply) == [3, 5, 6]


def test_stream_has_one_chunk_per_step(tmp_path: Path) -> None:
    text = scenario().replace("max_num_seqs: 64", "max_num_seqs: 64\n  num_speculative_tokens: 4")
    text += "workload:\n  acceptance: 1.0\n"
    text += "  burst: {num_prompts: 1, prompt_tokens: 5, output_tokens: 5}\n"
    body = {"prompt": [1] * 10, "max_tokens": 21, "ignore_eos": True}
    with serving(tmp_path, text) as served:
        stream = served.stream(body | {"stream_options": {"include_usage": True}})
        chunks = []
        while chunk := stream.chunk():
            chunks.append(chunk)
        metrics = served.get("/metrics").text
    told = [chunk["choices"] for chunk in chunks]
    assert [len(choices) for choices in told] == [1, 1, 1, 1, 1, 0]
    assert [choices[0]["finish_reason"] for choices in told[:-1]] == [None] * 4 + ["length"]
    assert chunks[-1]["usage"]["completion_tokens"] == 21
    assert "vllm:generation_tokens_total" in metrics
    (line,) = [m for m in metrics.splitlines() if m.startswith("vllm:generation_tokens_total")]
    assert float(line.split()[-1]) == 21
    told = {  # four verifications of four drafts, all accepted
        sample.labels.get("position", sample.name.removeprefix("vllm:spec_decode_num_")): sample
        for family in text_string_to_metric_families(metrics)
        if family.name.startswith("vllm:spec_decode_")
        for sample in family.samples
    }
    assert {name: sample.value for name, sample in told.items()} == {
        "drafts_total": 4,
        "draft_tokens_total": 16,
        "accepted_tokens_total": 16,
        **dict.fromkeys("0123", 4),
    }
    (part,) = json.loads((FOLDER / "vllm.json").read_text())["when"]
    assert {row["name"] + "_total" for row in part["metrics"]} == {s.name for s in told.values()}
    for sample in told.values():
        assert set(sample.labels) - {"position"} == {"model_name", "engine"}
