"""A scheduler that follows the script of a test, and an executor with constant step times."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

import simpy

from simkv.core.request import Prompt, Request
from simkv.core.scheduler_protocol import (
    Batch,
    Completion,
    Livelock,
    Scheduler,
)
from simkv.costs.step_load import Executor, StepLoad
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.run_record import RunRecord


class Seconds:
    """An executor whose steps take ``step`` seconds and idle passes ``idle`` seconds.

    ``loads`` are the loads of all executed steps.
    """

    def __init__(self, step: float = 1.0, idle: float = 0.25) -> None:
        self.step = step
        self.pass_time = idle
        self.loads: list[StepLoad] = []

    def run(self, load: StepLoad) -> float:
        self.loads.append(load)
        return self.step

    def forecast_steps(self, load: StepLoad, steps: int) -> list[float]:
        return [self.step] * steps

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:
        self.loads += [load] * len(seconds)

    def idle(self) -> float:
        return self.pass_time


class Fifo:
    """A scheduler that prefills every waiting request at once and decodes all of them; memory is
    unlimited.

    ``decide`` gets the number of the call, from 0. It returns a batch that replaces the decision of
    this call, or None for the default decision.
    """

    pipeline_depth = 1

    def __init__(self, decide: Callable[[int, Fifo], Batch | None] = lambda call, fifo: None):
        self.decide = decide
        self.calls = 0
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.lengths: dict[int, int] = {}
        self.told: list[Prompt] = []
        self.aborted: list[int] = []
        self.state: Hashable = None

    def add(self, prompt: Prompt) -> None:
        self.told.append(prompt)
        self.waiting.append(prompt.id)
        self.lengths[prompt.id] = prompt.prompt_tokens

    def schedule(self) -> Batch:
        self.calls += 1
        decided = self.decide(self.calls - 1, self)
        return self.rule() if decided is None else decided

    def rule(self) -> Batch:
        if self.waiting:
            ids, self.waiting = self.waiting, []
            self.running += ids
            return self.batch("prefill", [(i, self.lengths[i]) for i in ids])
        return self.batch("decode", [(i, 1) for i in self.running])

    def batch(self, kind: str, rows: Iterable[tuple[int, int]], *, emits: bool = True) -> Batch:
        rows = list(rows)
        return Batch(
            scheduled=rows,
            context=[self.lengths[i] - n for i, n in rows],
            emits=[i for i, _ in rows] if emits else [],
            kind=kind if rows else "idle",  # type: ignore[arg-type]
        )

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        for i in batch.emits:
            self.lengths[i] += 1
        self.running = [i for i in self.running if i not in ended]
        return Completion(batch.emits, sorted(ended))

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)

    num_blocks = free_blocks = 100

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def leap(self, most: int) -> int:
        return 1

    def skip(self, steps: int) -> list[int]:
        raise AssertionError("never asked to leap")

    def waiting_ids(self) -> list[int]:
        return list(self.waiting)

    def running_ids(self) -> list[int]:
        return list(self.running)

    def blocks_held(self) -> Mapping[int, int]:
        return {}

    def fingerprint(self) -> Hashable:
        return (tuple(self.waiting), tuple(self.running), tuple(self.lengths.items()), self.state)


def die(call: int, why: str = "panic: test") -> Callable[[int, Fifo], Batch | None]:
    """Return a ``decide`` function that crashes on the batch of this call."""

    def decide(now: int, fifo: Fifo) -> Batch | None:
        if now != call:
            return None
        batch = fifo.rule()
        batch.fatal = why
        return batch

    return decide


def hang(call: int) -> Callable[[int, Fifo], Batch | None]:
    """Return a ``decide`` function that never returns from this call."""

    def decide(now: int, fifo: Fifo) -> Batch | None:
        if now == call:
            raise Livelock("round and round", fifo.running)
        return None

    return decide


def simulate(
    scheduler: Scheduler,
    requests: Iterable[Request],
    *,
    horizon: float | None = None,
    ready: float = 0.0,
    executor: Executor | None = None,
    resolved: Callable[[], None] | None = None,
) -> RunRecord:
    """Simulate the requests and return the record."""
    engine = Engine(simpy.Environment(), scheduler, executor or Seconds(), ready, resolved)
    return run_clients(engine, requests, horizon)
