"""Registry of engines. To add an engine, create a package with a ``spec`` and add it below."""

from __future__ import annotations

from collections.abc import Mapping

from simkv.core.engine_spec import EngineConfig, EngineSpec
from simkv.core.scheduler_protocol import Scheduler, Variant
from simkv.schedulers.fastdeploy.spec import FASTDEPLOY
from simkv.schedulers.mistralrs.spec import MISTRALRS
from simkv.schedulers.sglang.spec import SGLANG
from simkv.schedulers.trtllm.spec import TRTLLM
from simkv.schedulers.vllm.spec import VLLM

#: Engines by their name in scenarios, in display order.
ENGINES: Mapping[str, EngineSpec] = {
    engine.name: engine for engine in (MISTRALRS, VLLM, SGLANG, FASTDEPLOY, TRTLLM)
}

#: Engine used if none is specified.
DEFAULT = VLLM


def find_engine_spec(config: EngineConfig) -> EngineSpec:
    """Return the spec of the engine that ``config`` configures."""
    # The config of a custom scheduler carries its own spec.
    own: EngineSpec | None = getattr(config, "own_spec", None)
    return own or ENGINES[config.name]


def build_scheduler(config: EngineConfig) -> Scheduler:
    """Build the scheduler of the engine and variant that ``config`` names."""
    return find_engine_spec(config).build(config)


def list_variants(engine: str) -> Mapping[str, Variant]:
    """Return the variants of an engine by name. Raises KeyError for an unknown engine."""
    return ENGINES[engine].variants
