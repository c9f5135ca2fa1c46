"""Send 100,000 requests to a server from eight clients that misbehave, and check its state.

python benchmarks/serve_soak.py [--requests 100000] [--minutes 10]

Each client has a different fault: it leaves during a stream, reads nothing for a while, sends its
request head very slowly, sends invalid JSON, invalid fields or a body of megabytes, closes its half
of the connection, or requests other paths with the wrong method. One client has no fault. Memory is
printed ten times. At the end, the engine must be empty and the log must contain no traceback. A
simulation of the recorded requests must have the same numbers of steps, preemptions and finished
requests as the server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from serve_fuzzing import SCENARIO, wait_for, wait_until_idle

PORT = 8767
HEADERS = "host: x\r\ncontent-type: application/json\r\n"
Fault = Callable[["Client"], Awaitable[None]]


class Client:
    """A client; ``sent`` is the number of its requests, and ``statuses`` the number of responses by
    status.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sent = 0
        self.statuses: Counter[str] = Counter()
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, head: str, body: bytes = b"") -> asyncio.StreamWriter:
        """Send a request on the open connection, or on a new one."""
        self.sent += 1
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", PORT)
        self._writer.write(f"{head}\r\n{HEADERS}content-length: {len(body)}\r\n\r\n".encode())
        self._writer.write(body)
        await self._writer.drain()
        return self._writer

    async def answer(self) -> None:
        """Read one response and count its status."""
        assert self._reader is not None
        head = await self._reader.readuntil(b"\r\n\r\n")
        self.statuses[head.split(b" ", 2)[1].decode()] += 1
        if length := re.search(rb"content-length: (\d+)", head, re.IGNORECASE):
            await self._reader.readexactly(int(length[1]))
        elif b"chunked" in head:
            while await self._reader.readuntil(b"\r\n") != b"0\r\n":
                pass
            await self._reader.readuntil(b"\r\n")
        if b"connection: close" in head.lower():
            self.leave()

    def leave(self) -> None:
        """Close the connection without reading the remaining data."""
        if self._writer is not None:
            self._writer.transport.abort()
        self._writer = None

    def body(self, **more: object) -> bytes:
        """Return the body of a completion with random lengths."""
        prompt = [self.random.randrange(1000)] * self.random.randint(1, 200)
        made = {"prompt": prompt, "max_tokens": self.random.randint(1, 24), **more}
        return json.dumps(made).encode()

    async def complete(self, body: bytes) -> asyncio.StreamWriter:
        """Send a completion."""
        return await self.send("POST /v1/completions HTTP/1.1", body)


async def behave(client: Client) -> None:
    await client.complete(client.body(stream=client.random.random() < 0.5))
    await client.answer()


async def leave_early(client: Client) -> None:
    await client.complete(client.body(stream=True, max_tokens=100))
    await asyncio.sleep(0.02 * client.random.random())
    client.leave()


async def read_nothing(client: Client) -> None:
    await client.complete(client.body(stream=True, max_tokens=200))
    await asyncio.sleep(0.02 * client.random.random())
    await client.answer()


async def dribble(client: Client) -> None:
    body = client.body()
    writer = await client.send("POST /v1/completions HTTP/1.1\r\nx: y", b"")
    await client.answer()  # an empty body is invalid
    writer.write(b"POST /v1/completions HTTP/1.1\r\n")
    for part in (HEADERS.encode(), f"content-length: {len(body)}\r\n\r\n".encode(), body[:9]):
        writer.write(part)
        await asyncio.sleep(0.002)
    writer.write(body[9:])
    client.sent += 1
    await client.answer()


async def send_garbage(client: Client) -> None:
    body = client.body()
    await client.complete(body[: client.random.randrange(1, len(body))])
    await client.answer()


async def send_wrong_fields(client: Client) -> None:
    wrong = client.random.choice([{"max_tokens": -1}, {"prompt": {}}, {"n": 7}, {"stream": 3}])
    await client.complete(client.body(**wrong))
    await client.answer()


async def send_much(client: Client) -> None:
    size = client.random.choice([10, 100, 1000, 10_000, 200_000])
    await client.complete(client.body(prompt=[5] * size))
    await client.answer()


async def wander(client: Client) -> None:
    path = client.random.choice(["/nowhere", "/v1/completions", "/health", "/v1/models", "/load"])
    await client.send(f"{client.random.choice(['GET', 'PUT'])} {path} HTTP/1.1", b"{}")
    if client.random.random() < 0.1:
        client.leave()
    else:
        await client.answer()


FAULTS: tuple[Fault, ...] = (
    *(behave, leave_early, read_nothing, dribble, send_garbage, send_wrong_fields),
    *(send_much, wander),
)


async def misbehave(clients: list[Client], most: int, until: float) -> None:
    """Send ``most`` requests in total, each with its client's fault; stop at the time ``until`` at
    the latest.
    """

    async def repeat(client: Client, fault: Fault) -> None:
        while client.sent < most // len(clients) and time.monotonic() < until:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                await fault(client)
                continue
            client.statuses["closed"] += 1
            client.leave()

    await asyncio.gather(*map(repeat, clients, FAULTS))


async def watch(clients: list[Client], most: int, pid: int) -> None:
    """Print the memory of the server after each tenth of the requests."""
    for tenth in range(1, 10):
        while sum(one.sent for one in clients) < most * tenth // 10:
            await asyncio.sleep(0.1)
        print(f"{most * tenth // 10:>8,} requests: {memory(pid):.0f} MiB", flush=True)


def memory(pid: int) -> float:
    """Return the resident memory of a process in MiB."""
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def counters(url: str) -> dict[str, float]:
    """Return the sums of the server's counters, by name."""
    found: Counter[str] = Counter()
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            reason = re.search('finished_reason="([a-z]+)"', name)
            found[name.partition("{")[0] + (f" {reason[1]}" if reason else "")] += float(value)
    return dict(found)


async def soak(most: int, minutes: float, pid: int) -> list[Client]:
    clients = [Client(seed) for seed in range(len(FAULTS))]
    watching = asyncio.create_task(watch(clients, most, pid))
    await misbehave(clients, most, time.monotonic() + 60 * minutes)
    watching.cancel()
    return clients


def main() -> int:
    """Run the soak test and check the server's state; return the exit code."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--requests", type=int, default=100_000)
    options.add_argument("--minutes", type=float, default=10)
    given = options.parse_args()
    simkv, url = [sys.executable, "-m", "simkv"], f"http://127.0.0.1:{PORT}"
    with tempfile.TemporaryDirectory() as made, (Path(made) / "said").open("w+") as said:
        folder = Path(made)
        (folder / "served.yaml").write_text(SCENARIO)
        command = [*simkv, "serve", "served.yaml", "--port", str(PORT), "--speed", "100"]
        server = subprocess.Popen(
            [*command, "--record", "came.csv"], cwd=folder, stdout=said, stderr=said
        )
        try:
            wait_for(url)
            began = time.monotonic()
            clients = asyncio.run(soak(given.requests, given.minutes, server.pid))
            live: dict[str, float] = {}
            while live != (now := counters(url)):  # requests may still be in the sockets
                live = now
                wait_until_idle(url)
                time.sleep(1)
            sent, seconds = sum(one.sent for one in clients), time.monotonic() - began
            print(f"{sent:>8,} requests in {seconds:.0f} s: {memory(server.pid):.0f} MiB")
            for fault, client in zip(FAULTS, clients, strict=True):
                print(f"{fault.__name__:<18}{client.sent:>7,} sent, {dict(client.statuses)}")
        finally:
            server.terminate()
            server.wait(60)
        said.seek(0)
        failed = "Traceback" in said.read()
        (folder / "again.yaml").write_text(SCENARIO + "workload: {trace: came.csv}\n")
        run = [*simkv, "run", "again.yaml", "--exit-zero", "--json", "--out", "again"]
        subprocess.run(run, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        again = json.loads((folder / "again" / "summary.json").read_text())["variants"]["run"]
    pairs = (
        ("steps", live["vllm:iteration_tokens_total_count"], again["steps"]),
        ("preemptions", live["vllm:num_preemptions_total"], again["preemptions"]),
        ("finished", live["vllm:request_success_total length"], again["finished"]),
    )
    for name, here, there in pairs:
        print(f"{name}: server {here:,.0f}, run of the record {there:,.0f}")
    print(f"traceback {failed}, exit code of the server {server.returncode}")
    return int(failed or server.returncode != 0 or any(a != b for _, a, b in pairs))


if __name__ == "__main__":
    sys.exit(main())
