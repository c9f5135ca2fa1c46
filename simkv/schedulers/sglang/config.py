"""The knobs of SGLang, and the releases that have them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt

from simkv.core.scheduler import Variant
from simkv.schedulers.sglang.prefill import Policy

VARIANTS: dict[str, Variant] = {
    "0.5.23": Variant(
        source="PyPI sglang==0.5.23, managers/scheduler.py and schedule_policy.py",
        summary="prefill first, decode memory promised by a decaying ratio, retraction to the tail",
    ),
    "0.5.23-lpm-aging": Variant(
        source="PyPI sglang==0.5.23 with sgl-project/sglang#31723 (2026-07-19, open)",
        summary="0.5.23; under lpm every pass that a request waited counts like cached tokens",
    ),
}


@dataclass(frozen=True)
class SglangConfig:
    """SGLang's knobs under the names of its flags (environment variables in lower case).

    ``max_total_num_tokens`` is the KV pool in tokens (``--max-total-tokens``; the product takes
    what the GPU's memory holds, the default is ours), handed out in pages of ``page_size`` tokens
    (1). At most ``max_running_requests`` (the product derives 2048 to 4096) hold a row at a time.

    A prefill pass computes up to ``chunked_prefill_size`` tokens (the product takes 2048 to 16384
    by GPU; 8192 on 80 GB; -1 is off) and cuts the prompt that passes it; it ends when
    ``max_prefill_tokens`` (16384) are reached or ``prefill_max_requests`` (no limit) chosen.
    ``schedule_policy`` is fcfs, lpm or hrrn; the last two fall back to fcfs with
    ``disable_radix_cache``. With ``enable_mixed_chunk`` running requests decode in the prefill's
    step. After a prefill ``prefill_decode_interval`` (0) steps take none, if at least
    ``prefill_decode_interval_min_bs`` (0) requests run. Unless ``disable_overlap_schedule``, a
    step is scheduled before the tokens of the step before it are known.

    A running request is promised the tokens it may still emit, at most
    ``clip_max_new_tokens_estimation`` (4096), times a ratio. The ratio starts at
    ``init_new_token_ratio`` (0.7) times ``schedule_conservativeness`` (1.0), at most 1, and falls
    to ``min_new_token_ratio_factor`` (0.14) of that in ``new_token_ratio_decay_steps`` (600)
    decode steps; a retraction sets it so that the others can go on for about
    ``retract_decode_steps`` (20) steps.

    ``in_batch_prefix_caching_*_threshold`` (32 and 32 tokens): lpm and hrrn hold back a request
    with at most ``check`` tokens in the cache that shares ``deprioritize`` or more with another.

    ``lpm_aging_tokens_per_pass`` (0): as so many cached tokens counts each pass that a request
    waited, in variant ``0.5.23-lpm-aging`` only.

    Raises ValueError if the pool or the chunk is not a whole number of pages, or for a knob that
    the variant does not have.
    """

    name: Literal["sglang"] = "sglang"
    variant: Literal["0.5.23", "0.5.23-lpm-aging"] = "0.5.23"
    max_total_num_tokens: Annotated[int, Gt(0)] = 16384
    page_size: Annotated[int, Gt(0)] = 1
    max_running_requests: Annotated[int, Gt(0)] = 2048
    chunked_prefill_size: Annotated[int, Ge(-1)] = 8192
    max_prefill_tokens: Annotated[int, Gt(0)] = 16384
    prefill_max_requests: Annotated[int, Gt(0)] | None = None
    schedule_policy: Policy = "fcfs"
    disable_radix_cache: bool = False
    disable_overlap_schedule: bool = False
    enable_mixed_chunk: bool = False
    prefill_decode_interval: Annotated[int, Ge(0)] = 0
    prefill_decode_interval_min_bs: Annotated[int, Ge(0)] = 0
    schedule_conservativeness: Annotated[float, Ge(0)] = 1.0
    init_new_token_ratio: Annotated[float, Ge(0)] = 0.7
    min_new_token_ratio_factor: Annotated[float, Ge(0)] = 0.14
    new_token_ratio_decay_steps: Annotated[int, Gt(0)] = 600
    retract_decode_steps: Annotated[int, Ge(0)] = 20
    clip_max_new_tokens_estimation: Annotated[int, Ge(0)] = 4096
    in_batch_prefix_caching_check_threshold: Annotated[int, Ge(-1)] = 32
    in_batch_prefix_caching_deprioritize_threshold: Annotated[int, Gt(0)] = 32
    lpm_aging_tokens_per_pass: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        if self.lpm_aging_tokens_per_pass and self.variant != "0.5.23-lpm-aging":
            raise ValueError(
                f"lpm_aging_tokens_per_pass: variant {self.variant!r} has no such flag; "
                "use '0.5.23-lpm-aging'"
            )
        if self.max_total_num_tokens % self.page_size:
            raise ValueError(
                f"max_total_num_tokens ({self.max_total_num_tokens}) must be a multiple of "
                f"page_size ({self.page_size})"
            )
        if self.chunked_prefill_size > 0 and self.chunked_prefill_size % self.page_size:
            raise ValueError(
                f"chunked_prefill_size ({self.chunked_prefill_size}) must be a multiple of "
                f"page_size ({self.page_size})"
            )
