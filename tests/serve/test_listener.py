"""Tests that accepted connections do not delay small packets, and that hosts without a socket are
rejected.
"""

from __future__ import annotations

import asyncio
import socket
import statistics
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from simkv.core.errors import InputError
from simkv.serve.server_process import bind
from tests.serve.running_server import scenario, serving


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_accepted_connections_set_tcp_nodelay(host: str) -> None:
    try:
        listener = bind(host, 0)
    except InputError:
        pytest.skip(f"{host} is not available")

    async def visit() -> int:
        found: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def accepted(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            server_side = writer.get_extra_info("socket")
            found.set_result(server_side.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(accepted, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            try:
                return await found
            finally:
                writer.close()

    assert asyncio.run(visit()) != 0


def test_later_requests_do_not_wait_for_delayed_ack(tmp_path: Path) -> None:
    """A delayed acknowledgement takes 40 ms on Linux; a response of the server takes one
    millisecond.
    """
    seconds = []
    with serving(tmp_path, scenario()) as served:
        where = urlsplit(served.url)
        with socket.create_connection((where.hostname, where.port)) as client:
            for _ in range(12):
                began = time.monotonic()
                client.sendall(b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n")
                received = b""
                while not received.endswith(b"}"):
                    received += client.recv(4096)
                seconds.append(time.monotonic() - began)
    assert statistics.median(seconds[1:]) < 0.035


@pytest.mark.parametrize("host", ["no such host", "a" * 300, "a..b", "[::1]", "\udcff"])
def test_rejects_unknown_host(host: str) -> None:
    with pytest.raises(InputError, match="--host"):
        bind(host, 0)
