"""simkv: a flight simulator for LLM-serving schedulers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simkv.api import compare, run, sweep
    from simkv.run import run_file, run_scenario
    from simkv.scenario import load

__version__ = "0.1.0"
__all__ = ["__version__", "compare", "load", "run", "run_file", "run_scenario", "sweep"]

_HOME = {
    "compare": "api",
    "load": "scenario",
    "run_file": "run",
    "run_scenario": "run",
    "sweep": "api",
}


def __getattr__(name: str) -> Any:
    """Import the public functions on first use, so that ``import simkv`` stays light."""
    if name == "run":  # the module of this name, which can be called
        return import_module("simkv.run")
    if name in _HOME:
        return getattr(import_module(f"simkv.{_HOME[name]}"), name)
    raise AttributeError(f"module 'simkv' has no attribute {name!r}")
