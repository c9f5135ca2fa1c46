"""The knobs of mistral.rs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from simkv.core.scheduler import MOST_BLOCK_SIZE, MOST_BLOCKS

VariantName = Literal["seed", "bucketed", "pr2031a", "pr2031", "pr2034", "pr2034july", "merged2250"]


@dataclass(frozen=True)
class MistralrsConfig:
    """Knobs of the engine, under its own names.

    ``block_size`` in tokens; ``num_gpu_blocks`` as given to the engine: all but ``seed`` keep one
    of them as a null block. ``waiting_timeout`` counts failed admission attempts of the head of
    the queue before it may evict (a constant 64 in the engine). The two ``prefill_batch`` limits
    exist in ``pr2034`` only. Prefix caching is off by default here, unlike in the engine, because
    a workload has to say which prompts share what.
    """

    name: Literal["mistralrs"] = "mistralrs"
    variant: VariantName = "merged2250"
    block_size: Annotated[int, Gt(0), Le(MOST_BLOCK_SIZE)] = 32
    num_gpu_blocks: Annotated[int, Gt(1), Le(MOST_BLOCKS)] = 1024
    max_num_seqs: Annotated[int, Gt(0)] = 16
    prefix_caching: bool = False
    waiting_timeout: Annotated[int, Ge(0)] = 64
    prefill_batch_max_seqs: Annotated[int, Gt(0)] = 10
    prefill_batch_max_tokens: Annotated[int, Gt(0)] = 16384

    def __post_init__(self) -> None:
        if self.variant == "seed" and self.prefix_caching:
            raise ValueError("prefix_caching: variant 'seed' has no prefix cache; use false")
