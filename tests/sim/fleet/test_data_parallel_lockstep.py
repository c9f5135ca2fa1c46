"""Tests of engines in lockstep: examples computed by hand, and invariants."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.metrics.run_metrics import request_rows, step_rows
from simkv.metrics.scenario_runner import run_file
from simkv.scenario.fleet_section import FleetSettings, RoundRobinConfig
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.vllm.config import VllmConfig
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.fleet.data_parallel_lockstep import DataParallelLockstep
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.fleet.routers import build_router
from simkv.sim.run_record import RunRecord
from simkv.workload.workload_section import generate_requests
from tests.fakes import Fifo, Seconds, die
from tests.laws.random_fleets import with_fleet
from tests.laws.random_scenarios import scenarios
from tests.laws.test_fleets import rows, run
from tests.laws.test_leaping import assert_same, stretched


def fleet(schedulers: Sequence[Any], executors: Sequence[Any]) -> Fleet:
    """Run engines in lockstep; they receive the requests in turn."""

    def maker(scheduler: Any, executor: Any) -> Any:
        return lambda env, rank: Engine(env, scheduler, executor, rank=rank)

    makers = [maker(*pair) for pair in zip(schedulers, executors, strict=True)]
    router = build_router(RoundRobinConfig(), lambda prompt: prompt.id)
    return Fleet(simpy.Environment(), makers, router, FleetSettings(lockstep=True))


def spans(record: RunRecord) -> list[tuple[float, float]]:
    steps = record.steps
    return list(zip(steps.start, steps.end, strict=True))


def test_step_lasts_as_long_as_slowest_rank() -> None:
    requests = [
        Request(0, prompt_tokens=8, output_tokens=3, max_tokens=3),
        Request(1, prompt_tokens=8, output_tokens=1, max_tokens=1, arrival=0.5),
    ]
    served = fleet([Fifo(), Fifo()], [Seconds(1.0), Seconds(3.0)])
    run_clients(served, requests, None)
    first, second = (lifetime.engine.record for lifetime in served.lifetimes)
    # In isolation, this rank would take a second per token, and the other rank would start at 0.5
    # s.
    assert spans(first) == [(0.0, 1.0), (1.0, 4.0), (4.0, 5.0)]
    assert spans(second) == [(1.0, 4.0)]
    assert first.requests[0].ended_at == 5.0
    assert second.requests[1].ended_at == 4.0


def test_ranks_sleep_and_wake() -> None:
    requests = [
        Request(i, prompt_tokens=8, output_tokens=1, max_tokens=1, arrival=at)
        for i, at in enumerate((0.0, 10.0, 20.0, 20.0))
    ]
    served = fleet([Fifo(), Fifo()], [Seconds(1.0), Seconds(2.0)])
    run_clients(served, requests, None)
    assert [spans(lifetime.engine.record) for lifetime in served.lifetimes] == [
        [(0.0, 1.0), (20.0, 22.0)],
        [(10.0, 12.0), (20.0, 22.0)],
    ]


def test_death_of_one_rank_stops_all() -> None:
    requests = [
        Request(i, prompt_tokens=8, output_tokens=9, max_tokens=9, arrival=0.0) for i in (0, 1)
    ]
    served = fleet([Fifo(), Fifo(die(2))], [Seconds(), Seconds()])
    record = run_clients(served, requests, None)
    assert [life.outcome for life in record.requests.values()] == [Outcome.STALLED] * 2
    assert "another engine in lockstep" in record.requests[0].reason
    assert "panic: test" in record.requests[1].reason


def test_rejects_unequal_pipeline_depths() -> None:
    deep = Fifo()
    deep.pipeline_depth = 2
    env = simpy.Environment()
    with pytest.raises(ValueError, match="expected equal depths"):
        DataParallelLockstep([Engine(env, s, Seconds()) for s in (Fifo(), deep)])


def record_of(scenario: Scenario, *, together: bool) -> RunRecord:
    """Simulate the scenario on one engine without leaping, alone or as a lockstep group with one
    rank.
    """
    executor = SimulatedExecutor(load_profile(scenario.profile, Path()))
    env = simpy.Environment()
    engine = Engine(
        env, build_scheduler(scenario.engine), executor, scenario.engine_ready, leaping=False
    )
    if together:
        engine.run = DataParallelLockstep([engine]).run  # type: ignore[method-assign]
    return run_clients(
        engine, generate_requests(scenario.workload, scenario.timeout), scenario.horizon
    )


@given(scenarios("vllm", "0.19.0"))
def test_group_of_one_matches_engine(scenario: Scenario) -> None:
    alone, together = (record_of(scenario, together=choice) for choice in (False, True))
    assert request_rows("", alone) == request_rows("", together)
    assert step_rows("", alone) == step_rows("", together)
    assert alone.engine_halt == together.engine_halt


@given(scenarios("vllm", "0.19.0"), st.integers(2, 3))
def test_group_steps_are_synchronous(scenario: Scenario, count: int) -> None:
    profile = load_profile(scenario.profile, Path())
    schedulers = [build_scheduler(scenario.engine) for _ in range(count)]
    served = fleet(schedulers, [SimulatedExecutor(profile) for _ in range(count)])
    requests = generate_requests(scenario.workload, scenario.timeout)
    record = run_clients(served, requests, scenario.horizon)
    assert {r.id for r in requests} == set(record.requests)
    assert all(life.outcome for life in record.requests.values())
    ends: dict[float, float] = {}
    for lifetime in served.lifetimes:
        for start, end in spans(lifetime.engine.record):
            assert ends.setdefault(start, end) == end
    passes = sorted(ends.items())
    assert all(end <= start for (_, end), (start, _) in pairwise(passes))


@pytest.mark.parametrize(
    ("engine", "variant"), [("vllm", "0.33.0"), ("vllm", "0.17.0"), ("sglang", "0.5.23")]
)
@given(data=st.data())
@settings(max_examples=15)
def test_group_leap_changes_nothing(engine: str, variant: str, data: st.DataObject) -> None:
    scenario = stretched(data.draw(scenarios(engine, variant)), data.draw(st.sampled_from([4, 9])))
    router = data.draw(st.sampled_from(["round_robin", "least_loaded"]))
    section = {"replicas": data.draw(st.integers(1, 3)), "router": router, "lockstep": True}
    scenario = with_fleet(scenario, section)
    leaping, stepping = run(scenario), run(scenario, leaping=False)
    assert_same(rows(leaping), rows(stepping), "run")
    for i, life in leaping.record.requests.items():
        assert life.segments == stepping.record.requests[i].segments


@pytest.mark.parametrize("depth", [1, 2])
def test_group_leaps_until_arrival(depth: int) -> None:
    knobs = {"num_gpu_blocks": 100, "max_model_len": 800, "async_scheduling": depth == 2}
    schedulers = [build_scheduler(VllmConfig(**knobs)) for _ in range(3)]
    assert {scheduler.pipeline_depth for scheduler in schedulers} == {depth}
    profile = load_profile("unit-step", Path())
    served = fleet(schedulers, [SimulatedExecutor(profile) for _ in range(3)])
    requests = [Request(i, 8, 300, at, output_tokens=300) for i, at in enumerate((0, 0, 100.5))]
    record = run_clients(served, requests, None)
    # the third rank was idle, and the other ranks were leaping
    assert record.requests[2].received_at == 101.0
    for lifetime in served.lifetimes:
        assert lifetime.engine.leaps > 0
        assert len(lifetime.engine.record.steps) > 10 * lifetime.engine.leaps


SCENARIO = """
name: ranks
workload:
  arrivals: {num_prompts: 12, request_rate: 50, seed: 1,
    prompt_tokens: {distribution: uniform, low: 5, high: 90},
    output_tokens: {distribution: uniform, low: 5, high: 40}}
engine: {name: vllm, variant: 0.19.0, num_gpu_blocks: 100, max_model_len: 200}
profile: l4-mistralrs-pr2034
fleet: {replicas: 2, router: least_loaded, refresh_interval: 0.1}
variants:
  free: {}
  lockstep: {fleet: {lockstep: true}}
"""


def test_leap_changes_nothing_with_costs_by_group() -> None:
    """The costs of a mixture of experts depend on the tokens of all ranks."""
    data = {
        "name": "experts",
        "workload": {"arrivals": {"num_prompts": 9, "request_rate": 5, "prompt_tokens": 24,
                                  "output_tokens": 20}},
        "engine": {"name": "vllm"},
        "hardware": {"gpu": "L40S", "model": "qwen3-30b-a3b", "dp": 2},
    }  # fmt: skip
    scenario = resolve_variants(YamlDocument(Path("experts.yaml"), data))["run"]
    assert_same(rows(run(scenario)), rows(run(scenario, leaping=False)), "run")


def test_lockstep_in_scenario(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    results = run_file(path)
    free, together = results["free"].summary, results["lockstep"].summary
    assert free["finished"] == together["finished"] == 12
    assert free["makespan_s"] < together["makespan_s"]


def test_rejects_unequal_replicas(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO.replace("replicas: 2", "lockstep: true, replicas: [{}, {}]"))
    with pytest.raises(InputError, match="all replicas in one group"):
        run_file(path)
