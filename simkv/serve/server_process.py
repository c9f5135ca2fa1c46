"""Run the server as a process: sockets, signals and graceful shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from simkv.core.errors import InputError
from simkv.serve.live_simulation import LiveSimulation
from simkv.serve.request_guard import BodyLimits

#: Maximum number of connections that wait to be accepted.
BACKLOG = 2048
#: Maximum number of sockets of an event loop on Windows (``FD_SETSIZE`` in CPython).
WINDOWS_SOCKETS = 512
#: File descriptors reserved for uses other than connections.
RESERVED_FILES = 64


class CountedConnection(socket.socket):
    """A connection that belongs to the set ``others`` while it is open."""

    others: set[CountedConnection]

    def close(self) -> None:
        self.others.discard(self)
        super().close()


class Listener(socket.socket):
    """Listening socket that accepts connections up to the limit of open files."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._connections: set[CountedConnection] = set()
        self._most = max(raise_file_limit() - RESERVED_FILES, 1)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection.

        Raises ConnectionAbortedError if there are too many connections.
        """
        number, address = self._accept()  # type: ignore[attr-defined]
        if len(self._connections) >= self._most:
            os.close(number)
            raise ConnectionAbortedError(errno.ECONNABORTED, "too many connections")
        visitor = CountedConnection(self.family, self.type, self.proto, fileno=number)
        # asyncio sets this option only if the protocol number is TCP's, but here it is 0. Without
        # the option, Nagle's algorithm delays the body of a response until the client's delayed ACK
        # (40 ms).
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor.others = self._connections
        self._connections.add(visitor)
        return visitor, address


def raise_file_limit() -> int:
    """Raise the limit of open files to the maximum that the system allows, and return it.

    On Windows, which has no such limit, return the number of sockets that ``select`` accepts.
    """
    try:
        import resource
    except ImportError:
        return WINDOWS_SOCKETS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def bind(host: str, port: int) -> Listener:
    """Return a listening socket. Raises InputError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        plain = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError, TypeError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--host {host} --port {port}: {why}") from error
    return Listener(plain.family, plain.type, plain.proto, fileno=plain.detach())


#: Maximum size of a request's head in bytes, and maximum time to receive it in seconds.
HEAD_BYTES = 65536
HEAD_SECONDS = 30.0
#: Maximum time (s) to receive a body before the connection is closed; the guard sends an error
#: response earlier.
BODY_SECONDS = BodyLimits.seconds + 1.0


class LimitedHttpProtocol(HttpToolsProtocol):
    """HTTP protocol that closes a connection if a request is too large or arrives too slowly.

    uvicorn itself limits neither the size of the request head nor the time of a request.
    """

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._head = 0
        self._patience: asyncio.TimerHandle | None = None
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._patience is None:  # blank lines before a request also keep a connection open
            self._wait(HEAD_SECONDS)
        super().data_received(data)

    def on_message_begin(self) -> None:
        self._wait(HEAD_SECONDS)
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._head = 0
        self._wait(BODY_SECONDS)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._wait(None)
        super().on_message_complete()

    def _wait(self, seconds: float | None) -> None:
        """Start the timer of an incomplete request, or stop the timer if ``seconds`` is None."""
        if self._patience is not None:
            self._patience.cancel()
        self._patience = None
        if seconds is not None:
            self._patience = self.loop.call_later(seconds, self._give_up, seconds)

    def _give_up(self, seconds: float) -> None:
        """Close the connection, unless the response to an earlier request is still being sent."""
        answering = self.cycle and not self.cycle.response_complete
        if answering and (self.pipeline or not self.cycle.more_body):
            self._wait(seconds)
        else:
            self.transport.close()

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > HEAD_BYTES:
            raise ValueError("the request head is too large")


class SignalFreeServer(uvicorn.Server):
    """uvicorn server without signal handlers, because one process can run several servers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass
class ServedApp:
    """An application with its socket and its simulation.

    ``unguarded_app`` is the application without its middleware. ``in_flight`` returns the number of
    calls in flight.
    """

    app: Any
    unguarded_app: Any
    live: LiveSimulation
    socket: socket.socket
    in_flight: Callable[[], int]


class ShutdownFlag:
    """A flag that is set when the process receives a shutdown signal."""

    def __init__(self) -> None:
        self.is_set = False

    def reason(self) -> str:
        """Return the reason why new calls are rejected, or ""."""
        return "the server is shutting down" if self.is_set else ""


async def serve_until_shutdown(
    sites: Sequence[ServedApp],
    ending: ShutdownFlag,
    grace: float,
    ready: Callable[[], None],
    beside: Sequence[Coroutine[Any, Any, None]] = (),
) -> None:
    """Serve until a signal arrives, then let the calls in flight end for at most ``grace`` seconds.

    A second signal stops the servers at once. ``ready`` is called when the servers accept clients.
    The coroutines in ``beside`` run at the same time and are cancelled at the end.
    """
    loop = asyncio.get_running_loop()
    gc.collect()
    # exclude existing objects from garbage collection, because a collection would stop the clock
    gc.freeze()
    stop, now = asyncio.Event(), asyncio.Event()

    def end() -> None:
        (now if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    servers = [SignalFreeServer(_config(site.app)) for site in sites]
    running = [
        asyncio.ensure_future(server.serve([site.socket]))
        for server, site in zip(servers, sites, strict=True)
    ]
    for site in sites:
        await warm(site.unguarded_app)
    while not all(server.started for server in servers):
        await asyncio.sleep(0.002)
    for site in sites:
        site.live.start()
    ready()
    others = [asyncio.ensure_future(one) for one in beside]
    await stop.wait()
    ending.is_set = True
    for server in servers:
        server.should_exit = True
    limit = loop.time() + grace
    while any(site.in_flight() for site in sites) and loop.time() < limit and not now.is_set():
        await asyncio.sleep(0.02)
    for site in sites:
        site.live.cut_off()
    await asyncio.gather(*running)
    for other in others:
        other.cancel()


async def warm(app: Any) -> None:
    """Send an invalid request, so that one-time costs do not delay a real request."""
    body = b'{"prompt": [1], "model": "\\u0000"}'
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        assert message.get("status", 404) == 404, message

    await app(scope, receive, send)


def _config(app: Any) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=5,
    )
