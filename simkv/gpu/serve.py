"""Serve a scenario for real: its workload by the wall clock, its scheduler, steps on a device."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from simkv import __version__
from simkv.conform.recorder import Recorder, decision_hashes, write_trace
from simkv.engine import Engine, serve
from simkv.errors import InputError
from simkv.gpu.executor import Pass, TorchExecutor, WallClock
from simkv.gpu.machine import ceilings, machine
from simkv.gpu.pool import Layout
from simkv.gpu.runner import Runner, RunnerConfig, covering
from simkv.gpu.shapes import ModelShape
from simkv.gpu.tables import build_with_tables
from simkv.metrics import request_rows, summary
from simkv.record import Record
from simkv.report.files import MARK, replacing, resolved
from simkv.request import Request
from simkv.scenario import Scenario
from simkv.workload import clients

#: Tokens that a pipelined engine may compute past a request's last one, with room to spare.
OVERSHOOT = 8
#: Rows that the largest decode graph has, unless fewer can run.
MOST_DECODES = 512


@dataclass(frozen=True)
class Setup:
    """What to serve with: a model's shape, a device, and how its cache lies in memory.

    ``graph_tokens`` is the largest step that may become a CUDA graph (0: none); ``warm_up`` are
    the seconds of steps before the clock starts, which bring a GPU to its working clocks.
    """

    shape: ModelShape
    device: str = "cpu"
    layout: Layout = "block"
    graph_tokens: int = 2816
    warm_up: float = 0.0
    seed: int = 0


@dataclass(frozen=True)
class Served:
    """What a run was and did. ``requests`` in the order of their arrival."""

    scenario: Scenario
    requests: list[Request]
    record: Record
    passes: list[Pass]
    recorder: Recorder
    summary: dict[str, Any]

    @property
    def stopped(self) -> str:
        """Why requests were left over, if any were, in the words of a decision trace."""
        if stop := self.record.standstill:
            return f"no progress: {stop.why}"
        cut = self.summary["cut_off"]
        return "the horizon came first" if cut else "no progress: the engine fell asleep"


class Server:
    """Everything that serves one scenario; ``serve`` does it, once.

    A ``runner`` that is large enough can serve one scenario after another; without one it is made.
    Raises InputError if the model and the cache do not fit the device, or the runner is too small.
    """

    def __init__(self, scenario: Scenario, setup: Setup, runner: Runner | None = None) -> None:
        config = runner_config(scenario, setup)
        if runner is None:
            check_fits(setup, config)
            runner = Runner(setup.shape, config, setup.device)
        elif covering([config, runner.config]) != runner.config:
            raise InputError(f"{scenario.name}: needs {config}, the runner has {runner.config}")
        runner.reset()
        self.scenario = scenario
        self.setup = setup
        self.clients = clients(scenario.workload, scenario.timeout)
        self.requests = sorted(self.clients.requests, key=lambda request: request.arrival)
        scheduler, tables, _ = build_with_tables(scenario.engine)
        self.runner = runner
        self.clock = WallClock()
        self.executor = TorchExecutor(runner, tables, self.clock)
        self.recorder = Recorder(scheduler, scenario.engine)

    def serve(self, advance: Callable[[], None] | None = None) -> Served:
        """Serve the workload by the wall clock; ``advance`` is called whenever a request ends."""
        left = len(self.requests)

        def ended() -> None:
            nonlocal left
            left -= 1
            lives = engine.record.lives.values()
            self.clock.hurry = left <= 0 and all(life.outcome for life in lives)
            if advance:
                advance()

        engine = Engine(
            self.clock,
            self.executor.watch(self.recorder),
            self.executor,
            self.scenario.engine_ready,
            ended,
            leaping=False,
        )
        self.runner.warm_up(self.setup.warm_up)
        with no_garbage_collection():
            self.clock.start()
            record = serve(engine, self.clients, self.scenario.horizon)
        self.recorder.close()
        return Served(
            self.scenario,
            self.requests,
            record,
            self.executor.passes,
            self.recorder,
            figures(record, self.executor.passes),
        )


def runner_config(scenario: Scenario, setup: Setup) -> RunnerConfig:
    """What a runner needs to serve a scenario. Raises InputError for one that cannot be served."""
    if scenario.pipeline:
        raise InputError("pipeline: only the lockstep engine runs for real; use pipeline: null")
    if scenario.fleet is not None:
        raise InputError("fleet: one engine runs on one device; leave it out to serve for real")
    requests = clients(scenario.workload, scenario.timeout).requests
    engine: Any = scenario.engine
    scheduler, _, block_size = build_with_tables(engine)
    most_seqs = getattr(engine, "max_num_seqs", None) or engine.max_running_requests
    return RunnerConfig(
        num_blocks=scheduler.num_blocks,
        block_size=block_size,
        seats=len(requests),
        max_len=max(r.prompt_tokens + r.output_tokens for r in requests) + OVERSHOOT,
        max_decodes=min(most_seqs, len(requests), MOST_DECODES),
        host_blocks=getattr(engine, "num_cpu_blocks", 0),
        graph_tokens=setup.graph_tokens,
        layout=setup.layout,
        seed=setup.seed,
    )


def figures(record: Record, passes: list[Pass]) -> dict[str, Any]:
    """The figures of ``summary.json``, and how the time was spent."""
    found = summary(record)
    del found["jain_index"]  # needs the time of each request alone on the device
    steps = [p for p in passes if p.timing]
    timings = [p.timing for p in steps if p.timing]
    wall = sum(p.seconds for p in steps)
    return found | {
        "device_share": sum(t.gpu_s for t in timings) / wall if wall else 0.0,
        "graph_share": sum(t.graph for t in timings) / len(steps) if steps else 0.0,
        "unbacked_tokens": sum(t.unbacked for t in timings),
        "premature_tokens": sum(t.premature for t in timings),
    }


def check_fits(setup: Setup, config: RunnerConfig) -> None:
    """Raise InputError if weights, KV pool and token store are more than the device has free."""
    on_gpu = torch.device(setup.device).type == "cuda"
    itemsize = 2 if on_gpu else 4
    shape = setup.shape
    weights = (shape.step_weights + (0 if shape.tied else shape.vocab * shape.hidden)) * itemsize
    cache = (config.num_blocks + 1) * config.block_size * shape.kv_bytes_per_token(itemsize)
    store = 4 * (config.seats + 1) * config.max_len
    free = torch.cuda.mem_get_info()[0] if on_gpu else 8 << 30
    if weights + cache + store > 0.95 * free:
        gib = [f"{x / (1 << 30):.1f}" for x in (weights, cache, store, free)]
        raise InputError(
            f"{shape.name} on {setup.device}: weights {gib[0]} GiB, {config.num_blocks} blocks of "
            f"KV {gib[1]} GiB and {config.seats} requests of {config.max_len} tokens {gib[2]} GiB "
            f"do not fit into {gib[3]} GiB"
        )


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep Python's collector from stopping a step."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def write_served(folder: Path, runs: dict[str, Served], setup: Setup) -> None:
    """Write runs (by variant) to ``folder``, complete or not at all.

    ``summary.json``, ``requests.csv``, ``passes.csv`` (a line per iteration of the engine's loop),
    ``scenario.yaml``, and per variant a decision trace ``decisions-<variant>.jsonl.gz``.
    """
    import pandas as pd
    from ruamel.yaml import YAML

    with replacing(folder) as new:
        about = {
            "version": __version__,
            "setup": asdict(setup),
            "machine": machine(setup.device),
            "ceilings": ceilings(setup.device)._asdict(),
            "variants": {name: _summary(run) for name, run in runs.items()},
        }
        (new / MARK).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        requests = [row for name, run in runs.items() for row in request_rows(name, run.record)]
        pd.DataFrame(requests).to_csv(new / "requests.csv", index=False)
        passes = [row for name, run in runs.items() for row in pass_rows(name, run)]
        pd.DataFrame(passes).to_csv(new / "passes.csv", index=False)
        for name, run in runs.items():
            trace = new / f"decisions-{name}.jsonl.gz"
            write_trace(trace, run.recorder, run.requests, run.stopped)
        nothing: dict[str, Any] = {"expect": {}, "published": {}}
        scenarios = {n: run.scenario.model_copy(update=nothing) for n, run in runs.items()}
        with (new / "scenario.yaml").open("w", encoding="utf-8") as file:
            YAML().dump(resolved(scenarios), file)


def _summary(run: Served) -> dict[str, Any]:
    hashes = decision_hashes(run.recorder.lines)
    return {**run.summary, "decisions": len(hashes), "decisions_hash": hashes[-1] if hashes else ""}


def pass_rows(variant: str, run: Served) -> list[dict[str, Any]]:
    """One row per iteration of the engine's loop, times in seconds; see ``Pass`` and ``Timing``."""
    rows = []
    for p in run.passes:
        row: dict[str, Any] = {"variant": variant, **p._asdict(), **p.load._asdict()}
        timing = row.pop("timing")
        del row["load"]
        if timing:
            row |= timing._asdict()
            row["size"] = "x".join(map(str, timing.size))
        rows.append(row)
    return rows
