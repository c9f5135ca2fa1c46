"""Tests of the status of a server: the speed of its clock, its lag, and its shutdown."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from simkv.metrics.scenario_runner import run_file
from simkv.serve.request_guard import BodyLimits, Guard
from tests.serve.running_server import inside, scenario, until

BODY = {"prompt": "a b c", "max_tokens": 4}


def test_speed_is_reported_everywhere(tmp_path: Path) -> None:
    async def visit() -> str:
        async with inside(tmp_path, scenario(), model="m", speed=20) as (house, client):
            assert "at 20 times real time" in house.banner
            whole = await client.post("/v1/completions", json=BODY)
            streamed = await client.post("/v1/completions", json={**BODY, "stream": True})
            for response in (whole, streamed, await client.get("/v1/models")):
                assert response.headers["x-simkv-speed"] == "20"
            assert "simkv:speed 20.0" in (await client.get("/metrics")).text
            told = (await client.get("/scenario")).text
            assert "--speed 20" in told
            return told

    (tmp_path / "again.yaml").write_text(asyncio.run(visit()))
    lives = run_file(tmp_path / "again.yaml")["run"].record.requests
    assert [life.tokens for life in lives.values()] == [4, 4]


def test_repeats_request_id(tmp_path: Path) -> None:
    """Fields of the request body that have no meaning for this call are accepted."""
    ignored = {"stop": ["x"], "temperature": 0.3, "top_p": 0.9, "seed": 4, "logit_bias": {}}

    async def visit() -> None:
        async with inside(tmp_path, scenario(), speed=100) as (house, client):
            for stream in (False, True):
                headers = {"x-request-id": f"mine-{stream}"}
                body = {**BODY, **ignored, "stream": stream}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.headers["x-request-id"] == f"mine-{stream}"
                assert house.handler.find(f"mine-{stream}") == [int(stream)]
                assert f"cmpl-mine-{stream}" in answer.text
            assert (await client.get("/ping")).status_code == 200

    asyncio.run(visit())


def test_warns_about_lag(tmp_path: Path) -> None:
    async def visit() -> None:
        async with inside(tmp_path, scenario()) as (house, _):
            live, said = house.live, []
            live.warn = said.append
            now = asyncio.get_running_loop().time()
            live._note_lag(now - 0.05)
            assert said == []
            for _ in range(3):
                live._note_lag(now - 60)
            assert len(said) == 1
            assert "ms late: it sends replies later than simulated" in said[0]
            assert live.lag >= 60

    asyncio.run(visit())


def test_rejects_calls_during_shutdown(tmp_path: Path) -> None:
    async def visit() -> None:
        async with inside(tmp_path, scenario()) as (house, client):
            first = asyncio.ensure_future(
                client.post("/v1/completions", json={**BODY, "max_tokens": 2000})
            )
            await until(lambda: house.handler.in_flight == 1)
            house._ending.is_set = True
            refused = await client.post("/v1/completions", json=BODY)
            assert refused.status_code == 503
            assert "shutting down" in refused.json()["error"]["message"]
            assert (await client.get("/metrics")).status_code == 200
            house.live.cut_off()
            assert (await first).status_code == 503
            assert house.live.journal[0].timeout is not None

    asyncio.run(visit())


def test_late_body_times_out(tmp_path: Path) -> None:
    async def never() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async def visit() -> None:
        async with inside(tmp_path, scenario()) as (house, _):
            guard = Guard(house.served_app.unguarded_app, 1.0, limits=BodyLimits(seconds=0.01))
            over = httpx.ASGITransport(guard)
            async with httpx.AsyncClient(transport=over, base_url="http://x") as client:
                late = await client.post("/v1/completions", content=never())
            assert late.status_code == 408
            assert late.json()["error"]["code"] == 408
            assert house.live.journal == []

    asyncio.run(visit())
