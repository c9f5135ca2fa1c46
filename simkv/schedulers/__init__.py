"""The schedulers of real engines, one engine per file, versions as variants in that file."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from simkv.core.scheduler import Scheduler, Variant

#: Engine name in a scenario -> module here, which has ``build(config)`` and ``VARIANTS``.
ENGINES = ("mistralrs", "vllm", "sglang", "fastdeploy")


def build(config: Any) -> Scheduler:
    """The scheduler for an engine's config object (``MistralrsConfig``, ``VllmConfig``, ...)."""
    scheduler: Scheduler = import_module(f"simkv.schedulers.{config.name}.scheduler").build(config)
    return scheduler


def variants(engine: str) -> Mapping[str, Variant]:
    """The variants of an engine by name."""
    found: Mapping[str, Variant] = import_module(f"simkv.schedulers.{engine}.scheduler").VARIANTS
    return found
