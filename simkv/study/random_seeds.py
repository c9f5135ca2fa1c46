"""What is drawn by chance in a scenario, and the same scenario with other seeds."""

from __future__ import annotations

from typing import Any

import numpy as np

from simkv.core.errors import InputError
from simkv.scenario.scenario import Scenario
from simkv.workload.workload_section import Workload


def find_seed(workload: Workload) -> int | None:
    """The seed of what a workload draws by chance; None if it draws nothing."""
    form = workload.arrivals or workload.sessions
    if form is not None:
        return form.seed
    drawn = workload.sample is not None or workload.request_rate is not None
    return workload.seed if workload.trace is not None and drawn else None


def reseed_scenario(scenario: Scenario, repeat: int) -> Scenario:
    """The scenario with a seed of its own for each ``repeat``, derived from its own seed.

    Repeat 0 is the scenario itself, and so is every other if nothing is drawn by chance.
    """
    workload = scenario.workload
    seed = find_seed(workload)
    if repeat == 0 or seed is None:
        return scenario
    derived = int(np.random.SeedSequence(seed, spawn_key=(repeat,)).generate_state(1)[0])
    changed = with_form(workload, seed=derived) or {"seed": derived}
    return scenario.model_copy(update={"workload": workload.model_copy(update=changed)})


def with_form(workload: Workload, **fields: Any) -> dict[str, Any]:
    """The form of a workload that draws its requests with other ``fields``; nothing without one.

    It is built anew, for a copy would keep what has been drawn before.
    """
    for name in ("arrivals", "sessions"):
        form = getattr(workload, name)
        if form is not None:
            given = {field: getattr(form, field) for field in form.model_fields_set}
            return {name: type(form)(**{**given, **fields})}
    return {}


def make_unseeded_error(repeats: int) -> InputError:
    """What is wrong with several ``repeats`` of what is not drawn by chance."""
    return InputError(
        f"--repeats {repeats}: nothing in this workload is drawn by chance, so that all repeats "
        "would be the same; expected 1"
    )
