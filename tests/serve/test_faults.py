"""Tests of faults of sockets and engines, and of shutdown: faults are reported, and no state
remains.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from simkv.metrics.scenario_runner import run_file
from tests.serve.running_server import (
    inside,
    scenario,
    serving,
    wait_until,
)

STREAM = {"prompt": "x", "max_tokens": 30, "stream": True}
DEADLY = "sglang-30743-chunk-oom"


async def vanish(url: str, count: int, seed: int) -> int:
    """Run clients that connect, send and disconnect at random moments. Return the number of clients
    that disconnect after they received data.
    """
    luck, where = random.Random(seed), urlsplit(url)

    async def client() -> bool:
        await asyncio.sleep(luck.random() * 0.5)
        try:
            reader, writer = await asyncio.open_connection(where.hostname, where.port)
        except OSError:
            return False
        body = json.dumps(
            {
                "prompt": [luck.randrange(9)] * luck.randint(1, 300),
                "max_tokens": luck.randint(1, 300),
                "stream": True,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        whole = head.encode() + b"content-type: application/json\r\n\r\n" + body
        cut = luck.choice([20, len(whole) - 1, len(whole), len(whole)])
        writer.write(whole[:cut])
        if cut < len(whole):
            writer.close()
            return False
        heard = luck.random() < 0.5 and bool(await reader.read(1))
        await asyncio.sleep(luck.random() * 0.3)
        writer.transport.abort() if luck.random() < 0.5 else writer.close()
        return heard

    return sum(await asyncio.gather(*(client() for _ in range(count))))


def test_500_disconnected_clients_leave_no_state(tmp_path: Path) -> None:
    with serving(tmp_path, scenario(200, 1024), "--record", "came.csv") as served:
        heard = asyncio.run(vanish(served.url, 500, 5))
        served.wait_for_load(0)
        served.wait_for_metric("vllm:num_requests_running", 0)
        served.wait_for_metric("vllm:num_requests_waiting{", 0)
        assert served.metric("vllm:kv_cache_usage_perc") == 0
        said = served.end()
    assert "Traceback" not in said
    (tmp_path / "again.yaml").write_text(scenario(200, 1024) + "workload: {trace: came.csv}\n")
    result = run_file(tmp_path / "again.yaml")["run"]
    record = result.record
    assert record.steps.free_blocks[-1] <= record.num_blocks == 199
    for i, tiles in result.diagnosis.ledger.items():
        life = record.requests[i]
        assert sum(tile.seconds for tile in tiles) == pytest.approx(
            (life.ended_at or 0.0) - life.request.arrival, abs=1e-9
        )
        assert (life.tokens == life.request.output_tokens) is (life.outcome == "finished")
    assert 50 < heard <= len(record.requests) <= 500
    assert {life.outcome.value for life in record.requests.values() if life.outcome} <= {
        "finished",
        "starved",
        "timed_out",
    }
    assert sum(life.outcome != "finished" for life in record.requests.values()) > 0


def test_survives_connection_flood(tmp_path: Path) -> None:
    with serving(tmp_path, scenario(), files=128) as served:
        where = urlsplit(served.url)
        flood = [socket.create_connection((where.hostname, where.port)) for _ in range(400)]
        for number, visitor in enumerate(flood):
            with contextlib.suppress(OSError):  # most clients are disconnected
                visitor.sendall([b"GET /health HTTP/1.1\r\nx-", b"\x00\xff\r\n\r\n"][number % 2])
        for visitor in flood:
            visitor.close()

        def healthy() -> bool:
            with contextlib.suppress(httpx.HTTPError):
                return served.get("/health").status_code == 200
            return False

        wait_until(healthy)
        assert served.post("/v1/completions", {**STREAM, "stream": False}).status_code == 200
        assert "Traceback" not in served.end()


@pytest.mark.parametrize(("grace", "whole"), [("300", True), ("0.05", False)])
def test_drains_on_shutdown(tmp_path: Path, grace: str, whole: bool) -> None:
    with serving(tmp_path, scenario(), "--record", "came.csv", "--grace", grace) as served:
        stream = served.stream({"prompt": "x", "max_tokens": 30 if whole else 3000})
        served.wait_for_load(1)
        said = served.end()
        chunks = []
        while chunk := stream.chunk():
            chunks.append(chunk)
        with pytest.raises(httpx.ConnectError):
            served.get("/health")
    assert "1 requests written to came.csv" in said
    assert (len(chunks) == 30 and "error" not in chunks[-1]) is whole
    assert ("stopped before" in str(chunks[-1])) is not whole
    rows = (tmp_path / "came.csv").read_text().splitlines()
    assert ("timeout" in rows[0]) is not whole
    assert len(rows) == 2


def test_dead_engine_ends_connections(tmp_path: Path) -> None:
    command = Path(__file__).parents[2] / "scenarios" / f"{DEADLY}.yaml"
    prompts = [[n] * tokens for n, tokens in enumerate((100, 100, 100, 100, 6000))]
    with serving(tmp_path, command.read_text(), "--speed", "50") as served:
        stream = served.stream({"prompt": prompts, "max_tokens": 150})
        said = []
        while chunk := stream.chunk():
            said += [chunk["error"]["message"]] if "error" in chunk else []
        assert len(said) == 5
        assert all("engine is dead" in each for each in said)
        assert served.get("/health").status_code == 503
        refused = served.post("/v1/completions", STREAM)
        assert refused.status_code == 503
        assert "prefill out of memory" in refused.json()["error"]["message"]
        assert served.get("/metrics").status_code == 200
        assert "engine died" in served.get("/explain").text


def test_explain_without_requests(tmp_path: Path) -> None:
    """The reply also ends if the engine crashes before any token."""

    async def visit() -> None:
        async with inside(tmp_path, scenario()) as (house, client):
            assert (await client.get("/explain")).text == "No requests received yet.\n"
            house.live._end_all("a law is broken")
            found = await client.get("/explain?format=json")
            assert found.status_code == 200
            (verdict,) = found.json()["verdicts"]
            assert verdict == {"name": "engine died", "text": "a law is broken", "requests": []}
            assert "The engine is dead: a law is broken" in (await client.get("/explain")).text
            assert (await client.get("/health")).status_code == 503
            refused = await client.post("/v1/completions", json={"prompt": "x"})
            assert refused.status_code == 503

    asyncio.run(visit())


def test_rejects_wrong_key(tmp_path: Path) -> None:
    async def visit() -> None:
        async with inside(tmp_path, scenario(), api_key="right") as (_, client):
            for key in (b"", b"Bearer wrong", b"Bearer \xe9", b"right"):
                given = {b"authorization": key} if key else {}
                for path in ("/v1/models", "/explain", "/scenario"):
                    response = await client.get(path, headers=given)
                    assert response.status_code == 401
                    assert response.json()["error"]["code"] == 401
                refused = await client.post("/v1/completions", json=STREAM, headers=given)
                assert refused.status_code == 401
            assert (await client.get("/health")).status_code == 200
            good = {"authorization": "Bearer right"}
            assert (await client.get("/v1/models", headers=good)).status_code == 200

    asyncio.run(visit())


def test_slow_clients_do_not_block_others(tmp_path: Path) -> None:
    with serving(tmp_path, scenario(), "--speed", "50") as served:
        where = urlsplit(served.url)
        body = json.dumps({**STREAM, "max_tokens": 3000}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        slow = socket.create_connection((where.hostname, where.port))
        slow.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
        half = socket.create_connection((where.hostname, where.port))
        half.sendall(b"GET /health HTTP/1.1\r\nx-")
        large = socket.create_connection((where.hostname, where.port))
        large.sendall(b"GET /health HTTP/1.1\r\n" + b"x-a: " + b"b" * 70_000 + b"\r\n\r\n")
        assert large.recv(100).startswith(b"HTTP/1.1 400")
        assert served.post("/v1/completions", {**STREAM, "stream": False}).status_code == 200
        for visitor in (slow, half, large):
            visitor.close()
        served.wait_for_load(0)
