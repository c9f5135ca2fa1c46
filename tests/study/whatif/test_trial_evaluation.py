from __future__ import annotations

from multiprocessing import active_children
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.core.figure_registry import FIGURE_NAMES, figure
from simkv.metrics.scenario_runner import run_scenario
from simkv.schedulers.mistralrs.versions import RULES
from simkv.study.field_changes import NoSuchField, with_field, with_knobs
from simkv.study.whatif import trial_evaluation as module
from simkv.study.whatif.trial_evaluation import (
    Evaluator,
    TooManyRuns,
    evaluate_job,
    make_trial_job,
)
from tests.study.whatif.known_verdicts import overload, queue_loop, six

HERE = Path()


def test_figures_match_run() -> None:
    result = run_scenario(overload(), HERE)
    figures = evaluate_job(make_trial_job(overload(), HERE))
    assert figures.verdict == result.summary["verdict"] == "starved"
    assert figures.values == {name: figure(result.summary, name) for name in FIGURE_NAMES}
    assert [e.outcome for e in figures.endings] == ["finished"] * 6 + ["starved"] * 4
    assert [e.e2e_s for e in figures.endings] == [5.0, 10.0, 15.0, 20.0, 25.0, 30.0] + [None] * 4


def test_runs_each_case_once() -> None:
    ticks: list[int] = []
    evaluator = Evaluator(HERE, tick=lambda: ticks.append(1))
    first = evaluator.evaluate(evaluator.job(overload()))
    renamed = overload().model_copy(update={"name": "other", "summary": "said otherwise"})
    assert evaluator.evaluate(evaluator.job(renamed)) is first
    assert (evaluator.runs, len(ticks)) == (1, 1)


def test_digest_covers_inputs() -> None:
    base = overload()
    others = [
        overload(timeout=29),
        with_knobs(base, max_num_seqs=2),
        with_field(base, "workload.requests.3.arrival", 1, HERE),
        with_field(base, "engine_ready", 1.0, HERE),
        base.model_copy(update={"profile": "l4-mistralrs-pr2034"}),
    ]
    jobs = [make_trial_job(base, HERE), make_trial_job(base, HERE, RULES["merged2250"])]
    digests = {job.digest for job in (*jobs, *(make_trial_job(other, HERE) for other in others))}
    assert len(digests) == 2 + len(others)


def test_rules_replace_variant_rules() -> None:
    """Two variants differ from ``bucketed`` in a single rule each: with this rule, they are
    equal.
    """
    for variant in ("pr2031", "merged2250"):
        by_rule = evaluate_job(make_trial_job(six(), HERE, RULES[variant]))
        assert by_rule == evaluate_job(make_trial_job(six(variant), HERE))
    assert evaluate_job(make_trial_job(six(), HERE, RULES["pr2031"])) != evaluate_job(
        make_trial_job(six(), HERE)
    )


def test_results_are_independent_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluator, "POOL_PAYS", -1.0)
    monkeypatch.setattr(Evaluator, "POOL_LEAST", -1.0)
    cases = [make_trial_job(overload(timeout=float(t)), HERE) for t in (12, 17, 22, 12, 27, 32)]
    alone = Evaluator(HERE)
    with Evaluator(HERE, workers=2) as beside:
        assert beside.evaluate_all(cases) == alone.evaluate_all(cases)
        assert list(beside.stream(cases)) == [alone.evaluate(case) for case in cases]
        assert beside.runs == alone.runs == 5
        with pytest.raises(InputError, match="unknown profile"):
            beside.job(overload().model_copy(update={"profile": "none"}))


def test_limit_counts_distinct_cases() -> None:
    evaluator = Evaluator(HERE, most_runs=2)
    evaluator.evaluate(evaluator.job(overload()))
    evaluator.evaluate(evaluator.job(overload()))
    evaluator.evaluate(evaluator.job(six()))
    with pytest.raises(TooManyRuns, match="2 runs"):
        evaluator.evaluate(evaluator.job(queue_loop()))
    assert evaluator.runs == 2


def test_dropped_figures_are_recomputed_equally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Memory, "MOST", 12)
    evaluator = Evaluator(HERE)
    first = evaluator.evaluate(evaluator.job(overload()))
    evaluator.evaluate(evaluator.job(six()))
    again = evaluator.evaluate(evaluator.job(overload()))
    assert again == first
    assert again is not first


def test_changes_nested_fields() -> None:
    base = overload()
    assert with_field(base, "timeout", 7.0, HERE).timeout == 7.0
    assert with_field(base, "engine.max_num_seqs", 3, HERE).engine.max_num_seqs == 3
    changed = with_field(base, "workload.requests.2.prompt_tokens", 99, HERE).workload.requests
    assert changed is not None
    assert [row.prompt_tokens for row in changed] == [10, 10, 99] + [10] * 7
    assert base.workload.requests is not None
    assert base.workload.requests[2].prompt_tokens == 10


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("engin.block_size", "unknown field 'engin' .did you mean 'engine'"),
        ("engine.max_num_sqs", "engine has no field 'max_num_sqs' .did you mean 'max_num_seqs'"),
        ("name", "unknown field 'name'"),
        ("workload.requests.10.arrival", "workload.requests has no field '10'"),
        ("timeout.s", "timeout has no field 's'; it has no fields"),
    ],
)
def test_rejects_unknown_field(path: str, message: str) -> None:
    with pytest.raises(NoSuchField, match=message):
        with_field(overload(), path, 1, HERE)


def test_rejects_invalid_value() -> None:
    with pytest.raises(InputError, match="greater than 0"):
        with_knobs(overload(), max_num_seqs=0)
    with pytest.raises(InputError, match="prefix_caching: variant 'seed'"):
        with_knobs(overload(), variant="seed", prefix_caching=True)


def test_interrupt_leaves_no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Evaluator, "POOL_PAYS", -1.0)
    monkeypatch.setattr(Evaluator, "POOL_LEAST", -1.0)
    before = set(active_children())
    cases = [make_trial_job(overload(timeout=float(t)), HERE) for t in (12, 17, 22, 27)]

    def interrupted() -> None:
        with Evaluator(HERE, workers=2) as evaluator:
            evaluator.evaluate_all(cases)
            assert len(set(active_children()) - before) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert set(active_children()) == before


def test_progress_knows_expected_runs() -> None:
    seen: list[int | None] = []
    evaluator = Evaluator(Path(), tick=lambda: seen.append(evaluator.expected))
    jobs = [evaluator.job(overload(timeout)) for timeout in (30.0, 31.0, 32.0)]
    evaluator.evaluate(jobs[0])
    evaluator.evaluate_all(jobs)
    assert seen == [None, 3, 3]


def test_planned_runs_count_from_the_start_until_they_are_skipped() -> None:
    evaluator = Evaluator(Path())
    jobs = [evaluator.job(overload(timeout)) for timeout in (30.0, 31.0, 32.0)]
    evaluator.plan_jobs(jobs)
    evaluator.evaluate(jobs[0])
    assert evaluator.expected == 3
    evaluator.skip_jobs(jobs[2:])
    assert evaluator.expected == 2
