"""The plan of a validation: what it stresses, how it is sized, and that it can be read again."""

from __future__ import annotations

import json

import pytest

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, StepCost
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.costs.step_load import StepLoad
from simkv.metrics.run_metrics import summarize
from simkv.validation.gpu_runs.baseline_models import roofline
from simkv.validation.gpu_runs.comparison_levels import simulate_with_profile
from simkv.validation.gpu_runs.load_sizing import MIN_PREEMPTIONS, Trial, packaged_trace
from simkv.validation.gpu_runs.nominal_costs import nominal_profile
from simkv.validation.gpu_runs.validation_plan_file import read_plan, write_plan
from simkv.validation.gpu_runs.validation_suite import (
    FULL_SCALE,
    SMALL_SCALE,
    order_trial_runs,
    plan_trials,
)

H200 = roofline(MODEL_SHAPES["llama-3-8b"], 2, 4.3e12, 790e12)
SECONDS = 4.0
#: A device on which the small sizes take their time.
SLOW = CostProfile.model_validate(
    {
        **H200.model_dump(),
        "terms": [
            *(term.model_dump() for term in H200.terms),
            {**H200.terms[1].model_dump(), "feature": "steps", "seconds": 1e-3},
        ],
    }
)


@pytest.fixture(scope="module")
def cases() -> list[Trial]:
    return plan_trials(H200, FULL_SCALE, SECONDS, sized_by=H200)


def by_name(cases: list[Trial], name: str) -> Trial:
    return next(case for case in cases if case.name == name)


def test_it_has_all_that_a_profile_is_to_be_judged_by(cases):
    assert [case.name for case in cases] == [
        "decode-heavy",
        "memory-pressure",
        "prefill-heavy",
        "prefill-whole",
        "mistralrs-six-bucketed",
        "mistralrs-six-pr2034",
        "mistralrs-forty-bucketed",
        "mistralrs-forty-pr2034",
        "bursty-trace",
    ]
    assert by_name(cases, "memory-pressure").predicted["preemptions"] >= MIN_PREEMPTIONS
    assert by_name(cases, "mistralrs-six-bucketed").predicted["preemptions"] == 245
    for case in cases:
        longer = 4 if case.name.startswith("memory-pressure") else 1.5
        assert case.predicted_s < longer * SECONDS
        assert case.scenario.horizon > 3 * case.predicted_s
        assert case.beside is None or by_name(cases, case.beside)


def test_decodes_and_prefills_are_what_their_names_say(cases):
    decodes, prefills = (
        by_name(cases, f"{kind}-heavy").predicted for kind in ("decode", "prefill")
    )
    assert decodes["total_output_tokens"] > 0.7 * decodes["total_input_tokens"]
    assert prefills["total_input_tokens"] > 20 * prefills["total_output_tokens"]


def test_pairs_serve_the_same_requests(cases):
    for case in cases:
        if case.beside:
            other = by_name(cases, case.beside).scenario
            assert case.scenario.workload == other.workload
            assert case.scenario.engine != other.engine


def test_the_same_plan_every_time():
    first, again, other = (
        plan_trials(SLOW, SMALL_SCALE, 0.5, seed=s, sized_by=SLOW) for s in (0, 0, 1)
    )
    assert first == again != other


def test_a_slower_device_gets_lower_rates(cases):
    slow = H200.model_copy(update={"terms": [_slower(term) for term in H200.terms]})
    rates = [
        by_name(found, "decode-heavy").scenario.workload.arrivals.request_rate
        for found in (cases, plan_trials(slow, FULL_SCALE, SECONDS, sized_by=slow))
    ]
    assert rates[1] == pytest.approx(rates[0] / 2, rel=0.01)


def _slower(term):
    if term.seconds is not None:
        return term.model_copy(update={"seconds": 2 * term.seconds})
    pieces = [p.model_copy(update={"base": 2 * p.base, "slope": 2 * p.slope}) for p in term.pieces]
    return term.model_copy(update={"pieces": pieces})


def test_a_profile_does_not_choose_its_judges(cases):
    """Another one predicts otherwise, and is judged by the same cases."""
    slow = H200.model_copy(update={"terms": [_slower(term) for term in H200.terms]})
    for case, same in zip(
        plan_trials(slow, FULL_SCALE, SECONDS, sized_by=H200), cases, strict=True
    ):
        assert case.scenario.workload == same.scenario.workload
        assert case.predicted_s > same.predicted_s


def test_cases_are_sized_by_what_a_data_sheet_says():
    decode = StepLoad(0, 0, 0, 1, 100)
    on_a_gpu = nominal_profile(H200.model_copy(update={"gpu": "NVIDIA H200"}))
    assert 1.2 < StepCost(on_a_gpu)(decode) / StepCost(H200)(decode) < 1.6
    on_a_core = nominal_profile(H200)
    assert StepCost(on_a_core)(decode) > 100 * StepCost(on_a_gpu)(decode)
    with pytest.raises(InputError, match="model: lama is not one of the runner's"):
        nominal_profile(H200.model_copy(update={"model": "lama"}))


def test_a_time_too_short_for_preemptions_is_refused():
    with pytest.raises(InputError, match="a longer --budget is needed"):
        plan_trials(H200, FULL_SCALE, 0.01, sized_by=H200)


def test_a_plan_is_read_as_it_was_written(cases, tmp_path):
    write_plan(tmp_path, cases, H200)
    found = read_plan(tmp_path, H200)
    assert [case.name for case in found] == [case.name for case in cases]
    for case, other in zip(cases, found, strict=True):
        figures = summarize(simulate_with_profile(other.scenario, H200))
        assert {**figures, "requests": case.scenario.workload.size} == case.predicted
        assert case.predicted == other.predicted
    with pytest.raises(InputError, match="there is a plan already"):
        write_plan(tmp_path, cases, H200)
    assert {path.name for path in tmp_path.iterdir()} == {"plan"}


def test_a_plan_belongs_to_its_profile(cases, tmp_path):
    assert read_plan(tmp_path, H200) is None
    write_plan(tmp_path, cases[:1], H200)
    with pytest.raises(InputError, match="made with another profile"):
        read_plan(tmp_path, H200.model_copy(update={"idle_pass_s": 1e-4}))
    path = tmp_path / "plan" / "plan.json"
    about = json.loads(path.read_text())
    del about["cases"]
    path.write_text(json.dumps(about))
    with pytest.raises(InputError, match="not a plan"):
        read_plan(tmp_path, H200)


def test_everything_is_served_once_before_anything_twice(cases):
    found = order_trial_runs(cases, 3)
    assert [turn.number for turn in found] == [n for n in (1, 2, 3) for _ in cases]
    assert [turn.name for turn in found[len(cases) :][:2]] == [
        "decode-heavy-2",
        "memory-pressure-2",
    ]
    assert len({turn.name for turn in found}) == 3 * len(cases)


def test_the_trace_is_there():
    assert packaged_trace("spikes.csv").is_file()
    with pytest.raises(InputError, match="not installed"):
        packaged_trace("nothing.csv")


def test_small_sizes_fit_a_profile_of_a_slow_device():
    found = plan_trials(SLOW, SMALL_SCALE, 0.5, sized_by=SLOW)
    assert max(case.predicted_s for case in found if "memory" not in case.name) < 1.0
