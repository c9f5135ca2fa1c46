"""The engines that simkv knows. A new one is a folder here with a ``spec``, and a line below."""

from __future__ import annotations

from collections.abc import Mapping

from simkv.core.engine_spec import EngineConfig, EngineSpec
from simkv.core.scheduler_protocol import Scheduler, Variant
from simkv.schedulers.fastdeploy.spec import FASTDEPLOY
from simkv.schedulers.mistralrs.spec import MISTRALRS
from simkv.schedulers.sglang.spec import SGLANG
from simkv.schedulers.trtllm.spec import TRTLLM
from simkv.schedulers.vllm.spec import VLLM

#: By the name that a scenario gives, in the order in which they are listed to the reader.
ENGINES: Mapping[str, EngineSpec] = {
    engine.name: engine for engine in (MISTRALRS, VLLM, SGLANG, FASTDEPLOY, TRTLLM)
}

#: The engine that stands for others where none is named.
DEFAULT = VLLM


def find_engine_spec(config: EngineConfig) -> EngineSpec:
    """The engine that ``config`` is for; a config of one's own brings its own."""
    own: EngineSpec | None = getattr(config, "own_spec", None)
    return own or ENGINES[config.name]


def build_scheduler(config: EngineConfig) -> Scheduler:
    """The scheduler that ``config`` describes."""
    return find_engine_spec(config).build(config)


def list_variants(engine: str) -> Mapping[str, Variant]:
    """The variants of an engine by name."""
    return ENGINES[engine].variants
