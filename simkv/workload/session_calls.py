"""Requests of a generated session, before they have numbers and times."""

from __future__ import annotations

from dataclasses import dataclass, field

#: Maximum number of turns in a session; each turn repeats all previous turns.
MAX_TURNS = 1000

#: Calls whose new prompt tokens (True) or answers (False) a prompt repeats, in order.
History = tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True)
class SessionCall:
    """A request of a session, before it has a number and a time. Calls are given by index in the
    session.

    - ``new``: number of new prompt tokens. ``output``: number of output tokens.
    - ``before``: calls that this call waits for.
    - ``history``: calls whose new prompt tokens (True) or answers (False) the prompt repeats, in
      order.
    - ``rewritten``: number of tokens of a compacted context.
    - ``agent``: first call of the sub-agent; -1 for the main agent.
    - ``first_wins``: whether the call waits only for the first answer.
    - ``prefix``: stream and number of the shared tokens at the beginning of a context of its own;
      None if the context begins with the shared prefix of the session.
    - ``delay``: think time and tool time in seconds, in template graphs.
    """

    new: int
    output: int
    before: tuple[int, ...] = ()
    history: History = field(default=(), repr=False)
    rewritten: int = 0
    agent: int = -1
    first_wins: bool = False
    prefix: tuple[str, int] | None = None
    delay: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, slots=True)
class ContextRules:
    """Limits of the contexts of a session, in tokens.

    - ``prefix_tokens``: length of the shared prefix of the session.
    - ``max_tokens``: limit of output lengths.
    - ``max_model_len``: limit of prompt and answer.
    - ``compact_at``: prompt length above which a context is compacted to ``compact_to`` tokens.
    """

    prefix_tokens: int = 0
    max_tokens: int | None = None
    max_model_len: int | None = None
    compact_at: int | None = None
    compact_to: int = 0

    def fits(self, tokens: int) -> bool:
        return self.max_model_len is None or tokens <= self.max_model_len

    def limited(self, output: int) -> int:
        return output if self.max_tokens is None else min(output, self.max_tokens)
