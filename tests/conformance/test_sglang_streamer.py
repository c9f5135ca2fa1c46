"""Tests that simkv streams tokens in the same messages as SGLang (``record_sglang_streamer``)."""

import json
from pathlib import Path

import numpy as np
import pytest

from simkv.core.request import Request
from simkv.metrics.run_metrics import message_rows
from simkv.sim.run_record import RequestRecord
from simkv.sim.segments import RowSegment, pack_segments

RECORDED = json.loads((Path(__file__).parent / "streamer.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("interval", "tokens", "sent"), RECORDED)
def test_messages_are_sent_after_the_recorded_tokens(
    interval: int, tokens: int, sent: list[int]
) -> None:
    """The first token is prefilled in row 7; decodes pause for the prefill of another request."""
    life = RequestRecord(Request(0, 4, tokens), tokens=tokens, tokens_per_chunk=interval)
    segments = [RowSegment("prefill", 7, 7, True), RowSegment("decode", 9, 7 + tokens, True)]
    life.segment_data = pack_segments(segments)
    row_of = np.append([7], np.arange(9, 8 + tokens))
    assert message_rows(life).tolist() == [row_of[count - 1] for count in sent]
