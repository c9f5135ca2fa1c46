"""Requests that the cache cannot hold, that the engine forgot, or to which it said no."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkv.core.outcome import Outcome
from simkv.core.scheduler import blocks_for
from simkv.loop.record import Life, Record
from simkv.why.verdicts.verdict import Verdict, how_many, named, with_outcome


@dataclass(frozen=True)
class Unservable(Verdict):
    """Requests that the whole cache cannot hold; the worst of them ``needs`` the most blocks."""

    name = "unservable"
    needs: int
    has: int
    all: tuple[int, ...]

    @property
    def text(self) -> str:
        missing = self.needs - self.has
        return (
            f"{how_many(self.all)} cannot fit: request {self.requests[0]} needs {self.needs} "
            f"blocks, the cache has {self.has}; {missing} {'is' if missing == 1 else 'are'} missing"
        )


@dataclass(frozen=True)
class Lost(Verdict):
    """The engine forgot these requests: they are in no queue and never ended."""

    name = "lost"
    all: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"{how_many(self.all)} lost: {named(self.all)}; {self.why}"


@dataclass(frozen=True)
class Rejected(Verdict):
    """The engine said no to these requests."""

    name = "rejected"
    all: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"{how_many(self.all)} rejected: {named(self.all)}; {self.why}"


def unservable(record: Record, block_size: int) -> Unservable | None:
    """Requests that would not fit alone."""
    needs = {
        i: blocks_for(life.request.prompt_tokens + life.request.output_tokens - 1, block_size)
        for i, life in record.lives.items()
        if life.outcome is not Outcome.FINISHED
    }
    too_large = [i for i, blocks in needs.items() if blocks > record.num_blocks]
    if not too_large:
        return None
    worst = max(too_large, key=lambda i: (needs[i], -i))
    return Unservable((worst,), needs[worst], record.num_blocks, tuple(too_large))


def forgotten(record: Record) -> Lost | None:
    """Requests that ended as lost."""
    lives = with_outcome(record, Outcome.LOST)
    ids = tuple(life.request.id for life in lives)
    return Lost(ids[:1], ids, lives[0].reason) if ids else None


def rejected(record: Record) -> Rejected | None:
    """Requests that ended as rejected."""
    lives = with_outcome(record, Outcome.REJECTED)
    ids = tuple(life.request.id for life in lives)
    return Rejected(ids[:1], ids, rejection(lives)) if ids else None


def rejection(lives: Sequence[Life]) -> str:
    """Why these requests were rejected: the reason of the longest prompt of each limit."""
    longest: dict[str, Life] = {}
    for life in lives:
        limit = life.refusal.knob if life.refusal else ""
        known = longest.setdefault(limit, life)
        if life.request.prompt_tokens > known.request.prompt_tokens:
            longest[limit] = life
    if len(lives) == 1:
        return lives[0].reason
    return "; ".join(f"{life.reason} (request {life.request.id})" for life in longest.values())
