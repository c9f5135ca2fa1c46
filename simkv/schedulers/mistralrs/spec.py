"""What mistral.rs is to the rest of simkv."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simkv.core.blocks import BlockPool
from simkv.core.engine import EngineSpec, Tabled
from simkv.core.setting import EngineSetting
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.mistralrs.recording import RECORDING
from simkv.schedulers.mistralrs.seams import SEAMS, WITHOUT
from simkv.schedulers.mistralrs.versions import JULY_RULES, RULES, VARIANTS, MistralrsRules

if TYPE_CHECKING:
    from simkv.schedulers.mistralrs.queues import Queues

#: Read by the variants whose rules have a ``prefill_limit``.
PREFILL_LIMITS = ("prefill_batch_max_seqs", "prefill_batch_max_tokens")


def build(config: MistralrsConfig, rules: MistralrsRules | None = None) -> Queues:
    """The scheduler of ``config.variant``, or one that differs from it in its ``rules``.

    ``seed`` has none that could differ.
    """
    if config.variant == "seed":
        from simkv.schedulers.mistralrs.seed import Seed

        return Seed(config)
    if config.rule:
        from simkv.schedulers.mistralrs.ruled import RuledBucketed

        return RuledBucketed(config, rules)
    from simkv.schedulers.mistralrs.scheduler import Bucketed, July  # where this engine runs

    return (July if config.variant == "pr2034july" else Bucketed)(config, rules)


def _with_tables(config: MistralrsConfig) -> Tabled:
    scheduler = build(config)
    scheduler.pool = BlockPool(scheduler.num_blocks)
    return Tabled(scheduler, scheduler.pool.tables)


def _setting(config: MistralrsConfig) -> EngineSetting:
    """Prompts are computed whole and without graphs; a step is scheduled after the one before."""
    return EngineSetting(
        engine=config.name,
        release=config.variant,
        max_num_batched_tokens=config.prefill_batch_max_tokens,
        max_num_seqs=config.max_num_seqs,
        graph_mode="eager",
        asynchronous=False,
        block_size=config.block_size,
    )


MISTRALRS = EngineSpec(
    name="mistralrs",
    config=MistralrsConfig,
    variants=VARIANTS,
    build=build,
    with_tables=_with_tables,
    recording=RECORDING,
    setting=_setting,
    cache_lines=(r"with block size (?P<size>\d+) and (?P<blocks>[\d,]+) GPU blocks",),
    cache_example="mistral.rs's 'and 2588 GPU blocks'",
    memory="num_gpu_blocks",
    lacks={
        variant: (
            *(("prefix_caching",) if variant == "seed" else ()),
            *(("rule",) if variant in WITHOUT else ()),
            *(() if variant in RULES and RULES[variant].prefill_limit else PREFILL_LIMITS),
        )
        for variant in VARIANTS
    },
    rules=RULES,
    rules_read={"pr2034july": JULY_RULES},
    seams=SEAMS,
    unrecorded="`mixed_decode` of pr2034 and pr2031a",
)
