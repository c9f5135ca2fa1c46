# mypyc: compile
"""The engine loop: it makes scheduling decisions, runs steps and delivers tokens in SimPy time."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from itertools import accumulate, repeat
from operator import sub
from typing import Literal

import simpy
from mypy_extensions import mypyc_attr

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import (
    Batch,
    Completion,
    Livelock,
    Scheduler,
    clocked,
    kv_waiter,
    offloader,
)
from simkv.costs.step_load import Executor, Floats, StepLoad
from simkv.sim.clock import SimProcess, current_rank
from simkv.sim.cycle_detection import CycleDetector
from simkv.sim.draft_verification import repeat_per_token, verify_drafts
from simkv.sim.leaping import (
    IdleStretch,
    InFlight,
    Leap,
    is_same_decision,
    step_ends,
)
from simkv.sim.replica_base import Replica
from simkv.sim.run_record import EngineHalt, RequestRecord
from simkv.sim.step_log import QueueState

#: Next action after an iteration of the loop: continue at once, run an idle pass, or wait for an
#: event.
NextAction = Literal["on", "idle", "sleep"]

#: Row number greater than any row of the step log; means "no such row".
NO_ROW = 1 << 60
#: Maximum number of steps in a leap.
MAX_LEAP_STEPS = 512


@mypyc_attr(allow_interpreted_subclasses=True)
class Engine(Replica):
    """Replica with an engine loop. The loop alternates between decisions and steps.

    - With ``pipeline_depth`` 2, a batch is decided while the previous batch runs.
    - With ``leaping``, consecutive equal decode steps are simulated as one event (a leap). The
      results are the same as without leaps.
    - ``in_flight``: batches on the GPU, oldest first.
    """

    # An external event ends the leap at the end of the step in which it occurs. ``run`` calls
    # ``schedule``, ``launch`` and ``finish_iteration``. For a leap, it calls ``leapable_steps``,
    # ``start_leap`` and ``finish_leap``. These methods are public for code that runs several
    # engines in lockstep.

    def __init__(
        self,
        env: simpy.Environment,
        scheduler: Scheduler,
        executor: Executor,
        ready: float = 0.0,
        resolved: Callable[[], None] | None = None,
        *,
        leaping: bool = True,
        rank: int = 0,
    ) -> None:
        super().__init__(env, scheduler, executor, ready, resolved, rank)
        self.leaping = leaping
        self.leaps = 0
        #: Called instead of ``cut`` if other engines leap together with this engine.
        self.on_leap_cut: Callable[[], None] | None = None
        self.in_flight: deque[InFlight] = deque()
        self._external_event = False
        self._copy_livelock = False  # whether KV copies repeat forever without progress
        self._leap: Leap | None = None
        self._idle_stretch: IdleStretch | None = None
        self._idle_passes = 0  # consecutive idle passes
        self._watch = CycleDetector(scheduler.fingerprint, lambda: scheduler.free_blocks)
        self._clocked = clocked(scheduler)
        self._kv_waiter = kv_waiter(scheduler)
        self._offloader = offloader(scheduler)
        self._group_row = self._completed_row = -1
        # ``_remaining``: tokens per request not yet assigned to a step. ``_finishes``, ``_ending``:
        # rows of the step log in which members of the decode group receive their last token.
        self._remaining: dict[int, int] = {}
        self._finishes: list[tuple[int, int, int]] = []
        self._ending: dict[int, list[int]] = {}

    def run(self) -> SimProcess:
        """SimPy process: run the engine until it finishes or is halted."""
        for event in self._iterate():
            yield event
            if self.halted:
                return

    def _iterate(self) -> SimProcess:
        """SimPy process: the engine loop."""
        # ``run`` checks whether the engine was halted.
        in_flight = self.in_flight
        gpu_free = 0.0
        yield self.timeout_at(self.ready)
        while True:
            batch = self.schedule()
            if batch is None:
                return
            load = self.load(batch)
            gpu_free = max(gpu_free, self.launch(batch, load, max(self.env.now, gpu_free)))
            if len(in_flight) < self.scheduler.pipeline_depth and batch:
                continue
            if in_flight[0].batch:
                if leap := self._plan_leap(batch, load):
                    yield leap.wake
                    gpu_free = self.finish_leap()
                else:
                    yield self.timeout_at(in_flight[0].end)
            elif in_flight[0].end > self.env.now:  # the step waits for KV copies
                yield self.timeout_at(in_flight[0].end)
            turn = self.finish_iteration(batch)
            if turn == "sleep":
                yield self.sleep()
                yield self.timeout_at(self.env.now)  # resume after all other events of this time
            elif turn == "idle":
                rest = self._plan_idle_stretch()
                yield rest.wake
                self._end_idle_stretch(len(rest.moments) - 1)

    def finish_iteration(self, batch: Batch) -> NextAction:
        """Complete the oldest batch in flight and return the next action."""
        # A newer batch was decided before.
        oldest = self.in_flight.popleft()
        delivered = self._complete(oldest)
        if self._external_event or delivered:
            self._watch.progress()
            self._external_event = False
        if delivered:  # after external events alone, the halt may still be in effect
            self.record.engine_halt = None
        working = bool(batch or oldest.batch) or any(f.batch for f in self.in_flight)
        unsaid = self._offloader is not None and self._offloader.has_pending_copies
        if not working and not unsaid:
            if not self._busy():
                return "sleep"
            if self._kv_waiter is not None and self._kv_waiter.awaits_kv:
                if self._watch.repeats(working=True, now=self.env.now):
                    self._copy_livelock = True
                    self._record_halt(self._watch.since)
                return "sleep"
        if self._watch.repeats(working, self.env.now):
            self._record_halt(self._watch.since)
            return "sleep"
        if not working:
            self.record.idle_passes += 1
            self._idle_passes += 1
            return "idle"
        self._idle_passes = 0
        return "on"

    def schedule(self) -> Batch | None:
        """Make a scheduling decision and record it.

        Returns None if the decision crashes the engine.
        """
        self.changed = True
        now = self.record.end = self.env.now
        self._deliver_inbox()
        try:
            batch = self.scheduler.schedule()
        except Livelock as livelock:
            why = f"livelock within one schedule call: {livelock.why}"
            self.die("livelock", why, livelock.cycle)
            return None
        if self.on_cache_change:
            self.on_cache_change(now)
        self._note_departures(batch)
        self.record.decided(batch, now)
        self.record.set_aside(batch.aside, now)
        for i in batch.ignored:
            self.reject(self.record.requests[i])
        for i, refusal in batch.refused.items():
            self.refuse(self.record.requests[i], refusal)
        for i in batch.lost:
            self.resolve(
                self.record.requests[i], Outcome.LOST, "the engine dropped it from its queues"
            )
        if batch.loads and self.on_kv_loads:
            self.on_kv_loads(batch.loads)
        if batch.fatal:
            self.die("engine died", batch.fatal, [i for i, _ in batch.scheduled])
            return None
        return batch

    def _deliver_inbox(self) -> None:
        """Pass the time and all messages in ``inbox`` to the scheduler."""
        now = self.env.now
        if self._clocked is not None:
            self._clocked.set_time(now)
        for message in self.inbox:
            if isinstance(message, Request):
                self.scheduler.add(message)
                self._remaining[message.id] = message.output_tokens
                self.record.requests[message.id].received_at = now
            elif isinstance(message, int):
                self.scheduler.abort(message)
            else:
                message()
        self.inbox.clear()

    def forget(self, request_id: int) -> None:
        super().forget(request_id)
        self._remaining.pop(request_id, None)

    def launch(
        self, batch: Batch, load: StepLoad, start: float, seconds: float | None = None
    ) -> float:
        """Start a batch on the GPU and return its end (s).

        The batch starts at ``start`` (s), or later if it must wait for KV copies. If ``seconds`` is
        given, it replaces the duration that the executor predicts.
        """
        if batch.moves and self.copy_engine:
            start = self.copy_engine.before(batch.moves, start if batch else self.env.now)
        if not batch:
            end = start if batch.moves and self.copy_engine else self.env.now
            self.in_flight.append(InFlight(batch, -1, end, frozenset()))
        else:
            end = start + (self.executor.run(load) if seconds is None else seconds)
            self._write(batch, load, start, end)
        if batch.moves and self.copy_engine:
            self.copy_engine.after(batch.moves, end)
        return end

    def _write(self, batch: Batch, load: StepLoad, start: float, end: float) -> None:
        """Record a step that runs from ``start`` to ``end``."""
        scheduler = self.scheduler
        queues = QueueState(scheduler.num_waiting, scheduler.num_running, scheduler.free_blocks)
        row = self.record.step(batch, load, start, end, queues, self.env.now)
        if batch.decodes:
            self._group_row = row
        for i in batch.joined:
            heappush(self._finishes, (row + self._remaining[i] - 1, i, row))
        last_of = []
        drafted, lives = batch.drafted, self.record.requests
        accepted = verify_drafts(drafted, batch.emits, lives, self._remaining) if drafted else None
        for i in batch.emits:
            self._remaining[i] -= 1 + accepted.get(i, 0) if accepted else 1
            if self._remaining[i] == 0:
                last_of.append(i)
        group = self.record.decoding() if self.on_tokens and batch.decodes else ()
        self.in_flight.append(InFlight(batch, row, end, frozenset(last_of), group))

    def _note_departures(self, batch: Batch) -> None:
        """Record the requests that left the decode group since the previous batch."""
        for i in batch.left:
            since = self.record.decoding_since(i)
            if since is None:
                continue
            last_token = since + self._remaining[i] - 1
            self._remaining[i] -= self.record.leave_decode_group(i, self._group_row)
            if self._completed_row < last_token <= self._group_row:
                self._ending.setdefault(last_token, []).append(i)

    def _complete(self, flight: InFlight) -> bool:
        """Deliver the tokens of a completed batch.

        Return whether it delivered a token or rejected a request.
        """
        batch, row = flight.batch, flight.row
        self._completed_row = max(self._completed_row, row)
        ended = set(flight.finishing_ids)
        if batch.decodes:
            ended.update(self._ending.pop(row, ()))
            while self._next_finish() <= row:
                ended.add(heappop(self._finishes)[1])
        completion = self.scheduler.complete(batch, ended)
        self.changed = True
        if self.on_cache_change:
            self.on_cache_change(self.env.now)
        delivered = completion.delivered
        if batch.drafted:
            self.record.verified(batch.drafted, delivered, row)
        if len(completion.delivered) != len(batch.emits):
            self._note_dropped(batch, completion, row)
        lives = self.record.requests
        for i in completion.delivered:
            # some engines resume requests that they had given up
            if lives[i].outcome is Outcome.REJECTED:
                lives[i].outcome, lives[i].ended_at, lives[i].reason = None, None, ""
        if self.queue_limit:
            self.queue_limit.record_tokens(completion.delivered)
        if self.on_tokens:
            told = repeat_per_token(delivered, batch.drafted) if batch.drafted else delivered
            self.on_tokens([*told, *flight.group])
        self._end(completion)
        return bool(completion.delivered or completion.refused or batch.decodes)

    def _end(self, completion: Completion) -> None:
        """Record the requests that finish or are rejected with a completed batch."""
        for i in completion.finished:
            life = self.record.requests[i]
            if self.front_end is None or not self.front_end.finish(life):
                self.resolve(life, Outcome.FINISHED)
        for i in completion.refused:
            self.reject(self.record.requests[i])

    def _note_dropped(self, batch: Batch, completion: Completion, row: int) -> None:
        """Record the tokens that the engine dropped and must compute again."""
        accepted = batch.drafted.accepted if batch.drafted else {}
        for i in set(batch.emits) - set(completion.delivered):
            self._remaining[i] += 1 + accepted.get(i, 0)
            self.record.requests[i].ensure_interruptions().dropped_rows.append(row)

    def _next_finish(self) -> int:
        """Return the next row of the step log in which a request of the decode group finishes."""
        # Without such a row, the result is ``NO_ROW``.
        while self._finishes:
            row, i, since = self._finishes[0]
            if self.record.decoding_since(i) == since:
                return row
            heappop(self._finishes)
        return NO_ROW

    def leapable_steps(self, batch: Batch) -> int:
        """Return the number of next steps that are equal to the step just launched."""
        # The result is 0 unless the step only decodes.
        oldest, newest = self.in_flight[0], self.in_flight[-1]
        if not self.leaping or batch.kind != "decode" or not is_same_decision(oldest, newest):
            return 0
        most = min(self._next_finish() - oldest.row, MAX_LEAP_STEPS)
        if oldest.finishing_ids or oldest.row in self._ending:
            most = 0
        for i in batch.emits:
            most = min(most, self._remaining[i] + newest.row - oldest.row)
        return 0 if most < 1 else self.scheduler.leap(int(most) + 1) - 1

    def _plan_leap(self, batch: Batch, load: StepLoad) -> Leap | None:
        """Start a leap over repetitions of the last step and return it, or None if no leap is
        possible.
        """
        steps = self.leapable_steps(batch)
        foreseen = self.executor.forecast_steps(load, steps) if steps else ()
        return self.start_leap(load, foreseen) if len(foreseen) else None

    def start_leap(
        self, load: StepLoad, foreseen: Sequence[float] | Floats, own: list[float] | None = None
    ) -> Leap:
        """Start a leap over steps with the durations ``foreseen`` (s).

        Engines in lockstep wait for the slowest one in each step. ``own`` contains the durations
        without this wait.
        """
        # The caller waits for the leap's ``wake`` and then calls ``finish_leap``.
        oldest, newest = self.in_flight[0], self.in_flight[-1]
        ends = step_ends(newest.end, foreseen)
        moments = ends[:]
        if oldest is not newest:
            moments.insert(0, oldest.end)
            moments.pop()
        self._leap = Leap(load, ends, moments, self.timeout_at(moments[-1]), own)
        return self._leap

    def finish_leap(self) -> float:
        """End the leap and return the time at which the GPU is free (s)."""
        leap = self._leap
        assert leap is not None
        self._land(leap, len(leap.moments) - 1)
        return self.in_flight[-1].end

    def _land(self, leap: Leap, done: int) -> None:
        """Advance the state by ``done`` steps of the leap."""
        oldest, newest = self.in_flight[0], self.in_flight[-1]
        self._leap = None
        if not done:
            return
        self.leaps += 1
        batch, times = newest.batch, leap.ends[: done + 1]
        ends = times[1:]
        free = self._skip(leap.moments[:done])
        self.record.repeat(batch, ends, free, len(self.in_flight))
        self.executor.ran(leap.load, leap.own[:done] if leap.own else list(map(sub, ends, times)))
        if batch.decodes:
            self._group_row = newest.row + done
        lasts: dict[int, list[int]] = {}
        for i in batch.emits:
            lasts.setdefault(newest.row + self._remaining[i], []).append(i)
            self._remaining[i] -= done
        rows = [(newest.row + done, ends[-1])]
        if oldest is not newest:
            rows.insert(0, (oldest.row + done, leap.moments[done]))
        self.in_flight.clear()
        for row, end in rows:
            self.in_flight.append(InFlight(batch, row, end, frozenset(lasts.get(row, ()))))

    def _skip(self, moments: array[float]) -> list[int]:
        """Advance the scheduler by steps of a leap, which end at ``moments`` (s).

        Returns the number of free blocks after each step.
        """
        if self.on_cache_change is None:
            return self.scheduler.skip(len(moments))
        free: list[int] = []
        for moment in moments:  # one by one, so that each change of the cache has its own time
            free += self.scheduler.skip(1)
            self.on_cache_change(moment)
        return free

    def _plan_idle_stretch(self) -> IdleStretch:
        """Start a series of idle passes that have the same result as the last pass, and one
        more.
        """
        passes = 1
        most = self._watch.silent_calls(self._idle_passes) if self.leaping else 0
        if most and not any(flight.batch for flight in self.in_flight):
            passes = self.scheduler.leap(most + 1)
        moments = accumulate(repeat(self.executor.idle(), passes), initial=self.env.now)
        ends = array("d", moments)[1:]
        self._idle_stretch = IdleStretch(ends, self.timeout_at(ends[-1]))
        return self._idle_stretch

    def _end_idle_stretch(self, passes: int) -> None:
        """Advance the state by ``passes`` idle passes."""
        self._idle_stretch = None
        if passes:
            self.scheduler.skip(passes)
            self._watch.skip(passes)
            self._idle_passes += passes
            self.record.idle_passes += passes

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated now."""
        # The number is exact even during a leap.
        self.catch_up()
        return self.scheduler.free_blocks

    def catch_up(self) -> None:
        """Advance a leap in progress to the present time."""
        # The remaining steps stay planned.
        leap = self._leap
        if leap is None or not (done := self._completed_iterations(leap)):
            return
        self._land(leap, done)
        load = leap.load
        context = load.decode_context + done * load.decode_seqs
        leap.load = load._replace(decode_context=context)
        del leap.ends[:done], leap.moments[:done]
        if leap.own:
            del leap.own[:done]
        self._leap = leap

    def halt(self) -> list[RequestRecord]:
        """Stop permanently, even in the middle of a step. Return the unfinished requests."""
        self._stop_here()
        return super().halt()

    def finalize(self) -> None:
        """Close the record at the end of the run."""
        self._stop_here()
        self._remaining.clear()
        if self.front_end is not None:
            self.front_end.close()
            self.record.delivered = self.front_end.delivered
        self.record.close(self._group_row)

    def _stop_here(self) -> None:
        if self._leap is not None:
            self._land(self._leap, self._completed_iterations(self._leap))
        if self._idle_stretch is not None:
            self._end_idle_stretch(self._completed_iterations(self._idle_stretch))

    def _busy(self) -> bool:
        return bool(self.scheduler.num_waiting or self.scheduler.num_running)

    def notify(self, *, news: bool = True) -> None:
        """Report an event. The engine makes its next decision when the present step has ended.

        ``news`` is true for external events.
        """
        # After a livelock of KV copies was detected, the engine reacts only to external events.
        if self._copy_livelock and not news:
            return
        super().notify()
        if news:
            self._external_event, self._copy_livelock = True, False
        (self.on_leap_cut or self.cut)()

    def cut(self) -> None:
        """End a leap or a series of idle passes at the end of the present step."""
        ahead = self._leap or self._idle_stretch
        if ahead is not None:
            moments = ahead.moments
            index = self._completed_iterations(ahead)
            if index < len(moments) - 1:
                del moments[index + 1 :]
                ahead.wake = ahead.wake.move(moments[-1])

    def _completed_iterations(self, leap: Leap | IdleStretch) -> int:
        """Return the number of the leap's iterations that are complete by now."""
        # If an iteration ends exactly now, it counts only if the current event belongs to an engine
        # of higher rank, because such engines act later.
        moments, now = leap.moments, self.env.now
        if current_rank(self.env) > self.rank:
            return bisect_right(moments, now)
        return bisect_left(moments, now)

    def _record_halt(self, since: float) -> None:
        """Record a deadlock or livelock. The present state also occurred at ``since`` (s)."""
        if self.record.engine_halt is None:
            stuck = [*self.scheduler.running_ids(), *self.scheduler.waiting_ids()]
            decided = self.record.steps.decided
            kind, why = "deadlock", "requests wait, but the scheduler can run none of them"
            if decided and decided[-1] >= since:
                kind, why = "livelock", "the same decisions repeat without emitting a token"
            if self._copy_livelock:
                kind, why = "livelock", "the same KV is read repeatedly and no request can run"
            held = dict(self.scheduler.blocks_held())
            self.record.engine_halt = EngineHalt(
                kind, self.env.now, why, sorted(set(stuck)), held, since
            )
