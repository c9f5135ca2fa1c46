"""The loop: schedule calls, steps and token delivery in SimPy time."""

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
from simkv.sim.replica import Replica
from simkv.sim.run_record import EngineHalt, RequestRecord
from simkv.sim.step_log import QueueState

#: How an iteration goes on: with the next at once, after an idle pass, or when something comes.
NextAction = Literal["on", "idle", "sleep"]

#: A row of the step log that no run comes to.
NO_ROW = 1 << 60
#: A leap is not planned further ahead than this many steps.
MAX_LEAP_STEPS = 512


@mypyc_attr(allow_interpreted_subclasses=True)
class Engine(Replica):
    """A replica whose scheduler decides step by step.

    A batch of a pipelined scheduler (``pipeline_depth`` 2) is decided while its predecessor runs.

    With ``leaping``, a stretch of steps in which nothing but decoding would happen is one event.
    What comes from outside in the meantime ends the stretch with the step that it falls into, so
    leaping changes nothing but the work.

    ``run`` is made of ``schedule``, ``launch`` and ``end_turn``, and a leap of ``stretch``,
    ``set_out`` and ``land``, for whoever steps several engines together. ``in_flight`` are the
    batches on the GPU, the oldest first.
    """

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
        #: Called in place of ``cut`` where others leap with it.
        self.on_leap_cut: Callable[[], None] | None = None
        self.in_flight: deque[InFlight] = deque()
        self._outside = False
        self._circles = False  # copies follow each other for ever, and nothing comes of it
        self._leap: Leap | None = None
        self._rest: IdleStretch | None = None
        self._idle_passes = 0  # in a row
        self._watch = CycleDetector(scheduler.fingerprint, lambda: scheduler.free_blocks)
        self._clocked = clocked(scheduler)
        self._kv_waiter = kv_waiter(scheduler)
        self._offloader = offloader(scheduler)
        self._group_row = self._completed_row = -1
        # Tokens of each request that no step has been asked for yet, and the rows of the step log
        # in which members of the decode group will get their last one.
        self._left: dict[int, int] = {}
        self._finishes: list[tuple[int, int, int]] = []
        self._ending: dict[int, list[int]] = {}

    def run(self) -> SimProcess:
        """The engine's work until it is over or halted, as a SimPy process."""
        for event in self._iterate():
            yield event
            if self.halted:
                return

    def _iterate(self) -> SimProcess:
        """The engine's iterations."""
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
            elif in_flight[0].end > self.env.now:  # it waits for copies
                yield self.timeout_at(in_flight[0].end)
            turn = self.finish_iteration(batch)
            if turn == "sleep":
                yield self.sleep()
                yield self.timeout_at(self.env.now)  # after all else that happens then
            elif turn == "idle":
                rest = self._plan_rest()
                yield rest.wake
                self._end_rest(len(rest.moments) - 1)

    def finish_iteration(self, batch: Batch) -> NextAction:
        """The oldest batch has run, and ``batch`` was the last to be decided: what now."""
        oldest = self.in_flight.popleft()
        delivered = self._complete(oldest)
        if self._outside or delivered:
            self._watch.progress()
            self._outside = False
        if delivered:  # what came from outside may have changed nothing
            self.record.engine_halt = None
        working = bool(batch or oldest.batch) or any(f.batch for f in self.in_flight)
        unsaid = self._offloader is not None and self._offloader.has_pending_copies
        if not working and not unsaid:
            if not self._busy():
                return "sleep"
            if self._kv_waiter is not None and self._kv_waiter.awaits_kv:
                if self._watch.repeats(working=True, now=self.env.now):
                    self._circles = True
                    self._stand_still(self._watch.since)
                return "sleep"
        if self._watch.repeats(working, self.env.now):
            self._stand_still(self._watch.since)
            return "sleep"
        if not working:
            self.record.idle_passes += 1
            self._idle_passes += 1
            return "idle"
        self._idle_passes = 0
        return "on"

    def schedule(self) -> Batch | None:
        """Let the scheduler decide; None if that is the end of the engine."""
        self.changed = True
        now = self.record.end = self.env.now
        self._hear()
        try:
            batch = self.scheduler.schedule()
        except Livelock as livelock:
            why = f"livelock inside one schedule call: {livelock.why}"
            self.die("livelock", why, livelock.cycle)
            return None
        self._note_departures(batch)
        self.record.decided(batch, now)
        self.record.set_aside(batch.aside, now)
        for i in batch.ignored:
            self.reject(self.record.requests[i])
        for i, refusal in batch.refused.items():
            self.refuse(self.record.requests[i], refusal)
        for i in batch.lost:
            self.resolve(self.record.requests[i], Outcome.LOST, "it is in no queue any more")
        if batch.loads and self.loads:
            self.loads(batch.loads)
        if batch.fatal:
            self.die("engine died", batch.fatal, [i for i, _ in batch.scheduled])
            return None
        return batch

    def _hear(self) -> None:
        """Tell the scheduler what time it is and what has come."""
        now = self.env.now
        if self._clocked is not None:
            self._clocked.set_time(now)
        for message in self.inbox:
            if isinstance(message, Request):
                self.scheduler.add(message)
                self._left[message.id] = message.output_tokens
                self.record.requests[message.id].seen = now
            elif isinstance(message, int):
                self.scheduler.abort(message)
            else:
                message()
        self.inbox.clear()

    def launch(
        self, batch: Batch, load: StepLoad, start: float, seconds: float | None = None
    ) -> float:
        """Put a batch on the GPU at ``start``, behind those that are there; returns its end.

        It takes as long as the executor says, or ``seconds`` if they are given.
        """
        if batch.moves and self.copies:
            start = self.copies.before(batch.moves, start if batch else self.env.now)
        if not batch:
            end = start if batch.moves and self.copies else self.env.now
            self.in_flight.append(InFlight(batch, -1, end, frozenset()))
        else:
            end = start + (self.executor.run(load) if seconds is None else seconds)
            self._write(batch, load, start, end)
        if batch.moves and self.copies:
            self.copies.after(batch.moves, end)
        return end

    def _write(self, batch: Batch, load: StepLoad, start: float, end: float) -> None:
        """Note a step that runs from ``start`` to ``end``."""
        scheduler = self.scheduler
        queues = QueueState(scheduler.num_waiting, scheduler.num_running, scheduler.free_blocks)
        row = self.record.step(batch, load, start, end, queues, self.env.now)
        if batch.decodes:
            self._group_row = row
        for i in batch.joined:
            heappush(self._finishes, (row + self._left[i] - 1, i, row))
        last_of = []
        drafted, lives = batch.drafted, self.record.requests
        accepted = verify_drafts(drafted, batch.emits, lives, self._left) if drafted else None
        for i in batch.emits:
            self._left[i] -= 1 + accepted.get(i, 0) if accepted else 1
            if self._left[i] == 0:
                last_of.append(i)
        group = self.record.decoding() if self.delivered and batch.decodes else ()
        self.in_flight.append(InFlight(batch, row, end, frozenset(last_of), group))

    def _note_departures(self, batch: Batch) -> None:
        """Requests that the decode group has lost since the batch before."""
        for i in batch.left:
            since = self.record.decoding_since(i)
            if since is None:
                continue
            last_token = since + self._left[i] - 1
            self._left[i] -= self.record.leave(i, self._group_row)
            if self._completed_row < last_token <= self._group_row:
                self._ending.setdefault(last_token, []).append(i)

    def _complete(self, flight: InFlight) -> bool:
        """Deliver the tokens of a batch that has run; returns whether there were any."""
        batch, row = flight.batch, flight.row
        self._completed_row = max(self._completed_row, row)
        ended = set(flight.finishing_ids)
        if batch.decodes:
            ended.update(self._ending.pop(row, ()))
            while self._next_finish() <= row:
                ended.add(heappop(self._finishes)[1])
        completion = self.scheduler.complete(batch, ended)
        self.changed = True
        delivered = completion.delivered
        if batch.drafted:
            self.record.verified(batch.drafted, delivered, row)
        if len(completion.delivered) != len(batch.emits):
            self._note_dropped(batch, completion, row)
        lives = self.record.requests
        for i in completion.delivered:
            if lives[i].outcome is Outcome.REJECTED:  # some engines take up what they gave up
                lives[i].outcome, lives[i].ended_at, lives[i].reason = None, None, ""
        if self.queue_limit:
            self.queue_limit.told(completion.delivered)
        if self.delivered:
            told = repeat_per_token(delivered, batch.drafted) if batch.drafted else delivered
            self.delivered([*told, *flight.group])
        self._end(completion)
        return bool(completion.delivered or completion.refused or batch.decodes)

    def _end(self, completion: Completion) -> None:
        """Requests that are over with a batch."""
        for i in completion.finished:
            self.resolve(self.record.requests[i], Outcome.FINISHED)
        for i in completion.refused:
            self.reject(self.record.requests[i])

    def _note_dropped(self, batch: Batch, completion: Completion, row: int) -> None:
        """Tokens that were computed and thrown away have to be computed again, if ever."""
        accepted = batch.drafted.accepted if batch.drafted else {}
        for i in set(batch.emits) - set(completion.delivered):
            self._left[i] += 1 + accepted.get(i, 0)
            self.record.requests[i].ensure_interruptions().dropped.append(row)

    def _next_finish(self) -> int:
        """Row of the step log in which a member of the decode group gets its last token next."""
        while self._finishes:
            row, i, since = self._finishes[0]
            if self.record.decoding_since(i) == since:
                return row
            heappop(self._finishes)
        return NO_ROW

    def leapable_steps(self, batch: Batch) -> int:
        """How many steps like the one just launched would follow it, which are of decodes only."""
        oldest, newest = self.in_flight[0], self.in_flight[-1]
        if not self.leaping or batch.kind != "decode" or not is_same_decision(oldest, newest):
            return 0
        most = min(self._next_finish() - oldest.row, MAX_LEAP_STEPS)
        if oldest.finishing_ids or oldest.row in self._ending:
            most = 0
        for i in batch.emits:
            most = min(most, self._left[i] + newest.row - oldest.row)
        return 0 if most < 1 else self.scheduler.leap(int(most) + 1) - 1

    def _plan_leap(self, batch: Batch, load: StepLoad) -> Leap | None:
        """The stretch of steps like the one just launched, if its times are known."""
        steps = self.leapable_steps(batch)
        foreseen = self.executor.forecast_steps(load, steps) if steps else ()
        return self.start_leap(load, foreseen) if len(foreseen) else None

    def start_leap(
        self, load: StepLoad, foreseen: Sequence[float] | Floats, own: list[float] | None = None
    ) -> Leap:
        """Leap over steps that take so many seconds, of which the executor's ``own`` may be less.

        Whoever waits for its ``wake`` then lets it ``land``.
        """
        oldest, newest = self.in_flight[0], self.in_flight[-1]
        ends = step_ends(newest.end, foreseen)
        moments = ends[:]
        if oldest is not newest:
            moments.insert(0, oldest.end)
            moments.pop()
        self._leap = Leap(load, ends, moments, self.timeout_at(moments[-1]), own)
        return self._leap

    def finish_leap(self) -> float:
        """The leap is over; returns when the GPU is free."""
        leap = self._leap
        assert leap is not None
        self._land(leap, len(leap.moments) - 1)
        return self.in_flight[-1].end

    def _land(self, leap: Leap, done: int) -> None:
        """Bring everything to where stepping would be after ``done`` more steps."""
        oldest, newest = self.in_flight[0], self.in_flight[-1]
        self._leap = None
        if not done:
            return
        self.leaps += 1
        batch, times = newest.batch, leap.ends[: done + 1]
        ends = times[1:]
        self.record.repeat(batch, ends, self.scheduler.skip(done), len(self.in_flight))
        self.executor.ran(leap.load, leap.own[:done] if leap.own else list(map(sub, ends, times)))
        if batch.decodes:
            self._group_row = newest.row + done
        lasts: dict[int, list[int]] = {}
        for i in batch.emits:
            lasts.setdefault(newest.row + self._left[i], []).append(i)
            self._left[i] -= done
        rows = [(newest.row + done, ends[-1])]
        if oldest is not newest:
            rows.insert(0, (oldest.row + done, leap.moments[done]))
        self.in_flight.clear()
        for row, end in rows:
            self.in_flight.append(InFlight(batch, row, end, frozenset(lasts.get(row, ()))))

    def _plan_rest(self) -> IdleStretch:
        """The idle passes from now on that are like the one that is over, and one more."""
        passes = 1
        most = self._watch.quiet(self._idle_passes) if self.leaping else 0
        if most and not any(flight.batch for flight in self.in_flight):
            passes = self.scheduler.leap(most + 1)
        moments = accumulate(repeat(self.executor.idle(), passes), initial=self.env.now)
        ends = array("d", moments)[1:]
        self._rest = IdleStretch(ends, self.timeout_at(ends[-1]))
        return self._rest

    def _end_rest(self, passes: int) -> None:
        """So many idle passes were as foreseen."""
        self._rest = None
        if passes:
            self.scheduler.skip(passes)
            self._watch.skip(passes)
            self._idle_passes += passes
            self.record.idle_passes += passes

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had now, as stepping would have left them."""
        self._catch_up()
        return self.scheduler.free_blocks

    def _catch_up(self) -> None:
        """Bring a leap under way to where stepping would be now; it goes on from there."""
        leap = self._leap
        if leap is None or not (done := self._over(leap)):
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
        """Stop for good now, in the middle of a step; returns the requests that have not ended."""
        self._stop_here()
        return super().halt()

    def finalize(self) -> None:
        """The run ends now: a leap under way gets as far as stepping would have got."""
        self._stop_here()
        self._left.clear()
        self.record.close(self._group_row)

    def _stop_here(self) -> None:
        if self._leap is not None:
            self._land(self._leap, self._over(self._leap))
        if self._rest is not None:
            self._end_rest(self._over(self._rest))

    def _busy(self) -> bool:
        return bool(self.scheduler.num_waiting or self.scheduler.num_running)

    def notify(self, *, news: bool = True) -> None:
        """Something came: the engine looks again when its present step is over.

        One that is known to go round in a circle waits for ``news``.
        """
        if self._circles and not news:
            return
        super().notify()
        if news:
            self._outside, self._circles = True, False
        (self.on_leap_cut or self.cut)()

    def cut(self) -> None:
        """A leap under way ends with the present step."""
        ahead = self._leap or self._rest
        if ahead is not None:
            moments = ahead.moments
            index = self._over(ahead)
            if index < len(moments) - 1:
                del moments[index + 1 :]
                ahead.wake = ahead.wake.move(moments[-1])

    def _over(self, leap: Leap | IdleStretch) -> int:
        """How many of the leap's iterations would be over by now.

        One that is over just now counts if what is happening follows from an engine of higher rank.
        """
        moments, now = leap.moments, self.env.now
        if current_rank(self.env) > self.rank:
            return bisect_right(moments, now)
        return bisect_left(moments, now)

    def _stand_still(self, since: float) -> None:
        """The state of ``since`` repeats: without help from outside nothing will ever change."""
        if self.record.engine_halt is None:
            stuck = [*self.scheduler.running_ids(), *self.scheduler.waiting_ids()]
            decided = self.record.steps.decided
            kind, why = "deadlock", "requests wait and the scheduler can run none of them"
            if decided and decided[-1] >= since:
                kind, why = "livelock", "the same decisions repeat and no token is emitted"
            if self._circles:
                kind, why = "livelock", "the same KV is read again and again, and nobody can run"
            held = dict(self.scheduler.blocks_held())
            self.record.engine_halt = EngineHalt(
                kind, self.env.now, why, sorted(set(stuck)), held, since
            )
