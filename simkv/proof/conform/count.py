"""Numbers of recorded traces that each variant reproduces, shipped as data (``counts.json``)."""

from __future__ import annotations

import json
from pathlib import Path

COUNTS = Path(__file__).with_name("counts.json")

#: Engine -> variant -> ``{"equal": traces that come out equal, "recorded": traces replayed}``.
Counts = dict[str, dict[str, dict[str, int]]]


def shipped() -> Counts:
    """The counts that this version came with."""
    counts: Counts = json.loads(COUNTS.read_text(encoding="utf-8"))
    return counts
