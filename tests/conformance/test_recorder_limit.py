"""Tests of recordings that stopped at the recorder's limit while the simulation has proved a
cycle.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from simkv.conformance.decision_replay import check_trace, compare, replay_decisions
from simkv.conformance.decision_trace import DecisionTrace, read_trace
from simkv.schedulers.engine_registry import ENGINES

LIMIT = {"truncated": True, "why": "limit"}
#: Two requests whose KV fits into the cache only one at a time: each preempts the other forever.
HEADER = {
    "format": 1,
    "engine": "fastdeploy",
    "variant": "preempt-sync-sentinel",
    "case": "cycle",
    "config": {
        "block_size": 8,
        "max_num_seqs": 8,
        "enc_dec_block_num": 2,
        "prealloc_dec_block_slot_num_threshold": 9,
        "max_num_batched_tokens": 16,
        "num_blocks": 14,
        "admission_threshold": "whole remaining need",
        "reserve_init": 1,
        "reserve_decay": 1.0,
        "reserve_min": 0,
    },
    "requests": [
        {"id": 0, "arrival_step": 0, "prompt_tokens": 66, "output_tokens": 55, "max_tokens": 60},
        {"id": 1, "arrival_step": 7, "prompt_tokens": 78, "output_tokens": 36, "max_tokens": 36},
    ],
    "delays": {
        "tp_lag": 4,
        "messages_processed_between_schedule_and_put": 0,
        "idle_worker_sends_ack": True,
    },
}
#: Number of ticks without a token after which the simulation has proved a cycle, and number of
#: ticks of the recording.
PROVED, TICKS = 1522, 2200


@pytest.fixture(scope="module")
def lines() -> list[dict[str, Any]]:
    return list(replay_decisions(ENGINES["fastdeploy"], HEADER, TICKS - 1))


def written(path: Path, lines: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in [HEADER, *lines, LIMIT]))
    return path


def test_a_cycle_until_the_limit_is_equal(tmp_path: Path, lines: list[Any]) -> None:
    *steps, end = lines
    assert (len(steps), end["proved"]) == (TICKS, PROVED)
    result = check_trace(read_trace(written(tmp_path / "t.jsonl", steps)))
    assert (result.steps, result.difference) == (TICKS, None)


def test_a_recording_shorter_than_the_proof_differs(tmp_path: Path, lines: list[Any]) -> None:
    found = check_trace(read_trace(written(tmp_path / "t.jsonl", lines[: PROVED - 5]))).difference
    assert found
    assert (found.step, found.recorded) == ("end", {"ending": "limit"})


def test_a_recording_that_leaves_the_cycle_differs(tmp_path: Path, lines: list[Any]) -> None:
    steps = json.loads(json.dumps(lines[:-1]))
    steps[PROVED + 300]["free_blocks"] += 1
    found = check_trace(read_trace(written(tmp_path / "t.jsonl", steps))).difference
    assert found
    assert (found.step, list(found.recorded)) == (str(PROVED + 300), ["free_blocks"])


def test_the_rest_of_the_recording_must_repeat() -> None:
    """The recording must repeat even if every line equals the simulated line."""

    def compared(steps: list[Any], proved: int | None) -> bool:
        end = {"truncated": True, "ending": "stall", "why": "", "proved": proved}
        ours: Iterator[Any] = iter([*steps, end])
        return compare(DecisionTrace("t", {}, steps, LIMIT), ours)[1] is None

    turn = [{"step": i, "x": i % 3} for i in range(12)]
    assert compared(turn, 5)
    assert compared([{"step": 9, "x": 7}, *turn], 5)
    assert not compared([*turn, {"step": 12, "x": 1}], 5)
    assert not compared(turn, 1)  # before the end of a cycle
    assert not compared(turn, None)
    assert not compared(turn, 12)


def test_times_are_relative_to_their_line() -> None:
    """Lines must be equal in all messages of the previous tick."""

    def line(tick: int, sent: int) -> dict[str, Any]:
        events = [["ack", 3, "true", f"msg{sent}"], ["finished", 0]]
        return {"tick": tick, "delivered": [[sent, "pre"]], "events": events}

    end = {"truncated": True, "ending": "stall", "why": "", "proved": 2}
    for sent, equal in ((lambda tick: tick - 1, True), (lambda tick: 0, False)):
        steps = [line(tick, sent(tick)) for tick in range(5)]
        found = compare(DecisionTrace("t", {}, steps, LIMIT), iter([*steps, end]))[1]
        assert (found is None) == equal
