"""Tests of the expectations of scenarios: bounds, load errors and reports of failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from simkv.core.errors import InputError
from simkv.core.figure_registry import FIGURE_NAMES, figure
from simkv.core.outcome import Outcome
from simkv.metrics.expectation_checks import ExpectationCheck, check_expectations, exit_code
from simkv.metrics.run_metrics import request_rows
from simkv.metrics.scenario_runner import run_file
from simkv.report.run_files import write_run
from simkv.scenario.expectations import Bound, Expectations, OutcomeName
from simkv.scenario.scenario_loader import load

#: Two requests on a cache for one and a half requests: the second request is preempted once.
SCENARIO = """\
name: two
workload:
  requests:
    - {prompt_tokens: 40, output_tokens: 30}
    - {prompt_tokens: 40, output_tokens: 30, arrival: 1}
engine: {name: mistralrs, variant: merged2250, block_size: 8, num_gpu_blocks: 17}
profile: unit-step
variants:
  newest: {}
  oldest: {engine: {variant: bucketed}}
expect:
"""


def write(folder: Path, expect: str) -> Path:
    path = folder / "two.yaml"
    path.write_text(SCENARIO + "\n".join(f"  {line}" for line in expect.splitlines()) + "\n")
    return path


def checks(folder: Path, expect: str) -> list[ExpectationCheck]:
    return check_expectations(run_file(write(folder, expect)))


@pytest.mark.parametrize(
    ("bound", "found", "missed"),
    [
        ({"eq": 3}, 3.0, 0),
        ({"eq": 3}, 3.5, 0.5),
        ({"eq": 3}, 1.0, -2),
        ({"eq": 0.3}, 0.1 + 0.2, 0),
        ({"le": 3}, 3.0, 0),
        ({"le": 3}, -9.0, 0),
        ({"le": 3}, 4.0, 1),
        ({"ge": 3}, 3.0, 0),
        ({"ge": 3}, 2.0, -1),
        ({"within": [2, 4]}, 2.0, 0),
        ({"within": [2, 4]}, 4.0, 0),
        ({"within": [2, 4]}, 4.5, 0.5),
        ({"within": [2, 4]}, 1.0, -1),
    ],
)
def test_failed_bound_has_a_distance(bound: dict[str, Any], found: float, missed: float) -> None:
    assert Bound.model_validate(bound).missed_by(found) == pytest.approx(missed)


def test_every_summary_figure_can_be_expected(tmp_path: Path) -> None:
    result = run_file(write(tmp_path, "newest: {verdict: served}"))["newest"]
    numbers = {name: figure(result.summary, name) for name in FIGURE_NAMES}
    expect = "".join(f"{name}: {value!r}, " for name, value in numbers.items())
    found = checks(tmp_path, f"newest: {{verdict: served, {expect}}}")
    assert [c.figure for c in found] == ["verdict", *FIGURE_NAMES]
    assert all(c.ok for c in found)


def test_every_request_column_can_be_expected(tmp_path: Path) -> None:
    result = run_file(write(tmp_path, "newest: {verdict: served}"))["newest"]
    row = request_rows("newest", result.record)[1]
    names = list(type(Expectations(request={1: {}}).request[1]).model_fields)
    expect = ", ".join(f"{name}: {row[name]}" for name in names)
    assert row["preemptions"] == 1
    found = checks(tmp_path, f"newest: {{request: {{1: {{{expect}}}}}}}")
    assert [c.figure for c in found] == [f"request 1 {name}" for name in names]
    assert all(c.ok for c in found)


def test_failures_are_reported_with_their_distance(tmp_path: Path) -> None:
    found = checks(
        tmp_path,
        "newest: {preemptions: {ge: 3}, makespan_s: {within: [1, 30]}, verdict: livelock}\n"
        "oldest: {preemptions: 1, request: {0: {preemptions: 0}}}",
    )
    assert [str(c) for c in found] == [
        "verdict = livelock: found served",
        "makespan_s within 1 .. 30: found 37, missed by +7",
        "preemptions >= 3: found 1, missed by -2",
        "preemptions = 1: found 1",
        "request 0 preemptions = 0: found 1, missed by +1",
    ]
    assert [c.ok for c in found] == [False, False, False, True, False]
    assert [c.missed_by for c in found] == [None, 7, -2, None, 1]


def test_missing_request_figure_fails(tmp_path: Path) -> None:
    path = write(tmp_path, "newest: {request: {1: {finish_s: {ge: 0}, outcome: cut_off}}}")
    found = check_expectations(run_file(path, ["horizon=5"]))
    assert [(c.figure, c.ok, c.found) for c in found] == [
        ("request 1 outcome", True, "cut_off"),
        ("request 1 finish_s", False, None),
    ]
    assert str(found[1]) == "request 1 finish_s >= 0: found none"


def test_outcomes_use_the_names_of_the_record() -> None:
    assert set(get_args(OutcomeName)) == {str(outcome) for outcome in Outcome}


@pytest.mark.parametrize(
    ("expect", "place", "message"),
    [
        ("newest: {premptions: 1}", 12, "did you mean 'preemptions'?"),
        ("newest: {preemptions: {ge: 1, le: 2}}", 12, "exactly one of eq, le, ge, within"),
        ("newest: {preemptions: {}}", 12, "exactly one of eq, le, ge, within"),
        ("newest: {preemptions: {within: [2, 1]}}", 12, "within: must be [low, high]"),
        ("newest: {preemptions: {within: [2]}}", 12, "at least 2 items"),
        ("newest: {preemptions: many}", 12, "should be a number; found 'many'"),
        ("newest: {preemptions: {least: 1}}", 12, "expected one of eq, le, ge, within"),
        ("newest: {makespan_s: .inf}", 12, "finite number"),
        ("newest: {verdict: servd}", 12, "did you mean 'served'?"),
        ("newest: {preemptions: 1}\nnewset: {preemptions: 1}", 13, "did you mean 'newest'?"),
        ("newest:\n  request:\n    2: {preemptions: 1}", 14, "an id from 0 to 1"),
        ("newest:\n  request:\n    1: {premptions: 1}", 14, "did you mean 'preemptions'?"),
        ("newest: {request: {one: {}}}", 12, "should be a whole number"),
    ],
)
def test_errors_name_file_line_and_field(
    tmp_path: Path, expect: str, place: int, message: str
) -> None:
    path = write(tmp_path, expect)
    with pytest.raises(InputError) as error:
        load(path)
    text = str(error.value)
    assert text.startswith(f"{path}:{place}: expect.new")
    assert message in text


def test_saved_run_has_the_same_expectations(tmp_path: Path) -> None:
    path = write(tmp_path, "newest: {verdict: served, ttft_ms.mean: {le: 5}, request: {0: {}}}")
    results = run_file(path)
    write_run(tmp_path / "out", results, [], lambda folder: None)
    assert check_expectations(run_file(tmp_path / "out" / "scenario.yaml")) == check_expectations(
        results
    )


def test_exit_code_is_that_of_expectations_or_of_outcomes(tmp_path: Path) -> None:
    served = run_file(write(tmp_path, "newest: {finished: 2}"))["newest"]
    starved = run_file(tmp_path / "two.yaml", ["timeout=20"])["newest"]
    assert starved.summary["verdict"] != "served"
    holds = ExpectationCheck("newest", "finished", "= 2", 2, ok=True)
    missed = ExpectationCheck("newest", "finished", "= 2", 1, ok=False)
    assert [exit_code([served], checks) for checks in ([], [holds], [holds, missed])] == [0, 0, 1]
    assert [exit_code([served, starved], checks) for checks in ([], [holds], [missed])] == [3, 0, 1]
