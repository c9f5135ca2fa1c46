"""vLLM's scheduler with some of its decisions taken by a rule of one's own.

class Shortest(VllmRule):
    config: VllmKnobs

    def waiting_order(self, r: RuleView) -> float:
        return r.prompt_tokens

The decisions are those that a class for vLLM's ``--scheduler-cls`` can take without a copy of
``schedule``: all that is decided before it is called. A rule looks at ``self.config`` and what it
is given, and at nothing else; so it can be written out for vLLM (``simkv export-scheduler``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.request_state import FcfsQueue, RequestState
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.versions import find_rules

#: Whoever was preempted so often without a token in between goes round in a circle.
MAX_COUNTED_PREEMPTIONS = 64


@dataclass(frozen=True)
class CustomVllmConfig(VllmConfig):
    """vLLM's knobs; a subclass adds those of its rule. The policy is the rule itself."""

    def __post_init__(self) -> None:
        """Raise ValueError for what vLLM or a rule cannot have."""
        super().__post_init__()
        if self.rule is not None:
            raise ValueError("rule: the rule is this file's; expected none")
        if self.policy != "fcfs":
            raise ValueError(f"policy: {self.policy}; a rule takes the place of it, expected fcfs")
        if self.kv_cache_groups != (0,):
            raise ValueError("kv_cache_groups: a rule is for one group of layers; leave it out")
        rules = find_rules(self.variant)
        if rules.skip_blocked:
            raise ValueError(f"variant: {self.variant}: rules are for releases of vLLM")


class PolicyRequest(NamedTuple):
    """A request as a rule sees it, in tokens; ``arrival`` is in seconds."""

    prompt_tokens: int
    max_tokens: int
    emitted: int
    computed: int
    preemptions: int
    priority: int
    arrival: float


class CustomVllmScheduler(VllmScheduler):
    """vLLM's decisions as they are, but for those that a subclass takes."""

    # Where VllmScheduler is compiled, a copy has what this class adds, too.
    __mypyc_attrs__ = (*getattr(VllmScheduler, "__mypyc_attrs__", ()), "__dict__")

    config: CustomVllmConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._most = self._max_running
        self._preempted: dict[int, int] = {}

    def waiting_order(self, r: PolicyRequest) -> Any:  # noqa: ARG002
        """The queue is sorted by this before each step, smallest first; equals stay as they are."""
        return 0

    def running_order(self, r: PolicyRequest) -> Any:  # noqa: ARG002
        """The same of those who run: the first get tokens first, the last lose their blocks."""
        return 0

    def most_running(
        self,
        waiting: Sequence[PolicyRequest],  # noqa: ARG002
        running: Sequence[PolicyRequest],  # noqa: ARG002
    ) -> int | None:
        """Nobody is taken in when so many run; None for as many as the knobs say."""
        return None

    def chunk(
        self,
        waiting: Sequence[PolicyRequest],  # noqa: ARG002
        running: Sequence[PolicyRequest],  # noqa: ARG002
    ) -> int | None:
        """As ``long_prefill_token_threshold`` in this step; None for that of the knobs."""
        return None

    def schedule(self) -> Batch:
        """One call of the engine's ``schedule``, after the rule's own decisions."""
        assert isinstance(self.waiting, FcfsQueue)
        queued = {r.id: self._view(r) for r in self.waiting}
        for r in sorted(self.waiting, key=lambda r: self.waiting_order(queued[r.id])):
            self.waiting.remove(r)
            self.waiting.add(r)
        running = {i: self._view(r) for i, r in self.running.items()}
        ordered = sorted(running, key=lambda i: self.running_order(running[i]))
        self.running = {i: self.running[i] for i in ordered}
        for place, r in enumerate(self.running.values()):
            r.order = place
        self._admissions = len(self.running)
        views = [self._view(r) for r in self.waiting], [running[i] for i in ordered]
        most, chunk = self.most_running(*views), self.chunk(*views)
        self._max_running = self._most if most is None else min(most, self._most)
        config = self.config
        if chunk is not None:
            chunk = min(max(chunk, 0), config.max_model_len)
            self.config = replace(config, long_prefill_token_threshold=chunk)
        batch = super().schedule()
        self.config = config
        return batch

    def leap(self, most: int) -> int:  # noqa: ARG002
        """A rule may decide otherwise in the next step."""
        return 1

    def fingerprint(self) -> Any:
        """A rule may look at how often somebody was preempted: beyond so often it is all one."""
        often = tuple(
            (i, min(count, MAX_COUNTED_PREEMPTIONS)) for i, count in self._preempted.items()
        )
        return super().fingerprint(), tuple(self.waiting_ids()), often

    def _preempt(self, r: RequestState, by: RequestState, step: ScheduleStep) -> None:
        self._preempted[r.id] = self._preempted.get(r.id, 0) + 1
        super()._preempt(r, by, step)

    def _view(self, r: RequestState) -> PolicyRequest:
        length = self.decoding.length(r) if r in self.decoding else r.length
        return PolicyRequest(
            r.prompt.prompt_tokens,
            r.prompt.max_tokens,
            length - r.prompt.prompt_tokens,
            self._computed(r),
            self._preempted.get(r.id, 0),
            r.prompt.priority,
            r.prompt.arrival,
        )
