"""ASGI middleware that checks API keys, limits request bodies and adds a response header."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable
from dataclasses import dataclass

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from simkv.serve.error_responses import error_response

#: Paths that need no key, because probes and scrapers do not have one.
PUBLIC_PATHS = ("/health", "/ping", "/version", "/load", "/metrics")


@dataclass(frozen=True)
class BodyLimits:
    """Maximum size of a request body in bytes, and maximum time in seconds to receive it."""

    body: int = 16 * 1024 * 1024
    seconds: float = 30.0


class Guard:
    """ASGI middleware that admits requests with a valid API key and a body within the limits.

    Every response gets the header ``x-simkv-speed``. A slash at the end of a path is ignored.
    ``refuse`` returns the reason why the server accepts no new calls, or "".
    """

    def __init__(
        self,
        app: ASGIApp,
        speed: float,
        key: str | None = None,
        limits: BodyLimits | None = None,
        refuse: Callable[[], str] = lambda: "",
    ) -> None:
        self._app = app
        self._key = key.encode() if key else None
        self._limits = limits or BodyLimits()
        self._speed = (b"x-simkv-speed", f"{speed:g}".encode())
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        # A redirect would be unsafe, because its host would come from a header of the client.
        scope = {**scope, "path": scope["path"].rstrip("/") or "/"}

        async def send_and_say(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], self._speed]
            await send(message)

        refused = self._refused(scope["path"], scope["method"], Headers(scope=scope))
        app = refused or self._app
        await app(scope, self._counted(receive), send_and_say)

    def _refused(self, path: str, method: str, headers: Headers) -> JSONResponse | None:
        """Return the error response to an invalid path, method or header, or None."""
        if self._key and path not in PUBLIC_PATHS and method != "OPTIONS":
            scheme, _, given = headers.get("authorization", "").partition(" ")
            same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key)
            if not (same and scheme.lower() == "bearer"):
                return error_response(401, "Unauthorized")
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._limits.body:
            said = f"the body has {length[:20]} bytes; expected at most {self._limits.body}"
            return error_response(413, said)
        if method == "POST" and (why := self._refuse()):
            return error_response(503, why)
        return None

    def _counted(self, receive: Receive) -> Receive:
        """Return ``receive`` with limits on the size and the duration of the body."""
        limits, taken, whole = self._limits, 0, False
        end = asyncio.get_running_loop().time() + limits.seconds

        async def counted() -> Message:
            nonlocal taken, whole
            if whole:
                return await receive()
            try:
                async with asyncio.timeout_at(end):
                    message = await receive()
            except TimeoutError:
                said = f"the body was not received within {limits.seconds:g} s"
                raise HTTPException(408, said, {"connection": "close"}) from None
            taken += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if taken > limits.body:
                raise HTTPException(413, f"the body has more than {limits.body} bytes")
            return message

        return counted
