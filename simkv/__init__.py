"""simkv: a flight simulator for LLM-serving schedulers."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "load", "run_file", "run_scenario"]

_HOME = {"load": "scenario", "run_file": "run", "run_scenario": "run"}


def __getattr__(name: str) -> Any:
    """Import the public functions on first use, so that ``import simkv`` stays light."""
    if name in _HOME:
        return getattr(import_module(f"simkv.{_HOME[name]}"), name)
    raise AttributeError(f"module 'simkv' has no attribute {name!r}")
