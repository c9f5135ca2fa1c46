"""Computation for requests that have already ended, from records made by hand."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

from simkv.core.request import Request
from simkv.explain.ledger_kinds import LedgerKind, LedgerSegment
from simkv.explain.wait_ledger import find_wasted_segments
from simkv.sim.run_record import RequestRecord
from simkv.sim.segments import DECODE, EMITS, PREFILL


def wasted(ended_at: float | None, end: float = 9.0) -> list[LedgerSegment]:
    """Return the wasted segments of a request that ended at ``ended_at`` (s), in a run to ``end``.

    Steps of one second: the request prefills in the steps from 0 to 3 s and, after a pause, from 4
    to 6 s. It decodes from 6 to 9 s.
    """
    life = RequestRecord(
        Request(0, 40, 9),
        ended_at=ended_at,
        segment_data=array("i", (PREFILL + EMITS, 0, 4, DECODE + EMITS, 5, 7)),
        chunk_rows=array("i", [n for row in range(5) for n in (row, 8, 8 * row)]),
    )
    starts = [0.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    steps = SimpleNamespace(start=starts, end=[start + 1.0 for start in starts])
    record: Any = SimpleNamespace(steps=steps, end=end)
    return find_wasted_segments(record, life)


def test_steps_after_the_end_are_merged_between_pauses_by_kind() -> None:
    assert wasted(0.5) == [
        LedgerSegment(LedgerKind.PREFILL, 0.5, 3.0),
        LedgerSegment(LedgerKind.PREFILL, 4.0, 6.0),
        LedgerSegment(LedgerKind.DECODE, 6.0, 9.0),
    ]


def test_only_time_after_the_end_is_wasted() -> None:
    assert wasted(6.0) == [LedgerSegment(LedgerKind.DECODE, 6.0, 9.0)]
    assert wasted(8.25, end=8.5) == [LedgerSegment(LedgerKind.DECODE, 8.25, 8.5)]
    assert wasted(9.0) == wasted(None) == []
