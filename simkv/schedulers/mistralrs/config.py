"""The knobs of mistral.rs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from simkv.core.engine_flags import KnobSource
from simkv.core.policy_language import parse_policy
from simkv.core.scheduler_protocol import MAX_BLOCK_SIZE, MAX_BLOCKS, MAX_PASSES
from simkv.schedulers.mistralrs.policy_hooks import POLICY_HOOKS, VARIANTS_WITHOUT_HOOKS

VariantName = Literal["seed", "bucketed", "pr2031a", "pr2031", "pr2034", "pr2034july", "merged2250"]


@dataclass(frozen=True)
class MistralrsConfig:
    """Knobs of the engine, under its own names; a variant ignores those that it does not read."""

    name: Literal["mistralrs"] = "mistralrs"
    variant: Annotated[VariantName, KnobSource("`simkv policies` says where each is from")] = (
        "merged2250"
    )
    """Whose rules decide: a commit or pull request of mistral.rs."""
    block_size: Annotated[
        int, Gt(0), Le(MAX_BLOCK_SIZE), KnobSource("the engine's paged attention, 32")
    ] = 32
    """Tokens in a block of KV."""
    num_gpu_blocks: Annotated[
        int, Gt(1), Le(MAX_BLOCKS), KnobSource("made from GPU memory; the default is ours")
    ] = 1024
    """Blocks of KV as given to the engine; all variants but seed keep one as a null block."""
    max_num_seqs: Annotated[int, Gt(0), KnobSource("mistralrs-server, 16")] = 16
    """Most requests that run at a time."""
    prefix_caching: Annotated[bool, KnobSource("paged attention's prefix cache")] = False
    """Whether blocks of equal prompts are shared; off here, on in the engine, for a workload
    has to say which prompts share what."""
    waiting_timeout: Annotated[
        int, Ge(0), Le(MAX_PASSES), KnobSource("a constant in the engine, 64")
    ] = 64
    """Failed tries of the head of the queue to be admitted before it may evict somebody."""
    prefill_batch_max_seqs: Annotated[int, Gt(0), KnobSource("EricLBuehler/mistral.rs#2034")] = 10
    """Most requests whose prompts are computed in one step."""
    prefill_batch_max_tokens: Annotated[int, Gt(0), KnobSource("EricLBuehler/mistral.rs#2034")] = (
        16384
    )
    """Most prompt tokens computed in one step."""

    rule: Annotated[str | None, KnobSource("ours; docs/how-to/evolve.md")] = None
    """Decisions that expressions take in place of the variant, `SEAM = EXPRESSION` a line."""

    def __post_init__(self) -> None:
        if self.rule is not None and self.variant in VARIANTS_WITHOUT_HOOKS:
            raise ValueError(f"rule: variant {self.variant!r} has no seams for rules; use bucketed")
        parse_policy(self.rule, POLICY_HOOKS)
        if self.variant == "seed" and self.prefix_caching:
            raise ValueError("prefix_caching: variant 'seed' has no prefix cache; use false")
