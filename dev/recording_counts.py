"""Count the recorded traces that each variant reproduces, by replaying them.

    python -m dev.recording_counts TRACES... > simkv/conformance/counts.json

The traces are all available recordings, and those in tests/conformance/traces of versions that are
recorded nowhere else.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from simkv.conformance.decision_replay import Conformance, check_trace
from simkv.conformance.recording_counts import RecordingCounts
from simkv.schedulers.engine_registry import ENGINES


def variant_of(engine: str, recorded: str) -> str:
    """The variant whose scheduler replays traces of this name.

    Some are named by how the engine was set up (``v1-async``, ``lpm``, ``seed_wtinf``); where that
    says nothing of the variant, it is the first, which is the recorded release.
    """
    spec = ENGINES[engine]
    try:
        name = spec.naming.variant_of(recorded.removesuffix("_wtinf"))
    except ValueError:
        name = recorded
    return name if name in spec.variants else next(iter(spec.variants))


def count(results: Iterable[Conformance]) -> RecordingCounts:
    """Count replayed traces by the variant that replayed them; others are left out."""
    counts: RecordingCounts = {engine: {} for engine in ENGINES}
    for result in results:
        variant = variant_of(result.engine, result.variant)
        entry = counts[result.engine].setdefault(variant, {"equal": 0, "recorded": 0})
        entry["equal"] += result.difference is None
        entry["recorded"] += 1
    return {engine: dict(sorted(found.items())) for engine, found in counts.items()}


if __name__ == "__main__":
    print(json.dumps(count(check_trace(Path(path)) for path in sys.argv[1:]), indent=1))
