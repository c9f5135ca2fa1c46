"""Options of mistral.rs's scheduler."""

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
    """mistral.rs's options under their original names.

    Each variant reads only some of the options.
    """

    name: Literal["mistralrs"] = "mistralrs"
    variant: Annotated[VariantName, KnobSource("`simkv policies` lists the sources")] = "merged2250"
    """Scheduling rules: a commit or pull request of mistral.rs."""
    block_size: Annotated[
        int, Gt(0), Le(MAX_BLOCK_SIZE), KnobSource("the engine's paged attention, 32")
    ] = 32
    """Tokens per KV block."""
    num_gpu_blocks: Annotated[
        int, Gt(1), Le(MAX_BLOCKS), KnobSource("derived from GPU memory; the default is simkv's")
    ] = 1024
    """Number of KV blocks of the engine. All variants except `seed` use one of them as a null
    block."""
    max_num_seqs: Annotated[int, Gt(0), KnobSource("mistralrs-server, 16")] = 16
    """Maximum number of running requests."""
    prefix_caching: Annotated[bool, KnobSource("paged attention's prefix cache")] = False
    """Whether requests share the blocks of equal prompt prefixes. Unlike in mistral.rs, this is off
    by default, because the workload must declare which prefixes are shared."""
    waiting_timeout: Annotated[
        int, Ge(0), Le(MAX_PASSES), KnobSource("a constant in the engine, 64")
    ] = 64
    """Number of failed admissions after which the head of the queue may evict another request."""
    prefill_batch_max_seqs: Annotated[int, Gt(0), KnobSource("EricLBuehler/mistral.rs#2034")] = 10
    """Maximum number of requests per prefill step."""
    prefill_batch_max_tokens: Annotated[int, Gt(0), KnobSource("EricLBuehler/mistral.rs#2034")] = (
        16384
    )
    """Maximum number of prompt tokens per prefill step."""

    rule: Annotated[str | None, KnobSource("simkv; docs/how-to/evolve.md")] = None
    """Custom policy: expressions that replace decisions of the variant, one `HOOK = EXPRESSION` per
    line."""

    def __post_init__(self) -> None:
        if self.rule is not None and self.variant in VARIANTS_WITHOUT_HOOKS:
            raise ValueError(
                f"rule: variant {self.variant!r} does not support custom policies; use bucketed"
            )
        parse_policy(self.rule, POLICY_HOOKS)
        if self.variant == "seed" and self.prefix_caching:
            raise ValueError("prefix_caching: variant 'seed' has no prefix cache; use false")
