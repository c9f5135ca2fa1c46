"""The part of an engine's configuration that decides seconds and KV."""

from __future__ import annotations

from simkv.core.setting import EngineSetting, GraphMode

__all__ = ["EngineSetting", "GraphMode"]
