"""Verdicts on unserved requests: starved, timed out, too large, lost or rejected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkv.core.outcome import SERVED, Outcome
from simkv.core.scheduler_protocol import blocks_for
from simkv.explain.blame import Overtake
from simkv.explain.ledger_kinds import COMPUTE_KINDS, KIND_LABELS, Ledger, LedgerKind
from simkv.explain.verdicts.verdict import (
    Verdict,
    count_phrase,
    describe_shortfall,
    name_requests,
    requests_with_outcome,
)
from simkv.explain.wait_attribution import Blocker, WaitAttribution
from simkv.explain.wait_ledger import total_by_kind
from simkv.sim.run_record import RequestRecord, RunRecord, Shortfall

#: Minimum share of a request's waiting time for which another request counts as its main cause.
MAIN_BLOCKER_SHARE = 0.25


@dataclass(frozen=True)
class UnservableRequests(Verdict):
    """Requests that need more blocks than the whole KV cache has.

    The largest request needs ``needs`` blocks, and the cache has ``has`` blocks. ``all`` contains
    the ids of the requests.
    """

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
    """Requests that are in no queue of the engine and never ended.

    ``all`` contains the ids of the requests. ``why`` is the reason for the first request.
    """

    name = "lost"
    all: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"{count_phrase(self.all)} lost: {name_requests(self.all)}; {self.why}"


@dataclass(frozen=True)
class RejectedRequests(Verdict):
    """Requests that the engine rejected. ``all`` contains their ids."""

    name = "rejected"
    all: tuple[int, ...]
    why: str

    @property
    def text(self) -> str:
        return f"{count_phrase(self.all)} rejected: {name_requests(self.all)}; {self.why}"


def find_unservable(record: RunRecord, block_size: int) -> UnservableRequests | None:
    """Return the verdict on requests that exceed the whole KV cache, or None.

    ``block_size`` is in tokens.
    """
    needs = {
        i: blocks_for(life.request.prompt_tokens + life.request.output_tokens - 1, block_size)
        for i, life in record.requests.items()
        if life.outcome not in SERVED
    }
    too_large = [i for i, blocks in needs.items() if blocks > record.num_blocks]
    if not too_large:
        return None
    worst = max(too_large, key=lambda i: (needs[i], -i))
    return UnservableRequests((worst,), needs[worst], record.num_blocks, tuple(too_large))


def find_lost(record: RunRecord) -> LostRequests | None:
    """Return the verdict on requests with the outcome ``lost``, or None."""
    lives = requests_with_outcome(record, Outcome.LOST)
    ids = tuple(life.request.id for life in lives)
    return LostRequests(ids[:1], ids, lives[0].reason) if ids else None


def find_rejected(record: RunRecord) -> RejectedRequests | None:
    """Return the verdict on requests with the outcome ``rejected``, or None."""
    lives = requests_with_outcome(record, Outcome.REJECTED)
    ids = tuple(life.request.id for life in lives)
    return RejectedRequests(ids[:1], ids, rejection(lives)) if ids else None


def rejection(lives: Sequence[RequestRecord]) -> str:
    """Return the reasons for the rejection of requests as a phrase.

    For each exceeded engine limit, the phrase has the reason given for the longest prompt.
    """
    longest: dict[str, RequestRecord] = {}
    for life in lives:
        limit = life.refusal.knob if life.refusal else ""
        known = longest.setdefault(limit, life)
        if life.request.prompt_tokens > known.request.prompt_tokens:
            longest[limit] = life
    if len(lives) == 1:
        return lives[0].reason
    return "; ".join(f"{life.reason} (request {life.request.id})" for life in longest.values())


@dataclass(frozen=True)
class Starvation(Verdict):
    """Clients gave up on requests that waited and would have finished in time in isolation.

    ``all`` contains the ids of the requests. The other fields describe the request with the longest
    wait. ``lived`` is the time (s) until its client gave up, and ``waited`` is its waiting time
    (s). ``tokens`` is the number of tokens that it received. ``kinds`` is its waiting time (s) by
    reason. ``behind`` are the requests that blocked it, the longest blocking time first.
    ``overtaken`` describes the requests that overtook it, or is None.
    """

    name = "starvation"
    all: tuple[int, ...]
    waited: float
    lived: float
    tokens: int
    kinds: dict[LedgerKind, float]
    behind: tuple[Blocker, ...]
    overtaken: Overtake | None

    @property
    def main_blocker(self) -> int | None:
        """Id of the request that caused the longest wait, or None if this is less than a quarter of
        the waiting time.
        """
        first = next(iter(self.behind), None)
        return first.id if first and first.seconds >= MAIN_BLOCKER_SHARE * self.waited else None

    @property
    def text(self) -> str:
        text = (
            f"{count_phrase(self.all)} starved; request {self.requests[0]} waited "
            f"{self.waited:.3f} s of its {self.lived:.3f} s in the system and received "
            f"{_tokens(self.tokens)}"
        )
        if self.kinds:
            kind = max(self.kinds, key=lambda kind: self.kinds[kind])
            text += f", {self.kinds[kind]:.3f} s {KIND_LABELS[kind]}"
        if self.behind:
            first = self.behind[:2]
            if self.main_blocker is None:
                text += "; of this, " + " and ".join(
                    f"{b.seconds:.3f} s because of request {b.id}" for b in first
                )
            else:
                text += ", mainly because of " + " and ".join(
                    f"request {b.id} ({b.seconds:.3f} s)" for b in first
                )
        if self.overtaken:
            text += (
                f"; {count_phrase(range(self.overtaken.others))} that arrived later started "
                f"earlier; the first of them was request {self.overtaken.by}"
            )
        return text


def find_starvation(
    record: RunRecord, ledger: Ledger, pressure: WaitAttribution, overtakes: Sequence[Overtake]
) -> Starvation | None:
    """Return the verdict on starved requests, or None if no request starved.

    The verdict describes the request with the longest wait.
    """
    ids = tuple(life.request.id for life in requests_with_outcome(record, Outcome.STARVED))
    if not ids:
        return None
    waits = {
        i: total_by_kind(tile for tile in ledger[i] if tile.kind not in COMPUTE_KINDS) for i in ids
    }
    waited = {i: sum(kinds.values()) for i, kinds in waits.items()}
    worst = max(ids, key=lambda i: (waited[i], -record.requests[i].tokens, -i))
    lived = sum(tile.seconds for tile in ledger[worst])
    behind = tuple(pressure.on(worst)[:4])
    overtaken = next((overtake for overtake in overtakes if overtake.victim == worst), None)
    culprit = (overtaken.by,) if overtaken else tuple(blocker.id for blocker in behind[:1])
    return Starvation(
        (worst, *culprit),
        ids,
        waited[worst],
        lived,
        record.requests[worst].tokens,
        waits[worst],
        behind,
        overtaken,
    )


def _tokens(count: int) -> str:
    return "one token" if count == 1 else f"{count} tokens"


@dataclass(frozen=True)
class TimedOutRequests(Verdict):
    """Clients gave up on requests that could not have finished in time.

    ``all`` contains the ids of the requests. The other fields describe the request that needed the
    most additional time. ``lacked`` is the additional time (s), and ``alone`` is its duration in
    isolation (s). Both are None if the duration exceeds ten times ``timeout``. ``company`` is the
    delay (s) by other requests.
    """

    name = "timed_out"
    all: tuple[int, ...]
    timeout: float
    alone: float | None
    lacked: float | None
    company: float

    @property
    def text(self) -> str:
        shortfall = Shortfall(self.alone, self.lacked, self.company)
        return (
            f"{count_phrase(self.all)} timed out; request {self.requests[0]}: "
            f"{describe_shortfall(shortfall, self.timeout)}"
        )


def find_timed_out(record: RunRecord) -> TimedOutRequests | None:
    """Return the verdict on timed-out requests, or None if the needed time is unknown.

    The verdict describes the request that needed the most additional time.
    """
    lives = requests_with_outcome(record, Outcome.TIMED_OUT)
    ids = tuple(life.request.id for life in lives)
    known = [i for i in ids if i in record.shortfalls]
    if not known:
        return None

    def lack(i: int) -> tuple[bool, float, int]:
        short = record.shortfalls[i]
        return short.remaining_s is None, short.remaining_s or 0.0, -i

    worst = max(known, key=lack)
    short = record.shortfalls[worst]
    timeout = record.requests[worst].request.timeout or 0.0
    return TimedOutRequests(
        (worst,), ids, timeout, short.isolated_s, short.remaining_s, short.delay_s
    )
