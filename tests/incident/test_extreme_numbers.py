"""Tests of impossible numbers in logs, results, spans, profiles and scenarios: one line of error
each.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.costs.cost_profile import PACKAGED, load_profile
from simkv.incident.source_reader import read_source
from simkv.scenario.yaml_document import read_document
from simkv.workload.trace_reader import read_trace

HUGE = ["9" * 20, "9" * 5000, "1e400", "1.2.3"]
VLLM = (
    "INFO 09-13 12:00:00 [core.py:1] vLLM API server version 0.12.0\n"
    "INFO 09-13 12:00:10 [loggers.py:1] Engine 000: Avg prompt throughput: 1.0 tokens/s, "
    "Avg generation throughput: 5.0 tokens/s, Running: NUMBER reqs, Waiting: 2 reqs, "
    "GPU KV cache usage: 12.5%, Prefix cache hit rate: 0.0%\n"
)
SGLANG = (
    "[2026-09-13 12:00:12] Decode batch. #running-req: NUMBER, #token: 10, token usage: 0.12, "
    "gen throughput (token/s): 1.00, #queue-req: 0\n"
)


@pytest.mark.parametrize("number", HUGE[:2])
@pytest.mark.parametrize(("text", "line"), [(VLLM, 2), (SGLANG, 1)])
def test_a_log(text: str, line: int, number: str, tmp_path: Path) -> None:
    (tmp_path / "server.log").write_text(text.replace("NUMBER", number))
    with pytest.raises(InputError, match=f"server.log:{line}: contains an impossible value"):
        read_source(tmp_path / "server.log")


@pytest.mark.parametrize("rate", HUGE)
def test_a_rate_in_a_log(rate: str, tmp_path: Path) -> None:
    text = VLLM.replace("NUMBER", "3").replace("throughput: 5.0", f"throughput: {rate}")
    (tmp_path / "server.log").write_text(text)
    try:
        read_source(tmp_path / "server.log")
    except InputError as error:
        assert "server.log:2: contains an impossible value" in str(error)  # noqa: PT017
    else:
        assert rate == "1e400"  # does not match the form of a rate in the line


RESULT: dict[str, Any] = {
    "duration": 10.0,
    "completed": 2,
    "input_lens": [10, 20],
    "output_lens": [5, 6],
    "ttfts": [0.1, 0.2],
    "itls": [[0.1] * 4, [0.1] * 5],
    "start_times": [1.0, 2.0],
    "errors": ["", ""],
    "generated_texts": ["a", "b"],
}


@pytest.mark.parametrize("wrong", [{"itls": [[0.1, []], [0.1]]}, {"ttfts": ["x", 1]}])
def test_results_of_a_benchmark(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text(json.dumps(RESULT | wrong))
    with pytest.raises(InputError, match=r"result.json: ttfts, itls: should be numbers"):
        read_source(tmp_path / "result.json")


@pytest.mark.parametrize(
    ("name", "value"),
    [("prompt_tokens", 10**30), ("prompt_tokens", 1e308), ("start", "true"), ("start", 10**400)],
)
def test_spans(name: str, value: object, tmp_path: Path) -> None:
    given = {"start": 17e17, "prompt_tokens": 10, "completion_tokens": 5} | {name: value}
    usage = {f"gen_ai.usage.{key}": value for key, value in given.items() if key != "start"}
    times = dict.fromkeys(("time_to_first_token", "e2e", "time_in_queue"), 1.0)
    usage |= {f"gen_ai.latency.{key}": value for key, value in times.items()}
    told = [{"key": key, "value": {"doubleValue": value}} for key, value in usage.items()]
    span = {"name": "llm_request", "startTimeUnixNano": given["start"], "attributes": told}
    text = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})
    (tmp_path / "spans.json").write_text(text)
    with pytest.raises(InputError, match=rf"spans.json:1: .*{name}|not JSON"):
        read_trace(tmp_path / "spans.json")


@pytest.mark.parametrize("number", ["1e308", "-1e308", "1e16", "1e400", "NaN", "1" * 5000])
def test_a_profile(number: str, tmp_path: Path) -> None:
    text = (PACKAGED / "unit-step.json").read_text()
    told = json.loads(text)
    told["terms"][0] = {"name": "step", "feature": "steps", "seconds": "NUMBER"}
    (tmp_path / "p.json").write_text(json.dumps(told).replace('"NUMBER"', number))
    with pytest.raises(InputError) as raised:
        load_profile("p.json", tmp_path)
    assert "p.json: " in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "number", ["0x" + "f" * 100_000, "9" * 100_000, "1" + ":30" * 6000, "-" + "9" * 19]
)
def test_a_scenario(number: str, tmp_path: Path) -> None:
    head = "%YAML 1.1\n---\n" if ":" in number else "# 1\n# 2\n"
    (tmp_path / "s.yaml").write_text(f"{head}engine:\n  name: vllm\n  num_gpu_blocks: {number}\n")
    with pytest.raises(InputError) as raised:
        read_document(tmp_path / "s.yaml")
    assert "s.yaml:5: " in str(raised.value)
    assert "digits" in str(raised.value)
    assert len(str(raised.value)) < 300


def test_an_option_in_a_message_is_cut(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("name: s\n")
    with pytest.raises(InputError, match=r"at most 18 digits") as raised:
        read_document(tmp_path / "s.yaml").override("seed=0x" + "f" * 10_000)
    assert len(str(raised.value)) < 500
