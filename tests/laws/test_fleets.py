"""Tests of the laws for fleets: one outcome per request, no effect of leaps, Little's law, and
fleets of one replica.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.core.outcome import Outcome
from simkv.explain.wait_ledger import build_ledger
from simkv.metrics.run_metrics import token_rows
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.sim.fleet.autoscaler import Autoscaler
from simkv.sim.fleet.load_signals import LoadBoard
from simkv.workload.workload_section import build_clients
from tests.laws.random_fleets import fleets, with_fleet
from tests.laws.random_scenarios import ENGINES, scenarios
from tests.laws.test_laws import everything
from tests.laws.test_leaping import assert_same, stretched

#: Every second variant, because fleets behave equally for all releases of an engine.
every_engine = pytest.mark.parametrize(("engine", "variant"), ENGINES[::2], ids=lambda name: name)


def run(scenario: Scenario, *, leaping: bool = True) -> RunResult:
    return run_scenario(scenario, Path(), leaping=leaping)


def rows(result: RunResult) -> dict[str, Any]:
    """Return everything that a run records."""
    return {
        "requests": result.request_rows(""),
        "steps": result.step_rows(""),
        "summary": result.summary,
    }


@every_engine
@given(data=st.data())
@settings(max_examples=12)
def test_fleet_requests_end_once(engine: str, variant: str, data: st.DataObject) -> None:
    scenario = data.draw(fleets(engine, variant))
    result = run(scenario)
    lives, fleet = result.record.requests, result.fleet
    assert fleet is not None
    assert lives.keys() == {
        r.id for r in build_clients(scenario.workload, scenario.timeout).requests
    }
    for i, life in lives.items():
        assert life.outcome in Outcome
        assert life.ended_at is not None
        assert 0 <= life.tokens <= life.request.output_tokens
        messages = sum(last - first + 1 for first, last in token_rows(life))
        assert messages == life.tokens - life.accepted_tokens
        if life.outcome is Outcome.FINISHED:
            assert life.last_token == life.ended_at
        if life.outcome is Outcome.CUT_OFF:
            # If a request stalls, a client of a closed loop never sends its next request.
            closed = (
                scenario.workload.max_concurrency
                and life.reason == "it was not sent before the run ended"
            )
            assert scenario.horizon is not None or closed
        seen = [
            lifetime.index for lifetime in fleet.lifetimes if i in lifetime.engine.record.requests
        ]
        assert sorted(fleet.sent.get(i, [])) == seen
        assert set(fleet.served_by.get(i, [])) <= set(seen)
    figures = result.summary
    assert sum(figures[outcome.value] for outcome in Outcome) == figures["requests"] == len(lives)
    sent = sum(row["requests"] for row in figures["fleet"]["by_replica"])
    assert sent == sum(map(len, fleet.sent.values()))
    by_replica = figures["fleet"]["by_replica"]
    for figure in ("preemptions", "recomputed_tokens"):
        assert figures[figure] == sum(row[figure] for row in by_replica)
    assert figures["preemptions"] == len(result.diagnosis.preemptions)
    assert figures["recomputed_tokens"] == result.diagnosis.recompute_tokens
    for life in lives.values():
        assert life.preempted_rows == sorted(life.preempted_rows)
    assert result.diagnosis.ledger.keys() == lives.keys()
    for i, tiles in result.diagnosis.ledger.items():
        if fleet.served_by.get(i) and lives[i].ended_at > lives[i].request.arrival:
            assert tiles[0].start == lives[i].request.arrival
            assert tiles[-1].end == lives[i].ended_at


@every_engine
@given(data=st.data())
@settings(max_examples=18)
def test_leap_changes_nothing_in_fleet(engine: str, variant: str, data: st.DataObject) -> None:
    scenario = stretched(data.draw(fleets(engine, variant)), data.draw(st.sampled_from([1, 4, 9])))
    leaping, stepping = run(scenario), run(scenario, leaping=False)
    assert_same(rows(leaping), rows(stepping), "run")
    for i, life in leaping.record.requests.items():
        assert life.segments == stepping.record.requests[i].segments


@pytest.mark.parametrize(("engine", "variant"), ENGINES[::5], ids=lambda name: name)
@given(data=st.data())
@settings(max_examples=12)
def test_skipped_ticks_change_nothing(engine: str, variant: str, data: st.DataObject) -> None:
    scenario = stretched(data.draw(fleets(engine, variant)), data.draw(st.sampled_from([1, 9])))
    skipping = run(scenario)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Autoscaler, "steady_until", property(lambda _: 0.0, lambda *_: None), raising=False
        )
        refresh = LoadBoard.refresh
        patch.setattr(LoadBoard, "refresh", lambda board: min(refresh(board), 0.0))
        ticking = run(scenario)
    assert_same(rows(skipping), rows(ticking), "run")


@every_engine
@given(data=st.data())
@settings(max_examples=10)
def test_littles_law(engine: str, variant: str, data: st.DataObject) -> None:
    """The mean number of requests in the fleet is the arrival rate times the mean time in the
    fleet.
    """
    result = run(data.draw(fleets(engine, variant)))
    assert result.fleet is not None
    spent = math.fsum(
        life.ended_at - life.request.arrival
        for life in result.record.requests.values()
        if life.ended_at is not None
    )
    assert math.isclose(result.fleet.in_system_s, spent, rel_tol=1e-9, abs_tol=1e-9)


@every_engine
@given(data=st.data())
@settings(max_examples=10)
def test_fleet_of_one_matches_replica(engine: str, variant: str, data: st.DataObject) -> None:
    scenario = data.draw(scenarios(engine, variant))
    router = data.draw(st.sampled_from(["round_robin", "least_loaded", "cache_aware"]))
    section = {"replicas": 1, "router": router, "refresh_interval": 0.7}
    alone, fleet = run(scenario), run(with_fleet(scenario, section))
    assert everything(fleet) == everything(alone)  # type: ignore[arg-type]
    assert fleet.diagnosis.ledger == build_ledger(alone.record)
