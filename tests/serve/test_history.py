"""Tests that the history of received requests is bounded; the server and its recording continue
without it.
"""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.metrics.scenario_runner import run_file
from simkv.serve import live_simulation
from simkv.serve.server_assembly import ServerOptions
from tests.serve.running_server import inside, scenario
from tests.serve.test_live_simulation import FLEET

BODY = {"prompt": [1, 2, 3], "max_tokens": 3}


@pytest.mark.parametrize("fleet", ["", FLEET])
def test_history_is_dropped_at_its_limit(
    tmp_path: Path, fleet: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_simulation, "KEPT_RECORDS", 2)
    monkeypatch.setattr(live_simulation, "KEPT_STEPS", 3)
    record = tmp_path / "came.csv"
    said: list[str] = []

    async def visit() -> None:
        options = {"speed": 100.0, "max_history": 4, "record": record}
        async with inside(tmp_path, scenario() + fleet, **options) as (house, client):
            house.live.warn = said.append
            trace = house.begin_trace()
            for number in range(4):
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
                assert (await client.get(f"/explain/{number}")).status_code == 200
            for _ in range(6):
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
                trace.save()
            live = house.live
            assert (live.received, live.journal, live.changes) == (10, [], [])
            assert house.handler.names == {}
            assert sum(len(replica.record.requests) for replica in live.replicas) == 2
            for path in ("/explain", "/explain/0", "/explain/9", "/scenario"):
                answer = await client.get(path)
                assert answer.status_code == 503
                assert "more than 4 requests" in answer.json()["error"]["message"]
            steps.append(sum(len(replica.record.steps) for replica in live.replicas))
            kept.append(max(len(replica.record.steps.end) for replica in live.replicas))
            text = (await client.get("/metrics")).text
            found = re.findall(r"^vllm:iteration_tokens_total_count.* (\S+)$", text, re.MULTILINE)
            counted.append(sum(map(float, found)))
            assert house.write(record) == 10

    steps: list[int] = []
    kept: list[int] = []
    counted: list[float] = []
    asyncio.run(visit())
    assert kept[0] <= 6
    assert steps == counted == [30]  # all steps are counted, including dropped steps
    assert said == ["4 requests received: the history for /explain was dropped"]
    path = tmp_path / "again.yaml"
    path.write_text(scenario() + "workload: {trace: came.csv}\n")
    lives = run_file(path)["run"].record.requests
    assert [life.outcome for life in lives.values()] == [Outcome.FINISHED] * 10


def test_first_step_of_a_long_request_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a request runs for more steps than the server stores, it is still counted at its end."""
    monkeypatch.setattr(live_simulation, "KEPT_STEPS", 3)

    async def visit() -> None:
        async with inside(tmp_path, scenario(), speed=100.0, max_history=1) as (house, client):
            for tokens in (3, 40, 3):
                answer = await client.post("/v1/completions", json={**BODY, "max_tokens": tokens})
                assert answer.status_code == 200
            assert not house.live.dead
            text = (await client.get("/metrics")).text
            ended = re.findall(r"^vllm:request_success_total.* (\S+)$", text, re.MULTILINE)
            assert sum(map(float, ended)) == 3

    asyncio.run(visit())


def test_recording_at_the_end_keeps_the_history(tmp_path: Path) -> None:
    record = tmp_path / "came.csv.gz"

    async def visit() -> None:
        options = {"speed": 100.0, "max_history": 1, "record": record}
        async with inside(tmp_path, scenario(), **options) as (house, client):
            assert house.begin_trace() is None
            for _ in range(3):
                assert (await client.post("/v1/completions", json=BODY)).status_code == 200
            assert house.write(record) == len(house.live.journal) == 3

    asyncio.run(visit())


def test_limit_must_be_positive() -> None:
    with pytest.raises(InputError, match="--max-history 0: expected at least 1"):
        ServerOptions(max_history=0)
