"""Count the recorded traces that each variant reproduces, by replaying them.

python -m dev.recording_counts PATHS... > simkv/conformance/counts.json

PATHS are all available recordings. For versions without other recordings, they include the files of
tests/conformance/traces.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from simkv.conformance.decision_replay import Conformance, check_trace
from simkv.conformance.decision_trace import read_traces
from simkv.conformance.recording_counts import RecordingCounts
from simkv.schedulers.engine_registry import ENGINES


def variant_of(engine: str, recorded: str) -> str:
    """Return the variant whose scheduler replays traces with this variant name.

    Some traces are named after the engine's configuration (``v1-async``, ``lpm``, ``seed_wtinf``).
    If the name identifies no variant, the result is the engine's first variant, which is the
    recorded release.
    """
    spec = ENGINES[engine]
    try:
        name = spec.naming.variant_of(recorded.removesuffix("_wtinf"))
    except ValueError:
        name = recorded
    return name if name in spec.variants else next(iter(spec.variants))


def count(results: Iterable[Conformance]) -> RecordingCounts:
    """Count replayed and equal traces by engine and variant."""
    counts: RecordingCounts = {engine: {} for engine in ENGINES}
    for result in results:
        variant = variant_of(result.engine, result.variant)
        entry = counts[result.engine].setdefault(variant, {"equal": 0, "recorded": 0})
        entry["equal"] += result.difference is None
        entry["recorded"] += 1
    return {engine: dict(sorted(found.items())) for engine, found in counts.items()}


if __name__ == "__main__":
    traces = (trace for path in sys.argv[1:] for trace in read_traces(Path(path)))
    print(json.dumps(count(map(check_trace, traces)), indent=1))
