"""Why a run went as it did: the ledger, who blocked whom, what was wasted, and the verdicts.

    found = diagnose(result.record, spec_of(engine).block_size(engine))
    print(found.verdicts[0].text)

or ``result.diagnosis``, which is the same, worked out when first asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from simkv.loop.record import Record
from simkv.why.blame import (
    Blocker,
    Holding,
    Overtake,
    Preemption,
    Pressure,
    Waste,
    holdings,
    overtakes,
    preemptions,
    waste,
)
from simkv.why.ledger import Kind, Tile, ledger, totals
from simkv.why.verdicts.find import verdicts
from simkv.why.verdicts.verdict import Verdict

__all__ = [
    "Blocker",
    "Diagnosis",
    "Holding",
    "Overtake",
    "Preemption",
    "Verdict",
    "Waste",
    "diagnose",
    "holdings",
    "ledger_rows",
    "preemption_rows",
]

#: Blockers that the figures name.
MOST = 10


@dataclass(frozen=True)
class Diagnosis:
    """All that is known about why a run went as it did.

    ``totals`` are the seconds of all requests by kind. ``blockers`` are the requests to whom
    others' waiting is due, first the worst. ``recompute_tokens`` and ``waste.recompute`` (s) are
    the recompute tax. ``overtakes`` counts pairs; ``worst_overtakes`` has one entry for each
    overtaken request, first the one that looked on for longest. ``verdicts`` come gravest first.
    """

    ledger: dict[int, list[Tile]]
    totals: dict[Kind, float]
    blockers: list[Blocker]
    preemptions: list[Preemption]
    overtakes: int
    worst_overtakes: list[Overtake]
    recompute_tokens: int
    waste: Waste
    verdicts: Sequence[Verdict]
    pressure: Pressure = field(repr=False, compare=False)

    def figures(self) -> dict[str, Any]:
        """The sums of it as plain JSON: seconds by kind, blockers, the recompute tax, waste."""
        return {
            "time_s": {str(kind): seconds for kind, seconds in self.totals.items()},
            "blockers": [blocker._asdict() for blocker in self.blockers[:MOST]],
            "preemptions_by_reason": dict(Counter(taken.why for taken in self.preemptions)),
            "overtakes": self.overtakes,
            "recompute_tax": {"tokens": self.recompute_tokens, "seconds": self.waste.recompute},
            "gpu_s": self.waste._asdict(),
        }

    def blockers_of(self, request: int) -> list[Blocker]:
        """Who held what ``request`` waited for, first the worst."""
        return self.pressure.on(request)


def ledger_rows(variant: str, found: Diagnosis) -> list[dict[str, Any]]:
    """One row per interval of every request's life, as in ``ledger.csv``; times in seconds."""
    return [
        {"variant": variant, "id": i, "kind": str(kind), "start_s": start, "end_s": end}
        for i, intervals in sorted(found.ledger.items())
        for kind, start, end in intervals
    ]


def preemption_rows(variant: str, found: Diagnosis) -> list[dict[str, Any]]:
    """One row per preemption, as in ``preemptions.csv``: whose KV was taken when, for whom, why."""
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


def diagnose(record: Record, block_size: int) -> Diagnosis:
    """Work out why a run went as it did; ``block_size`` in tokens."""
    intervals = ledger(record)
    pressure = Pressure(record, intervals, block_size)
    taken = preemptions(record)
    overtaken = overtakes(record)
    return Diagnosis(
        ledger=intervals,
        totals=totals(tile for tiles in intervals.values() for tile in tiles),
        blockers=pressure.on_all(intervals),
        preemptions=taken,
        overtakes=sum(overtake.others for overtake in overtaken),
        worst_overtakes=overtaken,
        recompute_tokens=sum(life.recomputed_tokens for life in record.lives.values()),
        waste=waste(record),
        verdicts=verdicts(record, intervals, pressure, taken, overtaken, block_size),
        pressure=pressure,
    )
