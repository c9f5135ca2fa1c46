"""Criteria for a difference between the results of two revisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf, isnan

from simkv.core.figure_registry import FIGURE_NAMES
from simkv.study.change_check import FIGURES
from simkv.study.history.revision_run import RevisionResult
from simkv.study.whatif.outcome_predicate import RunCondition, parse_condition

#: Metrics that decide, in addition to ``FIGURES``, if verdict and expectations are equal.
MORE_FIGURES = ("preemptions", "recomputed_tokens", "makespan_s")


@dataclass(frozen=True)
class Criterion:
    """The compared property of a result. ``state`` returns the property as text."""

    about: str
    state: Callable[[RevisionResult], str]
    figure: str | None = None


def choose_criterion(
    good: RevisionResult, bad: RevisionResult, when: str | None, tolerance: float
) -> Criterion | None:
    """Return the first criterion in which two results differ, or None if they are equal.

    ``when`` is a condition or a metric. Without ``when``, the verdict, the expectations and the
    metrics are compared in this order. ``tolerance`` is the fraction by which a metric may differ.
    """
    if when is not None:
        criterion = _given(good, when, tolerance)
        return criterion if criterion.state(good) != criterion.state(bad) else None
    if good.figures.verdict != bad.figures.verdict:
        return Criterion("verdict", lambda result: result.figures.verdict)
    for text, ok in good.expectations:
        if ok != (text not in bad.missed):
            return _expectation(text)
    most = max(FIGURES + MORE_FIGURES, key=lambda name: _difference(good, bad, name))
    if _difference(good, bad, most) > tolerance:
        return _figure(good, most, tolerance)
    return None


def parse_when(when: str | None) -> None:
    """Raise InputError if ``--when`` is neither a condition nor a metric."""
    if when is not None and when not in FIGURE_NAMES:
        parse_condition(when, "--when")


def _given(good: RevisionResult, when: str, tolerance: float) -> Criterion:
    if when in FIGURE_NAMES:
        return _figure(good, when, tolerance)
    condition: RunCondition = parse_condition(when, "--when")

    def state(result: RevisionResult) -> str:
        return condition.text if condition.is_met(result.figures) else f"not {condition.text}"

    return Criterion(condition.text, state, getattr(condition, "figure", None))


def _expectation(text: str) -> Criterion:
    def state(result: RevisionResult) -> str:
        return "missed" if text in result.missed else "holds"

    return Criterion(f"expectation {text}", state, text.split()[0])


def _figure(good: RevisionResult, name: str, tolerance: float) -> Criterion:
    def state(result: RevisionResult) -> str:
        differs = _difference(good, result, name) > tolerance
        return "different" if differs else "as in GOOD"

    return Criterion(f"{name} by more than {tolerance:.3g} of its value in GOOD", state, name)


def _difference(one: RevisionResult, other: RevisionResult, name: str) -> float:
    """Return the relative difference of a metric, or infinity if only one run has the metric."""
    a, b = one.figures[name], other.figures[name]
    if isnan(a) or isnan(b):
        return 0.0 if isnan(a) and isnan(b) else inf
    return abs(b - a) / abs(a) if a else (inf if b else 0.0)
