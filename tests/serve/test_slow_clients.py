"""Tests that connections whose requests arrive too slowly are closed, and no other connections."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import uvicorn
from starlette.middleware.exceptions import ExceptionMiddleware

from simkv.serve import server_process
from simkv.serve.request_guard import BodyLimits, Guard

HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n"
GET = b"GET / HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n"
WHOLE = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"
#: Time limit of the server in these tests, interval between two bytes, and latest time at which the
#: server must close the connection (s).
LIMIT, PAUSE, CLOSED = 0.3, 0.1, 1.5


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Read the body of a POST, wait for longer than the limit, and respond."""
    while scope["method"] == "POST" and (await receive()).get("more_body"):
        pass
    if scope["path"] == "/slow":
        await asyncio.sleep(3 * LIMIT)
    headers = [(b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"ok"})


@contextmanager
def running(loop: asyncio.AbstractEventLoop) -> Iterator[tuple[str, int]]:
    """Serve the application with short limits; yield the address."""
    guard = Guard(ExceptionMiddleware(app), 1.0, limits=BodyLimits(seconds=LIMIT))

    config = uvicorn.Config(
        guard, http=server_process.LimitedHttpProtocol, lifespan="off", log_level="critical"
    )
    server = server_process.SignalFreeServer(config)
    listener = server_process.bind("127.0.0.1", 0)
    task = loop.create_task(server.serve([listener]))
    try:
        yield listener.getsockname()[:2]
    finally:
        server.should_exit = True
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(task)


async def dribble(address: tuple[str, int], begin: bytes, rest: bytes) -> tuple[float, bytes]:
    """Send ``begin``, and the rest byte by byte; return when the server closed the connection, and
    its reply.
    """
    reader, writer = await asyncio.open_connection(*address)
    started = time.monotonic()
    writer.write(begin)

    async def send() -> None:
        for byte in rest:
            await asyncio.sleep(PAUSE)
            writer.write(bytes([byte]))

    sending = asyncio.ensure_future(send())
    try:
        async with asyncio.timeout(4 * CLOSED):
            received = b""
            with contextlib.suppress(ConnectionResetError):  # bytes were sent to a closed socket
                while part := await reader.read(65536):
                    received += part
    finally:
        sending.cancel()
        writer.close()
    return time.monotonic() - started, received


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "HEAD_SECONDS", LIMIT)
    monkeypatch.setattr(server_process, "BODY_SECONDS", 2 * LIMIT)


@pytest.mark.parametrize(
    ("begin", "rest", "statuses"),
    [
        (b"", WHOLE * 2, []),
        (WHOLE, WHOLE * 2, [200]),  # the second request head on a connection
        (WHOLE, b"\r\n" * 25, [200]),  # blank lines between requests
        (HEAD, b"x" * 49, [408]),
        (GET, b"x" * 49, [200]),
    ],
)
@pytest.mark.usefixtures("short")
def test_closes_slow_connections(begin: bytes, rest: bytes, statuses: list[int]) -> None:
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop), running(loop) as address:
        seconds, received = loop.run_until_complete(dribble(address, begin, rest))
    assert seconds < CLOSED
    assert [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]] == statuses


@pytest.mark.usefixtures("short")
def test_long_reply_is_not_cut() -> None:
    """The time limit applies to the client's data, not to the server's reply."""
    slow = WHOLE.replace(b" / ", b" /slow ") + b"\r\n"
    loop = asyncio.new_event_loop()
    with contextlib.closing(loop), running(loop) as address:
        seconds, received = loop.run_until_complete(dribble(address, slow, b"\r\n"))
    assert seconds > 3 * LIMIT
    assert received.endswith(b"ok")
