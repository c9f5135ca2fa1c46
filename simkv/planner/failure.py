"""A fleet that loses one replica when that hurts most."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simkv.errors import InputError
from simkv.scenario import Scenario


def with_failure(scenario: Scenario, peak: Mapping[str, Any]) -> Scenario:
    """The scenario with one replica failing for good at the ``peak`` of a run without."""
    what = f"replica {peak['replica']} of {scenario.name}"
    raise InputError(f"--survive: {what}: this version of simkv has no fleets that fail")
