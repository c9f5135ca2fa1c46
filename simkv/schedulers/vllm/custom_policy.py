"""vLLM's scheduler with a custom policy, whose expressions replace some of its decisions."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from simkv.core.policy_language import PolicyExpression, parse_policy
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.policy_hooks import POLICY_HOOKS
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.request_state import PriorityQueue, RequestState
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler import VllmScheduler

QueuePosition = tuple[float, float, int]
#: Maximum preemption count in fingerprints; a request preempted this often is in a livelock.
MAX_COUNTED_PREEMPTIONS = 64


@dataclass(frozen=True, slots=True)
class EngineView:
    """Values that the expressions of a custom policy can read from the engine.

    ``simkv.core.policy_language`` describes the values.
    """

    of: VllmExpressionScheduler

    @property
    def free(self) -> float:
        return self.of.pool.free / self.of.num_blocks

    @property
    def running(self) -> float:
        return float(self.of.num_running)

    @property
    def waiting(self) -> float:
        return float(self.of.num_waiting)


@dataclass(frozen=True, slots=True)
class RequestView(EngineView):
    """Values that the expressions of a custom policy can read from the engine and one request."""

    r: RequestState

    @property
    def age(self) -> float:
        return self.of.newest - self.r.prompt.arrival

    @property
    def prompt_tokens(self) -> float:
        return float(self.r.prompt.prompt_tokens)

    @property
    def tokens(self) -> float:
        return float(self.of.length(self.r))

    @property
    def blocks(self) -> float:
        return float(self.of.held(self.r))

    @property
    def preemptions(self) -> float:
        return float(self.of.preempted.get(self.r.id, 0))

    @property
    def priority(self) -> float:
        return float(self.r.prompt.priority)

    @property
    def bucket(self) -> float:
        return float(self.of.length(self.r).bit_length())


class VllmExpressionScheduler(VllmScheduler):
    """Scheduler of a vLLM release, with a custom policy for some of its decisions.

    Ties are broken by arrival time.
    """

    # If VllmScheduler is compiled, ``copy`` must also copy the attributes of this class.
    __mypyc_attrs__ = (*getattr(VllmScheduler, "__mypyc_attrs__", ()), "__dict__")

    def __init__(
        self, config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
    ) -> None:
        super().__init__(config, rules, tables=tables)
        self.rule = parse_policy(config.rule, POLICY_HOOKS)
        self.newest = 0.0
        self.preempted: dict[int, int] = {}
        self._held_back = self._older = False
        if order := self.rule.get("waiting_order"):
            self.waiting = PolicyQueue(self._place(order))

    def length(self, r: RequestState) -> int:
        """Return the number of prompt and output tokens of a request."""
        return self.decoding.length(r) if r in self.decoding else r.length

    def held(self, r: RequestState) -> int:
        """Return the number of KV blocks that a request holds."""
        return self.memory.held(self._computed(r)) if r.id in self.running else 0

    def add(self, prompt: Prompt) -> None:
        self._older |= prompt.arrival > self.newest
        self.newest = max(self.newest, prompt.arrival)
        super().add(prompt)

    def leap(self, most: int) -> int:
        """Return the number of decode-only steps, as ``VllmScheduler.leap`` does."""
        # The result is 1 if a value that the policy reads changes from step to step.
        admit, chunk = self.rule.get("admit"), self.rule.get("chunk")
        if self._held_back and admit and admit.moves:
            return 1
        return 1 if self.waiting and chunk and chunk.moves else super().leap(most)

    def fingerprint(self) -> Hashable:
        often = tuple(
            (i, min(count, MAX_COUNTED_PREEMPTIONS)) for i, count in self.preempted.items()
        )
        return super().fingerprint(), tuple(self.waiting_ids()), often

    def _place(self, by: PolicyExpression) -> Callable[[RequestState], QueuePosition]:
        return lambda r: (by(RequestView(self, r)), r.prompt.arrival, r.id)

    def schedule(self) -> Batch:
        if self._older and isinstance(self.waiting, PolicyQueue):
            if "age" in self.rule["waiting_order"].names:
                self.waiting.sort()
            self._older = False
        return super().schedule()

    def _admit_waiting(self, step: ScheduleStep) -> None:
        self._held_back = False
        super()._admit_waiting(step)

    def _next_waiting(self, step: ScheduleStep) -> RequestState | None:
        r = super()._next_waiting(step)
        admit = self.rule.get("admit")
        if r is None or admit is None or not self.running or admit(RequestView(self, r)) > 0:
            return r
        self._held_back = True
        step.skip_request("rule")
        return None

    def _threshold(self) -> int:
        chunk = self.rule.get("chunk")
        if chunk is None:
            return super()._threshold()
        if self.rules.exempts_single_request and len(self.running) + len(self.waiting) == 1:
            return 0
        return int(min(max(chunk(EngineView(self)), 0), self.config.max_model_len))

    def _victim(self) -> RequestState:
        victim = self.rule.get("victim")
        if victim is None:
            return super()._victim()
        return max(self.running.values(), key=self._place(victim))

    def _preempt(self, r: RequestState, by: RequestState, step: ScheduleStep) -> None:
        self.preempted[r.id] = self.preempted.get(r.id, 0) + 1
        super()._preempt(r, by, step)


class PolicyQueue(PriorityQueue):
    """Waiting requests in the order of a custom policy."""

    # If PriorityQueue is compiled, ``copy`` must also copy the attributes of this class.
    __mypyc_attrs__ = (*getattr(PriorityQueue, "__mypyc_attrs__", ()), "__dict__")

    def __init__(self, place: Callable[[RequestState], QueuePosition]) -> None:
        super().__init__()
        self._place = place
        self._places: dict[int, QueuePosition] = {}

    def sort(self) -> None:
        """Evaluate the policy's expression for all waiting requests and sort them."""
        self._places = {}
        self._requests.sort(key=self._urgency)

    def add(self, r: RequestState) -> None:
        self._places.pop(r.id, None)
        super().add(r)

    def _urgency(self, r: RequestState) -> QueuePosition:
        place = self._places.get(r.id)
        if place is None:
            value, arrival, i = self._place(r)
            place = self._places[r.id] = (-value, -arrival, -i)
        return place
