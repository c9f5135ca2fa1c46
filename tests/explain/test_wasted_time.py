"""Tests of wasted GPU time in a record made by hand."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from simkv.core.request import Request
from simkv.explain.blame import compute_wasted_time
from simkv.explain.computed_runs import tabulate_runs
from simkv.sim.run_record import Interruptions, RequestRecord
from simkv.sim.segments import DECODE, EMITS, PREFILL


class Steps(SimpleNamespace):
    """Columns of the step log that the computation needs."""

    def __len__(self) -> int:
        return len(self.start)


# 6 of 8 tokens of a step of 2 s; the whole second step; 3 of 4 tokens of a step of 4 s, as
# recomputation or because request 1 has ended.
@pytest.mark.parametrize(
    ("ended_at", "wasted"),
    [
        (8.0, (1.5, 1.0, 3.0, 7.0)),
        (3.5, (4.5, 1.0, 0.0, 7.0)),
        (4.0, (4.5, 1.0, 0.0, 7.0)),
    ],
)
def test_wasted_time_is_divided_by_tokens(ended_at: float, wasted: tuple[float, ...]) -> None:
    """Request 0 ends before the first step; 6 of the 8 tokens of this step are for request 0.

    Request 1 decodes in the second step; the token of this step is dropped. In the third step,
    request 1 recomputes both tokens, and request 2 computes two tokens.
    """
    prefill = PREFILL + EMITS
    lives = [
        RequestRecord(
            Request(0, 6, 9),
            ended_at=0.5,
            segment_data=array("i", (prefill, 0, 0)),
            chunk_rows=array("i", (0, 6, 0)),
        ),
        RequestRecord(
            Request(1, 2, 9),
            ended_at=ended_at,
            segment_data=array("i", (prefill, 0, 0, DECODE + EMITS, 1, 1, prefill, 2, 2)),
            chunk_rows=array("i", (0, 2, 0, 1, 1, 2, 2, 3, 0)),
            interruptions=Interruptions(dropped_rows=[1]),
        ),
        RequestRecord(
            Request(2, 1, 9),
            ended_at=8.0,
            segment_data=array("i", (prefill, 2, 2)),
            chunk_rows=array("i", (2, 1, 0)),
        ),
    ]
    steps = Steps(
        start=[1.0, 3.0, 4.0], end=[3.0, 4.0, 8.0], prefill_tokens=[8, 0, 4], decode_seqs=[0, 1, 0]
    )
    record: Any = SimpleNamespace(requests=dict(enumerate(lives)), steps=steps)
    found = compute_wasted_time(record, tabulate_runs(record))
    assert tuple(found) == pytest.approx(wasted)
