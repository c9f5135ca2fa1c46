"""Serve a scenario on a real device: requests arrive in real time, and steps are run and
measured.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from simkv.conformance.decision_recorder import Recorder
from simkv.core.errors import InputError
from simkv.gpu.batch_runner import Runner, RunnerConfig, covering_config
from simkv.gpu.device_memory import new_runner
from simkv.gpu.execution_record import ExecutionRecord, GpuSetup, figures
from simkv.gpu.overlapped_engine import OverlappedEngine
from simkv.gpu.torch_executor import TorchExecutor, WallClock
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.workload.workload_section import build_clients

#: Number of tokens, with a margin, that a pipelined engine may compute past a request's last token.
OVERSHOOT = 8
#: Maximum number of rows of the largest decode graph.
MOST_DECODES = 512


class ScenarioExecution:
    """Execution of one scenario. ``serve`` can be called only once.

    ``runner`` may serve several scenarios; by default, a new runner is created. Raises InputError
    if model and cache do not fit on the device, or if the runner is too small.
    """

    def __init__(self, scenario: Scenario, setup: GpuSetup, runner: Runner | None = None) -> None:
        config = runner_config(scenario, setup)
        if runner is None:
            runner = new_runner(setup, config)
        elif covering_config([config, runner.config]) != runner.config:
            raise InputError(
                f"{scenario.name}: requires {config}, but the GPU runner was built with "
                f"{runner.config}"
            )
        runner.reset()
        self.scenario = scenario
        self.setup = setup
        self.clients = build_clients(scenario.workload, scenario.timeout)
        self.requests = sorted(self.clients.requests, key=lambda request: request.arrival)
        scheduler, tables = find_engine_spec(scenario.engine).build_with_tables(scenario.engine)
        self.runner = runner
        self.clock = WallClock()
        self.executor = TorchExecutor(runner, tables, self.clock)
        self.recorder = Recorder(scheduler, scenario.engine)

    def serve(self, advance: Callable[[], None] | None = None) -> ExecutionRecord:
        """Serve the workload in real time. ``advance`` is called whenever a request ends."""
        left = len(self.requests)

        def ended() -> None:
            nonlocal left
            left -= 1
            lives = engine.record.requests.values()
            self.clock.skip_waiting = left <= 0 and all(life.outcome for life in lives)
            if advance:
                advance()

        kind = OverlappedEngine if self.setup.overlap else Engine
        engine = kind(
            self.clock,
            self.executor.watch(self.recorder),
            self.executor,
            self.scenario.engine_ready,
            ended,
            leaping=False,
        )
        self.runner.warm_up(self.setup.warm_up)
        built = kernel_builds()
        with no_garbage_collection():
            self.clock.start()
            record = run_clients(engine, self.clients, self.scenario.horizon)
        built = kernel_builds() - built
        self.recorder.close()
        return ExecutionRecord(
            self.scenario,
            self.requests,
            record,
            self.executor.passes,
            self.recorder,
            figures(record, self.executor.passes) | {"kernel_builds": built},
            at_work=not engine.dead and engine.wake is None,
        )


def execute_scenario(
    scenario: Scenario, setup: GpuSetup, runner: Runner, advance: Callable[[], None] | None = None
) -> ExecutionRecord:
    """Serve a scenario. If a kernel was built during the run, serve the scenario once more.

    A build takes seconds and would distort the measured times. Raises InputError if the second run
    also builds a kernel.
    """
    for _ in range(2):
        run = ScenarioExecution(scenario, setup, runner).serve(advance)
        if not (built := run.summary["kernel_builds"]):
            return run
    raise InputError(
        f"{scenario.name}: the times are invalid, because {built} kernels were compiled during "
        "the run, and again during its repetition. Runner.warm_up should have compiled them"
    )


def kernel_builds() -> int:
    """Return the number of Triton kernels built so far."""
    kernels = sys.modules.get("simkv.gpu.triton_kernels")
    return kernels.count_builds() if kernels else 0


def runner_config(scenario: Scenario, setup: GpuSetup) -> RunnerConfig:
    """Return the runner's configuration for a scenario.

    Raises InputError if the scenario cannot be served.
    """
    if scenario.pipeline:
        raise InputError("pipeline: not supported on a device; use pipeline: null")
    if scenario.fleet is not None:
        raise InputError(
            "fleet: not supported, because one device runs one engine; remove the section fleet"
        )
    requests = build_clients(scenario.workload, scenario.timeout).requests
    engine: Any = scenario.engine
    spec = find_engine_spec(engine)
    return RunnerConfig(
        num_blocks=spec.build(engine).num_blocks,
        block_size=spec.block_size(engine),
        seats=len(requests),
        max_len=max(r.prompt_tokens + r.output_tokens for r in requests) + OVERSHOOT,
        max_decodes=min(getattr(engine, spec.seats), len(requests), MOST_DECODES),
        graph_tokens=setup.graph_tokens,
        seed=setup.seed,
    )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Context without Python's garbage collection, which would delay steps."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
