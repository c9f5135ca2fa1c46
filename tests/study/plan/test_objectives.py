"""Tests of objectives: their notation, and when they are met."""

from __future__ import annotations

import math

import pytest

import simkv
from simkv.core.errors import InputError
from simkv.core.figure_registry import FIGURE_NAMES
from simkv.scenario.objectives import (
    Objective,
    complete_objectives,
    compute_objective_figures,
    parse_objective,
)
from tests.metrics.test_goodput import CONTENTS


@pytest.mark.parametrize("text", ["ttft_ms.p99<=500", " ttft_ms.p99 <= 5e2 "])
def test_parses_objectives(text: str) -> None:
    assert parse_objective(text) == Objective("ttft_ms.p99", "<=", 500.0)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("ttft_ms.p99", "expected METRIC<=NUMBER"),
        ("ttft_ms.p99=500", "expected METRIC<=NUMBER"),
        ("ttft_ms.p98<=500", "did you mean 'ttft_ms.p9"),
        ("ttft_ms.p99<=fast", "expected a number after <=; found fast"),
        ("ttft_ms.p99<=nan", "expected a number"),
        ("ttft_ms.p99<=-5", "metrics are never negative; expected at least 0"),
    ],
)
def test_rejects_invalid_objectives(text: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        parse_objective(text)


def test_objective_holds_and_slack() -> None:
    most, least = parse_objective("starved<=0"), parse_objective("jain_index>=0.5")
    assert most.holds({"starved": 0})
    assert most.slack({"starved": 3}) == -3
    assert least.slack({"jain_index": 0.75}) == 0.5
    assert not least.holds({"jain_index": 0.49})
    assert least.holds({"jain_index": 0.5 * (1 - 1e-12)})


def test_latency_without_sample_does_not_hold() -> None:
    objective = parse_objective("ttft_ms.p99<=500")
    assert objective.slack({"ttft_ms.p99": None}) == -math.inf
    nobody = simkv.run(
        CONTENTS, timeout=0.5, workload__requests=CONTENTS["workload"]["requests"][:1]
    )  # type: ignore[index]
    values = compute_objective_figures(nobody.results["run"].summary)
    assert values["finished"] == 0
    assert not objective.holds(values)
    assert values["unserved"] == 1


def test_worst_of_several_values() -> None:
    most, least = parse_objective("starved<=0"), parse_objective("jain_index>=0.5")
    assert (most.worst([1, 3, 2]), least.worst([1, 3, 2])) == (3, 1)
    assert most.worst([1, None]) is None
    assert most.worst([]) is None


def test_assumed_objectives() -> None:
    asked = [parse_objective("ttft_ms.p99<=500")]
    assert [str(one) for one in complete_objectives(asked, {})] == [
        "ttft_ms.p99 <= 500",
        "unserved <= 0",
    ]
    with_goodput = complete_objectives([], {"ttft": 500.0})
    assert [str(one) for one in with_goodput] == ["unserved <= 0", "goodput_share >= 0.99"]
    assert all(one.assumed for one in with_goodput)
    some_may_starve = [parse_objective("starved<=3"), parse_objective("goodput>=2")]
    assert complete_objectives(some_may_starve, {"ttft": 500.0}) == some_may_starve


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ([], "--slo: missing"),
        (["starved<=0", "starved<=1"], "is given twice"),
        (["goodput>=1"], "requires latency limits"),
    ],
)
def test_rejects_contradictory_objectives(asked: list[str], what: str) -> None:
    with pytest.raises(InputError, match=what):
        complete_objectives([parse_objective(text) for text in asked], {})


def test_objective_figures_include_derived_figures() -> None:
    summary = simkv.run(CONTENTS).results["run"].summary
    values = compute_objective_figures(summary)
    assert set(FIGURE_NAMES) <= set(values)
    assert values["unserved"] == 1
    assert values["preemption_rate"] == 0
    assert values["recompute_tax"] == 0
    again = compute_objective_figures({**summary, "recomputed_tokens": 21, "preemptions": 6})
    # Two prompts of 100 tokens were served, with 10 output tokens and 1 output token.
    assert again["recompute_tax"] == 21 / 211
    assert again["preemption_rate"] == 2
