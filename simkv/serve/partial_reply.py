"""State of an unfinished reply: its number of tokens, and whether more will follow."""

from __future__ import annotations

import asyncio
from collections import deque

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Refusal


class Reply:
    """Reply to a request, which grows while the response to the client is written.

    ``tokens`` is the number of available tokens. ``due`` is the time (``time.monotonic``) of the
    oldest token that was not yet written, or None. ``outcome`` is set at the end. ``reason`` says
    why the request did not finish. ``refusal`` is set if a queue limit rejected the request.
    """

    __slots__ = (
        "_ends",
        "_repeated",
        "_source",
        "_waiter",
        "due",
        "outcome",
        "reason",
        "refusal",
        "request",
        "tokens",
    )

    def __init__(self, request: Request) -> None:
        self.request = request
        self.tokens = 0
        self.due: float | None = None
        self.outcome: Outcome | None = None
        self.reason = ""
        self.refusal: Refusal | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._source: object = None
        self._repeated = 0
        self._ends: deque[int] = deque()  # bounds of messages with several tokens

    @property
    def ended(self) -> bool:
        """Whether no more tokens will follow."""
        return self.outcome is not None

    def add_tokens(self, due: float, source: object, tokens: int = 1) -> None:
        """Add tokens that are available from time ``due`` on.

        ``source`` is the replica that generated the tokens. A new replica generates the reply again
        from its start, so tokens that are already counted are skipped.
        """
        if source is not self._source:
            self._source, self._repeated = source, self.tokens
        if again := min(self._repeated, tokens):
            self._repeated -= again
            tokens -= again
            if not tokens:
                return
        self.tokens += tokens
        if tokens > 1:
            self._ends.append(self.tokens - tokens)
            self._ends.append(self.tokens)
        if self.due is None:
            self.due = due
        self._wake()

    def message(self, first: int) -> int:
        """Return the end of the message that begins with token ``first``, as a token number.

        Several accepted draft tokens form one message.
        """
        if self._ends and self._ends[0] == first:
            self._ends.popleft()
            return self._ends.popleft()
        return first + 1

    def end(
        self, outcome: Outcome | None, reason: str = "", refusal: Refusal | None = None
    ) -> None:
        """End the reply."""
        self.outcome, self.reason, self.refusal = outcome or Outcome.LOST, reason, refusal
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def wait_for_tokens(self, seen: int) -> float | None:
        """Wait until there are more than ``seen`` tokens or the reply has ended.

        Returns ``due`` and resets it to None.
        """
        while self.tokens <= seen and not self.ended:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        due, self.due = self.due, None
        return due
