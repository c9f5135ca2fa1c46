"""Why a fleet's run went as it did: the diagnoses of its replicas, put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum
from typing import Any

from simkv.loop.fleet.fleet import Fleet
from simkv.loop.record import Life, Record
from simkv.why.blame import Blocker, Pressure, Waste
from simkv.why.diagnosis import Diagnosis, diagnose
from simkv.why.ledger import Kind, Tile, totals
from simkv.why.verdicts.verdict import Verdict


@dataclass(frozen=True)
class OnReplica(Verdict):
    """A verdict on one replica."""

    replica: int
    found: Verdict

    @property
    def name(self) -> str:  # type: ignore[override]
        """That of the verdict."""
        return self.found.name

    @property
    def text(self) -> str:
        return f"replica {self.replica}: {self.found.text}"

    def to_json(self) -> dict[str, Any]:
        return {**self.found.to_json(), "text": self.text, "replica": self.replica}


class _Pressures(Pressure):
    """The waiting on all replicas: whoever waits, waits for those on the same one."""

    def __init__(self, parts: Sequence[Pressure]) -> None:
        self._parts = parts

    def on(self, request: int) -> list[Blocker]:
        return _summed(part.on(request) for part in self._parts)

    def on_all(self, requests: Iterable[int]) -> list[Blocker]:
        wanted = list(requests)
        return _summed(part.on_all(wanted) for part in self._parts)

    def holders(self, at: float) -> dict[int, int]:
        held: dict[int, int] = {}
        for part in self._parts:
            for i, blocks in part.holders(at).items():
                held[i] = held.get(i, 0) + blocks
        return held


def diagnose_fleet(fleet: Fleet, record: Record, block_sizes: Sequence[int]) -> Diagnosis:
    """Work out why a fleet's run, of which ``record`` is the whole, went as it did.

    ``block_sizes`` are in tokens, by replica. Replicas that nothing was sent to are left out.
    """
    stints = [stint for stint in fleet.stints if stint.engine.record.lives]
    found = [diagnose(stint.engine.record, block_sizes[stint.replica]) for stint in stints]
    places = [fleet.stints.index(stint) for stint in stints]
    by_place = dict(zip(places, found, strict=True))
    ledger = {
        i: _one([by_place[place].ledger[i] for place in fleet.sent.get(i, ())], life)
        for i, life in record.lives.items()
    }
    pressure = _Pressures([part.pressure for part in found])
    overtakes = (overtake for part in found for overtake in part.worst_overtakes)
    wastes = [part.waste for part in found]
    return Diagnosis(
        ledger=ledger,
        totals=_in_order(totals(tile for tiles in ledger.values() for tile in tiles)),
        blockers=_summed(part.blockers for part in found),
        preemptions=sorted((p for part in found for p in part.preemptions), key=lambda p: p.at),
        overtakes=sum(part.overtakes for part in found),
        worst_overtakes=sorted(overtakes, key=lambda o: (-o.seconds, o.victim)),
        recompute_tokens=sum(part.recompute_tokens for part in found),
        waste=Waste(*(fsum(values) for values in zip(*wastes, strict=True)))
        if wastes
        else Waste(0.0, 0.0, 0.0, 0.0),
        verdicts=tuple(
            OnReplica(verdict.requests, stint.replica, verdict)
            for stint, part in zip(stints, found, strict=True)
            for verdict in part.verdicts
        ),
        pressure=pressure,
    )


def _one(ledgers: Sequence[Sequence[Tile]], life: Life) -> list[Tile]:
    """A request's intervals on one replica after the other; each ledger begins at its arrival."""
    tiles: list[Tile] = []
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


def _in_order(seconds: Mapping[Kind, float]) -> dict[Kind, float]:
    return {kind: seconds[kind] for kind in Kind if kind in seconds}
