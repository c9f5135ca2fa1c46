"""Replay recordings that have one line per scheduling decision; time is counted in decisions."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

from simkv.conformance.decision_recorder import Recorder, ended_requests
from simkv.core.engine_spec import EngineSpec
from simkv.core.recording_format import RecordingLine
from simkv.core.scheduler_protocol import (
    Batch,
    Completion,
    Livelock,
    clocked,
)
from simkv.native.scripted_transfers import ScriptedCopies, ScriptedDisk, ScriptedTransfers


def replay_steps(
    engine: EngineSpec, header: RecordingLine, at_least: int
) -> Iterator[RecordingLine]:
    """Yield one line for each decision of simkv's scheduler on the workload of ``header``.

    The parameters have the same meaning as in ``decision_replay.replay_decisions``.
    """
    recording, config = engine.recording, engine.recording.config(header)
    recorder = Recorder(engine.build(config), config, whole=True)
    timed = clocked(recorder)
    emitted, standstill = RemainingOutput(header["requests"]), StallDetector()
    transfers = ReplayedTransfers(recorder, header.get("transfers"))
    clients = ScriptedClients(header, recorder, transfers)
    copies = ScriptedCopies(header.get("copies", ()))
    disk = ScriptedDisk(header.get("disk", ()), header.get("looks", ()))
    under_way = InFlightBatches(recorder, emitted, copies, disk, transfers)
    for step in count():
        if timed:
            timed.set_time(float(step))
        moved = clients.arrive(step)
        try:
            batch = recorder.schedule()
        except Livelock as livelock:
            yield closing_line("livelock", livelock.why)
            return
        if batch.fatal and not recording.crash_line:
            yield closing_line("raised", batch.fatal)
            return
        under_way.launch(step, batch)
        moved |= clients.leave(step, 2)
        line = recorder.lines[-1]
        line["delivered"] = int(len(under_way) == recorder.pipeline_depth)
        if line["delivered"] and not batch.fatal:
            moved |= under_way.deliver()
        recorder.close()
        yield line
        if batch.fatal:
            yield closing_line(batch.fatal.split(":")[0], batch.fatal)
            return
        clients.alive -= ended_requests(line)
        if not clients.alive and not recorder.drains(line):
            break
        standstill.after(step, moved or clients.expected, recorder.fingerprint)
        if standstill.proved is not None and step >= at_least:
            yield closing_line(
                "stall", f"nothing can run: {sorted(clients.alive)}", standstill.proved
            )
            return
    if lost := line.get("lost"):
        yield closing_line("lost", f"requests left every queue: {lost}")


def closing_line(ending: str, why: str, proved: int | None = None) -> RecordingLine:
    """Return the last line of a replay in which requests remain unfinished.

    ``proved`` is the step at which the scheduler's state occurred for the second time, or None.
    """
    return {"truncated": True, "ending": ending, "why": why, "proved": proved}


class ReplayedTransfers:
    """KV transfers between replicas during a replay; none if ``steps`` is None."""

    def __init__(self, scheduler: Any, steps: Sequence[int] | None) -> None:
        self._scheduler = scheduler
        self._script = None if steps is None else ScriptedTransfers(steps)

    def announce(self, request: RecordingLine) -> None:
        """Report, before a request is added, that its KV will be sent or loaded."""
        if kv := request.get("kv"):
            tell = {"send": self._scheduler.keep, "load": self._scheduler.fetch}[kv]
            tell(request["id"])

    def launch(self, batch: Batch, step: int) -> None:
        """Start the transfers of a batch."""
        if self._script:
            self._script.begin(batch.loads, self._scheduler.sends, step)

    def deliver(self, step: int) -> bool:
        """Report the transfers that finish by ``step``; return whether any finished."""
        if not self._script:
            return False
        loads, sends = self._script.done(step)
        for i in loads:
            self._scheduler.loaded(i)
        for i in sends:
            self._scheduler.sent(i)
        return bool(loads or sends)


class InFlightBatches:
    """Batches that were scheduled but not completed, oldest first."""

    def __init__(
        self,
        recorder: Recorder,
        emitted: RemainingOutput,
        copies: ScriptedCopies,
        disk: ScriptedDisk,
        transfers: ReplayedTransfers,
    ) -> None:
        self._recorder, self._emitted, self._copies = recorder, emitted, copies
        self._disk, self._transfers = disk, transfers
        self._batches: deque[tuple[int, Batch, list[int]]] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def launch(self, step: int, batch: Batch) -> None:
        """Add the batch of a step and start the KV copies and transfers that it requests."""
        self._batches.append((step, batch, _members(batch)))
        if batch.moves:
            self._copies.begin(batch.moves, step)
            if batch.moves.disk:
                self._disk.begin(batch.moves.disk, step)
        transfers, looks = self._disk.done(step)
        if transfers or looks:
            self._recorder.finish_disk_transfers(transfers, looks)
        self._transfers.launch(batch, step)

    def deliver(self) -> bool:
        """Complete the oldest batch.

        Returns whether it delivered a token, rejected a request, or finished a copy or transfer.
        """
        step, batch, members = self._batches.popleft()
        if done := self._copies.done(step):
            self._recorder.moved(done)
        self._emitted.accept(batch)
        completion = self._recorder.complete(batch, self._emitted.ended(batch, members))
        self._emitted.count(batch, completion, members)
        arrived = self._transfers.deliver(step)
        return bool(done or arrived or completion.delivered or completion.refused or batch.decodes)


def _members(batch: Batch) -> list[int]:
    """Return the ids of the batch's decode group that are not in ``scheduled``.

    The decode group contains the requests that decode in every step.
    """
    if not batch.decodes:
        return []
    listed = {i for i, _ in batch.scheduled}
    return [row.id for row in batch.rows() if row.id not in listed]


def arrivals_by_step(requests: list[RecordingLine]) -> dict[int, list[RecordingLine]]:
    """Return the requests that arrive in each step, in the order of the header."""
    steps: dict[int, list[RecordingLine]] = {}
    for request in requests:
        steps.setdefault(request["arrival_step"], []).append(request)
    return steps


class ScriptedClients:
    """Recorded arrivals and aborts of each step; ``alive`` contains the ids of unfinished requests.

    Aborts are tuples (step, phase, id). Phase 0 is before the arrivals of the step, phase 1 is
    before the decision, and phase 2 is before the delivery of tokens.
    """

    def __init__(
        self, header: RecordingLine, recorder: Recorder, transfers: ReplayedTransfers
    ) -> None:
        self.alive = {request["id"] for request in header["requests"]}
        self._recorder, self._transfers = recorder, transfers
        self._arrivals = arrivals_by_step(header["requests"])
        self._aborts: dict[tuple[int, int], list[int]] = {}
        for step, phase, i in header.get("aborts", ()):
            self._aborts.setdefault((step, phase), []).append(i)

    @property
    def expected(self) -> bool:
        """Return whether arrivals or aborts remain."""
        return bool(self._arrivals or self._aborts)

    def arrive(self, step: int) -> bool:
        """Add the requests and process the aborts that precede the decision of ``step``.

        Returns whether requests arrived or were aborted.
        """
        moved = self.leave(step, 0)
        for request in self._arrivals.pop(step, ()):
            self._transfers.announce(request)
            self._recorder.add(self._recorder.recording.prompt(request))
            moved = True
        return self.leave(step, 1) or moved

    def leave(self, step: int, phase: int) -> bool:
        """Abort the unfinished requests whose clients leave in the phase; return whether
        any did.
        """
        left = False
        for i in self._aborts.pop((step, phase), ()):
            if i in self.alive and i in self._recorder.added:
                self._recorder.abort(i)
                self.alive.discard(i)
                left = True
        return left


class RemainingOutput:
    """Number of tokens that the model will still emit for each request; schedulers do not know this
    number.
    """

    def __init__(self, requests: list[RecordingLine]) -> None:
        self._left = {request["id"]: request["output_tokens"] for request in requests}
        self._accepts = {r["id"]: r["accepts"] for r in requests if r.get("accepts")}
        self._given = dict.fromkeys(self._left, 0)

    def accept(self, batch: Batch) -> None:
        """Set how many draft tokens of each request in ``batch`` are accepted, as the recording
        specifies.
        """
        if not (drafted := batch.drafted):
            return
        for i, tokens in drafted.tokens.items():
            accepts = self._accepts.get(i, [0])
            most = 0 if i in drafted.padding else min(tokens, self._left[i] - 1)
            drafted.accepted[i] = max(min(accepts[self._given[i] % len(accepts)], most), 0)

    def ended(self, batch: Batch, members: Iterable[int] = ()) -> set[int]:
        """Return the ids of the requests that receive their last token with this batch.

        ``members`` are the ids of the batch's decode group (requests that decode in every step).
        """
        return {i for i in (*batch.emits, *members) if self._left[i] == 1 + _more(batch, i)}

    def count(self, batch: Batch, completion: Completion, members: Iterable[int] = ()) -> None:
        """Subtract the delivered tokens of a batch; ``members`` are the ids of its decode group."""
        for i in (*completion.delivered, *members):
            self._left[i] -= 1 + _more(batch, i)
            self._given[i] += 1 + _more(batch, i)


def _more(batch: Batch, i: int) -> int:
    """Return the number of accepted draft tokens of a request, which it receives in addition to one
    token.
    """
    return batch.drafted.accepted.get(i, 0) if batch.drafted else 0


class StallDetector:
    """Detect that the scheduler's state repeats while no external event occurs.

    ``proved`` is the step at which a state occurred for the second time, or None.
    """

    def __init__(self) -> None:
        self._seen: set[Hashable] = set()
        self.proved: int | None = None

    def after(self, step: int, moved: bool, state: Callable[[], Hashable]) -> None:
        """Check the scheduler's state after a step.

        ``moved`` is true if an event occurred or is expected; the state is then not checked.
        """
        if moved:
            self.progress()
        elif self.proved is None and self.repeats(state()):
            self.proved = step

    def progress(self) -> None:
        """Discard the states seen so far, because an event makes them irrelevant."""
        self._seen.clear()

    def repeats(self, state: Hashable) -> bool:
        """Return whether ``state`` has occurred since the last call of ``progress``."""
        if state in self._seen:
            return True
        self._seen.add(state)
        return False
