"""The fields of scenarios as plain data: what decides a run, and in what two runs differ."""

from __future__ import annotations

from typing import Any

from simkv.scenario.roles import Role, names_of
from simkv.scenario.scenario import Scenario

#: What is said about a scenario, and what decides how it runs.
ABOUT = names_of(Scenario, Role.ABOUT)
DECISIVE = names_of(Scenario, Role.WORLD, Role.ENGINE)


def run_fields(scenario: Scenario, *, defaults: bool = True) -> dict[str, Any]:
    """The fields that decide how a scenario runs, as plain data; equal if the runs are the same.

    But for the files that it names, whose contents a digest adds. Without ``defaults`` what is at
    its default within a section is left out.
    """
    return scenario.model_dump(include=set(DECISIVE), exclude_defaults=not defaults)
