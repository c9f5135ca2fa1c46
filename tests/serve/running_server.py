"""A server for tests: a real process, and functions for calls to it."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from simkv.serve.served_scenario import load_served_scenario
from simkv.serve.server_assembly import Deployment, HttpServer, ServerOptions
from tests.conftest import ROOT

#: A step takes 10 ms, plus 0.1 ms per prompt token.
SCENARIO = """\
name: served
engine:
  name: vllm
  variant: "0.33.0"
  num_gpu_blocks: {blocks}
  max_model_len: {longest}
  max_num_seqs: 64
  enable_prefix_caching: true
profile: assumed-costs.json
"""
COSTS = ROOT / "scenarios" / "assumed-costs.json"
#: Time limit of tests that wait for something (s), for slow machines.
PATIENCE = 300.0


def wait_until(so: Callable[[], bool]) -> None:
    """Wait until the function ``so`` returns true."""
    deadline = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def scenario(blocks: int = 1000, longest: int = 4096) -> str:
    """Return the text of a scenario without a workload."""
    return SCENARIO.format(blocks=blocks, longest=longest)


@dataclass
class Served:
    """A running server: its address and process."""

    url: str
    process: subprocess.Popen[str]
    folder: Path

    def __post_init__(self) -> None:
        self.client = httpx.Client(
            base_url=self.url, timeout=PATIENCE, verify=False, trust_env=False
        )
        self._streams: list[Stream] = []

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return self.client.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.client.get(path, **options)

    def wait_for_load(self, calls: int) -> None:
        """Wait until this many calls are in flight."""
        wait_until(lambda: self.get("/load").json() == {"server_load": calls})

    def wait_for_metric(self, sample: str, value: float) -> None:
        """Wait until the metric with the prefix ``sample`` has this value."""
        wait_until(lambda: self.metric(sample) == value)

    def metric(self, sample: str) -> float:
        """Return the value of the metric with the prefix ``sample``."""
        lines = self.get("/metrics").text.splitlines()
        (line,) = [line for line in lines if line.startswith(sample)]
        return float(line.split()[-1])

    def stream(self, body: dict[str, Any]) -> Stream:
        """Open a streamed call; leaving the context disconnects the client."""
        self._streams.append(Stream(self.url, body))
        return self._streams[-1]

    def hang_up(self) -> None:
        """Close all connections.

        Sockets left to the garbage collector cause warnings in other tests.
        """
        self.client.close()
        for stream in self._streams:
            stream.close()

    def end(self) -> str:
        """Send SIGTERM, as Kubernetes does; return the output."""
        self.process.send_signal(signal.SIGTERM)
        out, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == 0, out
        return out


class Stream:
    """A call on a separate socket; closing the socket disconnects the client."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        where, content = urlsplit(url), json.dumps({**body, "stream": True}).encode()
        self._socket = socket.create_connection((where.hostname, where.port), PATIENCE)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
        self._socket.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
        # otherwise `first` would miss some data
        self._file = self._socket.makefile("rb", buffering=0)
        assert b" 200 " in self._file.readline()
        while self._file.readline().strip():  # the rest of the response head
            pass

    def chunk(self) -> dict[str, Any]:
        """Return the next event; an empty dict after the last event."""
        while not (line := self._file.readline()).startswith(b"data: "):
            assert line
        return {} if b"[DONE]" in line else dict(json.loads(line.removeprefix(b"data: ")))

    def close(self) -> None:
        self._file.close()
        self._socket.close()

    @staticmethod
    def first(streams: list[Stream]) -> Stream:
        """Return the first of several unread streams that receives data."""
        ready, _, _ = select.select([stream._socket for stream in streams], [], [], PATIENCE)
        (found,) = [stream for stream in streams if stream._socket in ready]
        return found


@asynccontextmanager
async def inside(
    folder: Path, text: str, **options: Any
) -> AsyncIterator[tuple[HttpServer, httpx.AsyncClient]]:
    """Run a server for this scenario in this process without a socket, which is faster."""
    path = folder / "served.yaml"
    path.write_text(text)
    shutil.copy(COSTS, folder)
    scenario = next(iter(load_served_scenario(path, [])[1].values()))
    (house,) = Deployment(
        scenario, folder, ServerOptions(port=0, **options), lambda _: None
    ).servers
    site = house.served_app
    site.live.start()
    over = httpx.ASGITransport(site.app)
    try:
        async with httpx.AsyncClient(transport=over, base_url="http://x", timeout=None) as client:
            yield house, client
    finally:
        site.live.cut_off()
        house.close()
        site.socket.close()


async def until(so: Callable[[], bool]) -> None:
    """Wait, in this process, until the function ``so`` returns true."""
    async with asyncio.timeout(PATIENCE):
        while not so():
            await asyncio.sleep(0.002)


@contextmanager
def serving(folder: Path, text: str, *options: str, files: int | None = None) -> Iterator[Served]:
    """Run a server for this scenario on its own port, with at most ``files`` open files."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    path = folder / "served.yaml"
    path.write_text(text)
    shutil.copy(COSTS, folder)
    command = [sys.executable, "-m", "simkv", "serve", str(path), "--port", "0", *options]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        preexec_fn=limit,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"on (http://\S+)", line)
        assert found, line + process.stdout.read()
        served = Served(found[1], process, folder)
        try:
            yield served
        finally:
            served.hang_up()
    finally:
        process.kill()
        process.communicate()
