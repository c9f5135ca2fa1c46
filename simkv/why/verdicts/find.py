"""All verdicts on a run."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.loop.record import Record
from simkv.why.blame import Overtake, Preemption, Pressure
from simkv.why.ledger import Ledger
from simkv.why.verdicts.head_of_line import head_of_line
from simkv.why.verdicts.priority import priority_inversion
from simkv.why.verdicts.starvation import starvation
from simkv.why.verdicts.stops import standstill
from simkv.why.verdicts.thrash import thrash
from simkv.why.verdicts.timed_out import timed_out
from simkv.why.verdicts.turned_away import forgotten, rejected, unservable
from simkv.why.verdicts.verdict import Verdict


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
        standstill(record, block_size),
        unservable(record, block_size),
        forgotten(record),
        starvation(record, ledger, pressure, overtakes),
        rejected(record),
        timed_out(record),
        thrash(record, pressure, preemptions),
        head_of_line(record, ledger, block_size),
        priority_inversion(record, ledger, preemptions),
    )
    return tuple(verdict for verdict in found if verdict)
