"""Tests of wait ledgers of records made by hand: gaps between runs, and computation after the
end.
"""

from __future__ import annotations

from array import array
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.explain import wait_ledger
from simkv.explain.computed_runs import tabulate_runs
from simkv.explain.ledger_kinds import LedgerKind, LedgerSegment
from simkv.explain.wait_ledger import build_ledger, find_wasted_segments
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.sim.run_record import RequestRecord
from simkv.sim.segments import DECODE, EMITS, PREFILL


def wasted(ended_at: float | None, end: float = 9.0) -> list[LedgerSegment]:
    """Return the wasted segments of a request that ended at ``ended_at`` (s), in a simulation until
    ``end`` (s).

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


def test_gap_without_a_reason_is_held_up_in_steps_with_a_prefill() -> None:
    """A request decodes in the first and the last of eight steps of one second."""
    life = RequestRecord(
        Request(0, 8, 2),
        outcome=Outcome.FINISHED,
        ended_at=8.0,
        segment_data=array("i", (DECODE + EMITS, 0, 0, DECODE + EMITS, 7, 7)),
    )
    starts = [float(row) for row in range(8)]
    steps = SimpleNamespace(
        start=starts,
        end=[start + 1.0 for start in starts],
        decided=starts,
        prefill_seqs=[0, 2, 1, 0, 0, 1, 0, 0],
    )
    record: Any = SimpleNamespace(
        steps=steps, requests={0: life}, queue_heads=[], prefix_cache=False, delivered=None,
        engine_halt=None, end=8.0,
    )  # fmt: skip
    assert build_ledger(record)[0] == [
        LedgerSegment(LedgerKind.DECODE, 0.0, 1.0),
        LedgerSegment(LedgerKind.HELD_UP, 1.0, 3.0),
        LedgerSegment(LedgerKind.IN_FLIGHT, 3.0, 5.0),
        LedgerSegment(LedgerKind.HELD_UP, 5.0, 6.0),
        LedgerSegment(LedgerKind.IN_FLIGHT, 6.0, 7.0),
        LedgerSegment(LedgerKind.DECODE, 7.0, 8.0),
    ]


def test_ledgers_of_requests_that_only_queue_are_computed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    contents = {
        "name": "burst",
        "workload": {"burst": {"num_prompts": 20, "prompt_tokens": 16, "output_tokens": 8}},
        "engine": {"name": "vllm", "max_num_seqs": 4, "max_model_len": 64},
        "profile": "unit-step",
    }
    record = run_scenario(Scenario.model_validate(contents), Path()).record
    alone: list[RequestRecord] = []
    tile = wait_ledger._tile
    monkeypatch.setattr(
        wait_ledger, "_tile", lambda life, spans: (alone.append(life), tile(life, spans))[1]
    )
    ledger = build_ledger(record, table=tabulate_runs(record))
    assert len(alone) < 5
    assert build_ledger(record) == ledger
    assert len(alone) >= 20
