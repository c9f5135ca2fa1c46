"""mistral.rs's scheduler with a custom policy, which replaces some decisions of a variant."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from simkv.core.policy_language import PolicyExpression, parse_policy
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import PreemptionReason
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.mistralrs.policy_hooks import GROUPING_DEFAULTS, POLICY_HOOKS
from simkv.schedulers.mistralrs.scheduler import BucketedScheduler, Key
from simkv.schedulers.mistralrs.scheduler_base import UNLIMITED_STEPS, Sequence, SequenceState
from simkv.schedulers.mistralrs.versions import MistralrsRules

QueuePosition = tuple[float, float, int]
#: Maximum preemption count in the fingerprint; states with higher counts are treated as equal, so
#: that a cycle is detected.
MAX_COUNTED_PREEMPTIONS = 64


@dataclass(frozen=True, slots=True)
class SequenceView:
    """Values that the expressions of a custom policy can read.

    ``simkv.core.policy_language`` describes the values.
    """

    q: Sequence
    of: BucketedExpressionScheduler

    @property
    def age(self) -> float:
        return self.of.newest - self.q.prompt.arrival

    @property
    def prompt_tokens(self) -> float:
        return float(self.q.prompt.prompt_tokens)

    @property
    def tokens(self) -> float:
        return float(self.q.length)

    @property
    def blocks(self) -> float:
        return float(self.of.pool.held(self.q.id))

    @property
    def preemptions(self) -> float:
        return float(self.of.preempted.get(self.q.id, 0))

    @property
    def priority(self) -> float:
        return float(self.q.prompt.priority)

    @property
    def bucket(self) -> float:
        return float(self.q.length.bit_length())

    @property
    def free(self) -> float:
        return self.of.pool.free / self.of.pool.num_blocks

    @property
    def running(self) -> float:
        return float(len(self.of.running))

    @property
    def waiting(self) -> float:
        return float(len(self.of.waiting))


class BucketedExpressionScheduler(BucketedScheduler):
    """Scheduler in which a custom policy makes some decisions.

    Ties are broken by arrival time.
    """

    def __init__(self, config: MistralrsConfig, rules: MistralrsRules | None = None) -> None:
        super().__init__(config, rules)
        rule = self.rule = parse_policy(config.rule, POLICY_HOOKS)
        self.newest = 0.0
        self.preempted: dict[int, int] = {}
        self._groups: dict[str, PolicyExpression] = {}
        if GROUPING_DEFAULTS.keys() & rule.keys():
            own = parse_policy(
                ";".join(f"{k} = {v}" for k, v in GROUPING_DEFAULTS.items()), POLICY_HOOKS
            )
            self._groups = {name: rule.get(name, own[name]) for name in GROUPING_DEFAULTS}

    def add(self, prompt: Prompt) -> None:
        self.newest = max(self.newest, prompt.arrival)
        super().add(prompt)

    def leap(self, most: int) -> int:
        """Return the number of decode-only steps until the queue or the batch changes."""
        # The result is 1 if a value that the policy reads changes from step to step.
        if not self._counts_failures() and self._may_change():
            return 1
        return super().leap(most)

    def fingerprint(self) -> Hashable:
        often = tuple(
            (i, min(count, MAX_COUNTED_PREEMPTIONS)) for i, count in self.preempted.items()
        )
        return super().fingerprint(), often

    def _may_change(self) -> bool:
        order, admit = self.rule.get("running_order"), self.rule.get("admit")
        if order is None and super()._order_flips():
            return True
        if self.waiting and admit is not None and admit.moves and not super()._capped():
            return True
        looked_at = [*self._groups.values(), *([order] if order else [])]
        return any(expression.moves for expression in looked_at)

    def _order_flips(self) -> bool:
        return "running_order" not in self.rule and super()._order_flips()

    def _meets_others(self) -> int:
        return UNLIMITED_STEPS if self._groups else super()._meets_others()

    def _place(self, by: PolicyExpression) -> Callable[[Sequence], QueuePosition]:
        if not by.names:
            value = by(None)
            return lambda q: (value, q.prompt.arrival, q.id)
        return lambda q: (by(SequenceView(q, self)), q.prompt.arrival, q.id)

    def _admit(self) -> list[Sequence]:
        if order := self.rule.get("waiting_order"):
            self.waiting = deque(sorted(self.waiting, key=self._place(order)))
        return super()._admit()

    def _capped(self) -> bool:
        if super()._capped():
            return True
        admit = self.rule.get("admit")
        held_back = admit is not None and bool(self.running and self.waiting)
        return held_back and admit(SequenceView(self.waiting[0], self)) <= 0  # type: ignore[misc]

    def _decode_order(self) -> list[Sequence]:
        order = self.rule.get("running_order")
        return sorted(self.running, key=self._place(order)) if order else super()._decode_order()

    def _first(self, groups: dict[Key, list[Sequence]]) -> Key:
        turn = self.rule.get("turn")
        if turn is None:
            return super()._first(groups)
        return min(groups, key=lambda key: min(map(self._place(turn), groups[key])))

    def _together(self, keep: list[Sequence], appended: list[Sequence]) -> list[Sequence]:
        if not (self._groups and keep):
            return super()._together(keep, appended)
        alike, turn = self._groups["alike"], self._place(self._groups["turn"])
        groups: dict[float, list[Sequence]] = {}
        for q in keep:
            key = alike(SequenceView(q, self)) if alike.names else 0.0
            groups.setdefault(key, []).append(q)
        chosen = groups.pop(
            min(groups, key=lambda key: min(map(turn, groups[key])))
            if len(groups) > 1
            else next(iter(groups))
        )
        others = [q for group in groups.values() for q in group]
        kept = [q for q in others if self._groups["keep"](SequenceView(q, self)) > 0]
        gone = set(kept)
        self._bounce([q for q in others if q not in gone], chosen)
        self._defer(kept)
        self.running = kept + chosen + appended
        return chosen

    def _preempt(self, q: Sequence, by: Sequence, why: PreemptionReason = "blocks") -> None:
        if q.state in (SequenceState.PROMPT, SequenceState.COMPLETION):
            self.preempted[q.id] = self.preempted.get(q.id, 0) + 1
        super()._preempt(q, by, why)
