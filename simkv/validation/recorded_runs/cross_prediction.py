"""Simulate a run with step costs fitted to another run of the same model on the same GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simkv.costs.cost_profile import CostProfile
from simkv.validation.recorded_runs.recorded_run import RecordedRun
from simkv.validation.recorded_runs.run_scores import Score, simulate_and_score
from simkv.validation.recorded_runs.run_simulation import engine_of


@dataclass(frozen=True)
class CrossPrediction:
    """A run simulated with costs fitted to isolated requests of another run."""

    costs_of: str
    score: Score


def cross_predict(
    scores: Sequence[Score], costs: Mapping[str, CostProfile]
) -> Iterator[CrossPrediction]:
    """Yield a prediction for each ordered pair of runs, with costs fitted to isolated requests.

    Both runs have the same model, GPU, tensor-parallel size and engine version. ``costs`` contains
    cost profiles by name of the run.
    """
    fitted = [
        s.case
        for s in scores
        if costs[s.case.name].attention is None and s.case.has_isolated_requests
    ]
    for case in fitted:
        for other in fitted:
            if case is not other and _same(case, other):
                found = simulate_and_score(case, costs[other.name], *engine_of(case))
                yield CrossPrediction(other.name, found)


def _same(one: RecordedRun, other: RecordedRun) -> bool:
    first, second = one.facts.engine, other.facts.engine
    return one.facts.model == other.facts.model and (
        (first.gpu, first.tensor_parallel, first.version)
        == (second.gpu, second.tensor_parallel, second.version)
    )


def cross_prediction_rows(found: Sequence[CrossPrediction]) -> Iterator[list[str]]:
    """Yield a table row per prediction: the errors of the mean latencies, and the coverage of
    intervals.
    """
    for one in found:
        means = [one.score.figure(m, "mean") for m in ("ttft_ms", "tpot_ms", "e2e_ms")]
        held = [bool(f.held) for f in one.score.figures if f.interval and f.real > 1]
        errors = [f"{f.error_pct:+.2f}" for f in means]
        yield [one.score.case.name, one.costs_of, *errors, f"{sum(held)} of {len(held)}"]


CROSSED = ("load of", "costs of", "TTFT", "TPOT", "E2E", "in their interval")
