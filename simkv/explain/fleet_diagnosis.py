"""Diagnosis of a run with several replicas, combined from the diagnoses of the replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from simkv.explain.blame import Blocker, WaitAttribution, WastedTime
from simkv.explain.diagnosis import Diagnosis, diagnose_run
from simkv.explain.verdicts.verdict import Verdict
from simkv.explain.wait_ledger import LedgerKind, LedgerSegment, total_by_kind
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.run_record import RequestRecord, RunRecord


@dataclass(frozen=True)
class ReplicaVerdict(Verdict):
    """Verdict ``found`` on the replica with index ``replica``."""

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
    """Attribution of waiting in a fleet: a request waits only for requests on the same replica."""

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
    """Diagnose the run of a fleet, a deployment with several replicas.

    ``record`` is the merged record of all replicas. ``block_sizes`` has the KV block size of each
    replica, in tokens. Replicas without requests are omitted.
    """
    lifetimes = [lifetime for lifetime in fleet.lifetimes if lifetime.engine.record.requests]
    found = [
        diagnose_run(lifetime.engine.record, block_sizes[lifetime.replica])
        for lifetime in lifetimes
    ]
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
        totals=_in_order(total_by_kind(tile for tiles in ledger.values() for tile in tiles)),
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
    """Join the segments of a request on successive replicas.

    The ledger of every replica begins at the arrival of the request, so overlaps are removed.
    """
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


def _in_order(seconds: Mapping[LedgerKind, float]) -> dict[LedgerKind, float]:
    return {kind: seconds[kind] for kind in LedgerKind if kind in seconds}
