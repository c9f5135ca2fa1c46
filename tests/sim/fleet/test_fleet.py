"""Tests of fleets: failures, draining, cold starts, scaling, and outdated load signals."""

from __future__ import annotations

from math import inf
from pathlib import Path
from typing import Any

import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.fleet_section import Autoscale
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.scenario_writer import build_resolved_scenario
from simkv.scenario.yaml_document import YamlDocument
from simkv.sim.clock import ExactTimeout
from simkv.sim.fleet.autoscaler import Autoscaler
from simkv.sim.fleet.load_signals import LoadBoard
from simkv.sim.fleet.recurring_tasks import RecurringTasks


def fleet(section: dict[str, Any], requests: list[dict[str, Any]], **more: Any) -> RunResult:
    """Run a fleet in which every step takes a second and each replica runs 4 requests at a time."""
    scenario = {
        "name": "fleet",
        "workload": {"requests": requests},
        "engine": {"name": "vllm", "max_num_seqs": 4, "async_scheduling": False},
        "profile": "unit-step",
        "fleet": section,
        **more,
    }
    return run_scenario(resolve_variants(YamlDocument(Path("fleet.yaml"), scenario))["run"], Path())


def at(*times: float, tokens: int = 5) -> list[dict[str, Any]]:
    return [{"arrival": time, "prompt_tokens": 4, "output_tokens": tokens} for time in times]


def where(result: RunResult) -> list[str]:
    return [row["replica"] for row in result.request_rows("")]


def ends(result: RunResult) -> list[float | None]:
    return [life.ended_at for life in result.record.requests.values()]


def test_retries_requests_of_failed_replica() -> None:
    section = {"replicas": 2, "failures": [{"replica": 0, "at": 3.5}]}
    result = fleet(section, at(0.0, 0.0, 5.0))
    assert where(result) == ["0 1", "1", "1"]
    # Request 0 had emitted 3 tokens. Replica 1 admits it at 4 s, and needs all 5 steps again.
    assert ends(result) == [9.0, 5.0, 10.0]
    life = result.record.requests[0]
    assert (life.tokens, life.first_token) == (5, 5.0)
    assert result.summary["fleet"]["retries"] == 1
    assert result.fleet is not None
    lost = result.fleet.lifetimes[0].engine.record.requests[0]
    assert (lost.outcome, lost.tokens, lost.ended_at) == (Outcome.CUT_OFF, 3, 3.5)
    assert "replica 0: it failed" in lost.reason


def test_loses_requests_of_failed_replica() -> None:
    section = {
        "replicas": 2,
        "failures": [{"replica": 0, "at": 3.5}],
        "on_failure": "lose",
    }
    result = fleet(section, at(0.0, 0.0))
    assert [str(life.outcome) for life in result.record.requests.values()] == ["lost", "finished"]
    assert result.record.requests[0].reason == "replica 0: it failed"
    assert result.summary["verdict"] == "lost"


def test_requests_wait_at_router_without_replicas() -> None:
    section = {
        "replicas": 1,
        "failures": [{"replica": 0, "at": 2.5, "back_at": 6.0}],
        "cold_start": 4.0,
    }
    requests = [*at(0.0), {**at(3.0)[0], "timeout": 2.0}]
    result = fleet(section, requests)
    first, second = result.record.requests.values()
    assert first.ended_at == 15.0
    assert (second.outcome, second.ended_at) == (Outcome.TIMED_OUT, 5.0)
    assert where(result) == ["0 0", None]
    assert [lifetime.name for lifetime in result.fleet.lifetimes] == [
        "replica 0",
        "replica 0 from 10 s",
    ]


def test_requests_stall_without_any_replica() -> None:
    result = fleet({"replicas": 1, "failures": [{"replica": 0, "at": 2.5}]}, at(0.0, 1.0))
    assert {life.outcome for life in result.record.requests.values()} == {Outcome.STALLED}
    assert result.summary["verdict"] == "deadlock"
    assert "no replica accepts requests" in result.summary["verdict_detail"]


def test_draining_replica_finishes_requests() -> None:
    section = {"replicas": 2, "drains": [{"replica": 0, "at": 1.5, "back_at": 4.0}]}
    result = fleet(section, at(0.0, 2.0, 3.0, 4.0))
    assert where(result) == ["0", "1", "1", "0"]
    assert ends(result) == [5.0, 7.0, 8.0, 9.0]
    assert result.summary["fleet"]["retries"] == 0


@pytest.mark.parametrize(
    ("drain", "left"),
    [
        pytest.param({"at": 1.5}, 5.0, id="with its last request"),
        pytest.param({"at": 5.5}, 5.5, id="at once where it has none"),
        pytest.param({"at": 1.5, "back_at": 6.0}, None, id="not if it comes back"),
    ],
)
def test_drained_replica_stops(drain: dict[str, float], left: float | None) -> None:
    section = {"replicas": 2, "drains": [{"replica": 0, **drain}]}
    result = fleet(section, at(0.0, 6.5, 7.0))
    assert [(s.replica, s.end) for s in result.run.lifetimes] == [(0, left), (1, None)]
    until = result.record.end if left is None else left
    assert [row["there_s"] for row in result.summary["fleet"]["by_replica"]] == [
        until,
        result.record.end,
    ]


def test_cold_start_delays_requests_and_empties_cache() -> None:
    result = fleet({"replicas": 2, "start_cold": True, "cold_start": 7.0}, at(0.0, 1.0, 8.0))
    assert ends(result) == [12.0, 12.0, 13.0]
    shared = [{**row, "prefix_group": "a", "prefix_tokens": 96} for row in at(0.0, 10.0, 20.0)]
    for row in shared:
        row["prompt_tokens"] = 100
    outage = {"replica": 0, "at": 15.5, "back_at": 16.0}
    result = fleet({"replicas": 1, "failures": [outage]}, shared)
    contexts = [life.chunks[0].context for life in result.record.requests.values()]
    assert contexts == [0, 96, 0]


def test_autoscaling_follows_load_with_lag() -> None:
    rule = {
        "target": 2.0,
        "max_replicas": 4,
        "interval": 1.0,
        "lag": 2.0,
        "scale_down_after": 3.0,
        "tolerance": 0.0,
    }
    section = {"replicas": 1, "router": "least_loaded", "autoscale": rule}
    result = fleet(section, at(*[0.5] * 6, 3.5, 30.0))
    lifetimes = [(s.replica, s.start, s.end) for s in result.fleet.lifetimes]
    # Six requests are in flight at 1 s, so there are three replicas from 3 s. Two replicas stop
    # three seconds after the load has ended.
    assert lifetimes[:3] == [(0, 0.0, None), (1, 3.0, lifetimes[1][2]), (2, 3.0, lifetimes[2][2])]
    assert all(end is not None and 9.0 <= end <= 14.0 for _, _, end in lifetimes[1:])
    assert where(result)[6:] == ["1", "0"]
    assert result.summary["finished"] == 8
    assert result.summary["fleet"]["replica_s"] < 3 * result.record.end


def test_idle_years_cost_few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    target_size, refresh = Autoscaler.target_size, LoadBoard.refresh
    monkeypatch.setattr(
        Autoscaler, "target_size", lambda *a: calls.append("scale") or target_size(*a)
    )
    monkeypatch.setattr(LoadBoard, "refresh", lambda board: calls.append("load") or refresh(board))
    rule = {"target": 1.0, "max_replicas": 4, "interval": 1.0, "scale_down_after": 1e7}
    section = {
        "replicas": 1, "router": "least_loaded", "refresh_interval": 0.1, "autoscale": rule
    }  # fmt: skip
    result = fleet(section, at(0.5, 0.5, 0.5, 1e8), engine_ready=1e6)
    assert result.summary["finished"] == 4
    assert max(s.end or 0.0 for s in result.fleet.lifetimes) == pytest.approx(1.1e7, rel=1e-2)
    assert calls.count("scale") < 300
    assert calls.count("load") < 300


def test_full_fleet_costs_no_checks_while_a_replica_drains(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If the fleet cannot reach a number of replicas, it does not try again until an event
    occurs.
    """
    calls = []
    target_size = Autoscaler.target_size
    monkeypatch.setattr(
        Autoscaler, "target_size", lambda *a: calls.append("scale") or target_size(*a)
    )
    rule = {"metric": "waiting", "target": 1.0, "max_replicas": 2, "scale_down_after": 5.0}
    section = {"replicas": 2, "router": "random", "autoscale": rule}
    result = fleet(section, at(0.0, 0.5, 0.6), engine_ready=1e7)
    assert result.summary["finished"] == 3
    assert len(calls) < 300


def test_later_events_end_a_pause_early() -> None:
    env = simpy.Environment()
    tasks, seen = RecurringTasks(env), []
    env.process(tasks.every(1.0, lambda: seen.append(env.now) or inf))
    ExactTimeout(env, 90.0)
    env.run(until=20.5)
    tasks.notify()
    env.run(until=100)
    assert seen == [0.0, 20.0, 21.0, 90.0, 91.0]


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 7.0]), st.integers(0, 9)), max_size=40),
    st.sampled_from([0.0, 3.0, 20.0]),
)
def test_scales_down_to_highest_recent_number(loads: list[Any], after: float) -> None:
    rule = Autoscale(target=1.0, max_replicas=9, min_replicas=1, scale_down_after=after)
    scaler, now, history = Autoscaler(rule), 0.0, []
    current = 3
    for pause, unrouted in loads:
        now += pause
        want = max(unrouted, 1)
        if current and abs(unrouted / current - 1.0) <= rule.tolerance:
            want = current
        history.append((now, want))
        recent = [number for time, number in history if time >= now - after]
        expected = want if want >= current else min(current, max(recent))
        assert scaler.target_size(now, [], current, unrouted) == expected
        current = expected


def test_stale_signals_route_to_one_replica() -> None:
    def used(**knobs: Any) -> set[str]:
        router = {"name": "least_loaded", "count_own_sends": False}
        return set(where(fleet({"replicas": 4, "router": router, **knobs}, at(*[2.5] * 4))))

    assert used() == {"0", "1", "2", "3"}
    assert used(refresh_interval=1.0) == {"0"}
    assert used(refresh_interval=1.0, router={"name": "least_loaded"}) == {"0", "1", "2", "3"}


def test_signals_refresh_at_interval() -> None:
    router = {"name": "least_loaded", "count_own_sends": False}
    section = {"replicas": 2, "router": router, "refresh_interval": 2.0}
    # A request that arrived at 1.9 s is visible from 2 s; a request that arrived at 2 s is not.
    assert where(fleet(section, at(1.9, 1.95, 2.0, 2.1))) == ["0", "0", "1", "1"]


def test_crashing_request_kills_replicas_in_turn() -> None:
    engine = {
        "name": "mistralrs",
        "variant": "merged2250",
        "block_size": 1,
        "num_gpu_blocks": 2,
        "max_num_seqs": 2,
        "prefill_batch_max_seqs": 1,
        "prefill_batch_max_tokens": 8,
        "waiting_timeout": 0,
        "prefix_caching": False,
    }
    requests = [{**row, "prompt_tokens": 1} for row in at(*[0.0] * 6, tokens=1)]
    result = fleet({"replicas": 2}, requests, engine=engine)
    ends = [lifetime.end for lifetime in result.fleet.lifetimes]
    assert None not in ends, "both died"
    assert {life.outcome for life in result.record.requests.values()} <= {
        Outcome.STALLED,
        Outcome.FINISHED,
        Outcome.REJECTED,
    }


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"replicas": 2, "failures": [{"replica": 2, "at": 1.0}]}, "replica 2 does not exist"),
        ({"failures": [{"replica": 0, "at": 2.0, "back_at": 1.0}]}, "must be later than at (2)"),
        (
            {"drains": [{"replica": 0, "at": 1.0}, {"replica": 0, "at": 2.0}]},
            "replica 0 has two outages at the same time",
        ),
        (
            {"replicas": 3, "autoscale": {"target": 1.0, "max_replicas": 2}},
            "must be between min_replicas",
        ),
        ({"replicas": [{}], "autoscale": {"target": 1.0, "max_replicas": 2}}, "equal replicas"),
        ({"router": "lest_loaded"}, "did you mean 'least_loaded'"),
        ({"replicas": [{"engine": {"block_sise": 2}}]}, "fleet.replicas.0.engine.block_sise"),
        ({"replicas": [{"profile": "unit-stp"}]}, "did you mean 'unit-step'"),
    ],
)
def test_rejects_invalid_fleets(section: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        fleet(section, at(0.0))
    assert says in str(error.value)


def test_saved_scenario_repeats_run() -> None:

    section = {
        "replicas": [{"count": 2}, {"engine": {"max_num_seqs": 2}, "profile": "unit-step"}],
        "router": {"name": "power_of_two", "seed": 3},
        "failures": [{"replica": 1, "at": 2.0, "back_at": 3.0}],
    }
    result = fleet(section, at(0.0, 0.5, 1.0, 1.5))
    again: dict[str, Scenario] = resolve_variants(
        YamlDocument(Path("again.yaml"), build_resolved_scenario({"run": result.scenario}))
    )
    assert run_scenario(again["run"], Path()).summary == result.summary


def test_each_replica_matches_separate_run() -> None:
    section = {"replicas": [{}, {"engine": {"max_num_seqs": 2}}]}
    result = fleet(section, at(0.0, 0.0, 1.0, 2.0))
    parts = result.apart()
    assert list(parts) == ["replica 0", "replica 1"]
    assert [part.summary["requests"] for part in parts.values()] == [2, 2]
    assert [part.scenario.engine.max_num_seqs for part in parts.values()] == [4, 2]
    for part in parts.values():
        assert list(part.record.steps.decided) == sorted(part.record.steps.decided)
        assert part.diagnosis.ledger.keys() == part.record.requests.keys()


def test_counts_preemptions_on_failed_replica() -> None:
    """Two requests of three blocks each share five blocks; the request that loses its KV is sent to
    another replica.
    """
    engine = {
        "name": "vllm",
        "block_size": 4,
        "num_gpu_blocks": 6,
        "startup_check": False,
        "async_scheduling": False,
        "enable_prefix_caching": False,
    }
    section = {"replicas": 2, "failures": [{"replica": 0, "at": 9.5}]}
    result = fleet(section, at(0.0, 0.0, 0.0, 0.0, tokens=8), engine=engine)
    assert where(result) == ["0", "1", "0 1", "1"]
    by_replica = [row["preemptions"] for row in result.summary["fleet"]["by_replica"]]
    assert by_replica[0] > 0
    assert result.summary["preemptions"] == sum(by_replica) == len(result.diagnosis.preemptions)


def test_request_without_replica_ends_at_arrival() -> None:
    """The simulation ended at 5 s; a request that arrives at 9 s must not end before its
    arrival.
    """
    result = fleet({"replicas": 1, "drains": [{"replica": 0, "at": 0.0}]}, at(0.0, 9.0))
    late = result.record.requests[1]
    assert late.outcome is Outcome.STALLED
    assert late.ended_at == late.request.arrival == result.record.end
