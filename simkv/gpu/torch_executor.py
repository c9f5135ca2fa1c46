"""Run simkv's engine loop with the wall clock and a device as executor.

    clock = WallClock()
    executor = TorchExecutor(runner, tables, clock)
    engine = Engine(clock, executor.watch(scheduler), executor, leaping=False)

The loop, the schedulers, the record and the figures are the same as in the simulation. A step lasts
from its decision (or the end of the previous step, if later) until its tokens are on the host, so
it includes the host's work. A request that arrives meanwhile is seen by the next decision. A
request that arrives while the engine sleeps wakes it, and the next step counts from the arrival.
Decisions thus depend only on the recorded durations of steps and idle passes: a simulation with
these durations must make the same decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from time import sleep
from typing import Any, NamedTuple, cast

import simpy

from simkv.core.engine_spec import BlockTables
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Batch,
    BatchKind,
    BatchRow,
    Completion,
    Scheduler,
)
from simkv.costs.step_load import StepLoad
from simkv.gpu.batch_runner import InFlightStep, Runner, Timing
from simkv.gpu.timer import current_clock, read_timer

#: Maximum oversleep of the operating system (s); the rest of a wait is spent awake.
SPIN = 0.0005


class WallClock(simpy.Environment):
    """SimPy environment in real time: events wait until their time since ``start``.

    With the thread's CPU time (``read_timer``), the time jumps to the events instead of waiting. If
    ``skip_waiting`` is set, events do not wait, because all clients have their results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skip_waiting = False
        self.start()

    def start(self) -> None:
        """Restart the clock at 0."""
        self._origin = read_timer()

    def wall(self) -> float:
        """Return seconds since ``start``, at least SimPy's time unless waiting is skipped."""
        return read_timer() - self._origin

    def step(self) -> None:
        due = self.peek()
        while not self.skip_waiting and due < float("inf") and (ahead := due - self.wall()) > 0:
            if current_clock() == "cpu":  # CPU time does not advance while sleeping
                self._origin -= ahead
            elif ahead > SPIN:
                sleep(ahead - SPIN)
        super().step()


class Pass(NamedTuple):
    """An iteration of the engine's loop; times in seconds.

    ``seconds`` is the duration reported to the engine, ``start`` its begin. An idle pass launched
    nothing. ``schedule_s`` is the time inside the scheduler's ``schedule``. ``longest_context`` is
    the longest context of a decode, ``longest_prefill`` the maximum KV tokens at the end of a
    prefill.
    """

    kind: BatchKind
    start: float
    seconds: float
    schedule_s: float
    timing: Timing | None
    load: StepLoad
    longest_context: int
    longest_prefill: int
    preempted: int


class EnqueuedStep(NamedTuple):
    """A step enqueued on the device, with its data at that time."""

    flight: InFlightStep
    batch: Batch
    rows: list[BatchRow]
    load: StepLoad
    schedule_s: float


class TorchExecutor:
    """Runs a scheduler's decisions on a device and measures them; ``passes`` is the log.

    A step has ended when ``run`` returns, so the next decision does not overlap with it: each
    step's host time adds to its device time, and both are in the log. An overlapping engine
    (``overlapped_engine``) uses ``enqueue`` to launch steps and ``finish`` to wait for the oldest.
    """

    def __init__(self, runner: Runner, tables: BlockTables, clock: WallClock) -> None:
        self.runner = runner
        self.tables = tables
        self.clock = clock
        self.passes: list[Pass] = []
        self._batch = Batch()
        self._rows: list[BatchRow] = []
        self._schedule_s = 0.0
        self._busy_until = 0.0
        self._under_way: deque[EnqueuedStep] = deque()

    def watch(self, scheduler: Scheduler) -> Scheduler:
        """Wrap the scheduler for the engine, so that its requests and decisions are seen here."""
        return cast(Scheduler, _Shown(scheduler, self))

    def decided(self, batch: Batch, seconds: float) -> None:
        """Record a decision; the next ``run`` or ``idle`` refers to this batch."""
        self._batch, self._rows, self._schedule_s = batch, batch.rows(), seconds

    def run(self, load: StepLoad) -> float:
        """Run the batch; return the seconds since its decision or the end of the previous step."""
        self.enqueue(load)
        return self.finish(float(self.clock.now))[1]

    def enqueue(self, load: StepLoad) -> None:
        """Enqueue the last decided batch on the device."""
        rows, batch = self._rows, self._batch
        listed = {i for i, _ in batch.scheduled}
        emits = {*batch.emits, *(row.id for row in rows if row.id not in listed)}
        flight = self.runner.launch(rows, emits, self.tables)
        self._under_way.append(EnqueuedStep(flight, batch, rows, load, self._schedule_s))

    @property
    def in_flight(self) -> int:
        """Number of enqueued steps that have not been finished."""
        return len(self._under_way)

    def finish(self, decided: float) -> tuple[float, float]:
        """Wait for the oldest step, ``decided`` at that time; return its start and its seconds."""
        flight, batch, rows, load, schedule_s = self._under_way.popleft()
        done = self.runner.wait(flight)
        start = max(decided, self._busy_until)
        seconds = self.clock.wall() - start
        self._busy_until = start + seconds
        prefills = [row for row in rows if row.tokens > 1]
        self.passes.append(
            Pass(
                batch.kind,
                start,
                seconds,
                schedule_s,
                done.timing,
                load,
                max((row.context for row in rows if row.tokens == 1), default=0),
                max((row.context + row.tokens for row in prefills), default=0),
                len(batch.preempted),
            )
        )
        return start, seconds

    def forecast_steps(self, load: StepLoad, steps: int) -> list[float]:  # noqa: ARG002
        """Return an empty list: the duration of a step is unknown before it has run."""
        return []

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:  # noqa: ARG002
        raise AssertionError("nothing was foreseen")

    def idle(self) -> float:
        """Return the seconds that the scheduler took to find nothing to run."""
        start = float(self.clock.now)
        seconds = max(self.clock.wall() - start, 1e-6)
        nothing = StepLoad(0, 0, 0, 0, 0)
        self.passes.append(Pass("idle", start, seconds, self._schedule_s, None, nothing, 0, 0, 0))
        return seconds


class _Shown:
    """Scheduler that passes each request and decision to the executor before the simulator."""

    def __init__(self, inner: Scheduler, executor: TorchExecutor) -> None:
        self._inner = inner
        self._executor = executor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add(self, prompt: Prompt) -> None:
        self._executor.runner.admit(prompt)
        self._inner.add(prompt)

    def abort(self, request_id: int) -> None:
        self._inner.abort(request_id)
        self._executor.runner.retire(request_id)

    def schedule(self) -> Batch:
        begin = read_timer()
        batch = self._inner.schedule()
        self._executor.decided(batch, read_timer() - begin)
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        completion = self._inner.complete(batch, ended)
        for i in (*completion.finished, *completion.refused):
            self._executor.runner.retire(i)
        return completion
