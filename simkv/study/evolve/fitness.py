"""Goals of a search: metrics, and the loss of a run relative to the engine's scheduler.

Example:

    goals = parse_goals(["e2e_ms.p99", "jain_index"], {})
    goals[0].loss(9.0, 10.0)  # -0.1: 10 % better than the engine's scheduler
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simkv.core.errors import InputError, spelling_hint
from simkv.core.figure_registry import METRICS
from simkv.scenario.objectives import (
    DERIVED,
    GOODPUT_FIGURES,
    OBJECTIVE_FIGURES,
    UNSERVED_FIGURES,
)

#: Loss of a run that lacks the metric because it served no requests or failed.
NO_FIGURE = 10.0
_MORE = ("good", "goodput", "goodput_share")


@dataclass(frozen=True)
class FigureGoal:
    """A metric to optimize, and whether higher values are better."""

    figure: str
    more_is_better: bool

    def __str__(self) -> str:
        return f"{self.figure} ({'higher' if self.more_is_better else 'lower'} is better)"

    def loss(self, value: float | None, shipped: float | None) -> float:
        """Return the fraction by which ``value`` is worse than ``shipped``; negative if it is
        better.

        ``shipped`` is the value of the engine's scheduler. If it is 0, the difference is returned.
        """
        if value is None or shipped is None:
            return 0.0 if value is shipped else NO_FIGURE if value is None else -NO_FIGURE
        off = (value - shipped) / (abs(shipped) or 1.0)
        return min(-off if self.more_is_better else off, NO_FIGURE)


def parse_goals(asked: Sequence[str], limits: Mapping[str, float]) -> tuple[FigureGoal, ...]:
    """Parse goals such as ``e2e_ms.p99`` or ``jain_index:max``. Raises InputError for an invalid
    goal.
    """
    if not asked:
        raise InputError("--objective: missing; expected a metric such as e2e_ms.p99")
    found: dict[str, FigureGoal] = {}
    for text in asked:
        figure, colon, way = text.partition(":")
        if figure not in OBJECTIVE_FIGURES:
            raise InputError(
                f"--objective {text}: unknown metric "
                f"{figure!r}{spelling_hint(figure, OBJECTIVE_FIGURES)}; "
                f"expected one of {', '.join(OBJECTIVE_FIGURES)}"
            )
        if colon and way not in ("min", "max"):
            raise InputError(f"--objective {text}: expected {figure}:min or {figure}:max")
        if figure in GOODPUT_FIGURES and not limits:
            raise InputError(f"--objective {text}: requires --goodput, such as --goodput ttft:500")
        if figure in found:
            raise InputError(f"--objective {text}: this metric is specified twice")
        more = figure in _MORE if figure in DERIVED else METRICS[figure].more_is_better
        found[figure] = FigureGoal(figure, way == "max" if colon else more)
    return tuple(found.values())


def has_outcome_goal(goals: Sequence[FigureGoal]) -> bool:
    """Return whether any goal is about unserved requests."""
    return any(goal.figure in UNSERVED_FIGURES for goal in goals)
