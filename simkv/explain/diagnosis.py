"""The diagnosis of a run or of a fleet: wait ledger, blockers, wasted GPU time and verdicts.

   found = diagnose_run(result.record, find_engine_spec(engine).block_size(engine))
   print(found.verdicts[0].text)

``result.diagnosis`` is the diagnosis of a result, computed on first access.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum
from types import MappingProxyType
from typing import Any

from simkv.explain.blame import (
    Overtake,
    Preemption,
    WastedTime,
    compute_wasted_time,
    find_overtakes,
    find_preemptions,
)
from simkv.explain.cache_eviction import find_moved_prefixes
from simkv.explain.computed_runs import tabulate_runs
from simkv.explain.ledger_kinds import Ledger, LedgerKind, LedgerSegment
from simkv.explain.verdicts.cache_thrash import find_cache_thrash
from simkv.explain.verdicts.deadlock_livelock import find_engine_halt
from simkv.explain.verdicts.head_of_line import find_head_of_line_blocking
from simkv.explain.verdicts.priority_inversion import find_priority_inversion
from simkv.explain.verdicts.thrashing import find_thrashing
from simkv.explain.verdicts.unserved_requests import (
    find_lost,
    find_rejected,
    find_starvation,
    find_timed_out,
    find_unservable,
)
from simkv.explain.verdicts.verdict import Verdict
from simkv.explain.wait_attribution import (
    Blocker,
    BlockHolding,
    WaitAttribution,
    find_block_holdings,
)
from simkv.explain.wait_ledger import build_ledger, total_by_kind
from simkv.sim.fleet.disaggregated_fleet import DisaggregatedFleet
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.run_record import RequestRecord, RunRecord

__all__ = [
    "BlockHolding",
    "Blocker",
    "Diagnosis",
    "Overtake",
    "Preemption",
    "Verdict",
    "WastedTime",
    "diagnose_fleet",
    "diagnose_run",
    "find_block_holdings",
    "ledger_rows",
    "preemption_rows",
]

#: Number of blockers in ``Diagnosis.figures``.
MAX_LISTED = 10


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of a run.

    ``ledger`` contains the intervals of each request, with the work done or the reason of the wait.
    ``totals`` is the time (s) of all requests by kind of interval. ``blockers`` are the requests
    that other requests waited for, the longest blocking time first. ``recompute_tokens`` and
    ``waste.recompute`` (s) are the cost of recomputation after preemptions. ``overtakes`` is the
    number of pairs of overtaking and overtaken requests. ``worst_overtakes`` has one entry per
    overtaken request, the longest delay first. ``verdicts`` are the problems found, the most severe
    first. ``pressure`` attributes waiting time to the requests that caused it.
    """

    ledger: dict[int, list[LedgerSegment]]
    totals: dict[LedgerKind, float]
    blockers: list[Blocker]
    preemptions: list[Preemption]
    overtakes: int
    worst_overtakes: list[Overtake]
    recompute_tokens: int
    waste: WastedTime
    verdicts: Sequence[Verdict]
    pressure: WaitAttribution = field(repr=False, compare=False)

    def figures(self) -> dict[str, Any]:
        """Return the metrics as JSON data: the time by kind, the main blockers and the wasted GPU
        time.
        """
        return {
            "time_s": {str(kind): seconds for kind, seconds in self.totals.items()},
            "blockers": [blocker._asdict() for blocker in self.blockers[:MAX_LISTED]],
            "preemptions_by_reason": dict(Counter(taken.why for taken in self.preemptions)),
            "overtakes": self.overtakes,
            "recompute_tax": {"tokens": self.recompute_tokens, "seconds": self.waste.recompute},
            "gpu_s": self.waste._asdict(),
        }

    def blockers_of(self, request: int) -> list[Blocker]:
        """Return the requests that blocked ``request``, the longest blocking time first."""
        return self.pressure.on(request)


def ledger_rows(variant: str, found: Diagnosis) -> list[dict[str, Any]]:
    """Return the rows of ``ledger.csv``: one per interval of a request, with times in seconds.

    ``variant`` is the name of the run.
    """
    return [
        {"variant": variant, "id": i, "kind": str(kind), "start_s": start, "end_s": end}
        for i, intervals in sorted(found.ledger.items())
        for kind, start, end in intervals
    ]


def preemption_rows(variant: str, found: Diagnosis) -> list[dict[str, Any]]:
    """Return the rows of ``preemptions.csv``, one per preemption.

    ``variant`` is the name of the run.
    """
    return [
        {
            "variant": variant,
            "at_s": taken.at,
            "victim": taken.victim,
            "by": taken.by,
            "why": taken.why,
            "tokens": taken.tokens,
        }
        for taken in found.preemptions
    ]


def diagnose_run(
    record: RunRecord, block_size: int, moved: Mapping[int, int] = MappingProxyType({})
) -> Diagnosis:
    """Return the diagnosis of a run. ``block_size`` is in tokens.

    For a replica of a fleet, ``moved`` is the result of ``find_moved_prefixes``.
    """
    table = tabulate_runs(record)
    intervals = build_ledger(record, table=table)
    pressure = WaitAttribution(record, intervals, block_size, table)
    taken = find_preemptions(record)
    overtaken = find_overtakes(record)
    return Diagnosis(
        ledger=intervals,
        totals=total_by_kind(tile for tiles in intervals.values() for tile in tiles),
        blockers=pressure.on_all(intervals),
        preemptions=taken,
        overtakes=sum(overtake.others for overtake in overtaken),
        worst_overtakes=overtaken,
        recompute_tokens=sum(life.recomputed_tokens for life in record.requests.values()),
        waste=compute_wasted_time(record, table),
        verdicts=find_verdicts(record, intervals, pressure, taken, overtaken, block_size, moved),
        pressure=pressure,
    )


def find_verdicts(
    record: RunRecord,
    ledger: Ledger,
    pressure: WaitAttribution,
    preemptions: Sequence[Preemption],
    overtakes: Sequence[Overtake],
    block_size: int,
    moved: Mapping[int, int],
) -> tuple[Verdict, ...]:
    """Return all verdicts on a run, the most severe first."""
    found = (
        find_engine_halt(record, block_size),
        find_unservable(record, block_size),
        find_lost(record),
        find_starvation(record, ledger, pressure, overtakes),
        find_rejected(record),
        find_timed_out(record),
        find_thrashing(record, pressure, preemptions),
        find_cache_thrash(record, block_size, moved),
        find_head_of_line_blocking(record, ledger, block_size),
        find_priority_inversion(record, ledger, preemptions),
    )
    return tuple(verdict for verdict in found if verdict)


@dataclass(frozen=True)
class ReplicaVerdict(Verdict):
    """A verdict on the replica with index ``replica``."""

    replica: int
    found: Verdict

    @property
    def name(self) -> str:  # type: ignore[override]
        """Name of the verdict."""
        return self.found.name

    @property
    def text(self) -> str:
        return f"replica {self.replica}: {self.found.text}"

    def to_json(self) -> dict[str, Any]:
        return {**self.found.to_json(), "text": self.text, "replica": self.replica}


class _Pressures(WaitAttribution):
    """Attribution of waiting time in a fleet. A request waits only for requests on the same
    replica.
    """

    def __init__(self, parts: Sequence[WaitAttribution]) -> None:
        self._parts = parts

    def on(self, request: int) -> list[Blocker]:
        return _summed(part.on(request) for part in self._parts)

    def on_all(self, requests: Iterable[int]) -> list[Blocker]:
        wanted = list(requests)
        return _summed(part.on_all(wanted) for part in self._parts)

    def block_holders(self, at: float) -> dict[int, int]:
        held: dict[int, int] = {}
        for part in self._parts:
            for i, blocks in part.block_holders(at).items():
                held[i] = held.get(i, 0) + blocks
        return held


def diagnose_fleet(fleet: Fleet, record: RunRecord, block_sizes: Sequence[int]) -> Diagnosis:
    """Return the diagnosis of a run of a fleet, a deployment with several replicas.

    ``record`` is the merged record of all replicas. ``block_sizes`` has the KV block size of each
    replica in tokens. Replicas without requests are omitted.
    """
    lifetimes = [lifetime for lifetime in fleet.lifetimes if lifetime.engine.record.requests]
    # Replicas that only prefill receive turns whose answers were decoded elsewhere.
    same_roles = not isinstance(fleet, DisaggregatedFleet)
    found = []
    for lifetime in lifetimes:
        own = lifetime.engine.record
        moved = find_moved_prefixes(record, own) if same_roles else {}
        found.append(diagnose_run(own, block_sizes[lifetime.replica], moved))
    places = [fleet.lifetimes.index(lifetime) for lifetime in lifetimes]
    by_place = dict(zip(places, found, strict=True))
    ledger = {
        i: _one([by_place[place].ledger[i] for place in fleet.sent.get(i, ())], life)
        for i, life in record.requests.items()
    }
    pressure = _Pressures([part.pressure for part in found])
    overtakes = (overtake for part in found for overtake in part.worst_overtakes)
    wastes = [part.waste for part in found]
    return Diagnosis(
        ledger=ledger,
        totals=total_by_kind(tile for tiles in ledger.values() for tile in tiles),
        blockers=_summed(part.blockers for part in found),
        preemptions=sorted((p for part in found for p in part.preemptions), key=lambda p: p.at),
        overtakes=sum(part.overtakes for part in found),
        worst_overtakes=sorted(overtakes, key=lambda o: (-o.seconds, o.victim)),
        recompute_tokens=sum(part.recompute_tokens for part in found),
        waste=WastedTime(*(fsum(values) for values in zip(*wastes, strict=True)))
        if wastes
        else WastedTime(0.0, 0.0, 0.0, 0.0),
        verdicts=tuple(
            ReplicaVerdict(verdict.requests, lifetime.replica, verdict)
            for lifetime, part in zip(lifetimes, found, strict=True)
            for verdict in part.verdicts
        ),
        pressure=pressure,
    )


def _one(ledgers: Sequence[Sequence[LedgerSegment]], life: RequestRecord) -> list[LedgerSegment]:
    """Join the intervals of a request that several replicas served one after the other."""
    tiles: list[LedgerSegment] = []
    since = life.request.arrival
    for ledger in ledgers:
        for tile in ledger:
            if tile.end <= since:
                continue
            tile = tile._replace(start=max(tile.start, since))
            if tiles and tiles[-1].kind is tile.kind:
                tiles[-1] = tiles[-1]._replace(end=tile.end)
            else:
                tiles.append(tile)
        since = tiles[-1].end if tiles else since
    return tiles


def _summed(found: Iterable[Sequence[Blocker]]) -> list[Blocker]:
    by_id: dict[int, list[Blocker]] = {}
    for blockers in found:
        for blocker in blockers:
            by_id.setdefault(blocker.id, []).append(blocker)
    sums = [
        Blocker(i, fsum(b.seconds for b in some), fsum(b.block_seconds for b in some))
        for i, some in by_id.items()
    ]
    return sorted(sums, key=lambda blocker: (-round(blocker.seconds, 9), blocker.id))
