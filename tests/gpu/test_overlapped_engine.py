"""Tests of steps that are prepared while the device runs the previous step; decisions stay the
same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import simpy

from simkv.costs.cost_profile import CostProfile, StepCost
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.costs.step_load import StepLoad
from simkv.gpu.overlapped_engine import OverlappedEngine
from simkv.gpu.profile_fit import RealStep, fit_overlapped
from simkv.gpu.scenario_execution import ScenarioExecution
from simkv.gpu.torch_executor import TorchExecutor, WallClock
from simkv.schedulers.engine_registry import build_scheduler, find_engine_spec
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.workload.workload_section import build_clients
from tests.gpu.test_scenario_execution import SETUP, check_l0, check_tokens
from tests.laws.pressure_scenarios import plain_scenario

OVERLAP = replace(SETUP, overlap=True)


def pipelined(engine: str = "vllm", variant: str = "0.33.0") -> Any:
    """Return a scenario whose requests all arrive at the start."""
    scenario = plain_scenario(engine, variant)
    arrivals = scenario.workload.arrivals.model_copy(update={"request_rate": float("inf")})
    workload = scenario.workload.model_copy(update={"arrivals": arrivals})
    scenario = scenario.model_copy(update={"workload": workload})
    if engine == "vllm":
        ahead = replace(scenario.engine, async_scheduling=True)
        scenario = scenario.model_copy(update={"engine": ahead})
    assert build_scheduler(scenario.engine).pipeline_depth == 2
    return scenario


class PlantedClock(WallClock):
    """A clock that advances only by the given durations."""

    def __init__(self) -> None:
        self.spent = 0.0
        super().__init__()

    def start(self) -> None:
        self.spent = 0.0

    def wall(self) -> float:
        return self.spent

    def step(self) -> None:
        self.spent = max(self.spent, min(self.peek(), 1e9))
        simpy.Environment.step(self)


class PlantedRunner:
    """A device that runs steps one after another, and a host that prepares them."""

    def __init__(self, clock: PlantedClock, host_s: float, device_s: float) -> None:
        self.clock, self.host_s, self.device_s = clock, host_s, device_s
        self.free = 0.0

    def admit(self, prompt: Any) -> None:
        """Do nothing."""

    def retire(self, request_id: int) -> None:
        """Do nothing."""

    def launch(self, *given: Any) -> Any:
        self.clock.spent += self.host_s
        self.free = max(self.free, self.clock.spent) + self.device_s
        return self.free

    def wait(self, end: float) -> Any:
        self.clock.spent = max(self.clock.spent, end)
        return SimpleNamespace(timing=SimpleNamespace(gpu_s=self.device_s))


def served(kind: type[Engine], host_s: float, device_s: float) -> tuple[Any, Sequence[Any]]:
    """Return the record of a pipelined scheduler on a planted device, and its passes."""
    scenario = pipelined()
    clock = PlantedClock()
    runner: Any = PlantedRunner(clock, host_s, device_s)
    scheduler, tables = find_engine_spec(scenario.engine).build_with_tables(scenario.engine)
    executor = TorchExecutor(runner, tables, clock)
    engine = kind(clock, executor.watch(scheduler), executor, leaping=False)
    record = run_clients(engine, build_clients(scenario.workload, None), None)
    return record, executor.passes


@pytest.mark.parametrize(("host_s", "device_s"), [(0.002, 0.008), (0.008, 0.002), (0.0, 0.01)])
def test_a_step_costs_the_larger_of_host_and_device(host_s, device_s):
    record, passes = served(OverlappedEngine, host_s, device_s)
    seconds = sorted(p.seconds for p in passes)
    middle = seconds[len(seconds) // 2]
    assert middle == pytest.approx(max(host_s, device_s), rel=1e-6)
    one_by_one, alike = served(Engine, host_s, device_s)
    seconds = sorted(p.seconds for p in alike)
    assert seconds[len(seconds) // 2] == pytest.approx(host_s + device_s, rel=1e-6)
    assert record.end < one_by_one.end or host_s == 0.0
    assert list(record.steps.start) == [p.start for p in passes]


def test_decisions_equal_the_simulated_pipeline():
    scenario = pipelined()
    record, _ = served(OverlappedEngine, 0.002, 0.008)
    terms = [{"name": "device", "feature": "steps", "seconds": 0.008}]
    about = {"name": "x", "engine": "e", "model": "m", "gpu": "g", "basis": "measured"}
    rest = {"idle_pass_s": 1e-5, "range": {}, "fit": {"points": 0}, "source": []}
    profile = CostProfile.model_validate({**about, **rest, "terms": terms})
    executor = SimulatedExecutor(profile)
    engine = Engine(simpy.Environment(), build_scheduler(scenario.engine), executor, leaping=False)
    simulated = run_clients(engine, build_clients(scenario.workload, None), None)
    for column in ("kind", "prefill_tokens", "decode_seqs", "preempted", "free_blocks"):
        assert list(getattr(record.steps, column)) == list(getattr(simulated.steps, column))


@pytest.mark.parametrize(
    ("engine", "variant"), [("vllm", "0.33.0"), ("sglang", "0.5.23"), ("mistralrs", "pr2034")]
)
def test_real_run_replays_and_emits_tokens_of_the_model(engine, variant):
    """Without a pipeline, the steps of a scheduler do not overlap."""
    scenario = (
        plain_scenario(engine, variant) if engine == "mistralrs" else pipelined(engine, variant)
    )
    server = ScenarioExecution(scenario, OVERLAP)
    run = server.serve()
    assert run.summary["finished"] == len(run.requests)
    check_l0(run)
    check_tokens(run, server.runner)


def test_horizon_in_the_middle_of_a_step_replays():
    scenario = pipelined().model_copy(update={"horizon": 0.05})
    run = ScenarioExecution(scenario, OVERLAP).serve()
    assert run.summary["cut_off"] > 0
    assert len([p for p in run.passes if p.timing]) == len(run.record.steps)
    check_l0(run)


TERMS = [
    {"name": "all", "feature": "decode_context", "when": "pure decode", "seconds": 1e-5},
    {"name": "host, per step", "feature": "steps", "seconds": 2e-3},
    {"name": "host, per sequence", "feature": "decode_seqs", "seconds": 1e-4},
]


def synchronous_profile() -> CostProfile:
    about = {"name": "x", "engine": "e", "model": "m", "gpu": "g", "basis": "measured"}
    rest = {"idle_pass_s": 1e-5, "range": {}, "fit": {"points": 0}, "source": []}
    return CostProfile.model_validate({**about, **rest, "terms": TERMS})


def test_overlapped_profile_is_the_maximum_of_host_and_device():
    profile = synchronous_profile()
    ahead = CostProfile.model_validate_json(fit_overlapped(profile, [], []).model_dump_json())
    for context, seconds in ((100, 2.4e-3), (1000, 1e-2)):
        load = StepLoad(0, 0, 0, 4, context)
        assert StepCost(ahead)(load) == pytest.approx(seconds)
        assert StepCost(profile)(load) == pytest.approx(1e-5 * context + 2.4e-3)


def test_overlapped_profile_is_fitted_to_a_pipelined_run():
    """In the pipelined run, steps take 5 % and 0.2 ms more, and the host takes 10 % less than in a
    synchronous run.
    """
    profile = synchronous_profile()

    def true(load: StepLoad) -> float:
        host = 0.9 * (2e-3 + 1e-4 * load.decode_seqs)
        return max(1.05e-5 * load.decode_context + 2e-4, host)

    loads = [StepLoad(0, 0, 0, n, n * c) for n in (1, 4, 9) for c in range(10, 900, 5)]
    steps = [RealStep(load, true(load), 1.0) for load in loads]
    found = fit_overlapped(profile, steps[::2], steps[1::2])
    assert found.fit.held_out["all"].points == len(steps[1::2])
    assert found.fit.held_out["all"].p95 < 0.02
    assert fit_overlapped(profile, [], steps).fit.held_out["all"].p95 > 0.05
