"""simkv: a flight simulator for LLM-serving schedulers."""

import sys

# ``python -m`` puts the current directory first on the module path, so a file ``yaml.py`` in a
# downloaded directory would be imported instead of the real module. Drop that entry unless it
# contains this package. This must run before any import, including ``__future__``, which is a
# module too.
if (
    sys.argv[:1] == ["-m"]
    and not sys.flags.safe_path
    and not __file__.startswith(f"{sys.path[0]}/simkv/")
):
    del sys.path[0]

# same as typing.TYPE_CHECKING; importing typing is slower than this whole module
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from simkv.api import compare, evolve, pareto, plan, plot, run, sweep
    from simkv.core.errors import InputError
    from simkv.core.version import __version__
    from simkv.metrics.scenario_runner import run_file, run_scenario
    from simkv.scenario.scenario_loader import load

__all__ = [
    "InputError",
    "__version__",
    "compare",
    "evolve",
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
    "InputError": "core.errors",
    "__version__": "core.version",
    "compare": "api",
    "evolve": "api",
    "load": "scenario.scenario_loader",
    "pareto": "api",
    "plan": "api",
    "plot": "api",
    "run": "api",
    "run_file": "metrics.scenario_runner",
    "run_scenario": "metrics.scenario_runner",
    "sweep": "api",
}


def __getattr__(name: str) -> "Any":
    """Import a public name on first use, so that ``import simkv`` stays fast."""
    if name in _HOME:
        from importlib import import_module

        return getattr(import_module(f"simkv.{_HOME[name]}"), name)
    raise AttributeError(f"module 'simkv' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, imported or not, and the standard module attributes."""
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
