"""Small random workloads on which the scheduler of TensorRT-LLM is recorded."""

from __future__ import annotations

from random import Random
from typing import Any

from simkv.conformance.record.case_sampling import (
    GAPS,
    add_follow_ups,
    case_numbers,
    sample_aborts,
    sample_requests,
    sample_settings,
)
from simkv.conformance.record.recording_case import CaseSchema, RecordingCase
from simkv.native.trtllm.trtllm_driver import NATIVE_TRTLLM
from simkv.schedulers.trtllm.config import TrtllmConfig
from simkv.schedulers.trtllm.recording import RECORDING

#: Kinds of cases. Without block reuse: plain, with aborts, with little memory. With block reuse:
#: plain, with aborts, and with so little memory that requests with shared blocks are paused.
KINDS = ("rand", "gone", "tight", "reuse", "left", "press")

#: Settings for which additional recordings are kept if no other recording depends on them.
SHOWN_KNOBS = (
    "capacity_scheduler_policy",
    "enable_chunked_prefill",
    "context_chunking_policy",
    "disable_overlap_scheduler",
    "max_seq_len",
    "enable_block_reuse",
)


def case_names(_: str, count: int) -> list[str]:
    """Return ``count`` names of random cases; the kinds alternate."""
    return case_numbers(KINDS, count)


def make_case(version: str, name: str) -> RecordingCase:
    """Build the case with this name, which consists of a kind in ``KINDS`` and a number."""
    draw, kind = Random(f"{version} {name}"), name.split("-")[0]
    reuse = kind in ("reuse", "left", "press")
    tight = kind in ("tight", "press") or (reuse and draw.random() < 0.5)
    config = _config(draw, version, kind, tight=tight, reuse=reuse)
    most = config.longest - 1
    if not config.enable_chunked_prefill:
        most = min(most, config.max_num_tokens)
    gaps, outputs = ((0, 0, 1, 6), (8, 24)) if kind == "press" else (GAPS, (1, 8, 40))
    requests = sample_requests(draw, most // 3 + 1 if tight else most, gaps, outputs)
    for _ in range(2 * reuse):
        requests = add_follow_ups(draw, requests, most)
    leave = kind in ("gone", "left") or (kind != "reuse" and draw.random() < 0.2)
    lines = [RECORDING.request_line(request, int(request.arrival)) for request in requests]
    return RecordingCase(config, lines, sample_aborts(draw, requests) if leave else ())


def _config(draw: Random, version: str, kind: str, *, tight: bool, reuse: bool) -> TrtllmConfig:
    """Return a config with a KV cache that fills up quickly."""
    block = draw.choice([1, 2, 4] if tight else [1, 4, 8, 16])
    least, largest = (12, 60) if tight else (48, 400)
    pool = block * draw.randint(-(-least // block), -(-largest // block))
    policies: tuple[Any, ...] = ("MAX_UTILIZATION", "GUARANTEED_NO_EVICT", "STATIC_BATCH")
    press = kind == "press"
    knobs = sample_settings(
        draw,
        {
            "variant": (NATIVE_TRTLLM.variant_of(version),),
            "max_seq_len": (None, None, range(max(6, pool // 3), pool + 1)),
            "max_batch_size": (8,) if press else (range(1, 7 if tight else 13),),
            "max_num_tokens": (range(max(block, 6), pool + 1),),
            "capacity_scheduler_policy": policies[: 1 if press else 3] + policies[:1],
            "enable_chunked_prefill": (True, False),
            "disable_overlap_scheduler": (True, True, False, False, False),
        },
    )
    if knobs["enable_chunked_prefill"] and draw.random() < 0.5:
        knobs["context_chunking_policy"] = "EQUAL_PROGRESS"
    return TrtllmConfig(
        tokens_per_block=block,
        max_tokens_in_paged_kv_cache=pool,
        enable_block_reuse=reuse,
        **knobs,
    )


CASE_SCHEMA = CaseSchema(
    case_names,
    make_case,
    kept=(
        "variant",
        "tokens_per_block",
        "max_tokens_in_paged_kv_cache",
        "max_batch_size",
        "max_num_tokens",
    ),
    plain={"enable_block_reuse": False},
    shown=SHOWN_KNOBS,
)
