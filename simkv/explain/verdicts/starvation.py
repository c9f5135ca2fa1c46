"""Verdict: clients gave up because their requests waited too long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkv.core.outcome import Outcome
from simkv.explain.blame import Blocker, Overtake, WaitAttribution
from simkv.explain.verdicts.verdict import Verdict, count_phrase, requests_with_outcome
from simkv.explain.wait_ledger import (
    COMPUTE_KINDS,
    KIND_LABELS,
    Ledger,
    LedgerKind,
    total_by_kind,
)
from simkv.sim.run_record import RunRecord


@dataclass(frozen=True)
class Starvation(Verdict):
    """Clients gave up. The worst request spent ``waited`` of its ``lived`` seconds waiting.

    ``kinds`` are the seconds of waiting by reason. ``behind`` are the requests that blocked it,
    worst first. ``overtaken`` is its overtaking by others, if any.
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
    def text(self) -> str:
        text = (
            f"{count_phrase(self.all)} starved; request {self.requests[0]} waited "
            f"{self.waited:.3f} of "
            f"its {self.lived:.3f} s and got {_tokens(self.tokens)}"
        )
        if self.kinds:
            kind = max(self.kinds, key=lambda kind: self.kinds[kind])
            text += f", {self.kinds[kind]:.3f} s {KIND_LABELS[kind]}"
        if self.behind:
            text += ", mainly because of " + " and ".join(
                f"request {b.id} ({b.seconds:.3f} s)" for b in self.behind[:2]
            )
        if self.overtaken:
            text += (
                f"; {count_phrase(range(self.overtaken.others))} that arrived later started "
                f"earlier, the first was request {self.overtaken.by}"
            )
        return text


def find_starvation(
    record: RunRecord, ledger: Ledger, pressure: WaitAttribution, overtakes: Sequence[Overtake]
) -> Starvation | None:
    """Return the verdict, or None; the worst request waited longest.

    Among equal waits, it is the request with the fewest tokens.
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
