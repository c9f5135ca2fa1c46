"""What FastDeploy is to the rest of simkv."""

from __future__ import annotations

from simkv.core.engine import EngineSpec, Tabled
from simkv.schedulers.fastdeploy.config import VARIANTS, FastDeployConfig
from simkv.schedulers.fastdeploy.recording import RECORDING
from simkv.schedulers.fastdeploy.scheduler import FastDeploy


def _with_tables(config: FastDeployConfig) -> Tabled:
    scheduler = FastDeploy(config)
    return Tabled(scheduler, scheduler.manager.pool.tables)


FASTDEPLOY = EngineSpec(
    name="fastdeploy",
    config=FastDeployConfig,
    variants=VARIANTS,
    build=FastDeploy,
    with_tables=_with_tables,
    recording=RECORDING,
    cache_lines=(r"total_block_num[=: ]+(?P<blocks>[\d,]+)",),
    cache_example="FastDeploy's 'total_block_num:2588'",
    memory="num_blocks",
    has_threads=True,
)
