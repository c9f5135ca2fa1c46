"""Predict the results of load generators, and calibrate step times with them.

Predictions use the launch line of the server and the GPU's name. A calibration fits four numbers:
the factors that decode and prefill step times are multiplied by, the latency of the API server, and
its time per request. To estimate the error of a calibration, each file is predicted with a
calibration to all other files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, hypot, log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simkv.core.errors import InputError
from simkv.core.figure_registry import figure
from simkv.metrics.intervals import FigureInterval
from simkv.metrics.run_metrics import summarize
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import FrontEndSection, Scenario, StepScale
from simkv.scenario.scenario_builder import BuiltScenario, build_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.scenario_options import ScenarioOptions
from simkv.sim.simulation import build_replica_specs, find_front_end_costs, simulate_scenario
from simkv.validation.benchmark_results import BenchmarkResult

#: Metrics that a calibration fits, if a file contains them.
FITTED = ("ttft_ms.mean", "tpot_ms.mean", "e2e_ms.mean")
#: Changes of the load in the re-runs that measure the source of error ``protocol``: other arrival
#: times, if a file does not contain them, and other lengths, if a file has only their means.
OTHER_ARRIVALS: tuple[dict[str, float], ...] = ({"seed": 1}, {"seed": 2})
OTHER_LENGTHS: tuple[dict[str, float], ...] = (
    {"seed": 3, "range_ratio": 0.5},
    {"seed": 4, "range_ratio": 0.9},
)
#: Step times may be multiplied or divided by at most this factor.
MAX_FACTOR = 8.0
#: Maximum latency of the API server, and maximum time per request (s).
MAX_LATENCY_S, MAX_REQUEST_S = 2.0, 0.2
#: Weight of the prior at the packaged values. Two results have four mean latencies and would
#: determine the four numbers exactly, although a simulation with the right numbers still has an
#: error of about 5 %. The weight assumes that a factor of 1.4, or a large change of the API server,
#: is as likely as this error.
PRIOR = 0.15
#: Error of all latencies below which a fit ends.
CLOSE = 0.01
#: Changes of the API server's latency and time per request that count as large (s).
LATENCY_UNIT_S, REQUEST_UNIT_S = 0.05, 0.01


class ComparedFigure(NamedTuple):
    """A metric of a benchmark: the measured value, the predicted value, and the interval of the
    prediction (None if unknown).

    ``reason`` states why the interval has no upper bound, or that a queue grows.
    """

    name: str
    measured: float
    predicted: float
    interval: FigureInterval | None = None
    reason: str = ""

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1

    @property
    def inside(self) -> bool | None:
        """Whether the interval contains the measured value; None without an interval."""
        if self.interval is None or self.interval.low is None:
            return None
        high = self.interval.high
        return self.interval.low <= self.measured and (high is None or self.measured <= high)


@dataclass(frozen=True)
class CheckedBenchmark:
    """Result of a load generator with its prediction, and likely reasons for errors."""

    benchmark: BenchmarkResult
    figures: tuple[ComparedFigure, ...]
    causes: tuple[str, ...]

    @property
    def worst(self) -> ComparedFigure:
        """The metric with the largest error."""
        return max(self.figures, key=lambda one: abs(log(one.predicted / one.measured)))

    @property
    def outside(self) -> list[ComparedFigure]:
        """Metrics whose measured value is outside the interval of the prediction."""
        return [one for one in self.figures if one.inside is False]


def build_benchmark_scenario(
    benchmark: BenchmarkResult, options: ScenarioOptions, overrides: Sequence[str] = ()
) -> tuple[Scenario, BuiltScenario]:
    """Return the scenario of a server under the load of a benchmark result.

    Raises InputError if the options or overrides are invalid.
    """
    return _build(benchmark, options, overrides, {})


def _build(
    benchmark: BenchmarkResult,
    options: ScenarioOptions,
    overrides: Sequence[str],
    changes: Mapping[str, Any],
) -> tuple[Scenario, BuiltScenario]:
    model = options.model or (None if options.from_command else benchmark.model)
    built = build_scenario(replace(options, model=model, **{**benchmark.load, **changes}))
    return resolve_variants(built.document, overrides)["run"], built


def build_other_protocols(
    benchmark: BenchmarkResult, options: ScenarioOptions, overrides: Sequence[str] = ()
) -> list[Scenario]:
    """Return scenarios with other loads that are possible for a benchmark result.

    The arrival times or the lengths differ. The result is empty if the file has the times and
    lengths of single requests.
    """
    if "trace" in benchmark.load:
        return []
    changes = OTHER_LENGTHS
    if "request_rate" in benchmark.load:
        changes = OTHER_ARRIVALS + OTHER_LENGTHS
    return [_build(benchmark, options, overrides, change)[0] for change in changes]


def check_benchmark(
    benchmark: BenchmarkResult,
    scenario: Scenario,
    notes: Sequence[str] = (),
    protocols: Sequence[Scenario] = (),
) -> CheckedBenchmark:
    """Predict the metrics of a benchmark result.

    ``notes`` are the options of the launch line that the scenario does not include. ``protocols``
    are scenarios with other possible loads (see ``build_other_protocols``). Their metrics determine
    the source of error ``protocol``, which widens the intervals.
    """
    result = run_scenario(scenario, Path())
    others = [_simulate(other) for other in protocols]
    rows, widths = [], []
    for name, measured in benchmark.figures.items():
        if not (predicted := figure(result.summary, name)):
            continue
        found = [log(value / predicted) for other in others if (value := figure(other, name))]
        ends = min([0.0, *found]), max([0.0, *found])
        interval = _widen(result.fidelity.intervals.get(name), predicted, ends)
        known = result.fidelity
        reason = known.reasons.get(name) or known.saturated.get(name, "")
        rows.append(ComparedFigure(name, measured, predicted, interval, reason))
        widths.append(ends)
    if not rows:
        raise InputError(f"{benchmark.name}: the simulation computes none of the measured metrics")
    causes = _causes(result, benchmark, notes)
    if others:
        low = 100 * (exp(min(low for low, _ in widths)) - 1)
        high = 100 * (exp(max(high for _, high in widths)) - 1)
        causes.append(
            f"source of error protocol: with other arrival times and lengths that the file allows, "
            f"the metrics change by up to {low:+.0f} to {high:+.0f} %; the intervals contain this, "
            f"but {len(others)} re-runs are few: in a short benchmark, other arrivals may change "
            "the metrics more"
        )
    return CheckedBenchmark(benchmark, tuple(rows), tuple(causes))


def _simulate(scenario: Scenario) -> dict[str, Any]:
    """Return the metrics of a scenario."""
    return summarize(simulate_scenario(scenario, build_replica_specs(scenario, Path())).record)


def _widen(
    interval: FigureInterval | None, predicted: float, ends: tuple[float, float]
) -> FigureInterval | None:
    """Return an interval with an independent source of error added, whose ends are logarithms."""
    if interval is None or interval.low is None:
        return interval
    low, high = interval.low, interval.high
    if low > 0:
        low = predicted * exp(-hypot(log(predicted / low), ends[0]))
    if high is not None and high > 0:
        high = predicted * exp(hypot(log(high / predicted), ends[1]))
    return FigureInterval(low, high)


def _causes(result: RunResult, benchmark: BenchmarkResult, notes: Sequence[str]) -> list[str]:
    """Return likely reasons for the errors; the most likely reason comes first."""
    unfinished = result.summary["requests"] - result.summary["finished"]
    found = [result.fidelity.note] if result.fidelity.note else []
    if unfinished:
        found.append(f"{unfinished} simulated requests did not finish")
    costs = find_front_end_costs(result.scenario, result.specs[0])
    if costs and result.scenario.front_end is None:
        found.append("the time of the API server is a packaged value, not measured on this server")
    return [*found, *benchmark.notes, *notes, *result.notes]


class Calibration(NamedTuple):
    """Fitted numbers: the factors that step times are multiplied by, and two times of the API
    server in seconds.
    """

    decode: float
    prefill: float
    latency_s: float
    request_s: float

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with these fitted numbers."""
        given = scenario.front_end if isinstance(scenario.front_end, FrontEndSection) else None
        front_end = (given or FrontEndSection()).model_copy(
            update={"latency_ms": 1e3 * self.latency_s, "request_ms": 1e3 * self.request_s}
        )
        scale = StepScale(decode=self.decode, prefill=self.prefill, mixed=self.prefill)
        return scenario.model_copy(update={"step_scale": scale, "front_end": front_end})


class CalibrationCase(NamedTuple):
    """A benchmark result, and the scenario that predicts it."""

    benchmark: BenchmarkResult
    scenario: Scenario


class _CloseFit(Exception):
    """Signal that a calibration reproduces all latencies closely."""

    def __init__(self, found: Calibration) -> None:
        super().__init__()
        self.found = found


def fit_calibration(
    cases: Sequence[CalibrationCase], advance: Callable[[], Any] = lambda: None
) -> Calibration:
    """Return the calibration with the smallest errors of the mean latencies over all cases.

    With one case, only the factors are fitted. ``advance`` is called after each simulation.
    """
    from scipy.optimize import least_squares

    first = cases[0].scenario
    packaged = find_front_end_costs(first, build_replica_specs(first, Path())[0])
    latency = packaged.latency_s if packaged else 0.0
    request = packaged.request_s if packaged else 0.0

    def calibration(values: np.ndarray[Any, Any]) -> Calibration:
        """Convert the variables of the fit, which start at 1; a change by 1 is a large change for
        each of them.
        """
        given = [float(value) - 1 for value in values] + [0.0] * (4 - len(values))
        return Calibration(
            round(exp(given[0]), 6),
            round(exp(given[1]), 6),
            round(max(latency + LATENCY_UNIT_S * given[2], 0.0), 6),
            round(max(request + REQUEST_UNIT_S * given[3], 0.0), 6),
        )

    def errors(values: np.ndarray[Any, Any]) -> list[float]:
        found = []
        for case in cases:
            figures = predict_figures(case, calibration(values))
            found += [log(one.predicted / one.measured) for one in figures]
            advance()
        if max(map(abs, found)) < CLOSE:
            raise _CloseFit(calibration(values))
        return found + [PRIOR * (float(value) - 1) for value in values]

    most, count = log(MAX_FACTOR), 2 if len(cases) == 1 else 4
    low = [1 - most, 1 - most, 1 - latency / LATENCY_UNIT_S, 1 - request / REQUEST_UNIT_S]
    high = [
        1 + most,
        1 + most,
        1 + MAX_LATENCY_S / LATENCY_UNIT_S,
        1 + MAX_REQUEST_S / REQUEST_UNIT_S,
    ]
    try:
        fitted = least_squares(
            errors,
            np.clip(_first_guess(cases, calibration, advance)[:count], low[:count], high[:count]),
            bounds=(
                [value - 1e-3 for value in low[:count]],
                [value + 1e-3 for value in high[:count]],
            ),
            diff_step=0.1,
            ftol=1e-4,
            xtol=1e-3,
            loss="soft_l1",
            f_scale=0.3,
            max_nfev=10,
        )
    except _CloseFit as close:
        return close.found
    return calibration(fitted.x)


def _first_guess(
    cases: Sequence[CalibrationCase],
    calibration: Callable[[np.ndarray[Any, Any]], Calibration],
    advance: Callable[[], Any],
) -> np.ndarray[Any, Any]:
    """Return start values for the fit of the factors.

    The decode factor is multiplied by the median ratio of measured to predicted TPOT, and the
    prefill factor by the median ratio of measured to predicted TTFT. This is repeated once with the
    corrected factors.
    """
    values = np.ones(4)
    for _ in range(2):
        ratios: dict[str, list[float]] = {name: [] for name in FITTED}
        for case in cases:
            for one in predict_figures(case, calibration(values)):
                ratios[one.name].append(log(one.measured / one.predicted))
            advance()
        for index, name in enumerate(("tpot_ms.mean", "ttft_ms.mean")):
            if ratios[name]:
                values[index] += float(np.clip(np.median(ratios[name]), -1.0, 1.0))
    return values


def predict_figures(
    case: CalibrationCase, calibration: Calibration | None = None
) -> list[ComparedFigure]:
    """Predict the metrics that calibrations are fitted to.

    ``calibration`` is used for the prediction; None selects the packaged costs. Raises InputError
    if the benchmark has none of the metrics.
    """
    scenario = calibration.apply(case.scenario) if calibration else case.scenario
    summary = _simulate(scenario)
    found = []
    for name in FITTED:
        measured, predicted = case.benchmark.figures.get(name), figure(summary, name)
        if measured and predicted:
            found.append(ComparedFigure(name, measured, predicted))
    if not found:
        raise InputError(
            f"{case.benchmark.name}: contains none of the metrics to which step times can be "
            f"fitted; expected one of {', '.join(FITTED)}"
        )
    return found


def leave_one_out(
    cases: Sequence[CalibrationCase], advance: Callable[[], Any] = lambda: None
) -> list[tuple[CalibrationCase, list[ComparedFigure]]]:
    """Return each case with its metrics as predicted by a calibration to all other cases."""
    found = []
    for case in cases if len(cases) > 1 else ():
        others = [other for other in cases if other is not case]
        found.append((case, predict_figures(case, fit_calibration(others, advance))))
    return found
