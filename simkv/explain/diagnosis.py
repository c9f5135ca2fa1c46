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

from simkv.explain.blame import (
    Blocker,
    BlockHolding,
    Overtake,
    Preemption,
    WaitAttribution,
    WastedTime,
    compute_wasted_time,
    find_block_holdings,
    find_overtakes,
    find_preemptions,
)
from simkv.explain.verdicts.all_verdicts import find_verdicts
from simkv.explain.verdicts.verdict import Verdict
from simkv.explain.wait_ledger import (
    LedgerKind,
    LedgerSegment,
    build_ledger,
    total_by_kind,
)
from simkv.sim.run_record import RunRecord

__all__ = [
    "BlockHolding",
    "Blocker",
    "Diagnosis",
    "Overtake",
    "Preemption",
    "Verdict",
    "WastedTime",
    "diagnose_run",
    "find_block_holdings",
    "ledger_rows",
    "preemption_rows",
]

#: Blockers that the figures name.
MAX_LISTED = 10


@dataclass(frozen=True)
class Diagnosis:
    """All that is known about why a run went as it did.

    ``total_by_kind`` are the seconds of all requests by kind. ``blockers`` are the requests to whom
    others' waiting is due, first the worst. ``recompute_tokens`` and
    ``compute_wasted_time.recompute`` (s) are the recompute tax. ``find_overtakes`` counts pairs;
    ``worst_overtakes`` has one entry for each overtaken request, first the one that looked on for
    longest. ``find_verdicts`` come gravest first.
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
        """The sums of it as plain JSON: seconds by kind, blockers, the recompute tax, waste."""
        return {
            "time_s": {str(kind): seconds for kind, seconds in self.totals.items()},
            "blockers": [blocker._asdict() for blocker in self.blockers[:MAX_LISTED]],
            "preemptions_by_reason": dict(Counter(taken.why for taken in self.preemptions)),
            "overtakes": self.overtakes,
            "recompute_tax": {"tokens": self.recompute_tokens, "seconds": self.waste.recompute},
            "gpu_s": self.waste._asdict(),
        }

    def blockers_of(self, request: int) -> list[Blocker]:
        """Who held what ``request`` waited for, first the worst."""
        return self.pressure.on(request)


def ledger_rows(variant: str, found: Diagnosis) -> list[dict[str, Any]]:
    """One row per interval of every request's life, as in ``build_ledger.csv``; times in
    seconds."""
    return [
        {"variant": variant, "id": i, "kind": str(kind), "start_s": start, "end_s": end}
        for i, intervals in sorted(found.ledger.items())
        for kind, start, end in intervals
    ]


def preemption_rows(variant: str, found: Diagnosis) -> list[dict[str, Any]]:
    """One row per preemption, as in ``find_preemptions.csv``: whose KV was taken when, for whom,
    why."""
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


def diagnose_run(record: RunRecord, block_size: int) -> Diagnosis:
    """Work out why a run went as it did; ``block_size`` in tokens."""
    intervals = build_ledger(record)
    pressure = WaitAttribution(record, intervals, block_size)
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
        waste=compute_wasted_time(record),
        verdicts=find_verdicts(record, intervals, pressure, taken, overtaken, block_size),
        pressure=pressure,
    )
