"""The part of an engine's configuration that decides seconds and KV."""

from __future__ import annotations

from simkv.core.engine_spec import EngineConfig
from simkv.core.execution_settings import ExecutionSettings, GraphMode
from simkv.schedulers.engine_registry import find_engine_spec

__all__ = ["ExecutionSettings", "GraphMode", "find_execution_settings"]


def find_execution_settings(config: EngineConfig) -> ExecutionSettings:
    """The setting of any engine's configuration, as the engine's folder has it."""
    return find_engine_spec(config).setting(config)
