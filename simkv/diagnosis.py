"""Why a run went as it did: who blocked whom, what was wasted, and verdicts with their proof.

    found = diagnose(result.record, block_size(result.scenario.engine))
    print(found.verdicts[0].text)

or ``result.diagnosis``, which is the same, worked out when first asked for.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from math import fsum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simkv.ledger import NEGLIGIBLE, Interval, Kind, ledger, lost, runs, totals
from simkv.record import Life, Outcome, Record
from simkv.schedulers.base import blocks_for

if TYPE_CHECKING:
    from simkv.verdicts import Verdict

Floats = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]


class Holding(NamedTuple):
    """A request holds ``blocks`` blocks of KV from ``start`` to ``end`` (s)."""

    start: float
    end: float
    blocks: int


class Blocker(NamedTuple):
    """A request that held what others waited for.

    ``seconds`` is its share of their waiting, by the blocks (or slots) that it held in the
    meantime; ``block_seconds`` is what it held of the cache while they waited.
    """

    id: int
    seconds: float
    block_seconds: float


class Preemption(NamedTuple):
    """At ``at`` (s) the KV of ``victim`` was taken, for the sake of ``by`` (None: of all others).

    ``why`` is ``blocks`` (there were too few), ``bucket`` (of another length than those that run)
    or ``patience`` (the head of the queue had waited too long). ``tokens`` of KV were lost.
    """

    at: float
    victim: int
    by: int | None
    why: str
    tokens: int


class Overtake(NamedTuple):
    """``by`` arrived after ``victim`` and was served before it; ``seconds`` between the starts."""

    victim: int
    by: int
    seconds: float


@dataclass(frozen=True)
class Waste:
    """GPU seconds that served nobody, each step's time shared out by tokens.

    ``gone``: for clients that had gone away; ``dropped``: tokens computed and thrown away;
    ``recompute``: tokens that had been computed before. ``busy`` is the time of all steps.
    """

    gone: float
    dropped: float
    recompute: float
    busy: float

    @property
    def total(self) -> float:
        return self.gone + self.dropped + self.recompute


@dataclass(frozen=True)
class Diagnosis:
    """All that is known about why a run went as it did.

    ``blockers`` are the requests to whom most of others' waiting is due, first the worst.
    ``recompute_tokens`` and ``waste.recompute`` (s) are the recompute tax. ``overtakes`` counts
    pairs; ``worst_overtakes`` gives for each overtaken request the one that was served first.
    """

    ledger: dict[int, list[Interval]]
    totals: dict[Kind, float]
    blockers: list[Blocker]
    preemptions: list[Preemption]
    overtakes: int
    worst_overtakes: list[Overtake]
    recompute_tokens: int
    waste: Waste
    verdicts: list[Verdict]
    _pressure: _Pressure = field(repr=False, compare=False)

    def blockers_of(self, request: int) -> list[Blocker]:
        """Who held what ``request`` waited for, first the worst."""
        return self._pressure.on(request)


def block_size(engine: Any) -> int:
    """Tokens per block of an engine's config, which may call it a page."""
    return int(getattr(engine, "block_size", None) or engine.page_size)


def diagnose(record: Record, block_size: int) -> Diagnosis:
    """Work out why a run went as it did; ``block_size`` in tokens."""
    from simkv.verdicts import verdicts

    lives = record.lives.values()
    intervals = ledger(record)
    pressure = _Pressure(record, intervals, block_size)
    overtaken = {life.request.id: found for life, found in _overtakes(lives, record)}
    found = Diagnosis(
        ledger=intervals,
        totals=totals(interval for tiles in intervals.values() for interval in tiles),
        blockers=pressure.on_all(),
        preemptions=_preemptions(record),
        overtakes=sum(count for count, _ in overtaken.values()),
        worst_overtakes=sorted(
            (worst for _, worst in overtaken.values()), key=lambda o: (-o.seconds, o.victim)
        ),
        recompute_tokens=sum(life.recomputed_tokens for life in lives),
        waste=_waste(record),
        verdicts=[],
        _pressure=pressure,
    )
    found.verdicts.extend(verdicts(record, found, block_size))
    return found


def holdings(record: Record, life: Life, block_size: int) -> list[Holding]:
    """The blocks that a request held over time, from the tokens of KV that it had computed.

    Neighbours differ. Prefixes that it shared count in full; blocks that an engine hands out ahead
    of use do not. One that the run leaves with its blocks holds them to the end.
    """
    log = record.steps
    found: list[Holding] = []

    def hold(start: float, blocks: int) -> None:
        """From ``start`` on it has ``blocks``."""
        if found and found[-1].end > start:
            if found[-1].blocks == blocks:
                return
            found[-1] = found[-1]._replace(end=start)
        if blocks:
            found.append(Holding(start, record.end, blocks))

    before = None
    for run in runs(life):
        if before and (at := lost(log, life, before, run)) <= log.start[run.first]:
            hold(max(at, log.end[before.last]), 0)
        for row, blocks in _growth(run.context, run.tokens, run.last - run.first + 1, block_size):
            hold(log.start[run.first + row], blocks)
        before = run
    if before:
        kept = life.outcome in (Outcome.STALLED, Outcome.CUT_OFF)
        left = max(log.end[before.last], min(lost(log, life, before, None), record.end))
        hold(record.end if kept and not life.preempted_at else left, 0)
    return [holding for holding in found if holding.end > holding.start]
