"""What mistral.rs is to the rest of simkv."""

from __future__ import annotations

from simkv.core.engine import EngineSpec, Tabled
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.mistralrs.recording import RECORDING
from simkv.schedulers.mistralrs.scheduler import build
from simkv.schedulers.mistralrs.versions import JULY_RULES, RULES, VARIANTS


def _with_tables(config: MistralrsConfig) -> Tabled:
    scheduler = build(config)
    return Tabled(scheduler, scheduler.pool.tables)


MISTRALRS = EngineSpec(
    name="mistralrs",
    config=MistralrsConfig,
    variants=VARIANTS,
    build=build,
    with_tables=_with_tables,
    recording=RECORDING,
    cache_lines=(r"with block size (?P<size>\d+) and (?P<blocks>[\d,]+) GPU blocks",),
    cache_example="mistral.rs's 'and 2588 GPU blocks'",
    memory="num_gpu_blocks",
    rules=RULES,
    rules_read={"pr2034july": JULY_RULES},
)
