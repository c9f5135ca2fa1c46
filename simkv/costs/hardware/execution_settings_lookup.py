"""Look up the engine settings that determine step durations and KV cache size."""

from __future__ import annotations

from simkv.core.engine_spec import EngineConfig
from simkv.core.execution_settings import ExecutionSettings, GraphMode
from simkv.schedulers.engine_registry import find_engine_spec

__all__ = ["ExecutionSettings", "GraphMode", "find_execution_settings"]


def find_execution_settings(config: EngineConfig) -> ExecutionSettings:
    """Return the execution settings that the engine's specification derives from a config."""
    return find_engine_spec(config).setting(config)
