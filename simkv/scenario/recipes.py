"""Recipes of published benchmarks: how a server and its load generator were started.

``recipes.json`` contains settings only, with a source for each field, and no measured values. A
recipe fills the options of ``ScenarioOptions`` that are not given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError, spelling_hint
from simkv.scenario.scenario_options import ScenarioOptions

RECIPES_PATH = Path(__file__).with_name("recipes.json")
#: Options that replace the load of a recipe.
_OTHER_LOADS = ("load", "trace")


@dataclass(frozen=True)
class PublishedRecipe:
    """Settings of a published benchmark.

    ``command`` is the launch command; ``{tp}`` and ``{concurrency}`` stand for these settings.
    ``hardware`` has fields of the section ``hardware`` that the command does not state, such as
    number formats. ``date`` is the date of the latest result. ``sources`` maps a field to its
    source.
    """

    name: str
    gpu: str
    version: str
    date: str
    tp: int
    command: str
    hardware: Mapping[str, str]
    concurrency: int
    sources: Mapping[str, str]

    def apply(self, options: ScenarioOptions) -> ScenarioOptions:
        """Return the options with the recipe's settings where they give none."""
        clients = _read()["clients"]
        tp = options.tp or self.tp
        concurrency = options.max_concurrency or self.concurrency
        command = self.command.replace("{tp}", str(tp)).replace("{concurrency}", str(concurrency))
        server: dict[str, Any] = {
            "gpu": self.gpu,
            "model": self.hardware.get("model"),
            "version": self.version,
            "from_command": command,
        }
        low, high = clients["shares"]
        load: dict[str, Any] = {
            "max_concurrency": concurrency,
            "num_prompts": clients["rounds"] * concurrency,
            # Lengths are uniform between two shares of the length that the client is given.
            "input_len": round(clients["input_len"] * (low + high) / 2),
            "output_len": round(clients["output_len"] * (low + high) / 2),
            "range_ratio": round((high - low) / (high + low), 6),
        }
        if any(getattr(options, name) is not None for name in _OTHER_LOADS):
            load = {}
        given = {
            name: value
            for name, value in {**server, **load}.items()
            if getattr(options, name) is None
        }
        return replace(options, **given)

    def fields(self) -> dict[str, str]:
        """Return the fields of a scenario that the launch command does not state."""
        return {f"hardware.{name}": v for name, v in self.hardware.items() if name != "model"}

    def notes(self) -> list[str]:
        """Return the date and the sources of the settings as lines of text."""
        known = {**self.sources, **_read()["clients"]["sources"]}
        return [f"recipe {self.name} ({self.date})", *(f"{k}: {v}" for k, v in known.items())]


def find_recipe(name: str) -> PublishedRecipe:
    """Return a packaged recipe. Raises InputError that lists the names if there is none."""
    known = recipes()
    if name not in known:
        raise InputError(
            f"--recipe {name}: unknown recipe{spelling_hint(name, known)}; expected one of "
            f"{', '.join(known)}"
        )
    return known[name]


def recipes() -> dict[str, PublishedRecipe]:
    """Return the packaged recipes by name."""
    return {row["name"]: PublishedRecipe(**row) for row in _read()["recipes"]}


@lru_cache(maxsize=1)
def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECIPES_PATH.read_text(encoding="utf-8"))
    return found
