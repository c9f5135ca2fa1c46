"""Verdicts: requests that do not fit into the cache, were lost or were rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkv.core.outcome import Outcome
from simkv.core.scheduler_protocol import blocks_for
from simkv.explain.verdicts.verdict import (
    Verdict,
    count_phrase,
    name_requests,
    requests_with_outcome,
)
from simkv.sim.run_record import RequestRecord, RunRecord


@dataclass(frozen=True)
class UnservableRequests(Verdict):
    """Requests that exceed the whole cache; the worst of them ``needs`` the most blocks."""

    name = "unservable"
    needs: int
    has: int
    all: tuple[int, ...]

    @property
    def text(self) -> str:
        missing = self.needs - self.has
        return (
            f"{count_phrase(self.all)} cannot fit: request {self.requests[0]} needs {self.needs} "
            f"blocks, the cache has {self.has}; {missing} {'is' if missing == 1 else 'are'} missing"
        )


@dataclass(frozen=True)
class LostRequests(Verdict):
    """Requests that the engine lost: they are in no queue and never ended."""

    name = "lost"
    all: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"{count_phrase(self.all)} lost: {name_requests(self.all)}; {self.why}"


@dataclass(frozen=True)
class RejectedRequests(Verdict):
    """Requests that the engine rejected."""

    name = "rejected"
    all: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"{count_phrase(self.all)} rejected: {name_requests(self.all)}; {self.why}"


def find_unservable(record: RunRecord, block_size: int) -> UnservableRequests | None:
    """Find requests that do not fit into the cache even in isolation."""
    needs = {
        i: blocks_for(life.request.prompt_tokens + life.request.output_tokens - 1, block_size)
        for i, life in record.requests.items()
        if life.outcome is not Outcome.FINISHED
    }
    too_large = [i for i, blocks in needs.items() if blocks > record.num_blocks]
    if not too_large:
        return None
    worst = max(too_large, key=lambda i: (needs[i], -i))
    return UnservableRequests((worst,), needs[worst], record.num_blocks, tuple(too_large))


def find_lost(record: RunRecord) -> LostRequests | None:
    """Find requests with the outcome lost."""
    lives = requests_with_outcome(record, Outcome.LOST)
    ids = tuple(life.request.id for life in lives)
    return LostRequests(ids[:1], ids, lives[0].reason) if ids else None


def find_rejected(record: RunRecord) -> RejectedRequests | None:
    """Find requests with the outcome rejected."""
    lives = requests_with_outcome(record, Outcome.REJECTED)
    ids = tuple(life.request.id for life in lives)
    return RejectedRequests(ids[:1], ids, rejection(lives)) if ids else None


def rejection(lives: Sequence[RequestRecord]) -> str:
    """Return why requests were rejected: for each limit, the reason of the longest prompt."""
    longest: dict[str, RequestRecord] = {}
    for life in lives:
        limit = life.refusal.knob if life.refusal else ""
        known = longest.setdefault(limit, life)
        if life.request.prompt_tokens > known.request.prompt_tokens:
            longest[limit] = life
    if len(lives) == 1:
        return lives[0].reason
    return "; ".join(f"{life.reason} (request {life.request.id})" for life in longest.values())
