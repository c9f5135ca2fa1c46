"""Small random workloads on which the scheduler of TensorRT-LLM is recorded."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from simkv.conformance.record.recording_case import CaseSchema, RecordingCase, field_column
from simkv.core.recording_format import RecordingLine
from simkv.schedulers.trtllm.config import VARIANTS, TrtllmConfig

#: Kinds of cases. Without block reuse: plain, with aborts, with little memory. With block reuse:
#: plain, with aborts, and with so little memory that requests with shared blocks are paused.
KINDS = ("rand", "gone", "tight", "reuse", "left", "press")
REUSE_KINDS = ("reuse", "left", "press")

#: Settings for which additional recordings are kept if no other recording depends on them.
SHOWN_KNOBS = (
    "capacity_scheduler_policy",
    "enable_chunked_prefill",
    "context_chunking_policy",
    "disable_overlap_scheduler",
    "max_seq_len",
    "enable_block_reuse",
)

#: Cases of a revision that show rare behavior. A paused request that does not fit into one step
#: crashes the engine; a last token is emitted in the step of a pause; the last of several requests
#: is paused; the first request blocks all requests behind it.
RARE = {
    "5f480b7a6": [
        *("tight-206", "tight-451", "tight-595"),
        *("tight-299", "tight-175", "tight-203", "tight-210"),
    ]
}


def base_variant(version: str) -> str:
    """Return the variant whose settings are used for ``version``.

    This is ``version`` if it is known, and the newest known variant if it is not.
    """
    return version if version in VARIANTS else next(iter(VARIANTS))


def case_names(_: str, count: int) -> list[str]:
    """Return ``count`` names of random cases; the kinds of cases alternate."""
    return [f"{KINDS[i % len(KINDS)]}-{i // len(KINDS):03}" for i in range(count)]


def make_case(version: str, name: str) -> RecordingCase:
    """Build the case with this name, which consists of a kind in ``KINDS`` and a number."""
    draw = random.Random(f"{version} {name}")
    kind, _ = name.split("-")
    reuse = kind in REUSE_KINDS
    tight = kind in ("tight", "press") or (reuse and draw.random() < 0.5)
    config = replace(_knobs(draw, version, tight=tight), enable_block_reuse=reuse)
    if kind == "press":
        config = replace(config, capacity_scheduler_policy="MAX_UTILIZATION", max_batch_size=8)
    most = config.longest - 1
    if not config.enable_chunked_prefill:
        most = min(most, config.max_num_tokens)
    requests = _some_requests(draw, most // 3 + 1 if tight else most)
    if reuse:
        _share(draw, requests, most)
    leave = kind in ("gone", "left") or (kind != "reuse" and draw.random() < 0.2)
    if kind == "press":
        _lengthen(draw, requests)
    return RecordingCase(config, requests, _leaving(draw, requests) if leave else ())


def _knobs(draw: random.Random, version: str, *, tight: bool) -> TrtllmConfig:
    """Return a config with a KV cache that fills up quickly."""
    block = draw.choice([1, 2, 4] if tight else [1, 4, 8, 16])
    least, largest = (12, 60) if tight else (48, 400)
    pool = block * draw.randint(-(-least // block), -(-largest // block))
    chunked = draw.random() < 0.5
    knobs: dict[str, Any] = {
        "variant": base_variant(version),
        "tokens_per_block": block,
        "max_tokens_in_paged_kv_cache": pool,
        "max_seq_len": draw.choice([None, None, draw.randint(max(6, pool // 3), pool)]),
        "max_batch_size": draw.randint(1, 6 if tight else 12),
        "max_num_tokens": draw.randint(max(block, 6), pool),
        "capacity_scheduler_policy": draw.choice(
            ["MAX_UTILIZATION", "MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH"]
        ),
        "enable_chunked_prefill": chunked,
        "disable_overlap_scheduler": draw.random() < 0.4,
    }
    if chunked and draw.random() < 0.5:
        knobs["context_chunking_policy"] = "EQUAL_PROGRESS"
    return TrtllmConfig(**knobs)


def _some_requests(draw: random.Random, most: int) -> list[RecordingLine]:
    """Return requests that arrive within a few dozen steps, with at most ``most`` prompt tokens."""
    return [
        {
            "id": i,
            "arrival_step": draw.choice([0, 0, draw.randint(0, 12), draw.randint(0, 40)]),
            "prompt_tokens": draw.randint(1, draw.choice([most, max(1, most // 3)])),
            "output_tokens": (output := draw.choice([1, draw.randint(1, 8), draw.randint(9, 40)])),
            "max_tokens": output + draw.choice([0, 0, draw.randint(1, 30)]),
        }
        for i in range(draw.randint(2, 14))
    ]


def _share(draw: random.Random, requests: list[RecordingLine], most: int) -> None:
    """Make some prompts share a common prefix or continue an earlier prompt and its output."""
    for i, r in enumerate(requests):
        before = draw.choice(requests[:i]) if i and draw.random() < 0.4 else None
        if before:
            pieces = [*before["segments"], [f"o{before['id']}", 0, before["output_tokens"]]]
        else:
            pieces = [[draw.choice(["g0", "g0", "g1"]), 0, r["prompt_tokens"]]]
        whole = sum(end - start for _, start, end in pieces)
        own = draw.choice([0, 1, draw.randint(0, max(1, most // 4))])
        common = draw.choice([whole, draw.randint(0, whole)])
        pieces = [*_first(pieces, min(common, most - own)), [f"u{r['id']}", 0, own]]
        r["segments"] = [piece for piece in pieces if piece[2] > piece[1]] or [
            [f"u{r['id']}", 0, 1]
        ]
        r["prompt_tokens"] = sum(end - start for _, start, end in r["segments"])


def _lengthen(draw: random.Random, requests: list[RecordingLine]) -> None:
    """Make requests arrive together, with outputs that grow until the KV cache is full."""
    for r in requests:
        r["output_tokens"] = draw.randint(4, 24)
        r["max_tokens"] = r["output_tokens"] + draw.choice([0, 0, 9])
        r["arrival_step"] = draw.choice([0, draw.randint(0, 6), draw.randint(0, 60)])


def _first(pieces: list[list[Any]], tokens: int) -> list[list[Any]]:
    """Return the segments of a prompt that is shortened to ``tokens``."""
    kept = []
    for stream, start, end in pieces:
        if tokens > 0:
            kept.append([stream, start, min(end, start + tokens)])
        tokens -= end - start
    return kept


def _leaving(draw: random.Random, requests: list[RecordingLine]) -> list[tuple[int, int, int]]:
    """Return aborts of some requests, at random steps after their arrival."""
    some = draw.sample(requests, draw.randint(1, max(1, len(requests) // 2)))
    return sorted(
        (r["arrival_step"] + draw.randint(1, 25), draw.randint(0, 2), r["id"]) for r in some
    )


def _cut(request: RecordingLine, tokens: int) -> RecordingLine:
    more = {"segments": _first(request["segments"], tokens)} if "segments" in request else {}
    return {"prompt_tokens": tokens, **more}


CASE_SCHEMA = CaseSchema(
    kept=(
        "variant",
        "tokens_per_block",
        "max_tokens_in_paged_kv_cache",
        "max_batch_size",
        "max_num_tokens",
    ),
    plain={"enable_block_reuse": False},
    cut=_cut,
    limit="max_tokens",
    idle=(),
    columns={
        "request": field_column("id"),
        "before step": field_column("arrival_step"),
        "prompt": field_column("prompt_tokens"),
        "output": field_column("output_tokens"),
        "limit": field_column("max_tokens"),
    },
)
