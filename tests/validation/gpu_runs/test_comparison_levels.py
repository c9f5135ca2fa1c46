"""Tests of the three levels: no error for a run that is the simulation itself, and errors for a
wrong profile.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from simkv.costs.cost_profile import CostProfile, StepCost, StepError
from simkv.costs.step_load import StepLoad
from simkv.sim.simulation import simulate_with_profile
from simkv.validation.figure_comparison import FigureComparison
from simkv.validation.gpu_runs.baseline_models import TrainingStep, composed, fit_baselines
from simkv.validation.gpu_runs.comparison_levels import (
    FIGURES,
    measured_over_composed,
    score_intervals,
    validate_run,
)
from simkv.validation.gpu_runs.stalled_steps import Stall, find_stalls
from simkv.validation.gpu_runs.timed_replay import Agreement, GpuRun
from tests.laws.pressure_scenarios import plain_scenario

PROFILE = CostProfile.model_validate(
    {
        "name": "p",
        "engine": "e",
        "model": "m",
        "gpu": "g",
        "basis": "measured",
        "terms": [
            {"name": "a", "feature": "steps", "seconds": 1e-3},
            {"name": "b", "feature": "prefill_pairs", "seconds": 1e-6},
            {"name": "c", "feature": "decode_context", "seconds": 1e-6},
        ],
        "idle_pass_s": 1e-5,
        "range": {},
        "fit": {"points": 0},
        "source": [],
    }
)


def run_of(profile: CostProfile) -> GpuRun:
    """Return a run of a device with exactly the costs of ``profile``."""
    scenario = plain_scenario("vllm", "0.33.0")
    record = simulate_with_profile(scenario, profile).record
    log = record.steps
    # The step log has no contexts, so loads with the same cost are invented.
    seconds = [end - start for start, end in zip(log.start, log.end, strict=True)]
    kinds = zip(log.prefill_seqs, log.prefill_tokens, log.decode_seqs, seconds, strict=True)
    steps = []
    for prefills, tokens, decodes, taken in kinds:
        left = round((taken - 1e-3) / 1e-6)
        load = StepLoad(
            prefills, tokens, 0, decodes, 0 if prefills else left, left if prefills else 0
        )
        steps.append((load, taken))
    return GpuRun(scenario, steps, [n > 0 for n in log.preempted], record, Agreement(len(log)))


def test_exact_profile_has_no_error_at_any_level():
    found = validate_run(run_of(PROFILE), PROFILE)
    assert {"all", "decode", "preempting", "mixed"} <= found.steps["profile"].keys()
    assert all(error.p95 < 1e-9 for error in found.steps["profile"].values())
    assert [f.name for f in found.figures] == list(FIGURES)
    assert all(f.error("profile") == 0.0 for f in found.figures)
    assert found.same_victims["profile"] == 1.0


def test_slow_profile_has_positive_errors():
    slow = replace_constant(PROFILE, 2e-3)
    found = validate_run(run_of(PROFILE), slow)
    assert found.steps["profile"]["all"].bias > 0.1
    makespan = next(f for f in found.figures if f.name == "makespan_s")
    assert makespan.error("profile") > 0.1
    assert StepCost(slow)(StepLoad(0, 0, 0, 1, 0)) == 2e-3


def replace_constant(profile: CostProfile, seconds: float) -> CostProfile:
    terms = [profile.terms[0].model_copy(update={"seconds": seconds}), *profile.terms[1:]]
    return profile.model_copy(update={"terms": terms})


def test_baselines_are_compared():
    run = run_of(PROFILE)
    training = [TrainingStep(load, seconds) for load, seconds in run.steps]
    found = validate_run(run, PROFILE, baselines=fit_baselines(training, PROFILE))
    for name in ("constant step", "tokens only"):
        assert found.steps[name]["all"].median > 0.01
    assert found.steps["tokens only"]["all"].median < found.steps["constant step"]["all"].median
    assert found.steps["five prices"]["all"].p95 < 1e-6  # the form of this profile
    assert "five prices" in found.figures[0].simulated
    assert "random forest" not in found.figures[0].simulated


def test_ratio_of_measured_to_composed_step_times():
    gpu, model = "NVIDIA H100 80GB HBM3", "llama-3-8b"
    loads = [StepLoad(0, 0, 0, n, 500 * n) for n in (1, 8, 64)]
    cost = StepCost(composed(gpu, model))
    steps = [(load, 1.5 * cost(load)) for load in loads]
    found = measured_over_composed(steps, gpu, model)
    assert found == {"decode": pytest.approx((1.5, 1.5, 1.5))}
    assert measured_over_composed(steps, "x86_64", "tiny") == {}


def test_intervals_are_scored_by_coverage_and_width():
    def figure(real, interval):
        return FigureComparison("makespan_s", real, {"profile": real}, [real], interval)

    tight, wide = figure(1.0, (0.95, 1.05)), figure(1.0, (0.2, 1.8))
    missed = figure(1.0, (1.02, 1.12))
    found = score_intervals([tight, wide, missed, figure(1.0, None)])
    assert (found.figures, found.held, found.useful) == (3, 2, 1)
    assert found.width == pytest.approx(0.1)
    assert score_intervals([tight]).score == pytest.approx(0.1)
    assert score_intervals([wide]).score == pytest.approx(1.6)
    assert score_intervals([missed]).score == pytest.approx(0.1 + 40 * 0.02)
    assert score_intervals([figure(1.0, None)]) is None


def test_noise_is_the_difference_between_repeats():
    run = run_of(PROFILE)
    slower = run_of(replace_constant(PROFILE, 1.1e-3))
    found = validate_run(run, PROFILE, [run, slower])
    makespan = next(f for f in found.figures if f.name == "makespan_s")
    assert makespan.repeats[0] == makespan.repeats[1] < makespan.repeats[2]
    assert makespan.real == sum(makespan.repeats) / 3
    assert makespan.noise == makespan.repeats[2] / makespan.repeats[0] - 1.0
    low, high = makespan.error_interval()
    assert low < makespan.error() < high
    assert (low, high) == pytest.approx((makespan.repeats[0] / makespan.repeats[2] - 1.0, 0.0))
    assert found.steps["profile"]["all"].points == 3 * len(run.steps)
    ends = found.step_ends["profile"]["all"]
    assert ends["bias"][0] <= found.steps["profile"]["all"].bias <= ends["bias"][1]
    assert all(f.noise is None for f in validate_run(run, PROFILE).figures)


def test_stalled_steps_are_excluded_and_reported():
    rows = [{"size": "4x4x0", "seconds": "0.002", "gpu_s": "0.0015"} for _ in range(9)]
    rows[3] = {"size": "4x4x0", "seconds": "0.052", "gpu_s": "0.0015"}
    rows[7] = {"size": "4x4x0", "seconds": "0.042", "gpu_s": "0.0415"}
    # the only step of its size
    rows.append({"size": "64x4x16", "seconds": "0.09", "gpu_s": "0.09"})
    stalls = find_stalls(rows)
    assert [(s.number, s.side) for s in stalls] == [(3, "host"), (7, "device")]
    run = run_of(PROFILE)
    run.steps[5] = (run.steps[5][0], 1.0)
    worst = validate_run(run, PROFILE).steps["profile"]["all"]
    stalled = replace(run, stalls=[Stall(5, 1.0, 1e-3, "host")])
    assert validate_run(stalled, PROFILE).steps["profile"]["all"].points == worst.points - 1
    assert validate_run(stalled, PROFILE).steps["profile"]["all"].bias > worst.bias


def test_interval_contains_a_device_within_the_error_of_the_profile_only():
    error = {"points": 50, "median": 0.01, "p95": 0.05, "bias": 0.0}
    fit = PROFILE.fit.model_copy(update={"held_out": {"all": StepError(**error)}})
    judged = PROFILE.model_copy(update={"fit": fit})
    for factor, holds in ((1.0, True), (1.03, True), (1.2, False)):
        terms = [t.model_copy(update={"seconds": t.seconds * factor}) for t in PROFILE.terms]
        run = run_of(PROFILE.model_copy(update={"terms": terms}))
        held = {f.name: f.held for f in validate_run(run, judged).figures}
        assert held["makespan_s"] is holds
        assert held["tpot_ms.median"] is holds
    assert {f.held for f in validate_run(run, PROFILE).figures} == {None}
