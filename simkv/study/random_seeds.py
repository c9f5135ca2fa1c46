"""Determine whether a workload is random, and derive scenarios with other seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from simkv.core.errors import InputError
from simkv.scenario.scenario import Scenario
from simkv.workload.workload_section import Workload


def find_seed(workload: Workload) -> int | None:
    """Return the seed of a workload, or None if nothing in the workload is random."""
    form = workload.arrivals or workload.sessions
    if form is not None:
        return form.seed
    drawn = workload.sample is not None or workload.request_rate is not None
    return workload.seed if workload.trace is not None and drawn else None


def reseed_scenario(scenario: Scenario, repeat: int) -> Scenario:
    """Return the scenario with another seed, derived from its own seed and the index ``repeat``.

    Index 0 returns the scenario unchanged.
    """
    workload = scenario.workload
    seed = find_seed(workload)
    if repeat == 0 or seed is None:
        return scenario
    derived = int(np.random.SeedSequence(seed, spawn_key=(repeat,)).generate_state(1)[0])
    changed = with_form(workload, seed=derived) or {"seed": derived}
    return scenario.model_copy(update={"workload": workload.model_copy(update=changed)})


def with_form(workload: Workload, **fields: Any) -> dict[str, Any]:
    """Return a copy of the ``arrivals`` or ``sessions`` section of a workload, with ``fields``
    changed.

    The result has the section's name as its key. It is empty if the workload has neither section.
    """
    for name in ("arrivals", "sessions"):
        form = getattr(workload, name)
        if form is not None:
            given = {field: getattr(form, field) for field in form.model_fields_set}
            return {name: type(form)(**{**given, **fields})}
    return {}


def make_unseeded_error(repeats: int) -> InputError:
    """Return the error to raise if ``repeats`` is above 1 for a workload that is not random."""
    return InputError(
        f"--repeats {repeats}: the workload has no random part, so all repeats would give the "
        "same result; expected 1"
    )
