"""What goes wrong on sockets, in engines and at the end: nothing is left behind, and it is said."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from simkv.measure.simulate import run_file
from tests.serve.house import Served, scenario, serving

STREAM = {"prompt": "x", "max_tokens": 30, "stream": True}
DEADLY = "sglang-30743-chunk-oom"


def lines_of(served: Served, body: object, into: list[str]) -> None:
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        into.extend(line for line in response.iter_lines() if line)


async def vanish(url: str, count: int, seed: int) -> None:
    """Clients that come, ask, and close their sockets at random moments."""
    luck, where = random.Random(seed), urlsplit(url)

    async def client() -> None:
        await asyncio.sleep(luck.random() * 0.5)
        try:
            _, writer = await asyncio.open_connection(where.hostname, where.port)
        except OSError:
            return
        body = json.dumps(
            {
                "prompt": [luck.randrange(9)] * luck.randint(1, 300),
                "max_tokens": luck.randint(1, 300),
                "stream": luck.random() < 0.7,
            }
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
        whole = head.encode() + b"content-type: application/json\r\n\r\n" + body
        writer.write(whole[: luck.choice([20, len(whole) - 1, len(whole), len(whole)])])
        await asyncio.sleep(luck.random() * 0.3)
        writer.transport.abort() if luck.random() < 0.5 else writer.close()

    await asyncio.gather(*(client() for _ in range(count)))


def test_of_500_clients_that_vanish_nothing_is_left(tmp_path: Path) -> None:
    with serving(tmp_path, scenario(200, 1024), "--record", "came.csv") as served:
        asyncio.run(vanish(served.url, 500, 5))
        deadline = time.monotonic() + 30
        while served.get("/load").json() != {"server_load": 0}:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        while "vllm:num_requests_running" in (text := served.get("/metrics").text):
            left = [line for line in text.splitlines() if line.startswith("vllm:num_requests_")]
            if all(line.endswith(" 0.0") for line in left):
                break
            assert time.monotonic() < deadline
        used = next(x for x in text.splitlines() if x.startswith("vllm:kv_cache_usage_perc"))
        assert used.endswith(" 0.0")
        said = served.end()
    assert "Traceback" not in said
    (tmp_path / "again.yaml").write_text(scenario(200, 1024) + "workload: {trace: came.csv}\n")
    result = run_file(tmp_path / "again.yaml")["run"]
    record = result.record
    assert record.steps.free_blocks[-1] <= record.num_blocks == 199
    for i, tiles in result.diagnosis.ledger.items():
        life = record.lives[i]
        assert sum(tile.seconds for tile in tiles) == pytest.approx(
            (life.ended_at or 0.0) - life.request.arrival, abs=1e-9
        )
        assert (life.tokens == life.request.output_tokens) is (life.outcome == "finished")
    assert 200 < len(record.lives) <= 500
    assert {life.outcome.value for life in record.lives.values() if life.outcome} <= {
        "finished",
        "starved",
        "timed_out",
    }
    assert sum(life.outcome != "finished" for life in record.lives.values()) > 100


def test_a_flood_of_connections_leaves_the_server_as_it_was(tmp_path: Path) -> None:
    with serving(tmp_path, scenario(), files=128) as served:
        where = urlsplit(served.url)
        flood = [socket.create_connection((where.hostname, where.port)) for _ in range(400)]
        for number, visitor in enumerate(flood):
            with contextlib.suppress(OSError):  # most are hung up on
                visitor.sendall([b"GET /health HTTP/1.1\r\nx-", b"\x00\xff\r\n\r\n"][number % 2])
        for visitor in flood:
            visitor.close()
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(httpx.HTTPError):
                assert served.get("/health").status_code == 200
                break
            assert time.monotonic() < deadline
        assert served.post("/v1/completions", {**STREAM, "stream": False}).status_code == 200
        assert "Traceback" not in served.end()


@pytest.mark.parametrize(("grace", "whole"), [("20", True), ("0.05", False)])
def test_it_drains_when_told_to_end(tmp_path: Path, grace: str, whole: bool) -> None:
    with serving(tmp_path, scenario(), "--record", "came.csv", "--grace", grace) as served:
        lines: list[str] = []
        client = threading.Thread(target=lines_of, args=(served, STREAM, lines))
        client.start()
        deadline = time.monotonic() + 20
        while served.get("/load").json() != {"server_load": 1}:
            assert time.monotonic() < deadline
        said = served.end()
        client.join()
        with pytest.raises(httpx.ConnectError):
            served.get("/health")
    assert "Written came.csv: 1 requests" in said
    assert lines[-1] == "data: [DONE]"
    assert (len(lines) == 31) is whole
    assert any("stopped before" in line for line in lines) is not whole
    rows = (tmp_path / "came.csv").read_text().splitlines()
    assert ("timeout" in rows[0]) is not whole
    assert len(rows) == 2


def test_a_dead_engine_ends_its_connections_and_says_so(tmp_path: Path) -> None:
    command = Path(__file__).parents[2] / "scenarios" / f"{DEADLY}.yaml"
    # The prompt is to come within the first fifty steps, each of a twentieth of a second.
    with serving(tmp_path, command.read_text(), "--speed", "20") as served:
        lines: list[list[str]] = [[], []]
        deadline = time.monotonic() + 60
        for prompts, limit, into in (([100] * 4, 1000, lines[0]), ([6000], 10, lines[1])):
            body = {
                "prompt": [[10 * limit + n] * tokens for n, tokens in enumerate(prompts)],
                "max_tokens": limit,
                "simkv": {"output_tokens": min(limit, 400)},
                "stream": True,
            }
            threading.Thread(target=lines_of, args=(served, body, into)).start()
            while not lines[0]:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        while served.get("/health").status_code == 200:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert served.get("/health").status_code == 503
        refused = served.post("/v1/completions", STREAM)
        assert refused.status_code == 503
        assert "prefill out of memory" in refused.json()["error"]["message"]
        while not all(any("engine is dead" in line for line in each) for each in lines):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert "engine died" in served.get("/explain").text


def test_a_wrong_key_is_refused(tmp_path: Path) -> None:
    with serving(tmp_path, scenario(), "--api-key", "right") as served:
        for given in ({}, {"authorization": "Bearer wrong"}, {"authorization": "right"}):
            for path in ("/v1/models", "/explain", "/scenario"):
                response = served.get(path, headers=given)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == 401
        assert served.get("/health").status_code == 200
        good = {"authorization": "Bearer right"}
        assert served.get("/v1/models", headers=good).status_code == 200
        refused = served.post("/v1/completions", STREAM, headers={"authorization": b"Bearer \xe9"})
        assert refused.status_code == 401


def test_a_slow_reader_and_half_a_head_hold_up_nobody(tmp_path: Path) -> None:
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
        slow.close()
        half.close()
        deadline = time.monotonic() + 20
        while served.get("/load").json() != {"server_load": 0}:
            assert time.monotonic() < deadline
            time.sleep(0.02)
