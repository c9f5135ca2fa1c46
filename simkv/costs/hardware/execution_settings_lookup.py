"""Settings of an engine's configuration that determine step times and KV capacity."""

from __future__ import annotations

from simkv.core.engine_spec import EngineConfig
from simkv.core.execution_settings import ExecutionSettings, GraphMode
from simkv.schedulers.engine_registry import find_engine_spec

__all__ = ["ExecutionSettings", "GraphMode", "find_execution_settings"]


def find_execution_settings(config: EngineConfig) -> ExecutionSettings:
    """Return the execution settings of a configuration, as its engine's package defines them."""
    return find_engine_spec(config).setting(config)
