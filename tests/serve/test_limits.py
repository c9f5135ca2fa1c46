"""Tests of queue limits: error 503 with the engine's message and its way of counting, and the same
result in a re-run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simkv.core.outcome import Outcome
from simkv.metrics.scenario_runner import run_file
from tests.serve.running_server import (
    Served,
    inside,
    scenario,
    serving,
    until,
)

SGLANG = """\
name: served
engine: {name: sglang, max_total_num_tokens: 8000, max_running_requests: 1, max_queued_requests: 1}
profile: assumed-costs.json
"""
LONG = {"prompt": [1, 2, 3], "max_tokens": 2000}
TRY_AGAIN = "and cannot accept new requests. Please try again later or on a different instance."
REJECTED = 'vllm:admission_rejections_total{{model_name="served",reason="{}"}}'
LIMITED = "  max_num_queued_reqs: {}\n  max_num_queued_tokens: 2000\nprofile:"


@contextmanager
def under_way(served: Served, count: int, tokens: int = 3) -> Iterator[None]:
    """Open streams with prompts of the given lengths; they remain in flight until this context
    ends.
    """
    streams = []
    for number in range(count):
        streams.append(served.stream({"prompt": [1] * tokens, "max_tokens": 2000}))
        served.wait_for_load(number + 1)
    yield
    for stream in streams:
        stream.close()
    served.wait_for_load(0)


def test_vllm_rejects_when_queue_is_full(tmp_path: Path) -> None:
    text = scenario().replace("profile:", LIMITED.format(3))
    with serving(tmp_path, text, "--record", "came.csv", "--speed", "0.002") as served:
        with under_way(served, 3):
            refused = served.post("/v1/completions", {**LONG, "request_id": "mine"})
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error["message"].startswith(f"The engine is currently busy {TRY_AGAIN}")
            assert (error["type"], error["code"]) == ("Service Unavailable", 503)
            streamed = served.post("/v1/completions", {**LONG, "stream": True})
            assert streamed.status_code == 503  # before the stream begins
        with under_way(served, 2):
            several = served.post("/v1/completions", {"prompt": [[1], [2]], "max_tokens": 5})
            assert several.status_code == 503  # one of these would have been admitted
            assert served.get("/load").json() == {"server_load": 2}
        # the prefill of these requests takes two minutes of real time
        with under_way(served, 1, tokens=2000):
            full = served.post("/v1/completions", {"prompt": "x"})
            assert full.status_code == 503
            assert "prefill token backlog limit" in full.json()["error"]["message"]
        assert served.metric(REJECTED.format("max_num_queued_reqs")) == 3
        assert served.metric(REJECTED.format("max_num_queued_tokens")) == 1
        assert "rejected after 0" in served.get("/explain/mine").text
        assert "Traceback" not in served.end()
    (tmp_path / "again.yaml").write_text(text + "workload: {trace: came.csv}\n")
    lives = run_file(tmp_path / "again.yaml")["run"].record.requests
    assert [i for i, life in lives.items() if life.outcome is Outcome.REJECTED] == [3, 4, 8, 10]


def test_full_queue_is_reported_before_invalid_prompt(tmp_path: Path) -> None:
    """vLLM 0.33.0 checks the model first, the queue limit second, and the prompt last."""
    text = scenario().replace("profile:", LIMITED.format(1))
    too_long = {"prompt": [1] * 5000}

    async def visit() -> None:
        async with inside(tmp_path, text) as (house, client):

            async def status(**fields: object) -> int:
                return (await client.post("/v1/completions", json=fields)).status_code

            first = asyncio.ensure_future(client.post("/v1/completions", json=LONG))
            await until(lambda: house.handler.in_flight == 1)
            assert await status(**too_long) == 503
            assert await status(prompt="x", max_tokens=0) == 503
            assert await status(prompt=[[1], [2]]) == 503
            assert await status(**too_long, model="other") == 404
            counted = (await client.get("/metrics")).text.splitlines()
            assert REJECTED.format("max_num_queued_reqs") + " 3.0" in counted
            assert [r.prompt_tokens for r in house.live.journal] == [3, 5000, 1, 1]
            first.cancel()
            await until(lambda: house.handler.in_flight == 0)
            assert await status(**too_long) == 400
            assert len(house.live.journal) == 4
            house.write(tmp_path / "came.csv")

    asyncio.run(visit())
    (tmp_path / "again.yaml").write_text(text + "workload: {trace: came.csv}\n")
    lives = run_file(tmp_path / "again.yaml")["run"].record.requests
    assert [i for i, life in lives.items() if life.outcome is Outcome.REJECTED] == [1, 2, 3]


def test_fleet_rejects_if_all_replicas_are_full(tmp_path: Path) -> None:
    text = scenario().replace("profile:", LIMITED.format(1)) + "fleet: {replicas: 2}\n"
    too_long = {"prompt": [1] * 5000}

    async def visit() -> None:
        async with inside(tmp_path, text) as (house, client):

            async def status() -> int:
                return (await client.post("/v1/completions", json=too_long)).status_code

            calls = []
            for number in (1, 2):
                assert await status() == 400  # the other replica has capacity
                calls.append(asyncio.ensure_future(client.post("/v1/completions", json=LONG)))
                await until(lambda: house.handler.in_flight == number)  # noqa: B023
            assert await status() == 503
            assert [r.prompt_tokens for r in house.live.journal] == [3, 3, 5000]
            for call in calls:
                call.cancel()
            await until(lambda: house.handler.in_flight == 0)
            assert await status() == 400

    asyncio.run(visit())


def test_sglang_rejects_when_queue_is_full(tmp_path: Path) -> None:
    with serving(tmp_path, SGLANG, "--speed", "0.2") as served, under_way(served, 2):
        whole = served.post("/v1/completions", LONG)
        assert whole.status_code == 503
        assert whole.json()["error"]["message"] == "The request queue is full."
        lines = served.post("/v1/completions", {**LONG, "stream": True}).text.split("\n\n")
        assert "The request queue is full." in lines[0]
        assert lines[1] == "data: [DONE]"


def test_slash_at_the_end_of_a_path_does_not_redirect(tmp_path: Path) -> None:
    """A redirect would lead to the host named by the client."""

    async def ask() -> list[tuple[int, str | None]]:
        async with inside(tmp_path, scenario()) as (_, client):
            paths = ("/health/", "/v1/models/", "//evil.example/", "/nowhere/")
            found = [await client.get(path, headers={"host": "evil.example"}) for path in paths]
            body = {"prompt": [1], "max_tokens": 1}
            found.append(await client.post("/v1/completions/", json=body))
        return [(one.status_code, one.headers.get("location")) for one in found]

    assert asyncio.run(ask()) == [(200, None), (200, None), (404, None), (404, None), (200, None)]
