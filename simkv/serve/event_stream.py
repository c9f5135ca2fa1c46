"""Format replies for HTTP: as server-sent events with one chunk per message, or as one JSON
body.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from simkv.core.outcome import Outcome
from simkv.serve.error_responses import error_object, error_response
from simkv.serve.partial_reply import Reply
from simkv.serve.request_bodies import Body
from simkv.serve.request_handler import (
    ERROR_OUTCOMES,
    Generation,
    RequestHandler,
    finish_reason,
)


@dataclass(frozen=True)
class Dialect:
    """Response format of one of the two generation APIs.

    The id of a response starts with ``prefix``. ``kind`` and ``chunk_kind`` are the object types of
    a complete response and of a stream chunk. ``chunk`` and ``whole`` return the fields of a choice
    for a part of the text and for the complete text. ``opening`` contains the fields of the chunk
    before the first token, or is None.
    """

    prefix: str
    kind: str
    chunk_kind: str
    chunk: Callable[[str], dict[str, Any]]
    whole: Callable[[str], dict[str, Any]]
    opening: dict[str, Any] | None = None


COMPLETION = Dialect(
    "cmpl-",
    "text_completion",
    "text_completion",
    lambda text: {"text": text},
    lambda text: {"text": text},
)
CHAT = Dialect(
    "chatcmpl-",
    "chat.completion",
    "chat.completion.chunk",
    lambda text: {"delta": {"content": text}},
    lambda text: {"message": {"role": "assistant", "content": text}},
    {"delta": {"role": "assistant", "content": ""}},
)
#: Maximum number of messages that are formatted at a time, before other calls are served.
MAX_MESSAGES = 256
#: Placeholder for the text of a token in the prepared chunk.
TEXT_PLACEHOLDER = "\0"


class Writer:
    """Writer of the replies to one API call, in one of the two response formats."""

    def __init__(
        self, handler: RequestHandler, call: Generation, body: Body, dialect: Dialect
    ) -> None:
        self.handler, self.call, self.body, self.dialect = handler, call, body, dialect
        self._head = {
            "id": call.response_id,
            "object": dialect.chunk_kind,
            "created": int(time.time()),
            "model": call.model,
        }
        options = body.stream_options
        self._usage = bool(options and options.include_usage)
        self._running_usage = bool(self._usage and options and options.continuous_usage_stats)

    def _event(self, choices: list[dict[str, Any]], usage: dict[str, int] | None = None) -> bytes:
        said = {**self._head, "choices": choices}
        if self._usage:
            said["usage"] = usage
        return f"data: {json.dumps(said, separators=(',', ':'))}\n\n".encode()

    def _choice(self, index: int, fields: dict[str, Any], reason: str | None) -> dict[str, Any]:
        return {"index": index, **fields, "logprobs": None, "finish_reason": reason}

    def reason(self, answer: Reply) -> str:
        """Return the finish reason of a reply."""
        return finish_reason(answer.request, answer.tokens, self.handler.served.longest)

    async def events(self, index: int) -> AsyncIterator[bytes]:
        """Yield the stream events of the reply to one prompt.

        Tokens that are due at the same time are sent together.
        """
        answer, word = self.call.replies[index], self.handler.served.texts.word
        number, sent = answer.request.id, 0
        form = self._event([self._choice(index, self.dialect.chunk(TEXT_PLACEHOLDER), None)])
        # The text is the last string of a chunk; the id and model before it may contain the
        # placeholder.
        before, _, after = form.rpartition(json.dumps(TEXT_PLACEHOLDER)[1:-1].encode())
        while True:
            due = await answer.wait_for_tokens(sent)
            parts = []
            if sent == 0 and answer.tokens and self.dialect.opening:
                parts.append(self._event([self._choice(index, self.dialect.opening, None)]))
            last = answer.tokens - 1 if answer.outcome is Outcome.FINISHED else -1
            while sent < answer.tokens:
                end = answer.message(sent)
                text = "".join(word(number, place) for place in range(sent, end))
                closes = sent <= last < end
                if closes or self._running_usage:
                    reason = self.reason(answer) if closes else None
                    choice = self._choice(index, self.dialect.chunk(text), reason)
                    usage = self.call.usage() if self._running_usage else None
                    parts.append(self._event([choice], usage))
                else:
                    parts.append(b"".join((before, text.encode(), after)))
                sent = end
                if len(parts) >= MAX_MESSAGES:
                    yield b"".join(parts)
                    parts.clear()
                    await asyncio.sleep(0)
            if parts:
                yield b"".join(parts)
            if due is not None:
                self.handler.record_delay(due)
            if answer.ended and sent == answer.tokens:
                break
        if answer.outcome is not Outcome.FINISHED:
            status, message = reply_error(answer)
            yield f"data: {json.dumps(error_object(status, message))}\n\n".encode()

    def closing(self) -> bytes:
        """Return the end of a stream: ``[DONE]``, after the usage chunk if the client requested
        it.
        """
        usage = self._event([], self.call.usage()) if self._usage else b""
        return usage + b"data: [DONE]\n\n"

    def whole(self) -> JSONResponse:
        """Return all replies as one JSON response. Every reply must have ended."""
        bad = [answer for answer in self.call.replies if answer.outcome is not Outcome.FINISHED]
        if bad:
            return error_response(*reply_error(bad[0]))
        word, choices = self.handler.served.texts.word, []
        for index, answer in enumerate(self.call.replies):
            number = answer.request.id
            text = "".join(word(number, place) for place in range(answer.tokens))
            choices.append(self._choice(index, self.dialect.whole(text), self.reason(answer)))
        head = {**self._head, "object": self.dialect.kind}
        return JSONResponse({**head, "choices": choices, "usage": self.call.usage()})


def reply_error(answer: Reply) -> tuple[int, str]:
    """Return the HTTP status and the error message for a reply that did not finish."""
    assert answer.outcome is not None
    if answer.refusal:
        return 503, answer.refusal.words
    status, words = ERROR_OUTCOMES.get(answer.outcome, (500, answer.outcome.value))
    return status, f"{words}: {answer.reason}" if answer.reason else words


class ReplyResponse(Response):
    """Response to an API call. It ends when all replies have ended or the client disconnects."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. If the client disconnects, cancel its unfinished requests in the
        engine.
        """
        writer = self.writer
        answer = self._stream(send) if writer.body.stream else self._at_once(scope, receive, send)
        writing = asyncio.ensure_future(answer)
        gone = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writing, gone}, return_when=asyncio.FIRST_COMPLETED)
            if writing.done():
                writing.result()
        finally:
            for task in (writing, gone):
                task.cancel()
            writer.handler.end(writer.call)

    async def _stream(self, send: Send) -> None:
        headers = [
            (b"content-type", b"text/event-stream; charset=utf-8"),
            (b"cache-control", b"no-cache"),
        ]
        for name, value in self.writer.call.headers.items():
            headers.append((name.encode(), value.encode()))
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for events in self._events():
            await send({"type": "http.response.body", "body": events, "more_body": True})
        closing = self.writer.closing()
        await send({"type": "http.response.body", "body": closing, "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        """Yield the stream events of all replies, in the order in which they occur."""
        count = len(self.writer.call.replies)
        if count == 1:
            async for events in self.writer.events(0):
                yield events
            return
        ready: asyncio.Queue[bytes | None] = asyncio.Queue()

        async def collect(index: int) -> None:
            async for events in self.writer.events(index):
                ready.put_nowait(events)
            ready.put_nowait(None)

        tasks = [asyncio.ensure_future(collect(index)) for index in range(count)]
        try:
            while count:
                if (following := await ready.get()) is None:
                    count -= 1
                else:
                    yield following
        finally:
            for task in tasks:
                task.cancel()

    async def _at_once(self, scope: Scope, receive: Receive, send: Send) -> None:
        for answer in self.writer.call.replies:
            while not answer.ended:
                await answer.wait_for_tokens(answer.tokens)
        response = self.writer.whole()
        response.headers.update(self.writer.call.headers)
        await response(scope, receive, send)


async def _gone(receive: Receive) -> None:
    """Wait until the client disconnects."""
    while (await receive())["type"] != "http.disconnect":
        pass
