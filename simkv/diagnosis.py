"""Why a run went as it did: who blocked whom, what was wasted, and verdicts with their proof.

    found = diagnose(result.record, block_size(result.scenario.engine))
    print(found.verdicts[0].text)

or ``result.diagnosis``, which is the same, worked out when first asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from simkv.ledger import Interval, Kind
from simkv.record import Life, Record


class Holding(NamedTuple):
    """A request holds ``blocks`` blocks of KV from ``start`` to ``end`` (s)."""

    start: float
    end: float
    blocks: int


class Blocker(NamedTuple):
    """A request that held what others waited for.

    ``seconds`` is its share of their waiting, by the blocks (or slots) that it held in the
    meantime; ``block_seconds`` is what it held of the cache while they waited.
    """

    id: int
    seconds: float
    block_seconds: float


class Preemption(NamedTuple):
    """At ``at`` (s) the KV of ``victim`` was taken, for the sake of ``by`` (None: of all others).

    ``why`` is ``blocks`` (there were too few), ``bucket`` (of another length than those that run)
    or ``patience`` (the head of the queue had waited too long). ``tokens`` of KV were lost.
    """

    at: float
    victim: int
    by: int | None
    why: str
    tokens: int


class Overtake(NamedTuple):
    """``by`` arrived after ``victim`` and was served before it; ``seconds`` between the starts."""

    victim: int
    by: int
    seconds: float


@dataclass(frozen=True)
class Waste:
    """GPU seconds that served nobody, each step's time shared out by tokens.

    ``gone``: for clients that had gone away; ``dropped``: tokens computed and thrown away;
    ``recompute``: tokens that had been computed before. ``busy`` is the time of all steps.
    """

    gone: float
    dropped: float
    recompute: float
    busy: float

    @property
    def total(self) -> float:
        return self.gone + self.dropped + self.recompute


@dataclass(frozen=True)
class Verdict:
    """Something that went wrong: its name, the fewest requests that show it, and a sentence.

    The subclasses below add the evidence. ``to_json`` is what stands in ``summary.json``.
    """

    requests: tuple[int, ...]

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def text(self) -> str:
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        raise NotImplementedError


@dataclass(frozen=True)
class Diagnosis:
    """All that is known about why a run went as it did.

    ``blockers`` are the requests to whom most of others' waiting is due, first the worst.
    ``recompute_tokens`` and ``waste.recompute`` (s) are the recompute tax. ``overtakes`` counts
    pairs; ``worst_overtakes`` gives for each overtaken request the one that came furthest ahead.
    """

    ledger: dict[int, list[Interval]]
    totals: dict[Kind, float]
    blockers: list[Blocker]
    preemptions: list[Preemption]
    overtakes: int
    worst_overtakes: list[Overtake]
    recompute_tokens: int
    waste: Waste
    verdicts: list[Verdict]

    def blockers_of(self, request: int) -> list[Blocker]:
        """Who held what ``request`` waited for, first the worst."""
        raise NotImplementedError


def diagnose(record: Record, block_size: int) -> Diagnosis:
    """Work out why a run went as it did; ``block_size`` in tokens."""
    raise NotImplementedError


def holdings(record: Record, life: Life, block_size: int) -> list[Holding]:
    """The blocks that a request held over time, from the tokens of KV that it had computed.

    Prefixes that it shared count in full; blocks that an engine hands out ahead of use do not.
    """
    raise NotImplementedError
