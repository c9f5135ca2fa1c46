"""What a plan chooses from: the candidates of a scenario, each under several conditions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simkv.document import Document, read_document
from simkv.errors import InputError, nearest
from simkv.planner.failure import with_failure
from simkv.planner.objectives import Objective
from simkv.scenario import Scenario, resolve
from simkv.simulate import check_scenario
from simkv.sweeps.design import VARIANTS, Axis, assignment, grid
from simkv.sweeps.point import Job, job_of, repeated

Number = int | float


@dataclass(frozen=True, order=True)
class Condition:
    """How a candidate is tried: with the seed of a ``repeat``, with all steps ``scale`` times as
    long as the profile says, and with one replica failing if ``failing``."""

    scale: float = 1.0
    failing: bool = False
    repeat: int = 0

    @property
    def calm(self) -> Condition:
        """The same without a failure."""
        return Condition(self.scale, False, self.repeat)


@dataclass(frozen=True)
class Case:
    """A scenario's variant at any value of a knob.

    ``candidates`` are the values in the order of the search: later ones should do better.
    ``limits`` (ms) are those of goodput.
    """

    document: Document
    overrides: tuple[str, ...]
    variant: str
    knob: str
    candidates: tuple[Number, ...]
    objectives: tuple[Objective, ...]
    limits: Mapping[str, float]
    _scenarios: dict[int, Scenario] = field(default_factory=dict, compare=False, repr=False)

    def scenario(self, candidate: int) -> Scenario:
        """The scenario at a candidate's place. Raises InputError if it is not one."""
        if candidate not in self._scenarios:
            given = [*self.overrides, assignment(self.knob, self.candidates[candidate])]
            document = Document(self.document.path, copy(self.document.tree))
            found = resolve(document, given)[self.variant]
            self._scenarios[candidate] = found
        return self._scenarios[candidate]

    def check(self) -> None:
        """Raise InputError if the first or the last candidate cannot be run."""
        for candidate in sorted({0, len(self.candidates) - 1}):
            check_scenario(self.scenario(candidate), self.folder)

    @property
    def folder(self) -> Path:
        """Where the scenario's files are."""
        return self.document.path.parent.resolve()

    def job(
        self, candidate: int, condition: Condition, calm: Mapping[str, Any] | None = None
    ) -> Job:
        """What has to be run to try a candidate; with a failure it needs what came of the ``calm``
        run without."""
        scenario = tried(self.scenario(candidate), condition)
        if condition.failing:
            assert calm is not None
            scenario = with_failure(scenario, calm)
        return job_of(scenario, self.folder, self.limits)


def tried(scenario: Scenario, condition: Condition) -> Scenario:
    """The scenario with the seed and the speed of a condition."""
    scenario = repeated(scenario, condition.repeat)
    if condition.scale == 1.0:
        return scenario
    return scenario.model_copy(update={"step_scale": scenario.step_scale * condition.scale})


def ladder(axis: Axis, largest: bool) -> tuple[Number, ...]:
    """The values of a knob in the order of the search. Raises InputError if they are no numbers."""
    option = "--largest" if largest else "--smallest"
    if axis.path == VARIANTS:
        raise InputError(f"{option} {axis.path}: expected a field of the scenario; see --variant")
    values = [knobs[axis.path] for knobs in grid([axis])]
    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values):
        raise InputError(f"{option} {axis.path}: expected numbers; found {values[0]!r}")
    return tuple(sorted(numbers, reverse=largest))


def variants_of(path: Path, overrides: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """The variants of a scenario file to plan for; all if none is ``wanted``.

    Raises InputError for a name that is not one.
    """
    known = list(resolve(read_document(path), overrides))
    for name in wanted:
        if name not in known:
            raise InputError(
                f"--variant {name}: there is no such variant{nearest(name, known)}; expected one "
                f"of {', '.join(known)}"
            )
    return [name for name in known if not wanted or name in wanted]
