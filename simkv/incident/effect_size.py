"""Effect of a change on one metric, with an interval.

The metric is the number of finished requests, their mean E2E latency, the longest stall, or the
number of preemptions. It is simulated with and without the change in several scenarios that may
describe the incident. These scenarios have other sampled workloads, or step costs that are
decreased or increased by the held-out error of the profile. For each scenario, the requests are
resampled with replacement. The interval is from the lowest 5th percentile to the highest 95th
percentile over all scenarios.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simkv.core.figure_registry import format_seconds
from simkv.study.whatif.trial_evaluation import RunFigures
from simkv.study.whatif.whatif import MIN_LATENCY_CHANGE, MIN_STALL_CHANGE, Effect

Floats = npt.NDArray[np.float64]
#: Number of resamplings, and the percentiles (%) excluded at each end of the interval.
RESAMPLES, TAIL_PERCENT = 200, 5.0
#: Fraction of the scenarios in which a change must be an improvement.
MIN_HOLDING_SHARE = 0.9
ANSWERED, E2E, STALLED, PREEMPTED = "answered", "mean E2E", "longest stall", "preemptions"
_FIGURES = {STALLED: "longest_stall_s", PREEMPTED: "preemptions"}


@dataclass(frozen=True)
class EffectSize:
    """Effect of a change on the metric ``figure``, with a 90 % interval.

    ``before`` and ``after`` are the simulated values. ``low`` and ``high`` are the bounds of the
    ratio of ``after`` to ``before``, or None. For the number of finished requests, they are the
    bounds of the difference. ``worlds`` is the number of further simulated scenarios that may
    describe the incident. ``holds`` is the number of scenarios in which the whole interval is an
    improvement.
    """

    figure: str
    before: float
    after: float
    low: float | None
    high: float | None
    worlds: int
    of: tuple[int, int] = (0, 0)
    requests: int = 0
    holds: int = 0

    @property
    def sure(self) -> bool:
        """Whether the change is an improvement in at least the fraction ``MIN_HOLDING_SHARE`` of
        scenarios.
        """
        known = self.low is not None and self.high is not None
        return known and self.holds >= MIN_HOLDING_SHARE * (self.worlds + 1)

    @property
    def told(self) -> str:
        """The effect as text, such as ``mean E2E 41.1 s -> 5.8 s, x0.14, 90 % interval 0.12 to
        0.17``.
        """
        if self.figure == ANSWERED:
            ends = self._ends("{:+.0f}".format)
            return f"answered {self.before:.0f} -> {self.after:.0f}, {ends}"
        unit = format_seconds if self.figure != PREEMPTED else "{:.0f}".format
        ratio = f", x{self.after / self.before:.2f}" if self.before else ""
        return (
            f"{self.figure} {unit(self.before)} -> {unit(self.after)}{ratio}, "
            f"{self._ends('{:.2f}'.format)}"
        )

    @property
    def compared(self) -> str:
        """The compared requests as a sentence; empty if all requests are compared."""
        least, most = self.of
        if self.figure == ANSWERED or least >= self.requests:
            return ""
        count = f"{least}" if least == most else f"{least} to {most}"
        # The reconstructions have different numbers of requests.
        whole = f"of {self.requests}" if most <= self.requests else "in the reconstructions"
        return (
            f"The mean is over the requests that are answered with and without the change: {count} "
            f"{whole}."
        )

    def _ends(self, show: Callable[[float], str]) -> str:
        if self.low is None or self.high is None:
            return "90 % interval not determined: a simulation has no such request"
        return f"90 % interval {show(self.low)} to {show(self.high)}"


@dataclass(frozen=True)
class SideEffects:
    """Side effects of a change on other requests.

    ``slower`` is the number of requests that take at least 5 % longer. ``worst`` is the largest
    slowdown of a request as a factor. ``failed`` is the number of requests that finish only without
    the change.
    """

    slower: int
    worst: float
    failed: int


def measure_side_effects(effect: Effect, base: RunFigures) -> SideEffects:
    """Count the requests that a change makes slower or prevents from finishing."""
    before, after = ({e.id: e.e2e_s for e in run.endings} for run in (base, effect.figures))
    ratios = [(after[i] or 0.0) / (before[i] or 1.0) for i in effect.slower]
    return SideEffects(len(ratios), max(ratios, default=1.0), len(effect.newly_failed))


def choose_figure(effect: Effect, base: RunFigures) -> str:
    """Return the name of the metric that measures the benefit of a change."""
    if effect.figures["finished"] != base["finished"]:
        return ANSWERED
    if abs(effect.e2e_ratio - 1) >= MIN_LATENCY_CHANGE:
        return E2E
    stall = base["longest_stall_s"]
    shorter = stall - effect.figures["longest_stall_s"]
    return STALLED if shorter and abs(shorter) >= MIN_STALL_CHANGE * stall else PREEMPTED


def measure_effect(
    effect: Effect, base: RunFigures, worlds: Sequence[tuple[RunFigures, RunFigures]]
) -> EffectSize:
    """Return the effect of a change on the incident, with a 90 % interval.

    ``worlds`` contains the runs of other likely scenarios, in pairs without and with the change.
    """
    figure = choose_figure(effect, base)
    runs = [(base, effect.figures), *worlds]
    if figure in _FIGURES:
        name = _FIGURES[figure]
        told = base[name], effect.figures[name]
        if any(after[name] and not before[name] for before, after in runs):
            return EffectSize(figure, *told, None, None, len(worlds))
        ratios = [after[name] / before[name] if before[name] else 1.0 for before, after in runs]
        holds = sum(_improves(figure, ratio, ratio) for ratio in ratios)
        return EffectSize(figure, *told, min(ratios), max(ratios), len(worlds), holds=holds)
    pairs = [_paired(before, after) for before, after in runs]
    if figure == ANSWERED:
        told = base["finished"], effect.figures["finished"]
        of = (len(pairs[0][0]),) * 2
        estimate = told[1] - told[0]
    else:
        answered = [np.isfinite(one) & np.isfinite(other) for one, other in pairs]
        counts = [int(both.sum()) for both in answered]
        of = min(counts), max(counts)
        one, other = pairs[0][0][answered[0]], pairs[0][1][answered[0]]
        told = float(one.mean()), float(other.mean())
        estimate = told[1] / told[0]
    drawn = [_drawn(*both, figure) for both in pairs]
    if not all(map(len, drawn)):
        return EffectSize(figure, *told, None, None, len(worlds), of, len(pairs[0][0]))
    tails = (TAIL_PERCENT, 100 - TAIL_PERCENT)
    bounds = [
        (float(low), float(high)) for low, high in (np.percentile(one, tails) for one in drawn)
    ]
    # With few, very different requests, all resampled values may be above or below the simulated
    # value.
    bounds[0] = min(estimate, bounds[0][0]), max(estimate, bounds[0][1])
    holds = sum(_improves(figure, *ends) for ends in bounds)
    low, high = min(low for low, _ in bounds), max(high for _, high in bounds)
    return EffectSize(figure, *told, low, high, len(worlds), of, len(pairs[0][0]), holds)


def _improves(figure: str, low: float, high: float) -> bool:
    """Return whether all values from ``low`` to ``high`` are an improvement of the metric."""
    return low >= 0 if figure == ANSWERED else high < 1 + MIN_LATENCY_CHANGE


def _paired(before: RunFigures, after: RunFigures) -> tuple[Floats, Floats]:
    """Return the E2E latencies of the requests in two runs, in seconds; NaN without an answer."""
    ends = {ending.id: ending.e2e_s for ending in after.endings}
    both = [(e.e2e_s, ends[e.id]) for e in before.endings if e.id in ends]
    pairs = np.array([[np.nan if e is None else e for e in pair] for pair in both], np.float64)
    return pairs[:, 0], pairs[:, 1]


def _drawn(before: Floats, after: Floats, figure: str) -> Floats:
    """Return the effect in each of ``RESAMPLES`` resamples of the requests.

    The effect is a ratio of means or, for the number of finished requests, a difference.
    """
    luck, count = np.random.default_rng(0), len(before)
    if figure == ANSWERED:
        one, other = np.isfinite(before).astype(float), np.isfinite(after).astype(float)
    else:
        both = np.isfinite(before) & np.isfinite(after)
        one, other = np.where(both, before, 0.0), np.where(both, after, 0.0)
    found = []
    for _ in range(RESAMPLES):
        times = np.bincount(luck.integers(0, count, count), minlength=count)
        without, having = float(times @ one), float(times @ other)
        if figure == ANSWERED:
            found.append(having - without)
        elif without > 0:
            found.append(having / without)
    return np.array(found)
