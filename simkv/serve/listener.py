"""A listening socket that turns connections away before the process has no file descriptors left.

asyncio goes on accepting when there are none (``_accept_connection``, up to the backlog, each time
with a traceback), and does not come back from it.
"""

from __future__ import annotations

import errno
import os
import resource
import socket
from typing import Any

from simkv.core.errors import InputError

#: Connections that may wait to be accepted.
BACKLOG = 2048
#: File descriptors that are kept for all that is no connection.
RESERVED_FILES = 64


class CountedConnection(socket.socket):
    """A connection, and the set of ``others`` in which it is as long as it is open."""

    others: set[CountedConnection]

    def close(self) -> None:
        self.others.discard(self)
        super().close()


class Listener(socket.socket):
    """Accepts as many connections as there may be files; who comes then is hung up on."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._visitors: set[CountedConnection] = set()
        self._most = max(raise_file_limit() - RESERVED_FILES, 1)

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection. Raises ConnectionAbortedError where it was turned away."""
        number, address = self._accept()  # type: ignore[attr-defined]
        if len(self._visitors) >= self._most:
            os.close(number)
            raise ConnectionAbortedError(errno.ECONNABORTED, "too many connections")
        visitor = CountedConnection(self.family, self.type, self.proto, fileno=number)
        # asyncio sets this only where the protocol number is that of TCP; here it is 0. Without it
        # Nagle's algorithm holds a response's body back until the client's delayed ACK (40 ms).
        visitor.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        visitor.others = self._visitors
        self._visitors.add(visitor)
        return visitor, address


def raise_file_limit() -> int:
    """As many files as the process may have open, from now on all that the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return hard
    return soft


def bind(host: str, port: int) -> Listener:
    """A socket that listens. Raises InputError if that cannot be."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        plain = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError, TypeError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"--host {host} --port {port}: {why}") from error
    return Listener(plain.family, plain.type, plain.proto, fileno=plain.detach())
