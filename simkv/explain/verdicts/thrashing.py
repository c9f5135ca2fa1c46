"""Verdict: work is repeated because of preemptions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from simkv.explain.blame import PREEMPTION_LABELS, Preemption, WaitAttribution
from simkv.explain.verdicts.verdict import Verdict, times_phrase
from simkv.explain.wait_ledger import compute_runs
from simkv.sim.run_record import RunRecord

#: Minimum ratio of repeated to kept tokens; in addition, a request must be preempted twice.
MIN_REPEATED_SHARE = 0.1


@dataclass(frozen=True)
class Thrashing(Verdict):
    """``repeated`` tokens were computed again, compared with ``kept`` ones, after ``preemptions``.

    The victim had the most tokens computed again: ``worst`` tokens, after ``times`` preemptions.
    The second request in ``requests`` gained the most from these, or held the most blocks if the
    victim itself lacked them. ``reasons`` counts all preemptions by their cause.
    """

    name = "thrash"
    repeated: int
    kept: int
    preemptions: int
    worst: int
    times: int
    reasons: dict[str, int]

    @property
    def text(self) -> str:
        reasons = ", ".join(
            f"{count} {PREEMPTION_LABELS.get(why, why)}" for why, count in self.reasons.items()
        )
        victim, *other = self.requests
        text = (
            f"{self.repeated} tokens were recomputed, "
            f"{100 * self.repeated / max(self.kept, 1):.0f} % of the {self.kept} computed tokens "
            f"that were kept; preemptions: {reasons}; request {victim} lost its KV "
            f"{times_phrase(self.times)} and had {self.worst} tokens recomputed"
        )
        return text + "".join(f", mainly because of request {i}" for i in other)


def find_thrashing(
    record: RunRecord, pressure: WaitAttribution, preemptions: Sequence[Preemption]
) -> Thrashing | None:
    """Return the verdict, or None; the worst request had the most tokens computed again."""
    lives = record.requests
    repeated = sum(life.recomputed_tokens for life in lives.values())
    if not repeated:
        return None
    computed = sum(
        run.tokens * (run.last - run.first + 1)
        for life in lives.values()
        for run in compute_runs(life)
    )
    kept = computed - repeated
    if (
        repeated < MIN_REPEATED_SHARE * kept
        or max(len(life.preempted_at) for life in lives.values()) < 2
    ):
        return None
    worst = max(lives, key=lambda i: (lives[i].recomputed_tokens, -i))
    losses = [preemption for preemption in preemptions if preemption.victim == worst]
    gains = Counter(p.by for p in losses if p.by is not None and p.by != worst)
    if not gains:
        held = pressure.block_holders(losses[-1].at)
        gains.update({i: blocks for i, blocks in held.items() if i != worst})
    requests = (worst, *(i for i, _ in gains.most_common(1)))
    reasons = dict(Counter(preemption.why for preemption in preemptions).most_common())
    most, times = lives[worst].recomputed_tokens, len(lives[worst].preempted_at)
    return Thrashing(requests, repeated, kept, len(preemptions), most, times, reasons)
