"""Tests that pauses of streams have reasons, and that tokens have the engine's order."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from simkv.metrics.scenario_runner import run_file
from tests.serve.running_server import Stream, scenario, serving

ENDLESS = {"max_tokens": 400, "ignore_eos": True}


def test_pause_of_preempted_stream_matches_explanation(tmp_path: Path) -> None:
    """A cache of 16 blocks has room for one reply of 150 tokens and half of another reply.

    Both requests arrive in one call. A token is never early; on a busy machine, it may be late.
    """
    body = {"prompt": [[1] * 16, [2] * 16], "max_tokens": 150, "request_id": "both"}
    chunks: list[list[float]] = [[], []]
    with serving(tmp_path, scenario(17, 256)) as served:
        sent = time.monotonic()
        stream = served.stream(body)
        while chunk := stream.chunk():
            chunks[chunk["choices"][0]["index"]].append(time.monotonic() - sent)
        assert [len(came) for came in chunks] == [150, 150]
        found = served.get("/explain/both?format=json").json()["requests"]
        (victim,) = [each for each in found if "preempted" in str(each["intervals"])]
        number = victim["request"]
        assert [each["request"] for each in victim["blockers"]] == [1 - number]
        tiles = victim["intervals"]
        began = [tile["what"] for tile in tiles].index("preempted")
        assert tiles[began + 1]["what"] == "recompute"
        pause = sum(tile["seconds"] for tile in tiles[began : began + 2])
        assert pause > 0.3
        before = sum(tile["seconds"] for tile in tiles[:began])
        decoding = sum(tile["seconds"] for tile in tiles[:began] if tile["what"] == "decode")
        emitted = 1 + round(decoding / 0.01)
        assert chunks[number][emitted - 1] >= before - 0.001
        assert chunks[number][emitted] >= before + pause - 0.001
        text = served.get("/explain/both").text
        assert f"Main blockers: request {1 - number}" in text


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_token_order_matches_record(tmp_path: Path, policy: str) -> None:
    """Another policy serves the same arrivals in another order, in the server as in a
    simulation.
    """
    text = scenario(40, 512).replace("max_num_seqs: 64", f"max_num_seqs: 1\n  policy: {policy}")
    urgency = [0, 5, 1] if policy == "priority" else [0, 0, 0]
    with serving(tmp_path, text, "--record", "came.csv", "--speed", "0.1") as served:
        streams = []
        for number, priority in enumerate(urgency):
            body = {"prompt": [number] * 10, "priority": priority, **ENDLESS}
            streams.append(served.stream(body))
            served.wait_for_load(number + 1)
        left, order = list(streams), []
        while left:  # one request is served at a time, until its client disconnects
            served_now = Stream.first(left)
            order.append(streams.index(served_now))
            left.remove(served_now)
            served_now.close()
        served.wait_for_load(0)
        served.end()
    assert order == ([0, 2, 1] if policy == "priority" else [0, 1, 2])
    (tmp_path / "again.yaml").write_text(text + "workload: {trace: came.csv}\n")
    lives = run_file(tmp_path / "again.yaml")["run"].record.requests
    assert sorted(lives, key=lambda n: lives[n].first_token or 0.0) == order
