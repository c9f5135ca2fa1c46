"""Tests of the search for fixes: bounded trials, intervals and side effects on other requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import pytest

from simkv.costs.cost_profile import StepError, load_profile
from simkv.incident.effect_size import (
    ANSWERED,
    E2E,
    PREEMPTED,
    EffectSize,
    SideEffects,
    measure_effect,
    measure_side_effects,
)
from simkv.incident.incident_answer import (
    _describe_order,
    describe_search,
    describe_settings,
    describe_unknown_prefixes,
)
from simkv.incident.remedies import (
    Remedy,
    RemedyKind,
    RemedySearch,
    _is_tried,
    _like,
    _possible,
    _ranked,
    find_remedies,
    is_minor,
    lengthens_tail,
    scenarios_within_error,
    shortens_answers,
)
from simkv.incident.server_setup import ServerSetup
from simkv.incident.trial_bounds import FINALISTS, HORIZON_FACTOR, Bounds, bounds
from simkv.incident.wait_summary import server_verdicts, summarize_waits
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load, resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from simkv.serve.recorded_workload import write_recorded_trace
from simkv.study.whatif.candidate_changes import Change
from simkv.study.whatif.trial_evaluation import Evaluator, RequestEnding, RunFigures
from simkv.study.whatif.whatif import RANKED_LATENCIES, evaluate_change
from simkv.workload.workload_section import build_clients
from tests.incident.test_diagnose import HERE

ALL = ("finished", "total_output_tokens", "longest_stall_s", "preemptions", "e2e_ms.mean")
FAILED = ("stalled", "lost", "starved", "rejected", "timed_out", "cut_off")


def figures(took: list[float | None], **more: float) -> RunFigures:
    """Return a run with these E2E latencies (s); None is a request without an answer."""
    done = [one for one in took if one is not None]
    values: dict[str, Any] = dict.fromkeys((*ALL, *FAILED, *RANKED_LATENCIES, "e2e_ms.median"), 0.0)
    values |= {
        "finished": len(done),
        "requests": len(took),
        "cut_off": len(took) - len(done),
        "cancelled": 0,
    }
    values |= {"e2e_ms.mean": 1e3 * sum(done) / max(len(done), 1)} | more
    ends = (RequestEnding(i, "finished" if e else "cut_off", e) for i, e in enumerate(took))
    verdict = "served" if len(done) == len(took) else "cut off"
    return RunFigures(verdict, "", values, tuple(ends))


CHANGE = Change("knob", "max_num_seqs", 4, 8)


def test_effect_computed_by_hand() -> None:
    base, after = figures([10.0, 10.0, 10.0]), figures([5.0, 5.0, 5.0])
    found = measure_effect(evaluate_change(CHANGE, base, after), base, [])
    assert (found.figure, found.before, found.after) == (E2E, 10.0, 5.0)
    assert (found.low, found.high) == (0.5, 0.5)  # all values are equal, so resamples do not differ
    assert found.told == "mean E2E 10 s -> 5 s, x0.50, 90 % interval 0.50 to 0.50"
    worse = figures([9.0, 9.0, 9.0])
    found = measure_effect(evaluate_change(CHANGE, base, after), base, [(base, worse)])
    assert (found.low, found.high) == (0.5, 0.9)
    assert found.sure
    assert measure_effect(evaluate_change(CHANGE, base, after), base, [(base, base)]).sure
    slower = figures([10.6, 10.6, 10.6])
    assert not measure_effect(evaluate_change(CHANGE, base, after), base, [(base, slower)]).sure


def test_minor_flag_ranks_after_a_larger_cache() -> None:
    base = figures([10.0, 10.0, 10.0], longest_stall_s=4.0)

    def remedy(name: str, means: RemedyKind, took: float) -> Remedy:
        after = figures([took, took, took], longest_stall_s=1.0)
        effect = evaluate_change(Change("knob", name, 1, 2), base, after)
        return Remedy(effect, means, f"--{name}", False, SideEffects(0, 1.0, 0))

    cache, small = remedy("num-gpu-blocks", "memory", 4.0), remedy("block-size", "flag", 9.5)
    large = remedy("max-num-seqs", "flag", 6.0)
    assert _ranked([small, cache, large], base) == [large, cache, small]
    search = RemedySearch(base, (cache, small), 2, cast("Bounds", None), 0, ())
    assert describe_search(search, False).startswith("Fix: a larger cache, --num-gpu-blocks (")
    search = replace(search, remedies=(large, cache))
    assert describe_search(search, False).startswith("Fix: --max-num-seqs (")
    preempted = figures([10.0, 10.0, 10.0], preemptions=90)
    effect = evaluate_change(CHANGE, preempted, figures([9.5, 9.5, 9.5], preemptions=50))
    assert not is_minor(replace(small, effect=effect), 6000.0, preempted)
    assert is_minor(small, 6000.0, base)
    fewer = figures([10.0, 10.0, None])
    assert not is_minor(small, 6000.0, fewer)


def test_smallest_of_equal_changes_is_suggested() -> None:
    base, after = figures([10.0, 10.0, 10.0]), figures([5.0, 5.0, 5.0])

    def remedy(before: int, value: int, run: RunFigures, *, to_default: bool = False) -> Remedy:
        effect = evaluate_change(Change("knob", "max_num_seqs", before, value), base, run)
        gain = measure_effect(effect, base, [])
        paid = SideEffects(0, 1.0, 0)
        return Remedy(effect, "flag", f"--max-num-seqs {value}", to_default, paid, gain)

    default, enough = remedy(32, 256, after, to_default=True), remedy(32, 64, after)
    more, better = remedy(32, 128, after), remedy(32, 48, figures([5.0, 5.0, 4.9]))
    ranked = _ranked([default, more, enough], base)
    assert ranked == [enough, more, default]
    search = RemedySearch(base, tuple(ranked), 3, cast("Bounds", None), 0, ())
    assert describe_search(search, healthy=False).startswith("Fix: --max-num-seqs 64 (")
    assert describe_settings(search, {}).endswith("max_num_seqs=32 (better: 64).")
    assert _ranked([default, better], base) == [default, better]  # the effects differ
    lower, lowest = remedy(32, 16, after), remedy(32, 8, after, to_default=True)
    assert _ranked([lowest, lower], base) == [lower, lowest]


def test_effect_of_unknown_prefixes_is_named() -> None:
    setup = ServerSetup({"enable_prefix_caching": False}, None, None, 1, {}, ())
    assert "inputs do not show which prompts" in describe_unknown_prefixes(setup, pd.DataFrame())
    assert describe_unknown_prefixes(setup, pd.DataFrame({"session": [1]})) == ""
    assert describe_unknown_prefixes(replace(setup, engine={}), pd.DataFrame()) == ""


def test_effect_of_one_request_is_not_sure() -> None:
    base = figures([100.0, *[10.0] * 19])
    after = figures([10.0, *[11.0] * 19])
    found = measure_effect(evaluate_change(CHANGE, base, after), base, [])
    assert found.low < (10 + 11 * 19) / 290 < found.high
    assert found.high > 1  # resamples that include the long request show no loss
    assert not found.sure
    paid = measure_side_effects(evaluate_change(CHANGE, base, after), base)
    assert (paid.slower, paid.failed) == (19, 0)
    assert paid.worst == pytest.approx(1.1)


def test_answers_and_preemptions_are_effects() -> None:
    base, after = figures([1.0, None, None, None]), figures([1.0, 1.0, 1.0, 1.0])
    found = measure_effect(evaluate_change(CHANGE, base, after), base, [])
    assert (found.figure, found.before, found.after) == (ANSWERED, 1, 4)
    assert 0 < found.low < 3 < found.high <= 4
    base, after = figures([1.0, 1.0], preemptions=10), figures([1.0, 1.0], preemptions=4)
    found = measure_effect(
        evaluate_change(CHANGE, base, after), base, [(base, figures([1.0, 1.0], preemptions=9))]
    )
    assert (found.figure, found.low, found.high) == (PREEMPTED, 0.4, 0.9)


def test_mean_of_some_requests_names_their_number() -> None:
    base, after = figures([10.0, 10.0, None]), figures([5.0, None, 5.0])
    found = measure_effect(evaluate_change(CHANGE, base, after), base, [])
    assert found.told == "mean E2E 10 s -> 5 s, x0.50, 90 % interval 0.50 to 0.50"
    which = "The mean is over the requests that are answered with and without the change"
    assert found.compared == f"{which}: 1 of 3."
    fix = Remedy(
        evaluate_change(CHANGE, base, after), "flag", "-x", False, SideEffects(0, 1.0, 0), found
    )
    search = RemedySearch(base, (fix,), 7, cast("Bounds", None), 0, ())
    said = describe_search(search, healthy=False)
    assert said.endswith(f"0.50 to 0.50); 7 changes tried. {which}: 1 of 3.")
    other = figures([None, 10.0, None])  # no request has an answer in both runs
    found = measure_effect(
        evaluate_change(CHANGE, base, after), base, [(other, after), (base, after)]
    )
    assert (found.low, found.high) == (None, None)
    assert not found.sure
    assert found.compared == f"{which}: 0 to 1 of 3."
    # Another reconstruction can have more requests than the likeliest one.
    assert replace(found, of=(1, 5)).compared == f"{which}: 1 to 5 in the reconstructions."
    fewer = figures([1.0, 1.0], preemptions=4)
    base = figures([1.0, 1.0], preemptions=10)
    none, some = figures([1.0, 1.0]), figures([1.0, 1.0], preemptions=2)
    assert measure_effect(evaluate_change(CHANGE, base, fewer), base, [(none, none)]).high == 1.0
    found = measure_effect(evaluate_change(CHANGE, base, fewer), base, [(none, some)])
    assert "90 % interval not determined" in found.told
    assert not found.sure


def test_interval_contains_the_simulated_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds for any resample; here, a single resample rarely includes the first request."""
    monkeypatch.setattr("simkv.incident.effect_size.RESAMPLES", 1)
    for place in range(4):
        took = [1.0] * 4
        took[place] = 1000.0
        base, after = figures(took), figures([1.0] * 4)
        found = measure_effect(evaluate_change(CHANGE, base, after), base, [])
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.after / found.before <= found.high


def test_shorter_answers_are_no_fix() -> None:
    base = figures([10.0, 10.0], total_output_tokens=200)
    after = figures([5.0, 5.0], total_output_tokens=100)
    assert shortens_answers(evaluate_change(CHANGE, base, after), base)
    assert not shortens_answers(
        evaluate_change(CHANGE, base, figures([5.0, 5.0], total_output_tokens=200)), base
    )
    stuck = figures([None, 10.0], total_output_tokens=200)
    assert not shortens_answers(evaluate_change(CHANGE, stuck, after), stuck)


def test_uncertain_fix_is_reported_as_such() -> None:
    base, after = figures([10.0, 10.0]), figures([5.0, 5.0])
    effect = evaluate_change(CHANGE, base, after)
    unsure = Remedy(effect, "flag", "--max-num-seqs 8", False, measure_side_effects(effect, base))
    unsure = replace(unsure, gain=EffectSize(E2E, 10.0, 5.0, 0.4, 1.1, 2))
    found = RemedySearch(base, (unsure,), 7, bounds(steps_of(3), {}), 2, ())
    said = describe_search(found, False)
    assert said.startswith("Fix: uncertain; --max-num-seqs 8 (mean E2E 10 s -> 5 s")
    assert said.endswith("0.40 to 1.10) may help; 7 changes tried, 2 of them stopped early.")
    none = replace(found, remedies=())
    assert describe_search(none, False).startswith("Fix: none found; 7 changes tried")


def test_fix_of_sampled_requests_holds_in_nine_of_ten_reconstructions() -> None:
    base, after = figures([10.0, 10.0]), figures([5.0, 5.0])
    effect = evaluate_change(CHANGE, base, after)
    better, worse = (base, after), (base, figures([12.0, 12.0]))

    def answer(*worlds: tuple[RunFigures, RunFigures]) -> str:
        gain = measure_effect(effect, base, worlds)
        paid = measure_side_effects(effect, base)
        fix = Remedy(effect, "flag", "--max-num-seqs 8", False, paid, gain)
        unmeasured = replace(fix, typed="--max-num-seqs 9", gain=None)
        search = RemedySearch(base, (fix, unmeasured), 7, bounds(steps_of(3), {}), 0, ())
        return describe_search(search, healthy=False, sampled=True)

    assert "--max-num-seqs 8 (" in answer(*[better] * 4)
    whole = "7 changes tried. It holds in 5 of 5 reconstructions."
    assert answer(*[better] * 4).endswith(whole)
    nine_of_ten = answer(worse, *[better] * 8)
    assert "holds in 9 of 10 reconstructions" in nine_of_ten
    four_of_five = answer(worse, *[better] * 3)
    assert "none holds in at least 90 % of the 5 reconstructions" in four_of_five
    assert "--max-num-seqs" not in four_of_five


def test_cause_names_settings_whose_default_would_have_helped() -> None:
    base, after = figures([10.0, 10.0]), figures([5.0, 5.0])
    effect = evaluate_change(CHANGE, base, after)
    gain = measure_effect(effect, base, [(base, after)])
    fix = Remedy(effect, "flag", "--max-num-seqs 8", True, measure_side_effects(effect, base), gain)
    search = RemedySearch(base, (fix,), 7, bounds(steps_of(3), {}), 0, ())
    told = " Settings with a value that is too low or too high: max_num_seqs=4 (better: 8)."
    assert describe_settings(search, {"max_num_seqs": "log.txt"}) == told
    assert not describe_settings(search, {"max_num_seqs": "default of vllm on NVIDIA H100"})
    assert not describe_settings(replace(search, remedies=(replace(fix, to_default=False),)), {})
    unsure = replace(fix, gain=measure_effect(effect, base, [(base, figures([12.0, 12.0]))]))
    assert not describe_settings(replace(search, remedies=(unsure,)), {})
    assert not describe_settings(None, {})


def test_cause_names_the_order_of_the_queue() -> None:
    path = HERE / "sglang-31954-lpm-cold.yaml"
    result = run_scenario(load(path, [])["before"], HERE, intervals=False)
    found = server_verdicts(result)
    text = " The queue order schedule_policy=lpm admits requests with longer cached prefixes"
    assert _describe_order(result, found).startswith(text)
    assert _describe_order(result, []) == ""


def test_fix_that_lengthens_the_tail_ranks_after_others() -> None:
    base = figures([10.0] * 20)
    uneven = evaluate_change(CHANGE, base, figures([4.0] * 19 + [30.0]))
    even = evaluate_change(CHANGE, base, figures([6.0] * 20))
    assert lengthens_tail(uneven, base)
    assert not lengthens_tail(even, base)
    fixes = [
        Remedy(effect, "flag", name, False, measure_side_effects(effect, base))
        for effect, name in ((uneven, "uneven"), (even, "even"))
    ]
    assert [one.typed for one in _ranked(fixes, base)] == ["even", "uneven"]


def test_unsure_flag_does_not_replace_a_sure_larger_cache() -> None:
    base = figures([10.0, 10.0])
    effect = evaluate_change(CHANGE, base, figures([5.0, 5.0]))
    paid = measure_side_effects(effect, base)
    cache = Remedy(effect, "memory", "--num-gpu-blocks-override 9", False, paid)
    unsure = EffectSize(E2E, 10.0, 5.0, 0.4, 1.1, 2)
    flag = Remedy(effect, "flag", "--max-num-seqs 8", False, paid, unsure)
    search = RemedySearch(base, (cache, flag), 7, bounds(steps_of(3), {}), 0, ())
    assert describe_search(search, healthy=False).startswith("Fix: no flag; a larger cache")


def test_only_timeouts_leave_a_server_healthy() -> None:
    document = {
        "name": "short",
        "workload": {"requests": [{"prompt_tokens": 10, "output_tokens": 50}]},
        "engine": {"name": "vllm"},
        "profile": "unit-step",
        "timeout": 20,
    }
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "few.yaml", document)).values()))
    result = run_scenario(scenario, HERE, intervals=False)
    assert [one.name for one in result.diagnosis.verdicts] == ["timed_out"]
    assert server_verdicts(result) == []


def server(folder: Path, count: int = 40, **engine: Any) -> Scenario:
    """Return a scenario with four slots for a load that needs more, and its requests in a file."""
    load = {"num_prompts": count, "request_rate": 8.0, "prompt_tokens": 200, "output_tokens": 60}
    knobs = {"name": "vllm", "variant": "0.33.0", "num_gpu_blocks": 2000, "max_num_seqs": 4}
    document = {"name": "seats", "workload": {"arrivals": load}, "engine": knobs | engine}
    document["profile"] = str(HERE / "assumed-costs.json")
    made = next(iter(resolve_variants(YamlDocument(folder / "seats.yaml", document)).values()))
    write_recorded_trace(folder / "workload.csv", build_clients(made.workload, None).requests)
    document["workload"] = {"trace": "workload.csv"}
    return next(iter(resolve_variants(YamlDocument(folder / "seats.yaml", document)).values()))


def steps_of(count: int) -> RunResult:
    """Return a run of requests that are served one by one."""
    document = {
        "name": "few",
        "workload": {"burst": {"num_prompts": count, "prompt_tokens": 10, "output_tokens": 5}},
        "engine": {"name": "vllm", "max_num_seqs": 1},
        "profile": "unit-step",
    }
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "few.yaml", document)).values()))
    return run_scenario(scenario, HERE, intervals=False)


def test_trials_end() -> None:
    result = steps_of(3)
    assert bounds(result, {}).horizon == HORIZON_FACTOR * result.record.end
    assert bounds(result, {}).part is None


def test_long_incident_is_tried_on_its_worst_part(tmp_path: Path) -> None:
    scenario = server(tmp_path, 200)
    result = run_scenario(scenario, tmp_path, intervals=False)
    lost = summarize_waits(result).lost
    limits = bounds(result, lost, steps=60 * len(result.record.steps) // 4)
    assert limits.part is not None
    start, duration, share = limits.part
    arrivals = [life.request.arrival for life in result.record.requests.values()]
    assert duration == pytest.approx(max(arrivals) / 4, rel=0.01)
    inside = [i for i, at in enumerate(arrivals) if start <= at < start + duration]
    assert share == pytest.approx(sum(lost[i] for i in inside) / sum(lost.values()))
    assert share > 0.3  # a queue that grows is longest at the end
    assert limits.finalists == FINALISTS
    assert "54 % of all waiting time" in limits.told
    tried = limits.tried(scenario, tmp_path)
    assert len(run_scenario(tried, tmp_path, intervals=False).record.requests) == len(inside)
    with Evaluator(tmp_path) as evaluator:
        found = find_remedies(scenario, evaluator, limits)
    assert found.remedies[0].typed.startswith("--max-num-seqs")
    assert found.base["requests"] == 200  # the metrics are of the whole incident


def test_trial_of_a_slow_flag_is_cut_off(tmp_path: Path) -> None:
    scenario = server(tmp_path)
    result = run_scenario(scenario, tmp_path, intervals=False)
    limits = bounds(result, summarize_waits(result).lost)
    with Evaluator(tmp_path) as evaluator:
        found = find_remedies(scenario, evaluator, limits, [])
    assert found.cut_off > 0
    assert found.remedies[0].typed == "--max-num-seqs 256"
    assert found.remedies[0].gain is not None
    assert found.remedies[0].gain.sure


def test_scenarios_that_do_not_reproduce_the_incident_are_excluded(tmp_path: Path) -> None:
    scenario = server(tmp_path)
    profile = load_profile(scenario.profile or "", tmp_path)
    error = StepError(points=10, median=0.1, p95=0.2, bias=0.0)
    known = profile.model_copy(
        update={"fit": profile.fit.model_copy(update={"held_out": {"all": error}})}
    )
    cheaper, dearer = scenarios_within_error(scenario, known)
    factors = [one.step_scale.decode for one in (*cheaper, *dearer) if one.step_scale]
    assert factors[:4] == sorted(factors[:4])
    assert factors[4:] == sorted(factors[4:], reverse=True)
    assert factors[3] < 1 < factors[7]
    with Evaluator(tmp_path) as evaluator:
        base = evaluator.evaluate(evaluator.job(scenario))
        found = _possible([cheaper, dearer], base, evaluator)
        assert found[0] in cheaper[1:]  # steps 20 % faster: no request waits as long as before
        for one in found:
            assert _like(base, evaluator.evaluate(evaluator.job(one)))
        # a sampled member of the ensemble
        assert _possible([[cheaper[0]]], base, evaluator) == [cheaper[0]]


def test_much_older_releases_are_not_tried() -> None:
    scenario = steps_of(1).scenario
    current = scenario.model_copy(update={"engine": replace(scenario.engine, variant="0.27.0")})
    tried = {
        name: _is_tried(current, Change("variant", "variant", "0.27.0", name))
        for name in ("0.33.0-skip-blocked", "0.28.0", "0.26.0", "0.25.0", "0.24.0", "0.9.1")
    }
    assert [name for name, wanted in tried.items() if not wanted] == ["0.24.0", "0.9.1"]
