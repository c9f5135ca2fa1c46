from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import list_variants
from simkv.study.field_changes import with_field
from simkv.study.whatif.outcome_predicate import parse_condition
from simkv.study.whatif.trial_evaluation import Evaluator, evaluate_job, make_trial_job
from simkv.study.whatif.verdict_bisection import (
    REFUSED,
    Flips,
    SteppedRange,
    find_flips,
    find_variant_flips,
    parse_bisect_values,
)
from tests.study.whatif.known_verdicts import (
    overload,
    queue_loop,
    scenario,
    six,
)

HERE = Path()


def over(scenario: Scenario, text: str, when: str | None = None, **options: Any) -> Flips:
    shown = parse_condition(when) if when else None
    evaluator = Evaluator(HERE, most_runs=options.pop("most_runs", None))
    return find_flips(scenario, *parse_bisect_values(text), evaluator, shown, **options)


def told(found: Flips) -> list[tuple[Any, str, Any, str]]:
    return [(f.low.value, f.low.state, f.high.value, f.high.state) for f in found.flips]


def by_brute_force(scenario: Scenario, path: str, values: range) -> list[tuple[Any, str, Any, str]]:
    states = [
        (value, evaluate_job(make_trial_job(with_field(scenario, path, value, HERE), HERE)).verdict)
        for value in values
    ]
    return [(*a, *b) for a, b in pairwise(states) if a[1] != b[1]]


def test_flip_is_between_neighbours() -> None:
    """With five steps per request, one request at a time, 6 s serve one request, 31 s six, and 51 s
    all ten.
    """
    found = over(overload(), "timeout=1..500", samples=5)
    assert told(found) == [(5, "timed_out", 6, "starved"), (50, "starved", 51, "served")]
    assert (found.values, found.complete) == (500, True)
    assert [s.value for s in found.samples] == sorted(s.value for s in found.samples)
    assert found.runs == len(found.samples) < 20


def test_finds_every_flip_between_samples() -> None:
    """A small cache causes rejections, a medium cache kills the engine, and a large cache serves
    all requests.
    """
    path = "engine.num_gpu_blocks"
    every = by_brute_force(queue_loop(), path, range(2, 60))
    assert len(every) >= 2
    assert told(over(queue_loop(), f"{path}=2..59", samples=58)) == every
    coarse = told(over(queue_loop(), f"{path}=2..59", samples=6))
    assert coarse
    assert set(coarse) <= set(every)


def test_flips_of_figure_condition() -> None:
    found = over(overload(), "engine.max_num_seqs=1..12", "starved>=4")
    (flip,) = found.flips
    assert (flip.low.state, flip.high.state) == ("starved>=4", "not starved>=4")
    assert flip.low.figures is not None
    assert flip.high.figures is not None
    assert flip.low.figures["starved"] >= 4 > flip.high.figures["starved"]
    assert flip.high.value == flip.low.value + 1


def test_fractional_ranges_and_steps() -> None:
    requests = [{"prompt_tokens": 10, "output_tokens": 5, "timeout": 7.0}] * 2
    chosen = scenario({"name": "mistralrs", "max_num_seqs": 1}, requests)
    # The second request arrives while the first is served, until 5 s, and is served after it.
    found = over(chosen, "workload.requests.1.arrival=0.0..6.0")
    (flip,) = found.flips
    assert flip.high.value - flip.low.value == pytest.approx(0.006)
    assert flip.low.value <= 3.0 <= flip.high.value
    found = over(chosen, "workload.requests.1.arrival=0.0..6.0", samples=3)
    assert [s.value for s in found.samples][:1] == [0.0]
    path, values = parse_bisect_values("engine.max_num_seqs=2..20", step=6)
    assert path == "engine.max_num_seqs"
    assert isinstance(values, SteppedRange)
    assert [values.value(k) for k in range(values.last_index + 1)] == [2, 8, 14, 20]


@pytest.mark.parametrize(("low", "high", "step"), [(1, 2000, 1), (0, 9, 1), (0.5, 4.0, 0.01)])
@pytest.mark.parametrize("samples", [2, 5, 17, 40])
def test_grid_includes_both_ends(low: float, high: float, step: float, samples: int) -> None:
    values = SteppedRange(low, high, step)
    grid = values.grid(samples)
    assert grid == sorted(set(grid))
    assert (grid[0], grid[-1]) == (0, values.last_index)
    assert len(grid) <= samples
    assert values.value(values.last_index) == pytest.approx(high)


def test_tries_listed_values_in_order() -> None:
    found = over(six(), "engine.variant=bucketed,nonesuch,pr2031", "preemptions>=1")
    states = [sample.state for sample in found.samples]
    assert states == ["preemptions>=1", REFUSED, "not preemptions>=1"]
    assert "nonesuch" not in str(found.samples[0])
    assert found.samples[1].figures is None
    assert "'bucketed'" in found.samples[1].refused


def test_finds_variant_flips() -> None:
    found = find_variant_flips(queue_loop(), Evaluator(HERE))
    assert [sample.value for sample in found.samples] == list(list_variants("mistralrs"))
    alone = evaluate_job(
        make_trial_job(with_field(queue_loop(), "engine.variant", "pr2031", HERE), HERE)
    )
    assert next(s.figures for s in found.samples if s.value == "pr2031") == alone
    assert found.flips[0].low.value == "seed"
    assert found.flips[0].low.state == "livelock"
    caching = with_field(six(), "engine.prefix_caching", True, HERE)
    across = find_variant_flips(caching, Evaluator(HERE))
    assert across.samples[0].state == REFUSED
    assert "no prefix cache" in across.samples[0].refused


def test_result_is_independent_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    once = over(overload(), "timeout=1..60")
    monkeypatch.setattr(Evaluator, "POOL_PAYS", -1.0)
    monkeypatch.setattr(Evaluator, "POOL_LEAST", -1.0)
    with Evaluator(HERE, workers=2) as beside:
        assert find_flips(overload(), *parse_bisect_values("timeout=1..60"), beside) == once


def test_reports_limit_on_runs() -> None:
    found = over(overload(), "timeout=6..500", samples=5, most_runs=7)
    assert not found.complete
    assert found.runs == len(found.samples) == 7
    (flip,) = found.flips
    assert flip.low.value <= 50 < flip.high.value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("engine.max_num_seqs", "expected path=values"),
        ("=1..2", "expected path=values"),
        (
            "engine.max_num_seqs=1..",
            "none of the values is valid in this scenario; the first error: .* whole number",
        ),
        (
            "engine.max_num_seqs=a..b",
            "none of the values is valid in this scenario; the first error: .* whole number",
        ),
        ("engine.max_num_seqs=9..3", "the lower end 9 must be below 3"),
        (
            "engine.max_num_seqs=1..inf",
            "none of the values is valid in this scenario; the first error: .* whole number",
        ),
        ("engine.max_num_seqs=1..99999999999", "more than 10,000,000 values"),
        ("engine.max_num_seqs=[1,2", "not valid YAML"),
        (
            "timeout=-inf..3",
            "none of the values is valid in this scenario; the first error: .* number",
        ),
        ("timeout=1..9:log", r"expected LOW\.\.HIGH, or values"),
        ("engine.max_num_sqs=1..3", "did you mean 'max_num_seqs'"),
        (
            "engine.max_num_seqs=-5..0",
            "none of the values is valid in this scenario; the first error: .* greater than 0",
        ),
        (
            "engine.max_num_seqs=0.5..0.7",
            "none of the values is valid in this scenario; the first error: .* whole number",
        ),
    ],
)
def test_rejects_invalid_ranges(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        over(overload(), text)


def test_rejects_invalid_steps() -> None:
    for step in (0, -1, 20, float("nan"), float("inf")):
        with pytest.raises(InputError, match=r"--step .*: must be above 0 and at most 9"):
            parse_bisect_values("engine.max_num_seqs=1..10", step)
