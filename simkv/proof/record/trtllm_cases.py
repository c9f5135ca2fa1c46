"""Small random workloads on which the scheduler of TensorRT-LLM is recorded."""

from __future__ import annotations

import random
from typing import Any

from simkv.core.recording import Line
from simkv.proof.record.case import CaseForm, DrawnCase, field_of
from simkv.schedulers.trtllm.config import VARIANTS, TrtllmConfig

#: Plain, with clients that leave, with little room.
KINDS = ("rand", "gone", "tight")

#: Knobs for each of which recordings are kept that are otherwise without it.
SHOWN_KNOBS = (
    "capacity_scheduler_policy",
    "enable_chunked_prefill",
    "context_chunking_policy",
    "disable_overlap_scheduler",
    "max_seq_len",
)

#: Cases of a revision that show what few do: an engine that dies of a paused request that no step
#: takes whole, a last token that comes in the step of a pause, the last of several that is paused,
#: and the first that stops all behind it.
RARE = {
    "5f480b7a6": [
        *("tight-206", "tight-451", "tight-595"),
        *("tight-299", "tight-175", "tight-203", "tight-210"),
    ]
}


def variant_of(version: str) -> str:
    """The variant whose knobs ``version`` has: itself, or the newest if it is not known yet."""
    return version if version in VARIANTS else next(iter(VARIANTS))


def names_of(_: str, count: int) -> list[str]:
    """``count`` names of random cases, the kinds by turns."""
    return [f"{KINDS[i % len(KINDS)]}-{i // len(KINDS):03}" for i in range(count)]


def trtllm_case(version: str, name: str) -> DrawnCase:
    """The case of this name: a kind of ``KINDS`` and a number."""
    draw = random.Random(f"{version} {name}")
    kind, _ = name.split("-")
    config = _knobs(draw, version, tight=kind == "tight")
    most = config.longest - 1
    if not config.enable_chunked_prefill:
        most = min(most, config.max_num_tokens)
    requests = _some_requests(draw, most // 3 + 1 if kind == "tight" else most)
    leave = kind == "gone" or draw.random() < 0.2
    return DrawnCase(config, requests, _leaving(draw, requests) if leave else ())


def _knobs(draw: random.Random, version: str, *, tight: bool) -> TrtllmConfig:
    """A pool that is soon full."""
    block = draw.choice([1, 2, 4] if tight else [1, 4, 8, 16])
    least, largest = (12, 60) if tight else (48, 400)
    pool = block * draw.randint(-(-least // block), -(-largest // block))
    chunked = draw.random() < 0.5
    knobs: dict[str, Any] = {
        "variant": variant_of(version),
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


def _some_requests(draw: random.Random, most: int) -> list[Line]:
    """Requests that come within a few dozen steps, of prompts of ``most`` tokens at most."""
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


def _leaving(draw: random.Random, requests: list[Line]) -> list[tuple[int, int, int]]:
    """Some clients leave, in an order of their own."""
    some = draw.sample(requests, draw.randint(1, max(1, len(requests) // 2)))
    return sorted(
        (r["arrival_step"] + draw.randint(1, 25), draw.randint(0, 2), r["id"]) for r in some
    )


def _cut(request: Line, tokens: int) -> Line:  # noqa: ARG001
    return {"prompt_tokens": tokens}


FORM = CaseForm(
    kept=(
        "variant",
        "tokens_per_block",
        "max_tokens_in_paged_kv_cache",
        "max_batch_size",
        "max_num_tokens",
    ),
    plain={},
    cut=_cut,
    limit="max_tokens",
    idle=(),
    columns={
        "request": field_of("id"),
        "before step": field_of("arrival_step"),
        "prompt": field_of("prompt_tokens"),
        "output": field_of("output_tokens"),
        "limit": field_of("max_tokens"),
    },
)
