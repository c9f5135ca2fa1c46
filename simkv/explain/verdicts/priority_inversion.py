"""Verdict: requests were served before more urgent requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import groupby, pairwise
from typing import NamedTuple

from simkv.explain.blame import Preemption
from simkv.explain.ledger_kinds import COMPUTE_KINDS, WAIT_KINDS, Ledger, LedgerKind
from simkv.explain.verdicts.verdict import Verdict, times_phrase
from simkv.sim.run_record import RunRecord


@dataclass(frozen=True)
class PriorityInversion(Verdict):
    """A request was served before a more urgent waiting request, ``count`` times.

    ``requests`` contains the pair with the longest wait, the more urgent request first.
    ``priorities`` contains their priorities. The less urgent request was served at ``at`` (s).
    After that, the more urgent request still waited for ``seconds``.
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
            f"{times_phrase(self.count)} a request was served before a more urgent one: at "
            f"{self.at:.3f} s request {other} (priority {low}), while request {urgent} (priority "
            f"{high}) waited {self.seconds:.3f} s more"
        )


class _Wait(NamedTuple):
    """A period in which request ``id`` waits to be admitted or readmitted, in seconds."""

    priority: int
    start: float
    end: float
    id: int


def find_priority_inversion(
    record: RunRecord, ledger: Ledger, preemptions: Sequence[Preemption]
) -> PriorityInversion | None:
    """Return the verdict on priority inversion, or None.

    A request is served if it is admitted or if another request is preempted in its favor.
    """
    priority = {i: life.request.priority for i, life in record.requests.items()}
    if len(set(priority.values())) < 2:
        return None
    favoured = [(p.at, p.by) for p in preemptions if p.by is not None and p.by != p.victim]
    favoured += [
        (tile.start, i)
        for i, tiles in ledger.items()
        for before, tile in pairwise(tiles)
        if tile.kind in COMPUTE_KINDS and before.kind in WAIT_KINDS | {LedgerKind.IN_FLIGHT}
    ]
    favoured += [
        (tiles[0].start, i)
        for i, tiles in ledger.items()
        if tiles and tiles[0].kind in COMPUTE_KINDS
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
    """Yield all waiting periods of requests that the scheduler had received."""
    for i, tiles in ledger.items():
        for waits, stretch in groupby(
            tiles, key=lambda tile: tile.kind in WAIT_KINDS - {LedgerKind.UNSEEN}
        ):
            if waits:
                first, *rest = stretch
                yield _Wait(priority[i], first.start, (rest or [first])[-1].end, i)
