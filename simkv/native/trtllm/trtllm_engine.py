"""Drive TensorRT-LLM's unmodified Python scheduler, iteration by iteration, with a fake model.

The methods do the work of ``_executor_loop`` and ``_executor_loop_overlap`` of ``py_executor.py``
for one rank. Requests and the block manager are stubs.
"""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any, NamedTuple

from simkv.core.request import Prompt
from simkv.native.trtllm.trtllm_block_stubs import ReusingKvCacheStub
from simkv.native.trtllm.trtllm_stubs import (
    SCHEDULER,
    CapacitySchedulerPolicy,
    KvCacheStub,
    LlmRequestState,
    LlmRequestStub,
)
from simkv.schedulers.trtllm.config import TrtllmConfig


class LaunchedIteration(NamedTuple):
    """The requests of an iteration that compute their prompt, decode, and are paused."""

    contexts: list[LlmRequestStub]
    generations: list[LlmRequestStub]
    paused: list[LlmRequestStub]

    @property
    def kind(self) -> str:
        """Kind of the batch."""
        kind = "mixed" if self.generations else "prefill"
        return kind if self.contexts else "decode" if self.generations else "idle"


class Delivered(NamedTuple):
    """Requests that received a token, and requests that ended with their last token, in order."""

    emitted: list[int]
    finished: list[int]


class TrtllmEngine:
    """TensorRT-LLM's scheduler and its requests; the clients of those in ``heard`` have left."""

    def __init__(self, config: TrtllmConfig) -> None:
        self.config = config
        self.overlap = not config.disable_overlap_scheduler
        stand_in = ReusingKvCacheStub if config.enable_block_reuse else KvCacheStub
        self.cache = stand_in(config.num_blocks, config.tokens_per_block, config.longest)
        module: Any = importlib.import_module(SCHEDULER)
        chunking = (config.context_chunking_policy, config.tokens_per_block)
        self.scheduler = module.SimpleUnifiedScheduler(  # as in ``create_py_executor_instance``
            max_batch_size=config.max_batch_size,
            max_num_tokens=config.max_num_tokens,
            kv_cache_manager=self.cache,
            peft_cache_manager=None,
            scheduler_policy=CapacitySchedulerPolicy[config.capacity_scheduler_policy],
            ctx_chunk_config=chunking if config.enable_chunked_prefill else None,
            two_step_lookahead=False,
            scheduler_capacity=config.max_batch_size,
        )
        self.waiting_queue: deque[LlmRequestStub] = deque()
        self.active: list[LlmRequestStub] = []
        self.in_flight: deque[LaunchedIteration] = deque()
        self.heard: set[int] = set()
        self._canceled: set[int] = set()
        self._unsettled: LaunchedIteration | None = None

    def add(self, prompt: Prompt, output_tokens: int) -> None:
        """Queue a request whose model emits ``output_tokens`` tokens."""
        tokens = [(name, at) for name, a, b in prompt.segments for at in range(a, b)]
        most = min(prompt.max_tokens, self.config.longest - prompt.prompt_tokens)
        self.waiting_queue.append(
            LlmRequestStub(prompt.id, prompt.prompt_tokens, most, output_tokens, tokens)
        )

    def launch(self) -> LaunchedIteration:
        """Fetch requests, make a decision and prepare the blocks of the step."""
        self.settle()
        self._canceled |= self.heard
        self.heard.clear()
        room = self.config.max_batch_size - len(self.active)
        for _ in range(min(room, len(self.waiting_queue))):
            self.active.append(self.waiting_queue.popleft())
        output = self.scheduler.schedule_request(self.active, set())
        launched = LaunchedIteration(
            output.context_requests, output.generation_requests, output.paused_requests
        )
        for r in launched.paused:
            self.cache.remove_sequence(r)
        for r in launched.contexts:
            if r.is_first_context_chunk:
                self.cache.add_sequence(r)
        for r in launched.generations:
            self.cache.add_token(r)
        for r in () if self.config.enable_chunked_prefill else launched.contexts:
            r.context_chunk_size = r.context_remaining_length
        self.in_flight.append(launched)
        self._unsettled = launched
        return launched

    def settle(self) -> None:
        """Pause requests and update the states of launched requests, once per launch."""
        if self._unsettled is None:
            return
        contexts, generations, paused = self._unsettled
        self._unsettled = None
        for r in paused:
            r.pause()
        for r in contexts:
            if not r.is_finished:
                r.move_to_next_context_chunk()
            if r.context_remaining_length == 0:
                last = self.overlap and r.will_complete_next_iteration()
                to_complete = LlmRequestState.GENERATION_TO_COMPLETE
                r.state = to_complete if last else LlmRequestState.GENERATION_IN_PROGRESS
        for r in generations:
            if not r.is_finished and self.overlap and r.will_complete_next_iteration():
                r.state = LlmRequestState.GENERATION_TO_COMPLETE

    def deliver(self) -> Delivered:
        """Deliver the tokens of the oldest batch and respond to clients."""
        if not self.overlap:
            self.settle()
        contexts, generations, _ = self.in_flight.popleft()
        emitted = [r for r in contexts if not r.is_finished and r.context_remaining_length == 0]
        emitted += [r for r in generations if not r.is_finished]
        for r in emitted:
            r.add_token()
        ended = [r for r in emitted if r.is_finished]
        self.settle()
        finished = self._respond() if contexts or generations else []
        for r in contexts:
            self.cache.store_context_blocks(r)
        # A pause resets a request that has just received its last token.
        reset = [r for r in ended if not r.is_finished]
        return Delivered([r.request_id for r in emitted if r not in reset], finished)

    def _respond(self) -> list[int]:
        """Run ``_handle_canceled_requests`` and ``_handle_responses``; return finished requests."""
        finished = [r.request_id for r in self.active if r.is_finished]
        self.waiting_queue = deque(
            r for r in self.waiting_queue if r.request_id not in self._canceled
        )
        for r in self.active:
            if r.request_id in self._canceled:
                r.state = LlmRequestState.GENERATION_COMPLETE
        self._canceled.clear()
        over = [r for r in self.active if r.is_finished]
        self.active = [r for r in self.active if not r.is_finished]
        for r in over:
            self.cache.remove_sequence(r)
        return finished

    def waiting_ids(self) -> list[int]:
        """Return the ids of requests without blocks, then of requests that were not fetched yet."""
        without = [r.request_id for r in self.active if r.request_id not in self.cache.held]
        return without + [r.request_id for r in self.waiting_queue]

    def running_ids(self) -> list[int]:
        """Return the ids of requests with blocks, in arrival order."""
        return [r.request_id for r in self.active if r.request_id in self.cache.held]
