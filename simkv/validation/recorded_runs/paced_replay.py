"""Replay a recorded run step by step at the pace of the record.

The scheduler's rules decide the batches. The scheduler does not see a request before the recorded
time at which it was first scheduled. A step with the first or last token of a request ends at the
recorded time of this token. The cost profile gives the time of the kernels between two such tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median

import simpy

from simkv.core.errors import InputError
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Batch
from simkv.costs.cost_profile import CostProfile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.costs.step_load import StepLoad
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.vllm.config import VllmConfig
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.validation.recorded_runs.recorded_run import RecordedRun
from simkv.validation.recorded_runs.run_simulation import requests_of
from simkv.workload.clients import Clients

#: Maximum time between the tokens of one step, relative to the step; if it is exceeded, the batches
#: differ from the record.
MAX_TOKEN_SPREAD = 0.3
#: A request is submitted this time (s) before its recorded arrival and held back until the recorded
#: decision, because the engine looks for new requests only between two steps.
EARLY_ARRIVAL_S = 0.1


@dataclass(frozen=True)
class RequestEvents:
    """Recorded times in seconds, by request id.

    The times are the arrival at the engine core, the first scheduling, the first token and the last
    token.
    """

    came: dict[int, float]
    scheduled: dict[int, float]
    first: dict[int, float]
    last: dict[int, float]


@dataclass(frozen=True)
class PacedStep:
    """A step with its ``load``. Its kernels take ``kernels`` seconds according to the profile.

    ``came`` is the recorded time in seconds of the step's tokens, or None. ``sure`` is false if the
    record has different times for the tokens. ``after_idle`` is true if the engine was idle before
    the step.
    """

    load: StepLoad
    kernels: float
    came: float | None
    sure: bool
    after_idle: bool


def read_events(case: RecordedRun, requests: list[Request]) -> RequestEvents:
    """Return the recorded times on the engine's clock. Raises InputError if some are missing."""
    rows = case.requests
    missing = [name for name in ("queue_ms", "ttft_ms", "e2e_ms") if rows[name].isna().any()]
    if missing:
        raise InputError(
            f"{case.table}: {missing[0]}: not recorded for all requests; --host-times requires "
            "the schedule and token times of each request"
        )
    if not case.from_queue and "prefill_ms" not in rows:
        raise InputError(
            f"{case.table}: missing queued_s or prefill_ms; --host-times requires the time when "
            "each request was scheduled"
        )
    base = rows["queued_s"] if case.from_queue else rows["arrival_s"]
    first, last = base + rows["ttft_ms"] / 1e3, base + rows["e2e_ms"] / 1e3
    scheduled = base + rows["queue_ms"] / 1e3
    if "prefill_ms" in rows:
        scheduled = first - rows["prefill_ms"] / 1e3
    ids = [request.id for request in requests]
    came = scheduled - rows["queue_ms"] / 1e3
    times = (came, scheduled, first, last)
    return RequestEvents(
        *(dict(zip(ids, (t - came.min() + EARLY_ARRIVAL_S).tolist(), strict=True)) for t in times)
    )


def replay_paced(case: RecordedRun, profile: CostProfile, config: VllmConfig) -> list[PacedStep]:
    """Return all steps of a recorded run, replayed at the pace of the record.

    Raises InputError for a run of several data-parallel ranks, or if the recorded times are not on
    the engine's clock.
    """
    ranks = case.facts.engine.data_parallel
    if ranks > 1:
        raise InputError(
            f"{case.folder}: the run has {ranks} data-parallel ranks, but the rank of each "
            "request is not recorded; --host-times requires a run with one rank"
        )
    requests = requests_of(case)
    events = read_events(case, requests)
    sent = [replace(r, arrival=events.came[r.id] - EARLY_ARRIVAL_S) for r in requests]
    env = simpy.Environment()
    engine = PacedEngine(env, build_scheduler(config), profile, events)
    run_clients(engine, Clients(sent), None)
    return engine.steps


class PacedEngine(Engine):
    """An engine whose steps take the recorded time, or else the kernel time."""

    def __init__(
        self, env: simpy.Environment, scheduler: object, profile: CostProfile, events: RequestEvents
    ) -> None:
        super().__init__(env, scheduler, SimulatedExecutor(profile), leaping=False)  # type: ignore[arg-type]
        self.steps: list[PacedStep] = []
        self._events = events
        self._begun: set[int] = set()
        self._free = 0.0
        self._lasted = 0.0
        self._decided = sorted(events.scheduled.values())

    def submit(self, request: Request) -> None:
        """Submit a request. The engine receives it at its recorded scheduling time."""
        super().submit(request)
        due = self.env.timeout(max(self._events.scheduled[request.id] - self.env.now, 0.0))
        due.callbacks.append(lambda _: self.notify())

    def schedule(self) -> Batch | None:
        """Make a decision without the requests that are scheduled later in the record."""
        until = self.env.now + (self._lasted / 2 if self._busy() else 1e-9)
        coming = [self._events.scheduled[m.id] for m in self.inbox if isinstance(m, Request)]
        now = sum(1 for _ in takewhile(lambda time: time <= until, coming))
        early, self.inbox[now:] = self.inbox[now:], []
        batch = super().schedule()
        self.inbox[:0] = early
        return batch

    def launch(
        self, batch: Batch, load: StepLoad, start: float, seconds: float | None = None
    ) -> float:
        """Run a batch until the recorded time of its tokens.

        An unknown time is estimated from recorded scheduling times of requests or from the kernel
        time.
        """
        if not batch:
            return super().launch(batch, load, start, seconds)
        kernels = self.executor.run(load)
        came = list(self._tokens(batch))
        at = median(came) if came else None
        sure = not came or max(came) - min(came) < MAX_TOKEN_SPREAD * kernels
        self.steps.append(PacedStep(load, kernels, at, sure, start > self._free + 1e-9))
        end = self._near(start + kernels, kernels / 2) if at is None else at
        self._lasted = kernels
        self._free = super().launch(batch, load, start, max(end - start, 1e-6))
        return self._free

    def _near(self, end: float, within: float) -> float:
        """Return the recorded scheduling time that is nearest to ``end``, or ``end``.

        The time must be within ``within`` seconds of ``end``.
        """
        place = bisect_left(self._decided, end - within)
        near = self._decided[place : place + 8]
        best = min(near, key=lambda time: abs(time - end), default=end)
        return best if abs(best - end) < within else end

    def _tokens(self, batch: Batch) -> Iterator[float]:
        """Yield the recorded times of the first and last tokens that a batch emits."""
        row = len(self.record.steps)
        for i in batch.emits:
            if i not in self._begun:
                self._begun.add(i)
                yield self._events.first[i]
            if self._remaining[i] == 1:
                yield self._events.last[i]
        for i in batch.joined:
            if self._remaining[i] == 1:
                yield self._events.last[i]
        for end, i, since in self._finishes:
            if end == row and self.record.decoding_since(i) == since:
                yield self._events.last[i]
