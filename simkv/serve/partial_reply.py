"""An answer under way: how many tokens of it there are, and whether there will be more."""

from __future__ import annotations

import asyncio
from collections import deque

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Refusal


class Reply:
    """What becomes of a request, for whoever writes it to a socket.

    ``tokens`` are there, ``due`` is when (by ``time.monotonic``) the oldest of those came that
    nobody has fetched. With an ``outcome`` there will be no more, and ``reason`` says why if it is
    not finished, ``refusal`` if it was turned away for a limit. Nothing is kept per token, so a
    slow reader costs nothing; but of messages with several tokens (accepted drafts), their ends.
    """

    __slots__ = (
        "_again",
        "_ends",
        "_news",
        "_source",
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
        self._news: asyncio.Future[None] | None = None
        self._source: object = None
        self._again = 0
        self._ends: deque[int] = deque()  # of messages with several tokens

    @property
    def ended(self) -> bool:
        """Whether there will be no more tokens."""
        return self.outcome is not None

    def add_tokens(self, due: float, source: object, tokens: int = 1) -> None:
        """A token is there since ``due``, or several.

        Another ``source`` than that of the tokens before begins anew; what the client already has
        is not sent to it again.
        """
        if source is not self._source:
            self._source, self._again = source, self.tokens
        if again := min(self._again, tokens):
            self._again -= again
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
        """The end of the message that begins with token ``first``, and is read now."""
        if self._ends and self._ends[0] == first:
            self._ends.popleft()
            return self._ends.popleft()
        return first + 1

    def end(
        self, outcome: Outcome | None, reason: str = "", refusal: Refusal | None = None
    ) -> None:
        """There will be no more tokens."""
        self.outcome, self.reason, self.refusal = outcome or Outcome.LOST, reason, refusal
        self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    async def news(self, seen: int) -> float | None:
        """Wait until there are more than ``seen`` tokens, or the end; returns ``due``."""
        while self.tokens <= seen and not self.ended:
            self._news = asyncio.get_running_loop().create_future()
            await self._news
        due, self.due = self.due, None
        return due
