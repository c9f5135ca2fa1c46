"""Options of TensorRT-LLM's scheduler, and the modelled revision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from simkv.core.engine_flags import Flag, KnobSource
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import MAX_BLOCK_SIZE, Refusal, Variant

CapacityPolicy = Literal["GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"]
ChunkingPolicy = Literal["FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"]

VARIANTS: Mapping[str, Variant] = {
    "5f480b7a6": Variant(
        "NVIDIA/TensorRT-LLM@5f480b7a6 (2026-02, after #10273 and #11330)",
        "capacity scheduler, then micro-batch scheduler; a paused request is recomputed",
    ),
}


@dataclass(frozen=True)
class TrtllmConfig:
    """Options of TensorRT-LLM under the names of its LLM API.

    Raises ValueError for combinations that are invalid or not modelled.
    """

    name: Literal["trtllm"] = "trtllm"
    variant: Annotated[Literal["5f480b7a6"], KnobSource("`simkv policies` lists the source")] = (
        "5f480b7a6"
    )
    """Scheduling rules: a commit of TensorRT-LLM."""
    max_tokens_in_paged_kv_cache: Annotated[
        int, Gt(0), KnobSource("kv_cache_config.max_tokens")
    ] = 16384
    """Size of the KV pool in tokens. TensorRT-LLM uses the available memory; the default here is
    simkv's own."""
    tokens_per_block: Annotated[
        int, Gt(0), Le(MAX_BLOCK_SIZE), KnobSource("kv_cache_config, 32")
    ] = 32
    """Tokens per block, the allocation unit of the KV pool."""
    max_batch_size: Annotated[int, Gt(0), Flag("--max_batch_size", "2048")] = 2048
    """Maximum number of active requests, and maximum number of requests per step."""
    max_num_tokens: Annotated[int, Gt(0), Flag("--max_num_tokens", "8192")] = 8192
    """Maximum number of tokens per step."""
    max_seq_len: Annotated[Annotated[int, Gt(1)] | None, Flag("--max_seq_len")] = None
    """Maximum number of tokens of a request, including output. A larger `max_tokens` is reduced to
    fit. Default and upper limit: the size of the KV pool."""
    capacity_scheduler_policy: Annotated[CapacityPolicy, KnobSource("scheduler_config")] = (
        "GUARANTEED_NO_EVICT"
    )
    """Admission policy. GUARANTEED_NO_EVICT admits a request if blocks for its whole possible
    output are free. MAX_UTILIZATION admits a request if blocks for the current step are free.
    STATIC_BATCH admits a new batch when all requests of the previous batch have finished."""
    enable_chunked_prefill: Annotated[bool, Flag("--enable_chunked_prefill")] = False
    """Whether prompts may be computed in chunks. If false, prompts longer than `max_num_tokens` are
    rejected."""
    context_chunking_policy: Annotated[ChunkingPolicy, KnobSource("scheduler_config")] = (
        "FIRST_COME_FIRST_SERVED"
    )
    """How the tokens of a step are divided among prompts. FIRST_COME_FIRST_SERVED gives each
    prompt, in order of arrival, as many tokens as the prompt can use. EQUAL_PROGRESS gives each
    prompt in turn one more block."""
    disable_overlap_scheduler: Annotated[bool, KnobSource("LLM API")] = False
    """Whether a step is scheduled only after the tokens of the previous step are known."""
    enable_block_reuse: Annotated[bool, KnobSource("kv_cache_config")] = True
    """Whether blocks are cached for prompts with equal prefixes."""
    free_gpu_memory_fraction: Annotated[
        float, Ge(0.01), Le(1), KnobSource("kv_cache_config, 0.9")
    ] = 0.9
    """Share of the GPU memory beside the model that the KV cache may use. With `hardware`, it
    determines the size of the KV pool. The setting does not affect scheduling decisions."""

    def __post_init__(self) -> None:
        if self.max_tokens_in_paged_kv_cache % self.tokens_per_block:
            raise ValueError(
                f"max_tokens_in_paged_kv_cache ({self.max_tokens_in_paged_kv_cache}) must be a "
                f"multiple of tokens_per_block ({self.tokens_per_block})"
            )
        if self.max_tokens_in_paged_kv_cache < 2:
            raise ValueError(
                "max_tokens_in_paged_kv_cache: must be at least 2, otherwise no request fits"
            )
        if self.enable_chunked_prefill and self.max_num_tokens < self.tokens_per_block:
            raise ValueError(
                f"max_num_tokens ({self.max_num_tokens}) must be at least tokens_per_block "
                f"({self.tokens_per_block}), because chunks consist of whole blocks"
            )

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the pool."""
        return self.max_tokens_in_paged_kv_cache // self.tokens_per_block

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a request.

        This is ``max_seq_len`` or the pool size, whichever is smaller.
        """
        pool = self.max_tokens_in_paged_kv_cache
        return pool if self.max_seq_len is None else min(self.max_seq_len, pool)


def find_rejection(prompt: Prompt, config: TrtllmConfig) -> Refusal | None:
    """Return the error message if the server rejects a request on arrival, or None."""
    tokens, most = prompt.prompt_tokens, config.max_num_tokens
    if tokens > most and not config.enable_chunked_prefill:
        words = f"The sum of prompt length ({tokens}), query length (0) should not exceed "
        return Refusal("max_num_tokens", f"{words}max_num_tokens ({most})")
    if tokens >= config.longest:
        left = config.longest - tokens
        return Refusal("max_seq_len", f"`default_max_tokens` ({left}) must be greater than 0")
    return None
