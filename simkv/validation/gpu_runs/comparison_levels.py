"""Compare a real run with the simulation at three levels, to locate the source of an error.

L0  The simulation uses the recorded step times of the run and must make the same decisions. Both
    use the same scheduler, so this tests how scheduler, clock, clients and device are connected.
L1  The step times of the profile are compared with the measured ones, for the decisions of the run.
L2  The simulation uses the step times of the profile and makes its own decisions. Its metrics are
    compared with the metrics of the run.

Other cost models (see baseline_models.py) and repeats of the run are compared as well. An error
below the difference between two real runs is not significant. Every error has a 95 % confidence
interval over resampled steps or runs. The predicted interval of a metric is scored by its width and
by whether it contains the value of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import nan
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from simkv.core.figure_registry import figure
from simkv.costs.cost_profile import CostProfile, StepCost, StepError
from simkv.costs.hardware.model_shape import ModelShape
from simkv.costs.held_out_errors import summarize_errors_by_kind
from simkv.costs.profile_uncertainty import make_scaled_executor
from simkv.costs.scaled_executor import ErrorSide, classify_step
from simkv.costs.step_load import StepLoad
from simkv.metrics.intervals import MeasuredRun, compute_interval
from simkv.metrics.run_metrics import summarize
from simkv.scenario.scenario import Scenario
from simkv.sim.run_record import RunRecord
from simkv.sim.simulation import simulate_with_profile
from simkv.validation.bootstrap import ConfidenceInterval, step_error_intervals
from simkv.validation.figure_comparison import FigureComparison
from simkv.validation.gpu_runs.baseline_models import (
    CostModel,
    composed,
    profile_model,
    roofline,
)
from simkv.validation.gpu_runs.stalled_steps import Stall
from simkv.validation.gpu_runs.timed_replay import Agreement, GpuRun

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
FIGURES = (
    "makespan_s",
    "output_throughput",
    *(
        f"{name}.{statistic}"
        for name in LATENCIES
        for statistic in ("mean", "median", "p90", "p99")
    ),
    "preemptions",
    "recomputed_tokens",
    "peak_blocks",
)


@dataclass(frozen=True)
class Validation:
    """Results of a comparison at three levels.

    ``verdict`` compares decisions, ``steps`` compares step times, and ``figures`` compares metrics.
    ``step_ends`` are the 95 % confidence intervals of the step time errors. ``stalls`` are the
    unusually long steps of each run, which are excluded from ``steps``. ``same_victims`` is the
    Jaccard index of the requests preempted in the run and in the simulation, by cost model.
    ``over_composed`` has P10, median and P90 of the measured step times divided by the composed
    step times, by kind of step.
    """

    verdict: Agreement
    steps: dict[str, dict[str, StepError]]
    figures: list[FigureComparison]
    same_victims: dict[str, float]
    step_ends: dict[str, dict[str, dict[str, ConfidenceInterval]]]
    stalls: list[list[Stall]]
    over_composed: dict[str, tuple[float, float, float]] = field(default_factory=dict)


def validate_run(
    run: GpuRun,
    profile: CostProfile,
    again: Sequence[GpuRun] = (),
    baselines: Mapping[str, CostModel] | None = None,
) -> Validation:
    """Compare ``profile`` and ``baselines`` with a run and its repeats (``again``).

    The times of all steps except stalled steps are compared. For metrics, the means over the runs
    are compared.
    """
    runs = [run, *again]
    models = {
        "profile": profile_model(profile),
        **(baselines or {}),
        **_unfitted_models(run, profile),
    }
    records = {
        name: simulate_with_profile(run.scenario, model.profile).record
        for name, model in models.items()
        if model.profile
    }
    real = [figures_of(one.record) for one in runs]
    simulated = {name: figures_of(record) for name, record in records.items()}
    ends = figure_intervals(run.scenario, profile, records["profile"])
    steps = steady_steps(runs)
    errors = {name: _step_errors(steps, model) for name, model in models.items()}
    differing = [one.verdict for one in runs if one.verdict.step is not None]
    return Validation(
        differing[0] if differing else run.verdict,
        {name: summarize_errors_by_kind(found) for name, found in errors.items()},
        [
            FigureComparison(
                f,
                fmean(one[f] for one in real),
                {name: s[f] for name, s in simulated.items()},
                [one[f] for one in real],
                ends.get(f),
            )
            for f in FIGURES
        ],
        {name: _overlap(_victims(run.record), _victims(r)) for name, r in records.items()},
        {name: _step_ends(found) for name, found in errors.items()},
        [one.stalls for one in runs],
        measured_over_composed([step[:2] for step in steps], profile.gpu, profile.model),
    )


def _unfitted_models(run: GpuRun, profile: CostProfile) -> dict[str, CostModel]:
    """Return the cost models that need no fit: the roofline and the composed costs, if known."""
    found = {}
    if packaged := composed(profile.gpu, profile.model):
        found["composed"] = profile_model(packaged)
    if "ceilings" in run.about:
        top, setup = run.about["ceilings"], run.about["setup"]
        itemsize = 2 if setup["device"].startswith("cuda") else 4
        shape = ModelShape(**setup["shape"])
        line = roofline(shape, itemsize, top["bytes_per_s"], top["flops_per_s"])
        found["roofline"] = profile_model(line)
    return found


def measured_over_composed(
    steps: Sequence[tuple[StepLoad, float]], gpu: str, model: str
) -> dict[str, tuple[float, float, float]]:
    """Return P10, median and P90 of measured / composed step times, by kind of step.

    The result is empty if the catalog does not contain the GPU or the model.
    """
    packaged = composed(gpu, model)
    if packaged is None or not steps:
        return {}
    cost = StepCost(packaged)
    ratios: dict[str, list[float]] = {}
    for load, seconds in steps:
        ratios.setdefault(classify_step(load), []).append(seconds / cost(load))
    found = {}
    for kind, values in sorted(ratios.items()):
        low, middle, high = np.percentile(values, (10, 50, 90))
        found[kind] = (float(low), float(middle), float(high))
    return found


def figure_intervals(
    scenario: Scenario, profile: CostProfile, nominal: RunRecord
) -> dict[str, tuple[float, float]]:
    """Return the interval of each metric that follows from the profile's error on held-out steps.

    Metrics without finite bounds are left out. The result is empty if the error is unknown.
    """
    if not profile.fit.held_out:
        return {}
    sides: tuple[ErrorSide, ...] = ("faster", "slower")
    records = [nominal]
    for side in sides:
        scale = make_scaled_executor(profile, side)
        records.append(simulate_with_profile(scenario, profile, changed=scale).record)
    peaks = [_peak_blocks(record) for record in records]
    found: dict[str, tuple[float, float]] = {"peak_blocks": (min(peaks), max(peaks))}
    runs = [MeasuredRun.of("", record) for record in records]
    for name in FIGURES:
        if name not in found:
            (low, high), _ = compute_interval(name, runs)
            if low is not None and high is not None:
                found[name] = low, high
    return found


@dataclass(frozen=True)
class IntervalScore:
    """Score of the intervals of several metrics, from their coverage and width.

    ``figures`` is the number of metrics. ``held`` is the number of intervals that contain the real
    value. ``useful`` is the number of these intervals with a relative width of at most
    ``USEFUL_WIDTH``. ``score`` is the mean interval score of Gneiting and Raftery (2007); lower is
    better.
    """

    figures: int
    held: int
    useful: int
    width: float
    score: float


#: Relative width above which an interval contains little information, and the nominal level of the
#: intervals.
USEFUL_WIDTH, LEVEL = 0.2, 0.95


def score_intervals(figures: Sequence[FigureComparison]) -> IntervalScore | None:
    """Return the score of all metrics with a nonzero real value, or None without such metrics."""
    found = [(f.interval, f.real) for f in figures if f.interval and f.real]
    if not found:
        return None
    widths = [(high - low) / real for (low, high), real in found]
    missed = [max(low - real, real - high, 0.0) / real for (low, high), real in found]
    scores = [w + 2 / (1 - LEVEL) * m for w, m in zip(widths, missed, strict=True)]
    useful = sum(w <= USEFUL_WIDTH and not m for w, m in zip(widths, missed, strict=True))
    return IntervalScore(
        len(found), sum(not m for m in missed), useful, float(np.median(widths)), fmean(scores)
    )


def figures_of(record: RunRecord) -> dict[str, float]:
    """Return the compared metrics of a run. A latency without a sample is NaN."""
    found: dict[str, Any] = summarize(record)
    found["peak_blocks"] = _peak_blocks(record)
    values = {name: figure(found, name) for name in FIGURES}
    return {name: nan if value is None else float(value) for name, value in values.items()}


def _peak_blocks(record: RunRecord) -> float:
    return float(record.num_blocks - min(record.steps.free_blocks, default=record.num_blocks))


class SteadyStep(NamedTuple):
    """A step that did not stall: its load, its duration in seconds, and whether it preempted a
    request.
    """

    load: StepLoad
    seconds: float
    preempting: bool


def steady_steps(runs: Sequence[GpuRun]) -> list[SteadyStep]:
    """Return the steps of all runs, except stalled steps."""
    found = []
    for run in runs:
        stalled = {stall.number for stall in run.stalls}
        steps = zip(run.steps, run.preempting, strict=True)
        found += [
            SteadyStep(*step, preempting)
            for number, (step, preempting) in enumerate(steps)
            if number not in stalled
        ]
    return found


def _step_errors(steps: Sequence[SteadyStep], model: CostModel) -> list[tuple[str, float]]:
    """Return the relative errors of predicted step times by kind of step.

    A step counts for each kind to which it belongs.
    """
    found = []
    predicted = model.seconds([step.load for step in steps]) if steps else []
    for (load, seconds, preempting), cost in zip(steps, predicted, strict=True):
        kinds = {classify_step(load): True, "all": True, "preempting": preempting}
        error = cost / seconds - 1.0
        found += [(kind, error) for kind, there in kinds.items() if there]
    return found


def _step_ends(errors: Sequence[tuple[str, float]]) -> dict[str, dict[str, ConfidenceInterval]]:
    kinds = dict.fromkeys(kind for kind, _ in errors)
    return {
        kind: step_error_intervals(np.array([error for named, error in errors if named == kind]))
        for kind in kinds
    }


def _victims(record: RunRecord) -> set[int]:
    return {i for i, life in record.requests.items() if life.preempted_at}


def _overlap(a: set[int], b: set[int]) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0
