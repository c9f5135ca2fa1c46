"""Tests of a validation plan: its load, sizes, duration and file."""

from __future__ import annotations

import json

import pytest

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, StepCost
from simkv.costs.step_load import StepLoad
from simkv.validation.gpu_runs import validation_suite
from simkv.validation.gpu_runs.baseline_models import TrainingStep
from simkv.validation.gpu_runs.load_sizing import (
    MIN_PREEMPTIONS,
    PlanScale,
    Trial,
    packaged_trace,
    predict_figures,
    scale_of,
)
from simkv.validation.gpu_runs.nominal_costs import nominal_profile
from simkv.validation.gpu_runs.validation_plan_file import (
    Plan,
    read_plan,
    read_profiles,
    write_plan,
)
from simkv.validation.gpu_runs.validation_suite import (
    CASES,
    OVERLAPPED,
    SYNCHRONOUS,
    order_trial_runs,
    plan_trials,
    predicted_duration,
)
from tests.validation.gpu_runs.plan_table import BUDGET_S, RANGE, planned, profiles_for

H200 = profiles_for("NVIDIA H200", "llama-3-8b")
#: A short plan of a small model, for all tests except those of its load.
TINY_SCALE = PlanScale(rows=16, kv_tokens=2048, context=200, budget=64, divisor=10)
TINY_S = 170.0


def tiny_plan(profile: CostProfile, seed: int = 0) -> list[Trial]:
    """Return a small plan of one profile."""
    return plan_trials(
        {SYNCHRONOUS: profile}, TINY_SCALE, TINY_S, seed, sized_by=SLOW, start_s=10.0
    )


#: A device that needs some time even for small sizes.
SLOW = H200[SYNCHRONOUS].model_copy(
    update={
        "terms": [
            t.model_copy(update={"seconds": 1e-2}) if t.name == "host" else t
            for t in H200[SYNCHRONOUS].terms
        ]
    }
)


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    return tiny_plan(SLOW)


@pytest.fixture(scope="module")
def full_plan() -> list[Trial]:
    """Return the plan for an H200; plan_table.py prints it, and plans for other GPUs."""
    return planned("NVIDIA H200", "llama-3-8b")


def test_plan_has_many_rows_within_the_range_and_ten_minutes(full_plan):
    assert predicted_duration(full_plan) <= BUDGET_S
    by_name = {t.name: t.predicted for t in full_plan}
    assert {t.predicted["rows_peak"] for t in full_plan} >= {64, 128, 256}
    above_64 = {t.name.rsplit("-", 1)[0] for t in full_plan if t.predicted["rows_mean"] > 64}
    assert len(above_64) >= 3
    assert by_name["rows-full-seed0"]["kv_tokens_peak"] > 300_000
    assert by_name["memory-pressure-seed0"]["preemptions"] >= MIN_PREEMPTIONS
    assert by_name["memory-pressure-seed0"]["rows_mean"] > 64
    assert all(found["outside"] == [] for found in by_name.values())
    assert not any(found["preemptions"] for name, found in by_name.items() if "memory" not in name)


def test_pipelined_trials_come_first_and_each_case_has_two_seeds(full_plan):
    names = [trial.name for trial in full_plan]
    assert names[: len(CASES)] == [f"{case.name}-seed0" for case in CASES]
    assert {t.profile for t in full_plan[: len(CASES)]} == {OVERLAPPED}
    assert set(names) >= {f"{case.name}-seed1" for case in CASES}
    for trial in full_plan:
        assert trial.scenario.engine.async_scheduling is (trial.profile == OVERLAPPED)
        if trial.beside:
            other = full_plan[names.index(trial.beside)].scenario
            assert trial.scenario.workload == other.workload
            assert trial.scenario.engine != other.engine
    by_name = {trial.name: trial.scenario.workload for trial in full_plan}
    for case in CASES:
        assert by_name[f"{case.name}-seed0"] != by_name[f"{case.name}-seed1"]


def test_plan_is_reproducible(trials):
    assert tiny_plan(SLOW) == trials
    assert tiny_plan(SLOW, seed=1) != trials


def test_profile_does_not_select_its_trials():
    """A profile with other costs predicts other metrics for the same workloads."""
    faster = SLOW.model_copy(
        update={"terms": [t for t in SLOW.terms if t.name != "host"], "name": "faster"}
    )
    plans = [
        validation_suite._sized({SYNCHRONOUS: profile}, TINY_SCALE, 4.0, 0, SLOW)
        for profile in (SLOW, faster)
    ]
    for trial, same in zip(*plans, strict=True):
        assert trial.scenario.workload == same.scenario.workload
        assert trial.predicted_s > same.predicted_s


def test_plan_shrinks_if_the_profile_predicts_a_longer_one(trials):
    terms = [t.model_copy(update={"seconds": 3e-2}) if t.name == "host" else t for t in SLOW.terms]
    slower = tiny_plan(SLOW.model_copy(update={"terms": terms}))
    assert predicted_duration(slower, 10.0) <= TINY_S
    requests = [sum(t.predicted["requests"] for t in plan) for plan in (slower, trials)]
    assert requests[0] < requests[1]


def test_rejects_a_budget_that_is_too_short():
    with pytest.raises(InputError, match="20 s is too short for 17 runs; use at least"):
        plan_trials({SYNCHRONOUS: SLOW}, TINY_SCALE, 20.0, sized_by=SLOW, start_s=10.0)


def test_scale_follows_the_range_of_the_campaign():
    scale = scale_of(H200[SYNCHRONOUS])
    assert (scale.rows, scale.kv_tokens, scale.budget) == (256, 393_216, 2048)
    assert scale_of(H200[SYNCHRONOUS], 50_000).kv_tokens == 50_000
    with pytest.raises(InputError, match="calibrated for at most 393216 tokens"):
        scale_of(H200[SYNCHRONOUS], 500_000)
    with pytest.raises(InputError, match="range: missing decode_tail"):
        scale_of(H200[SYNCHRONOUS].model_copy(update={"range": {"decode_seqs": (1, 2)} | {
            name: RANGE[name] for name in ("decode_context", "prefill_tokens")}}))  # fmt: skip


def test_sizes_follow_the_data_sheet_or_the_measured_ceilings(tmp_path):
    decode = StepLoad(0, 0, 0, 1, 100)
    sheet = StepCost(nominal_profile(H200[SYNCHRONOUS]))(decode)
    unknown = H200[SYNCHRONOUS].model_copy(update={"gpu": "Some GPU"})
    with pytest.raises(InputError, match="Some GPU is not in the catalog"):
        nominal_profile(unknown, tmp_path)
    about = {"itemsize": 2, "ceilings": {"bytes_per_s": 4.8e11, "flops_per_s": 9.9e13}}
    (tmp_path / "campaign.json").write_text(json.dumps(about))
    measured = StepCost(nominal_profile(unknown, tmp_path))(decode)
    assert 5 < measured / sheet < 10  # a tenth of the bandwidth, and the same host
    with pytest.raises(InputError, match="model: the GPU runner does not support lama"):
        nominal_profile(unknown.model_copy(update={"model": "lama"}))


def test_plan_file_round_trip(trials, tmp_path):
    steps = [TrainingStep(StepLoad(0, 0, 0, 3, 30, longest=12), 0.25)]
    write_plan(tmp_path, Plan(trials, {SYNCHRONOUS: SLOW}, {SYNCHRONOUS: steps}))
    found = read_plan(tmp_path, {SYNCHRONOUS: SLOW})
    assert found is not None
    assert found.profiles == {SYNCHRONOUS: SLOW}
    assert found.training == {SYNCHRONOUS: steps}
    for trial, other in zip(trials, found.trials, strict=True):
        assert trial.predicted == other.predicted
        assert (trial.name, trial.profile, trial.beside) == (
            other.name, other.profile, other.beside,
        )  # fmt: skip
    again = predict_figures(found.trials[0].scenario, SLOW)
    assert again == trials[0].predicted
    with pytest.raises(InputError, match="exists already"):
        write_plan(tmp_path, found)
    assert {path.name for path in tmp_path.iterdir()} == {"plan"}


def test_plan_belongs_to_its_profiles(trials, tmp_path):
    assert read_plan(tmp_path) is None
    write_plan(tmp_path, Plan(trials[:1], {SYNCHRONOUS: SLOW}))
    changed = SLOW.model_copy(update={"idle_pass_s": 1e-4})
    with pytest.raises(InputError, match="made with another profile"):
        read_plan(tmp_path, {SYNCHRONOUS: changed})
    path = tmp_path / "plan" / "plan.json"
    about = json.loads(path.read_text())
    del about["trials"]
    path.write_text(json.dumps(about))
    with pytest.raises(InputError, match="not a plan"):
        read_plan(tmp_path)


def test_profiles_of_a_campaign_directory(tmp_path):
    for name, profile in H200.items():
        (tmp_path / f"{name}.json").write_text(profile.model_dump_json(exclude_none=True))
    both, folder = read_profiles(tmp_path)
    assert (list(both), folder) == ([OVERLAPPED, SYNCHRONOUS], tmp_path)
    single, folder = read_profiles(tmp_path / f"{OVERLAPPED}.json")
    assert (list(single), folder) == ([OVERLAPPED], tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match=r"contains no profile\.json"):
        read_profiles(tmp_path / "empty")


def test_every_trial_is_served_before_one_is_repeated(trials):
    runs = order_trial_runs(trials, 3)
    assert [run.number for run in runs] == [1] * len(trials) + [2, 3]
    assert [run.name for run in runs[-2:]] == ["rows-quarter-seed0-2", "rows-quarter-seed0-3"]
    assert len({run.name for run in runs}) == len(runs)


def test_packaged_trace():
    assert packaged_trace("spikes.csv").is_file()
    with pytest.raises(InputError, match="is missing in this installation"):
        packaged_trace("nothing.csv")
