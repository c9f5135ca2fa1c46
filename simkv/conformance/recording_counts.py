"""Number of recordings that simkv reproduces for each variant, from the packaged file
``counts.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

COUNTS_FILE = Path(__file__).with_name("counts.json")

#: Mapping from engine and variant to ``{"equal": traces reproduced exactly, "recorded": traces
#: replayed}``.
RecordingCounts = dict[str, dict[str, dict[str, int]]]


def packaged_counts() -> RecordingCounts:
    """Return two numbers by engine and variant: the recordings that simkv reproduces, and all
    replayed recordings.
    """
    counts: RecordingCounts = json.loads(COUNTS_FILE.read_text(encoding="utf-8"))
    return counts
