"""The knobs of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt

from simkv.core.scheduler import MOST_BLOCK_SIZE, MOST_BLOCKS
from simkv.schedulers.vllm.versions import RULES


@dataclass(frozen=True)
class VllmConfig:
    """Knobs of the engine, under its own names and with its defaults.

    ``block_size`` is in tokens. ``num_gpu_blocks`` counts the null block too, so one less can be
    used; vLLM finds it by measuring memory and takes ``max_model_len`` (tokens, prompt and output
    together) from the model: the defaults of these two are ours.

    ``max_num_seqs`` limits running requests (``max_num_active_seqs`` replaces it if set) and
    ``max_num_batched_tokens`` the tokens of a step (``max_num_scheduled_tokens`` too, if set).
    Their defaults are those of ``vllm serve`` on a GPU with less than 70 GiB or an A100; with
    more memory it takes 8192 tokens (16384 from 160 GiB on) and 1024 requests.

    ``long_prefill_token_threshold`` caps the tokens that one request gets in a step, 0 is off;
    ``..._adaptive`` raises it to an equal share of the batch. ``scheduler_reserve_full_isl`` asks
    at admission for room for the whole sequence, not for its first chunk only. ``watermark`` is
    the share of all blocks that an admission must leave free, unless nothing runs.
    ``prefill_schedule_interval`` lets prefills into every n-th step only while others decode.

    ``scheduler_reserve_full_isl``, ``async_scheduling`` and ``enable_prefix_caching`` left out are
    as the version has them: on, but the first two off in 0.11.0. Knobs that a version does not
    have cannot be set with it.

    ``num_cpu_blocks`` are those in host memory, for the variant that swaps (vLLM V0 made them from
    ``--swap-space``).

    ``startup_check``: false lets ``max_model_len`` exceed the cache, as vLLM did when
    ``num_gpu_blocks_override`` was set (until its #41069 and #47272), and does where it takes the
    layers of a model for smaller than they are (its #39734).

    Raises ValueError where vLLM refuses to start.
    """

    name: Literal["vllm"] = "vllm"
    variant: Literal["0.33.0", "0.33.0-skip-blocked", "0.33.0-swap", "0.19.0", "0.11.0"] = "0.33.0"
    block_size: Annotated[int, Gt(0), Le(MOST_BLOCK_SIZE)] = 16
    num_gpu_blocks: Annotated[int, Gt(1), Le(MOST_BLOCKS)] = 1024
    max_num_seqs: Annotated[int, Gt(0)] = 256
    max_num_batched_tokens: Annotated[int, Gt(0)] = 2048
    max_num_scheduled_tokens: Annotated[int, Gt(0)] | None = None
    max_num_active_seqs: Annotated[int, Gt(0)] | None = None
    max_model_len: Annotated[int, Gt(1)] = 8192
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool | None = None
    long_prefill_token_threshold: Annotated[int, Ge(0)] = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool | None = None
    watermark: Annotated[float, Ge(0), Lt(1)] = 0.0
    prefill_schedule_interval: Annotated[int, Gt(0)] = 1
    async_scheduling: bool | None = None
    num_cpu_blocks: Annotated[int, Ge(0), Le(MOST_BLOCKS)] = 0
    startup_check: bool = True

    def __post_init__(self) -> None:
        rules = RULES[self.variant]
        rules.refuse(self.variant, self)
        spare = 1 if rules.spares_null_block else 0
        usable = (self.num_gpu_blocks - spare) * self.block_size
        if self.startup_check and usable < self.max_model_len:
            raise ValueError(
                f"num_gpu_blocks: {self.num_gpu_blocks} blocks of {self.block_size} tokens"
                f"{', less the null block,' if spare else ''} hold {usable} tokens; "
                f"max_model_len {self.max_model_len} must fit"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs {self.max_num_seqs}"
            )
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must be at least "
                f"max_model_len {self.max_model_len} when enable_chunked_prefill is false"
            )
        if rules.threshold_spares_lone and self.long_prefill_token_threshold > self.max_model_len:
            raise ValueError(
                f"long_prefill_token_threshold: {self.long_prefill_token_threshold} must be at "
                f"most max_model_len {self.max_model_len}"
            )
        if (self.max_num_active_seqs or 0) > self.max_num_seqs:
            raise ValueError(
                f"max_num_active_seqs: {self.max_num_active_seqs} must be at most max_num_seqs "
                f"{self.max_num_seqs}"
            )
