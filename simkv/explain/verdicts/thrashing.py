"""Verdict: preemptions cause repeated work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from simkv.explain.blame import PREEMPTION_LABELS, Preemption
from simkv.explain.computed_runs import compute_runs
from simkv.explain.verdicts.verdict import Verdict, times_phrase
from simkv.explain.wait_attribution import WaitAttribution
from simkv.sim.run_record import RunRecord

#: Minimum ratio of tokens that were computed again to all other computed tokens for this verdict.
#: At least one request must also be preempted twice or more.
MIN_REPEATED_SHARE = 0.1


@dataclass(frozen=True)
class Thrashing(Verdict):
    """Preemptions caused a large amount of recomputation.

    ``repeated`` is the number of tokens that were computed again after ``preemptions`` preemptions.
    ``kept`` is the number of all other computed tokens. ``reasons`` contains the number of
    preemptions by cause. ``worst`` is the largest number of tokens recomputed by one request, after
    ``times`` preemptions. ``requests`` contains this request and the main beneficiary of its
    preemptions.
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
            f"{self.repeated} tokens were recomputed, in addition to {self.kept} tokens of "
            f"useful work; preemptions: {reasons}; request {victim} lost its KV "
            f"{times_phrase(self.times)} and had {self.worst} tokens recomputed"
        )
        return text + "".join(f", mainly because of request {i}" for i in other)


def find_thrashing(
    record: RunRecord, pressure: WaitAttribution, preemptions: Sequence[Preemption]
) -> Thrashing | None:
    """Return the verdict on recomputation, or None.

    There is no verdict if the recomputed tokens are below ``MIN_REPEATED_SHARE`` of the other
    tokens, or if no request was preempted twice.
    """
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
