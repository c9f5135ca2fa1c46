"""A listening socket that rejects connections before the process runs out of file descriptors.

Without file descriptors, asyncio keeps accepting (``_accept_connection``, up to the backlog, with a
traceback each time) and does not recover.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from typing import Any

from simkv.core.errors import InputError

#: Maximum number of connections that wait to be accepted.
BACKLOG = 2048
#: File descriptors reserved for uses other than connections.
RESERVED_FILES = 64


class CountedConnection(socket.socket):
    """A connection that is a member of the set ``others`` while it is open."""

    others: set[CountedConnection]

    def close(self) -> None:
        self.others.discard(self)
        super().close()


class Listener(socket.socket):
    """Listening socket that accepts connections up to the file limit and closes any others."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._connections: set[CountedConnection] = set()
        self._most = max(raise_file_limit() - RESERVED_FILES, 1)

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection. Raises ConnectionAbortedError if it was rejected."""
        number, address = self._accept()  # type: ignore[attr-defined]
        if len(self._connections) >= self._most:
            os.close(number)
            raise ConnectionAbortedError(errno.ECONNABORTED, "too many connections")
        visitor = CountedConnection(self.family, self.type, self.proto, fileno=number)
        # asyncio sets this option only if the protocol number is TCP's; here it is 0. Otherwise
        # Nagle's algorithm holds a response's body back until the client's delayed ACK (40 ms).
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor.others = self._connections
        self._connections.add(visitor)
        return visitor, address


def raise_file_limit() -> int:
    """Raise the limit of open files to the maximum that the system allows, and return it."""
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
