"""Driver of TensorRT-LLM's own Python scheduler; requests and KV blocks are stubs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch, Completion, Held, Refusal, WaitReason
from simkv.native.driver_protocol import Counts, NativeEngine
from simkv.native.trtllm.trtllm_engine import TrtllmEngine
from simkv.native.trtllm.trtllm_stubs import ROOT, SCHEDULER, stub_trtllm_imports
from simkv.schedulers.trtllm.config import VARIANTS, TrtllmConfig, find_rejection


class NativeTrtllm:
    """TensorRT-LLM's own scheduler as a ``NativeDriver``."""

    def __init__(self, config: TrtllmConfig) -> None:
        self.config = config
        self.engine = TrtllmEngine(config)
        self.scheduler = self.engine.scheduler
        self.waiting_ids, self.running_ids = self.engine.waiting_ids, self.engine.running_ids
        self.num_blocks = config.num_blocks
        self.pipeline_depth = 2 if self.engine.overlap else 1
        self._refused: dict[int, Refusal] = {}

    def add(self, prompt: Prompt) -> None:
        """Add a request; the API server rejects prompts that are too long."""
        if refusal := find_rejection(prompt, self.config):
            self._refused[prompt.id] = refusal
        else:
            self.engine.add(prompt, prompt.max_tokens)

    def abort(self, number: int) -> None:
        self.engine.heard.add(number)

    def schedule(self) -> Batch:
        engine, cache = self.engine, self.engine.cache
        launched = engine.launch()
        batch = Batch(refused=self._refused)
        self._refused = {}
        batch.kind = launched.kind  # type: ignore[assignment]
        for r in launched.contexts:
            batch.scheduled.append((r.request_id, r.context_chunk_size))
            batch.context.append(r.context_current_position)
            if r.is_last_context_chunk:
                batch.emits.append(r.request_id)
        for r in launched.generations:
            batch.scheduled.append((r.request_id, 1))
            batch.context.append(cache.tokens[r.request_id] - 1)
            batch.emits.append(r.request_id)
        for r in launched.paused:
            batch.preempt(r.request_id, None)
        tokens = sum(n for _, n in batch.scheduled)
        if tokens > self.config.max_num_tokens:
            batch.fatal = (
                f"the scheduler scheduled {tokens} tokens, more than max_num_tokens "
                f"{self.config.max_num_tokens}"
            )
        self._explain(batch, tokens)
        return batch

    def _explain(self, batch: Batch, tokens: int) -> None:
        """Infer why requests were not scheduled."""
        policy, rows = self.config.capacity_scheduler_policy, {i for i, _ in batch.scheduled}
        why: WaitReason = "blocks" if policy == "MAX_UTILIZATION" else "reserved"
        why = "rule" if policy == "STATIC_BATCH" else why
        why = "budget" if tokens >= self.config.max_num_tokens else why
        for r in self.engine.active:
            due = r.is_context_init_state or r.is_generation_in_progress_state
            if due and r.request_id in self.engine.cache.held and r.request_id not in rows:
                batch.aside[r.request_id] = why
        if waiting := self.engine.waiting_ids():
            queued = len(waiting) == len(self.engine.waiting_queue)
            batch.held = Held(waiting[0], "slot" if queued else why)

    def complete(
        self,
        accepted: Mapping[int, int],  # noqa: ARG002
        ended: Sequence[int],
        copied: Sequence[int],  # noqa: ARG002
    ) -> Completion:
        last = set(ended)
        for r in self.engine.active:
            if r.request_id in last:
                r.left = 1
        return Completion(*self.engine.deliver())

    def counts(self) -> Counts:
        running = len(self.running_ids())
        waiting = len(self.engine.active) - running + len(self.engine.waiting_queue)
        return waiting, running, self.engine.cache.free, 0

    def blocks_held(self) -> dict[int, int]:
        held = self.engine.cache.held
        return {i: held[i] for i in self.running_ids()}

    def block_tables(self) -> dict[int, list[int]]:
        """Return no tables, because the stub of the block manager does not number blocks."""
        return {}

    def fingerprint(self) -> Hashable:
        engine = self.engine
        requests = (
            (r.request_id, r.state_value, r.context_current_position, r.num_tokens)
            for r in engine.active
        )
        held = tuple(engine.cache.held.items())
        return tuple(requests), tuple(engine.waiting_ids()), held, engine.cache.free


NATIVE_TRTLLM = NativeEngine(
    title="TensorRT-LLM",
    package=ROOT,
    deciding=(SCHEDULER,),
    loaded=(SCHEDULER,),
    stub_imports=stub_trtllm_imports,
    build=lambda knobs, _: NativeTrtllm(TrtllmConfig(**knobs)),
    variant_of=lambda _: next(iter(VARIANTS)),
    stubbed="requests and KV blocks, C++ objects in TensorRT-LLM, are stubs of simkv",
    entry="schedule_request",
)
