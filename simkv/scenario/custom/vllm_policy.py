"""Base class of custom policies for vLLM's scheduler.

class Shortest(CustomVllmScheduler):
    config: CustomVllmConfig

    def waiting_order(self, r: PolicyRequest) -> float:
        return r.prompt_tokens

A policy uses only ``self.config`` and its arguments, so that ``simkv export-scheduler`` can export
it to vLLM. In vLLM, a class for ``--scheduler-cls`` applies the policy before it calls vLLM's
``schedule`` method.
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

#: Maximum preemption count in the fingerprint; without it, the states of a livelock would not
#: repeat.
MAX_COUNTED_PREEMPTIONS = 64


@dataclass(frozen=True)
class CustomVllmConfig(VllmConfig):
    """vLLM's settings. A subclass adds the settings of its policy.

    ``policy`` must be ``fcfs``.
    """

    def __post_init__(self) -> None:
        """Raise ValueError for settings that vLLM or a custom policy does not support."""
        super().__post_init__()
        if self.rule is not None:
            raise ValueError("rule: must not be set, because this file defines the policy")
        for knob in ("num_cpu_blocks", "kv_connector"):
            if getattr(self, knob):
                raise ValueError(f"{knob}: not supported with a custom policy; remove {knob}")
        if self.policy != "fcfs":
            raise ValueError(f"policy: must be fcfs with a custom policy, got {self.policy}")
        if self.kv_cache_groups != (0,):
            raise ValueError(
                "kv_cache_groups: custom policies support one group of layers; remove "
                "kv_cache_groups"
            )
        rules = find_rules(self.variant)
        if rules.skip_blocked:
            raise ValueError(f"variant: custom policies require a vLLM release, got {self.variant}")


class PolicyRequest(NamedTuple):
    """Request as a policy sees it. Lengths are in tokens, and ``arrival`` is in seconds."""

    prompt_tokens: int
    max_tokens: int
    emitted: int
    computed: int
    preemptions: int
    priority: int
    arrival: float


class CustomVllmScheduler(VllmScheduler):
    """vLLM's scheduler with a policy that a subclass defines."""

    # If VllmScheduler is compiled, ``copy`` must also copy the attributes of this class.
    __mypyc_attrs__ = (*getattr(VllmScheduler, "__mypyc_attrs__", ()), "__dict__")

    config: CustomVllmConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._most = self._max_running
        self._preempted: dict[int, int] = {}

    def waiting_order(self, r: PolicyRequest) -> Any:  # noqa: ARG002
        """Return the sort key of a waiting request. The request with the smallest key is first in
        the queue.
        """
        return 0

    def running_order(self, r: PolicyRequest) -> Any:  # noqa: ARG002
        """Return the sort key of a running request.

        Requests with small keys get tokens first. Requests with large keys are preempted first.
        """
        return 0

    def most_running(
        self,
        waiting: Sequence[PolicyRequest],  # noqa: ARG002
        running: Sequence[PolicyRequest],  # noqa: ARG002
    ) -> int | None:
        """Return the maximum number of running requests for this step; None means the configured
        value.
        """
        return None

    def chunk(
        self,
        waiting: Sequence[PolicyRequest],  # noqa: ARG002
        running: Sequence[PolicyRequest],  # noqa: ARG002
    ) -> int | None:
        """Return ``long_prefill_token_threshold`` for this step; None means the configured
        value.
        """
        return None

    def schedule(self) -> Batch:
        """Apply the policy's decisions, then call the engine's ``schedule``."""
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
        """Return 1, because a policy may change the batch in each step."""
        return 1

    def fingerprint(self) -> Any:
        """Return the state that determines future batches.

        Preemption counts are limited to a maximum, so that the number of states is finite.
        """
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
