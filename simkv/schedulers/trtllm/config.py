"""The knobs of TensorRT-LLM, and the revision whose rules decide."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from simkv.core.engine_flags import Flag, KnobSource
from simkv.core.scheduler_protocol import MAX_BLOCK_SIZE, Variant

CapacityPolicy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]
ChunkingPolicy = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]

VARIANTS: Mapping[str, Variant] = {
    "5f480b7a6": Variant(
        "NVIDIA/TensorRT-LLM@5f480b7a6 (2026-02, after #10273 and #11330)",
        "capacity first, then a micro-batch out of what fits; a paused request is computed again",
    ),
}


@dataclass(frozen=True)
class TrtllmConfig:
    """TensorRT-LLM's knobs under the names of its LLM API; ``scheduler_config`` and
    ``kv_cache_config`` are flat.

    Raises ValueError for what does not go together or is not modelled.
    """

    name: Literal["trtllm"] = "trtllm"
    variant: Annotated[
        Literal["5f480b7a6"], KnobSource("`simkv policies` says where it is from")
    ] = "5f480b7a6"
    """Whose rules decide: a commit of TensorRT-LLM."""
    max_tokens_in_paged_kv_cache: Annotated[
        int, Gt(0), KnobSource("kv_cache_config.max_tokens")
    ] = 16384
    """Tokens of KV in the pool; TensorRT-LLM takes what memory holds, the default is ours."""
    tokens_per_block: Annotated[
        int, Gt(0), Le(MAX_BLOCK_SIZE), KnobSource("kv_cache_config, 32")
    ] = 32
    """Tokens in a block, the unit in which KV is handed out."""
    max_batch_size: Annotated[int, Gt(0), Flag("--max_batch_size", "2048")] = 2048
    """Most requests that are active, and most in a step."""
    max_num_tokens: Annotated[int, Gt(0), Flag("--max_num_tokens", "8192")] = 8192
    """Most tokens in a step."""
    max_seq_len: Annotated[Annotated[int, Gt(1)] | None, Flag("--max_seq_len")] = None
    """Most tokens of a request, output included; a larger `max_tokens` is cut to it. Never more
    than the pool holds, which it is if left out."""
    capacity_scheduler_policy: Annotated[CapacityPolicy, KnobSource("scheduler_config")] = (
        "GUARANTEED_NO_EVICT"
    )
    """Who may run: those whose blocks are there to the last token that they may emit, those whose
    blocks are there for this step, or a batch that ends before the next."""
    enable_chunked_prefill: Annotated[bool, Flag("--enable_chunked_prefill")] = False
    """Whether a prompt may be computed in parts; else one longer than `max_num_tokens` is
    refused."""
    context_chunking_policy: Annotated[ChunkingPolicy, KnobSource("scheduler_config")] = (
        "FIRST_COME_FIRST_SERVED"
    )
    """How prompts share the tokens of a step: the first takes what it can, or a block each by
    turns."""
    disable_overlap_scheduler: Annotated[bool, KnobSource("LLM API")] = False
    """Whether a step is scheduled only when the tokens of the one before it are known."""
    enable_block_reuse: Annotated[bool, KnobSource("kv_cache_config")] = True
    """Whether blocks are kept for prompts that begin alike."""
    free_gpu_memory_fraction: Annotated[
        float, Ge(0.01), Le(1), KnobSource("kv_cache_config, 0.9")
    ] = 0.9
    """Share for KV of the GPU's memory that the model leaves, of which with `hardware` the pool
    follows. No decision depends on it."""

    def __post_init__(self) -> None:
        if self.max_tokens_in_paged_kv_cache % self.tokens_per_block:
            raise ValueError(
                f"max_tokens_in_paged_kv_cache ({self.max_tokens_in_paged_kv_cache}) must be a "
                f"multiple of tokens_per_block ({self.tokens_per_block})"
            )
        if self.max_tokens_in_paged_kv_cache < 2:
            raise ValueError("max_tokens_in_paged_kv_cache: no request fits; expected 2 or more")
        if self.enable_chunked_prefill and self.max_num_tokens < self.tokens_per_block:
            raise ValueError(
                f"max_num_tokens ({self.max_num_tokens}) is less than a chunk, which is of whole "
                f"blocks; expected tokens_per_block ({self.tokens_per_block}) or more"
            )

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.max_tokens_in_paged_kv_cache // self.tokens_per_block

    @property
    def longest(self) -> int:
        """Most tokens of a request: what ``max_seq_len`` says and the pool holds."""
        pool = self.max_tokens_in_paged_kv_cache
        return pool if self.max_seq_len is None else min(self.max_seq_len, pool)
