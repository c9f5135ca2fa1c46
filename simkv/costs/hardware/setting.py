"""The part of an engine's configuration that decides seconds and KV."""

from __future__ import annotations

from simkv.core.engine import EngineConfig
from simkv.core.setting import EngineSetting, GraphMode
from simkv.schedulers.registry import spec_of

__all__ = ["EngineSetting", "GraphMode", "setting_of"]


def setting_of(config: EngineConfig) -> EngineSetting:
    """The setting of any engine's configuration, as the engine's folder has it."""
    return spec_of(config).setting(config)
