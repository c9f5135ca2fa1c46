"""Numbers of recorded traces that each variant reproduces, shipped as data (``counts.json``)."""

from __future__ import annotations

import json
from pathlib import Path

COUNTS_FILE = Path(__file__).with_name("counts.json")

#: Engine -> variant -> ``{"equal": traces that come out equal, "recorded": traces replayed}``.
RecordingCounts = dict[str, dict[str, dict[str, int]]]


def packaged_counts() -> RecordingCounts:
    """The counts that this version came with."""
    counts: RecordingCounts = json.loads(COUNTS_FILE.read_text(encoding="utf-8"))
    return counts
