"""Tests of the comparison of a replay with a recording: every field of every line, and the
ending.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.conformance.decision_replay import ENDED, check_trace, compare
from simkv.conformance.decision_trace import DecisionTrace, TraceError, read_trace
from simkv.conformance.per_decision_replay import RemainingOutput, StallDetector, arrivals_by_step
from simkv.core.scheduler_protocol import Batch, Completion
from tests.conformance.recordings import FILES, Committed, committed

A, B = {"step": 0, "x": 1}, {"step": 1, "x": 2}
PANIC = {"truncated": True, "why": "engine panic"}
PANICKED = {"truncated": True, "ending": "panic", "why": "panic: test"}
STALLED = {"truncated": True, "ending": "stall", "why": "nothing can run"}


def trace(*steps: Any, truncated: Any = None) -> DecisionTrace:
    return DecisionTrace("t", {}, list(steps), truncated)


def difference(recorded: DecisionTrace, *simulated: Any) -> Any:
    _, found = compare(recorded, iter(simulated))
    return found and (found.step, found.recorded, found.simulated)


def test_equal_lines_are_equal_and_counted() -> None:
    assert compare(trace(A, B), iter([A, B])) == (2, None)


def test_additional_simulated_fields_are_ignored() -> None:
    assert difference(trace(A), {**A, "extra": 1}) is None


def test_the_first_mismatch_has_the_differing_fields_of_both_sides() -> None:
    assert difference(trace(A, B), A, {"step": 1, "x": 3}) == ("1", {"x": 2}, {"x": 3})
    assert difference(trace(A, B), A, {"step": 1}) == ("1", {"x": 2}, {"x": None})
    assert compare(trace(A, B), iter([A, {}]))[0] == 1


def test_a_missing_field_differs_from_none() -> None:
    assert difference(trace({"step": 0, "x": None}), {"step": 0}) is not None


def test_a_shorter_replay_differs() -> None:
    assert difference(trace(A, B), A) == ("1", B, {"step": None, "x": None})


def test_a_longer_replay_differs() -> None:
    assert difference(trace(A), A, B) == ("end", {"ending": ENDED}, B)


def test_endings_of_the_same_kind_are_equal() -> None:
    stuck = trace(A, truncated=PANIC)
    assert difference(stuck, A, PANICKED) is None
    assert difference(stuck, A, B, PANICKED) is None  # the number of steps may differ
    assert difference(stuck, A, STALLED) == ("end", {"ending": "panic"}, STALLED)
    assert difference(stuck, A) == ("end", {"ending": "panic"}, {"ending": ENDED})
    assert difference(trace(A), A, PANICKED) == ("end", {"ending": ENDED}, PANICKED)


# Files


def one_per_engine() -> list[Committed]:
    files = {path.parent.name: path.name.removesuffix(".jsonl.gz") for path in FILES}
    return [committed(engine, release)[-1] for engine, release in files.items()]


@pytest.mark.parametrize("source", one_per_engine(), ids=lambda source: source.engine)
def test_every_recorded_field_is_compared(source: Committed, tmp_path: Path) -> None:
    lines = source.lines()
    middle = len(lines) // 2
    for field in lines[middle]:
        path = source.write(
            tmp_path / "t.jsonl", lambda x, f=field: x[middle].update({f: "changed"})
        )
        found = check_trace(read_trace(path)).difference
        assert found is not None
        assert found.recorded == {field: "changed"}


@pytest.mark.parametrize("source", one_per_engine(), ids=lambda source: source.engine)
def test_a_missing_or_additional_line_differs(source: Committed, tmp_path: Path) -> None:
    for change in (lambda x: x.pop(), lambda x: x.append({**x[-1], "step": -1, "tick": -1})):
        assert check_trace(read_trace(source.write(tmp_path / "t.jsonl", change))).difference


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"engine": "vllmm"},
            "engine: unknown engine 'vllmm'; expected one of fastdeploy, mistral",
        ),
        ({"variant": "nope"}, "variant: unknown variant 'nope'; expected one of seed, bucketed"),
        ({"config": {}}, "header: cannot be replayed"),
        ({"requests": [5]}, "header: cannot be replayed"),
        ({"requests": [{"id": 0}]}, "header: cannot be replayed"),
    ],
)
def test_rejects_headers_that_cannot_be_replayed(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    source = committed("mistralrs", "bucketed")[0]
    path = source.write(tmp_path / "t.jsonl", lambda lines: lines[0].update(change))
    with pytest.raises(TraceError) as raised:
        check_trace(read_trace(path))
    assert str(raised.value).startswith(f"{path}:1: {message}")


# Lockstep


def test_arrivals_keep_the_order_of_the_header() -> None:
    rows = [{"id": i, "arrival_step": step} for i, step in enumerate([2, 0, 2])]
    assert arrivals_by_step(rows) == {2: [rows[0], rows[2]], 0: [rows[1]]}


def test_a_request_ends_with_its_last_token() -> None:
    emitted = RemainingOutput([{"id": 0, "output_tokens": 2}, {"id": 1, "output_tokens": 1}])
    batch = Batch(emits=[0, 1])
    assert emitted.ended(batch) == {1}
    emitted.count(batch, Completion([0, 1], [1]))
    assert emitted.ended(Batch(emits=[0])) == {0}


def test_progress_resets_the_stall_detector() -> None:
    watch = StallDetector()
    assert not watch.repeats("a")
    assert not watch.repeats("b")
    assert watch.repeats("a")
    watch.progress()
    assert not watch.repeats("a")
