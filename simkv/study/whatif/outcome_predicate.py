"""Conditions on the result of a run: a verdict, or a bound on a metric.

Example:

    parse_condition("starved")         # the verdict
    parse_condition("stalled")         # livelock, deadlock or a dead engine
    parse_condition("preemptions>=1")
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf, isclose, isfinite, isnan
from typing import Any, Literal, get_args

from simkv.core.errors import InputError, spelling_hint
from simkv.core.figure_registry import FIGURE_NAMES
from simkv.core.outcome import humanize
from simkv.scenario.expectations import VerdictName
from simkv.study.whatif.trial_evaluation import RunFigures

VERDICTS: tuple[str, ...] = get_args(VerdictName)
#: Verdicts for which ``stalled`` is another name: no further progress is possible.
STALLED = ("livelock", "deadlock", "engine died")
Sign = Literal[">=", "<=", "="]


@dataclass(frozen=True)
class VerdictCondition:
    """Condition that the verdict of the run is one of ``words``."""

    text: str
    words: tuple[str, ...]

    def is_met(self, figures: RunFigures) -> bool:
        return figures.verdict in self.words

    def describe(self, figures: RunFigures) -> str:
        """Return the run's verdict and the affected requests."""
        return figures.summary

    @property
    def outcome(self) -> str:
        """Outcome of the requests that the verdict affects."""
        if self.words == ("served",):
            return "finished"
        return "stalled" if set(self.words) <= set(STALLED) else self.words[0]

    def expectation(self, figures: RunFigures) -> dict[str, Any]:
        """Return the ``expect`` section of a scenario file for a run that meets the condition."""
        return {"verdict": figures.verdict}


@dataclass(frozen=True)
class FigureCondition:
    """Condition that a metric of the run is at least, at most or equal to a number.

    A run without the metric does not meet the condition.
    """

    text: str
    figure: str
    sign: Sign
    number: float

    def is_met(self, figures: RunFigures) -> bool:
        found = figures[self.figure]
        if isnan(found):
            return False
        if isclose(found, self.number, rel_tol=1e-9, abs_tol=1e-9):
            return True
        return self.sign != "=" and (found > self.number) == (self.sign == ">=")

    def describe(self, figures: RunFigures) -> str:
        """Return the run's value of the metric, and its verdict."""
        found = figures[self.figure]
        shown = "none" if isnan(found) else f"{found:.10g}"
        return f"{self.figure} {shown} ({figures.verdict})"

    def expectation(self, _: RunFigures) -> dict[str, Any]:
        """Return the ``expect`` section of a scenario file for the condition."""
        name = {">=": "ge", "<=": "le", "=": "eq"}[self.sign]
        number = int(self.number) if self.number == int(self.number) else self.number
        return {self.figure: {name: number}}


RunCondition = VerdictCondition | FigureCondition


def parse_condition(text: str, option: str = "--keep") -> RunCondition:
    """Parse a condition.

    Raises InputError with the name of the ``option`` if the text is invalid.
    """
    if bound := re.fullmatch(r"\s*([A-Za-z0-9_.]+)\s*(>=|<=|=)=?\s*([-+0-9.eE]+)\s*", text):
        return _bound(text.strip(), bound[1], bound[2], bound[3], option)
    word = re.sub(r"[\s_-]+", " ", text.strip().lower())
    by_word = {"stalled": STALLED, **{humanize(v): (v,) for v in VERDICTS}}
    if word not in by_word:
        raise InputError(
            f"{option} {text}: unknown verdict{spelling_hint(word, by_word)}; expected one of "
            f"{', '.join(by_word)}, or a bound such as preemptions>=1 or ttft_ms.p99<=500"
        )
    return VerdictCondition(word, by_word[word])


def _bound(text: str, name: str, sign: str, number: str, option: str) -> FigureCondition:
    if name not in FIGURE_NAMES:
        raise InputError(
            f"{option} {text}: unknown metric {name!r}{spelling_hint(name, FIGURE_NAMES)}; "
            f"expected one of {', '.join(FIGURE_NAMES)}"
        )
    try:
        value = float(number)
    except ValueError:
        value = inf
    if not isfinite(value):
        raise InputError(f"{option} {text}: {number!r} is not a number")
    signs: dict[str, Sign] = {">=": ">=", "<=": "<=", "=": "="}
    return FigureCondition(text, name, signs[sign], value)
