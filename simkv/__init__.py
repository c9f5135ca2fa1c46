"""simkv: a flight simulator for LLM-serving schedulers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from simkv.api import compare, pareto, plan, plot, run, sweep
    from simkv.errors import InputError
    from simkv.scenario import load
    from simkv.simulate import run_file, run_scenario

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "__version__",
    "compare",
    "load",
    "pareto",
    "plan",
    "plot",
    "run",
    "run_file",
    "run_scenario",
    "sweep",
]

_HOME = {
    "InputError": "errors",
    "compare": "api",
    "load": "scenario",
    "pareto": "api",
    "plan": "api",
    "plot": "api",
    "run": "api",
    "run_file": "simulate",
    "run_scenario": "simulate",
    "sweep": "api",
}


def __getattr__(name: str) -> Any:
    """Import the public functions on first use, so that ``import simkv`` stays light."""
    if name in _HOME:
        return getattr(import_module(f"simkv.{_HOME[name]}"), name)
    raise AttributeError(f"module 'simkv' has no attribute {name!r}")
