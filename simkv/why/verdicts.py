"""Verdicts on a run, each with its proof: the evidence and the fewest requests that show it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from itertools import groupby, pairwise
from typing import Any, ClassVar, NamedTuple

from simkv.core.outcome import Outcome
from simkv.core.scheduler import blocks_for
from simkv.loop.record import Life, Record, Standstill, emitting_rows
from simkv.why.blame import Blocker, Overtake, Preemption, Pressure
from simkv.why.ledger import SERVED, WAITS, WORDS, Kind, Tile, runs, totals

Ledger = Mapping[int, Sequence[Tile]]

#: Decisions of a livelock that are kept as its proof.
DECISIONS = 32
#: Thrash: this much work was repeated, over the work that was kept, and somebody's twice.
THRASH = 0.1
#: Head-of-line blocking: for this share of the run the head kept back one with enough blocks.
HEAD_OF_LINE = 0.05


@dataclass(frozen=True)
class Verdict:
    """Something that went wrong. ``requests`` are the fewest that show it."""

    name: ClassVar[str]
    requests: tuple[int, ...]

    @property
    def text(self) -> str:
        """What happened, in a sentence or two."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """The verdict as it stands in ``summary.json``: name, text and all of the evidence."""
        evidence = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {"verdict": self.name, "text": self.text, **evidence}


def _plain(value: Any) -> Any:
    """Evidence as JSON has it; a named tuple is an object."""
    if isinstance(value, tuple):
        named = getattr(value, "_asdict", None)
        return _plain(named()) if named else [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


class Decision(NamedTuple):
    """One decision of a cycle, at ``at`` (s): who prefills, who decodes and who is preempted."""

    at: float
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    preempted: tuple[int, ...]

    def __str__(self) -> str:
        acts = ("prefill", self.prefill), ("decode", self.decode), ("preempt", self.preempted)
        said = [f"{verb} {_ids(ids)}" for verb, ids in acts if ids]
        return "; ".join(said) or "nothing"


@dataclass(frozen=True)
class Circling(Verdict):
    """The engine works for ever and nobody gets a token: its state of ``since`` comes again.

    One round is ``decisions`` long and takes ``seconds``; ``cycle`` are the first of them. There
    are none where the circle is inside of one ``schedule`` call.
    """

    name = "livelock"
    since: float
    why: str
    seconds: float
    decisions: int
    cycle: tuple[Decision, ...]

    @property
    def text(self) -> str:
        text = f"from {self.since:.3f} s on {self.why}; it goes round among {_ids(self.requests)}"
        if self.cycle:
            steps = "decision" if self.decisions == 1 else f"{self.decisions} decisions"
            text += f", every {steps} and {self.seconds:.3f} s: "
            text += " → ".join(map(str, self.cycle[:4])) + " → …" * (self.decisions > 4)
        return text


@dataclass(frozen=True)
class Deadlock(Verdict):
    """Nothing can ever run. ``holds`` and ``lacks`` are blocks by request, ``free`` are left.

    A request lacks what it needs beside its own to go on by one token. ``head`` is the first in the
    queue, which waits for ``kind``.
    """

    name = "deadlock"
    since: float
    why: str
    stuck: tuple[int, ...]
    holds: dict[int, int]
    lacks: dict[int, int]
    free: int
    head: int | None
    kind: Kind | None

    @property
    def text(self) -> str:
        stuck = f"{_count(self.stuck)} stuck, {self.free} blocks free"
        said = [f"from {self.since:.3f} s on {self.why}", stuck]
        for i in self.requests:
            waits = f" ({WORDS[self.kind]})" if i == self.head and self.kind else ""
            held = f" holds {self.holds[i]} and" if i in self.holds else ""
            said.append(f"request {i}{waits}{held} lacks {self.lacks[i] or 'none'}")
        return "; ".join(said)


@dataclass(frozen=True)
class EngineDied(Verdict):
    """The real engine panics, raises or hangs at ``since`` (s)."""

    name = "engine died"
    since: float
    why: str

    @property
    def text(self) -> str:
        return f"at {self.since:.3f} s: {self.why}"


@dataclass(frozen=True)
class Unservable(Verdict):
    """Requests that the whole cache cannot hold; the worst of them ``needs`` the most blocks."""

    name = "unservable"
    needs: int
    has: int
    all: tuple[int, ...]

    @property
    def text(self) -> str:
        missing = self.needs - self.has
        return (
            f"{_count(self.all)} cannot fit: request {self.requests[0]} needs {self.needs} blocks, "
            f"the cache has {self.has}; {missing} {'is' if missing == 1 else 'are'} missing"
        )


@dataclass(frozen=True)
class Lost(Verdict):
    """The engine forgot these requests: they are in no queue and never ended."""

    name = "lost"
    all: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"{_count(self.all)} lost: {_ids(self.all)}; {self.why}"


@dataclass(frozen=True)
class Starvation(Verdict):
    """Clients gave up. The worst ``waited`` so many of the seconds that it ``lived``.

    ``kinds`` are these seconds by what it waited for; ``behind`` are those who held that, the worst
    first, and ``overtaken`` says by whom, if it was.
    """

    name = "starvation"
    all: tuple[int, ...]
    waited: float
    lived: float
    tokens: int
    kinds: dict[Kind, float]
    behind: tuple[Blocker, ...]
    overtaken: Overtake | None

    @property
    def text(self) -> str:
        text = (
            f"{_count(self.all)} starved; request {self.requests[0]} waited {self.waited:.3f} of "
            f"its {self.lived:.3f} s and got {_tokens(self.tokens)}"
        )
        if self.kinds:
            kind = max(self.kinds, key=lambda kind: self.kinds[kind])
            text += f", {self.kinds[kind]:.3f} s {WORDS[kind]}"
        if self.behind:
            text += ", above all behind " + " and ".join(
                f"request {b.id} ({b.seconds:.3f} s)" for b in self.behind[:2]
            )
        if self.overtaken:
            text += f"; {_count(range(self.overtaken.others))} that came later went before it, "
            text += f"request {self.overtaken.by} first"
        return text


@dataclass(frozen=True)
class Rejected(Verdict):
    """The engine said no to these requests."""

    name = "rejected"
    all: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"{_count(self.all)} rejected: {_ids(self.all)}; {self.why}"


@dataclass(frozen=True)
class Thrash(Verdict):
    """``repeated`` tokens were computed again for ``kept`` ones, after ``preemptions``.

    The victim had the most computed again, ``worst`` tokens, after ``times`` preemptions. The other
    request gained most of these, or held the most blocks when the victim itself lacked them.
    ``reasons`` counts all preemptions by their cause.
    """

    name = "thrash"
    repeated: int
    kept: int
    preemptions: int
    worst: int
    times: int
    reasons: dict[str, int]

    @property
    def text(self) -> str:
        reasons = ", ".join(
            f"{count} {_CAUSES.get(why, why)}" for why, count in self.reasons.items()
        )
        victim, *other = self.requests
        text = (
            f"{self.repeated} tokens were computed again for {self.kept} that were kept "
            f"({100 * self.repeated / max(self.kept, 1):.0f} %); preemptions: {reasons}; request "
            f"{victim} lost its KV {_times(self.times)} and had {self.worst} tokens computed again"
        )
        return text + "".join(f", above all to request {i}" for i in other)


_CAUSES = {
    "blocks": "for want of blocks",
    "bucket": "for another length than those that ran",
    "patience": "for a head of the queue that had waited too long",
}


@dataclass(frozen=True)
class HeadOfLine(Verdict):
    """For ``seconds`` the head of the queue lacked blocks of which others behind it had enough.

    The worst head ``needs`` more blocks than the ``free`` ones; the other of the two requests needs
    ``other_needs`` and stood behind it for ``longest`` s.
    """

    name = "head-of-line blocking"
    seconds: float
    longest: float
    needs: int
    free: int
    other_needs: int

    @property
    def text(self) -> str:
        head, other = self.requests
        return (
            f"for {self.seconds:.3f} s the head of the queue kept back requests for which there "
            f"were blocks: request {head} needs {self.needs} and {self.free} were free, request "
            f"{other} behind it needs {self.other_needs} and waited {self.longest:.3f} s"
        )


@dataclass(frozen=True)
class PriorityInversion(Verdict):
    """``count`` times a request went ahead while a more urgent one waited.

    It was taken in, or another was preempted for its sake.

    Of the two requests that show it the first waited ``seconds`` more from ``at`` (s) on.
    """

    name = "priority inversion"
    count: int
    at: float
    seconds: float
    priorities: tuple[int, int]

    @property
    def text(self) -> str:
        (urgent, other), (high, low) = self.requests, self.priorities
        return (
            f"{_times(self.count)} a request went before a more urgent one: at "
            f"{self.at:.3f} s request {other} (priority {low}), while request {urgent} (priority "
            f"{high}) waited {self.seconds:.3f} s more"
        )


def verdicts(
    record: Record,
    ledger: Ledger,
    pressure: Pressure,
    preemptions: Sequence[Preemption],
    overtakes: Sequence[Overtake],
    block_size: int,
) -> tuple[Verdict, ...]:
    """All verdicts on a run, the gravest first; none where all went well."""
    found = (
        _standstill(record, block_size),
        _unservable(record, block_size),
        _forgotten(record),
        _starvation(record, ledger, pressure, overtakes),
        _rejected(record),
        _thrash(record, pressure, preemptions),
        _head_of_line(record, ledger, block_size),
        _priority_inversion(record, ledger, preemptions),
    )
    return tuple(verdict for verdict in found if verdict)


def _with(record: Record, outcome: Outcome) -> list[Life]:
    return [life for life in record.lives.values() if life.outcome is outcome]


def _standstill(record: Record, block_size: int) -> Verdict | None:
    stop = record.standstill
    if stop is None or not (stalled := _with(record, Outcome.STALLED)):
        return None
    if stop.kind == "livelock":
        return _livelock(record, stop)
    if stop.kind == "deadlock":
        return _deadlock(record, stop, stalled, block_size)
    requests = tuple(stop.requests) or (stalled[0].request.id,)
    return EngineDied(requests, stop.since, stop.why)


def _livelock(record: Record, stop: Standstill) -> Circling:
    """The decisions since the state that came again, and whom they were about."""
    log = record.steps
    begin = stop.since if stop.cycle_start is None else stop.cycle_start
    first, last = bisect_left(log.decided, begin), bisect_left(log.decided, stop.since) - 1
    acts: dict[float, tuple[list[int], list[int], list[int]]] = {}
    for i, life in record.lives.items():
        for at in life.preempted_at[bisect_left(life.preempted_at, begin) :]:
            if at < stop.since:
                acts.setdefault(at, ([], [], []))[2].append(i)
        for run in runs(life):
            for row in range(max(run.first, first), min(run.last, last) + 1):
                at = log.decided[row]
                acts.setdefault(at, ([], [], []))[run.kind is Kind.DECODE].append(i)
    cycle = tuple(Decision(at, *map(tuple, acts[at])) for at in sorted(acts))
    taking_part = {i for decision in cycle for ids in decision[1:] for i in ids}
    requests = tuple(sorted(taking_part) or stop.requests)
    seconds = stop.since - begin
    return Circling(requests, stop.since, stop.why, seconds, len(cycle), cycle[:DECISIONS])


def _deadlock(
    record: Record, stop: Standstill, stalled: Sequence[Life], block_size: int
) -> Deadlock:
    """Who holds the most blocks, and who is first in the queue."""
    stuck = tuple(life.request.id for life in stalled)
    holds = {i: blocks for i, blocks in stop.held.items() if blocks}
    head = record.heads[-1][1] if record.heads else None
    shown = sorted((i for i in stuck if i in holds), key=lambda i: (-holds[i], i))[:2]
    requests = tuple(dict.fromkeys([*shown, *([head.id] if head else [])])) or stuck[:1]
    lacks = {i: _lacks(record.lives[i], holds.get(i, 0), block_size) for i in requests}
    free = max(record.num_blocks - sum(holds.values()), 0)
    first, kind = (head.id, Kind(head.why)) if head else (None, None)
    return Deadlock(requests, stop.since, stop.why, stuck, holds, lacks, free, first, kind)


def _lacks(life: Life, held: int, block_size: int) -> int:
    """Blocks that a request lacks to compute one token more than it has delivered."""
    return max(blocks_for(life.request.prompt_tokens + life.tokens, block_size) - held, 0)


def _unservable(record: Record, block_size: int) -> Unservable | None:
    needs = {
        i: blocks_for(life.request.prompt_tokens + life.request.output_tokens - 1, block_size)
        for i, life in record.lives.items()
        if life.outcome is not Outcome.FINISHED
    }
    too_large = [i for i, blocks in needs.items() if blocks > record.num_blocks]
    if not too_large:
        return None
    worst = max(too_large, key=lambda i: (needs[i], -i))
    return Unservable((worst,), needs[worst], record.num_blocks, tuple(too_large))


def _forgotten(record: Record) -> Lost | None:
    lives = _with(record, Outcome.LOST)
    ids = tuple(life.request.id for life in lives)
    return Lost(ids[:1], ids, lives[0].reason) if ids else None


def _rejected(record: Record) -> Rejected | None:
    lives = _with(record, Outcome.REJECTED)
    ids = tuple(life.request.id for life in lives)
    return Rejected(ids[:1], ids, lives[0].reason) if ids else None


def _starvation(
    record: Record, ledger: Ledger, pressure: Pressure, overtakes: Sequence[Overtake]
) -> Starvation | None:
    """The worst is the one that waited longest, of those with the fewest tokens."""
    ids = tuple(life.request.id for life in _with(record, Outcome.STARVED))
    if not ids:
        return None
    waits = {i: totals(tile for tile in ledger[i] if tile.kind not in SERVED) for i in ids}
    waited = {i: sum(kinds.values()) for i, kinds in waits.items()}
    worst = max(ids, key=lambda i: (waited[i], -record.lives[i].tokens, -i))
    lived = sum(tile.seconds for tile in ledger[worst])
    behind = tuple(pressure.on(worst)[:4])
    overtaken = next((overtake for overtake in overtakes if overtake.victim == worst), None)
    culprit = (overtaken.by,) if overtaken else tuple(blocker.id for blocker in behind[:1])
    return Starvation(
        (worst, *culprit),
        ids,
        waited[worst],
        lived,
        record.lives[worst].tokens,
        waits[worst],
        behind,
        overtaken,
    )


def _thrash(record: Record, pressure: Pressure, preemptions: Sequence[Preemption]) -> Thrash | None:
    lives = record.lives
    repeated = sum(life.recomputed_tokens for life in lives.values())
    if not repeated:
        return None
    computed = sum(
        run.tokens * (run.last - run.first + 1) for life in lives.values() for run in runs(life)
    )
    kept = computed - repeated
    if repeated < THRASH * kept or max(len(life.preempted_at) for life in lives.values()) < 2:
        return None
    worst = max(lives, key=lambda i: (lives[i].recomputed_tokens, -i))
    losses = [preemption for preemption in preemptions if preemption.victim == worst]
    gains = Counter(p.by for p in losses if p.by is not None and p.by != worst)
    if not gains:
        held = pressure.holders(losses[-1].at)
        gains.update({i: blocks for i, blocks in held.items() if i != worst})
    requests = (worst, *(i for i, _ in gains.most_common(1)))
    reasons = dict(Counter(preemption.why for preemption in preemptions).most_common())
    most, times = lives[worst].recomputed_tokens, len(lives[worst].preempted_at)
    return Thrash(requests, repeated, kept, len(preemptions), most, times, reasons)


class _Behind(NamedTuple):
    """One that stands behind the head of the queue: its blocks, and from when to when."""

    needs: int
    id: int
    start: float
    end: float


def _head_of_line(record: Record, ledger: Ledger, block_size: int) -> HeadOfLine | None:
    """While the head waits for blocks: would the smallest of those behind it have fitted?"""
    queue = sorted(
        (
            _Behind(blocks_for(life.request.prompt_tokens + 1, block_size), i, tile.start, tile.end)
            for i, life in record.lives.items()
            for tile in ledger[i]
            if tile.kind is Kind.BEHIND
        ),
        key=lambda behind: behind.start,
    )
    come = 0
    waiting: list[_Behind] = []
    seconds = longest = 0.0
    proof = (-1, -1, 0, 0, 0)
    for head, start, end in _heads_without_blocks(record):
        while come < len(queue) and queue[come].start < end:
            heappush(waiting, queue[come])
            come += 1
        while waiting and waiting[0].end <= start:
            heappop(waiting)
        free = _least_free(record, start, end)
        if not waiting or waiting[0].needs > free:
            continue
        other = waiting[0]
        needs = blocks_for(_known(record, head, start) + 1, block_size)
        blocked = min(end, other.end) - max(start, other.start)
        if blocked <= 0.0 or needs <= free:  # it is kept back by a reserve
            continue
        seconds += blocked
        if blocked > longest:
            longest, proof = blocked, (head, other.id, needs, free, other.needs)
    if seconds == 0.0 or seconds < HEAD_OF_LINE * _length(record):
        return None
    head, behind, needs, free, other_needs = proof
    return HeadOfLine((head, behind), seconds, longest, needs, free, other_needs)


def _heads_without_blocks(record: Record) -> Iterator[tuple[int, float, float]]:
    """Who stood at the head of the queue for want of blocks, from when to when."""
    end = record.standstill.since if record.standstill else record.end
    following = [at for at, _ in record.heads[1:]] + [end]
    for (start, held), until in zip(record.heads, following, strict=False):
        if held and held.why == "blocks" and until > start:
            yield held.id, start, until


def _least_free(record: Record, start: float, end: float) -> int:
    """The fewest blocks that were free after any decision between two times."""
    log = record.steps
    first, last = bisect_left(log.decided, start), bisect_left(log.decided, end)
    if first == last:
        return log.free_blocks[first - 1] if first else record.num_blocks
    return min(log.free_blocks[first:last])


def _known(record: Record, request: int, at: float) -> int:
    """Tokens of a request that are known at a time: its prompt and what it has emitted."""
    life, ends = record.lives[request], record.steps.end
    emitted = sum(
        bisect_right(ends, at, first, last + 1) - first for first, last in emitting_rows(life)
    )
    return life.request.prompt_tokens + emitted


def _length(record: Record) -> float:
    """Seconds from the first arrival to the last outcome."""
    lives = record.lives.values()
    last = max((life.ended_at or 0.0 for life in lives), default=0.0)
    return last - min((life.request.arrival for life in lives), default=0.0)


class _Wait(NamedTuple):
    """A request waits to be taken in, or in again."""

    priority: int
    start: float
    end: float
    id: int


def _priority_inversion(
    record: Record, ledger: Ledger, preemptions: Sequence[Preemption]
) -> PriorityInversion | None:
    """Whenever somebody is taken in or favoured: the most urgent of those who wait."""
    priority = {i: life.request.priority for i, life in record.lives.items()}
    if len(set(priority.values())) < 2:
        return None
    favoured = [(p.at, p.by) for p in preemptions if p.by is not None and p.by != p.victim]
    favoured += [
        (tile.start, i)
        for i, tiles in ledger.items()
        for before, tile in pairwise(tiles)
        if tile.kind in SERVED and before.kind in WAITS | {Kind.IN_FLIGHT}
    ]
    favoured += [
        (tiles[0].start, i) for i, tiles in ledger.items() if tiles and tiles[0].kind in SERVED
    ]
    waits = sorted(_waits(ledger, priority), key=lambda wait: wait.start)
    come, count, worst = 0, 0, (0.0, 0.0, -1, -1)
    waiting: list[_Wait] = []
    for at, i in sorted(favoured):
        while come < len(waits) and waits[come].start <= at:
            heappush(waiting, waits[come])
            come += 1
        while waiting and waiting[0].end <= at:
            heappop(waiting)
        if waiting and waiting[0].priority < priority[i]:
            count += 1
            worst = max(worst, (waiting[0].end - at, -at, waiting[0].id, i))
    if not count:
        return None
    seconds, before, urgent, other = worst
    priorities = (priority[urgent], priority[other])
    return PriorityInversion((urgent, other), count, -before, seconds, priorities)


def _waits(ledger: Ledger, priority: Mapping[int, int]) -> Iterator[_Wait]:
    """All stretches of waiting that the scheduler knew of."""
    for i, tiles in ledger.items():
        for waits, stretch in groupby(tiles, key=lambda tile: tile.kind in WAITS - {Kind.UNSEEN}):
            if waits:
                first, *rest = stretch
                yield _Wait(priority[i], first.start, (rest or [first])[-1].end, i)


def _ids(ids: Sequence[int], most: int = 8) -> str:
    """``request 3``, ``requests 3, 5 and 9 more``."""
    named = ", ".join(map(str, ids[:most]))
    more = f" and {len(ids) - most} more" if len(ids) > most else ""
    return f"request{'s' if len(ids) > 1 else ''} {named}{more}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _tokens(count: int) -> str:
    return "one token" if count == 1 else f"{count} tokens"


def _count(ids: Sequence[int]) -> str:
    return "one request" if len(ids) == 1 else f"{len(ids)} requests"
