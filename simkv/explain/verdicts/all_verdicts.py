"""Collection of the verdicts on a run."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.explain.blame import Overtake, Preemption, WaitAttribution
from simkv.explain.verdicts.deadlock_livelock import find_engine_halt
from simkv.explain.verdicts.head_of_line import find_head_of_line_blocking
from simkv.explain.verdicts.priority_inversion import find_priority_inversion
from simkv.explain.verdicts.starvation import find_starvation
from simkv.explain.verdicts.thrashing import find_thrashing
from simkv.explain.verdicts.timed_out_requests import find_timed_out
from simkv.explain.verdicts.unserved_requests import find_lost, find_rejected, find_unservable
from simkv.explain.verdicts.verdict import Verdict
from simkv.explain.wait_ledger import Ledger
from simkv.sim.run_record import RunRecord


def find_verdicts(
    record: RunRecord,
    ledger: Ledger,
    pressure: WaitAttribution,
    preemptions: Sequence[Preemption],
    overtakes: Sequence[Overtake],
    block_size: int,
) -> tuple[Verdict, ...]:
    """Return all verdicts on a run, most severe first; empty if no problem was found."""
    found = (
        find_engine_halt(record, block_size),
        find_unservable(record, block_size),
        find_lost(record),
        find_starvation(record, ledger, pressure, overtakes),
        find_rejected(record),
        find_timed_out(record),
        find_thrashing(record, pressure, preemptions),
        find_head_of_line_blocking(record, ledger, block_size),
        find_priority_inversion(record, ledger, preemptions),
    )
    return tuple(verdict for verdict in found if verdict)
