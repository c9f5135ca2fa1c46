"""Run simkv's engine loop in real time, with a device as executor.

    clock = WallClock()
    executor = TorchExecutor(runner, tables, clock)
    engine = Engine(clock, executor.watch(scheduler), executor, leaping=False)

The loop, the schedulers, the record and the metrics are the same as in the simulation. A step
starts at its decision or at the end of the previous step, whichever is later. It ends when its
tokens are on the host. A request that arrives during a step is considered in the next decision.
Decisions therefore depend only on the recorded durations, and a simulation with these durations
must make the same decisions.
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

#: Maximum oversleep of the operating system (s); for this last part of a wait, the thread stays
#: awake.
SPIN = 0.0005


class WallClock(simpy.Environment):
    """SimPy environment in real time.

    An event at time t occurs t seconds after ``start``. With ``skip_waiting``, it occurs at once.
    If the timer counts CPU time, the clock jumps to the next event instead of waiting.
    """

    def __init__(self) -> None:
        super().__init__()
        self.skip_waiting = False
        self.start()

    def start(self) -> None:
        """Restart the clock at 0."""
        self._origin = read_timer()

    def wall(self) -> float:
        """Return the seconds since ``start``."""
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
    """An iteration of the engine's loop. Times are in seconds.

    An idle pass launches no step. ``seconds`` is the duration from ``start``, as reported to the
    engine. ``schedule_s`` is the time inside the scheduler's ``schedule``. ``longest_context`` is
    the longest context of a decode. ``longest_prefill`` is the largest number of KV tokens at the
    end of a prefill.
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
    """A step enqueued on the device, with its batch and load."""

    flight: InFlightStep
    batch: Batch
    rows: list[BatchRow]
    load: StepLoad
    schedule_s: float


class TorchExecutor:
    """Run a scheduler's decisions on a device and measure the steps.

    ``passes`` is the log of the engine's loop. The time of a step includes its host time and its
    device time. An engine with overlap (``overlapped_engine``) uses ``enqueue`` to launch steps and
    ``finish`` to wait for the oldest step.
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
        """Return the scheduler for the engine, wrapped so that the executor receives its requests
        and batches.
        """
        return cast(Scheduler, _Shown(scheduler, self))

    def decided(self, batch: Batch, seconds: float) -> None:
        """Record the batch for the next ``run`` or ``idle``, and the duration of its decision."""
        self._batch, self._rows, self._schedule_s = batch, batch.rows(), seconds

    def run(self, load: StepLoad) -> float:
        """Run the batch and return its duration in seconds.

        The duration counts from the decision or from the end of the previous step, whichever is
        later.
        """
        self.enqueue(load)
        return self.finish(float(self.clock.now))[1]

    def enqueue(self, load: StepLoad) -> None:
        """Enqueue the last recorded batch on the device."""
        rows, batch = self._rows, self._batch
        listed = {i for i, _ in batch.scheduled}
        emits = {*batch.emits, *(row.id for row in rows if row.id not in listed)}
        flight = self.runner.launch(rows, emits, self.tables)
        self._under_way.append(EnqueuedStep(flight, batch, rows, load, self._schedule_s))

    @property
    def in_flight(self) -> int:
        """Number of enqueued steps that have not finished."""
        return len(self._under_way)

    def finish(self, decided: float) -> tuple[float, float]:
        """Wait for the oldest step, and return its start and its duration in seconds.

        ``decided`` is the time at which the step was decided.
        """
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
        """Return an empty list, because the duration of a step is unknown before it has run."""
        return []

    def ran(self, load: StepLoad, seconds: Sequence[float]) -> None:  # noqa: ARG002
        raise AssertionError("no step was scheduled in advance")

    def idle(self) -> float:
        """Return the duration in seconds of a scheduler call that found nothing to run."""
        start = float(self.clock.now)
        seconds = max(self.clock.wall() - start, 1e-6)
        nothing = StepLoad(0, 0, 0, 0, 0)
        self.passes.append(Pass("idle", start, seconds, self._schedule_s, None, nothing, 0, 0, 0))
        return seconds


class _Shown:
    """Scheduler that passes each request and batch to the executor before it returns."""

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
