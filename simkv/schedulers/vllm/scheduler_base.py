# mypyc: compile
"""State of vLLM's scheduler between steps, and its public properties.

The scheduling rules are in ``scheduler.py``.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from operator import attrgetter

from mypy_extensions import mypyc_attr

from simkv.core.block_pool import BlockCounter, BlockPool
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch, BatchRow, Completion
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.decode_group import DecodeGroup
from simkv.schedulers.vllm.draft_memory import DraftMemory
from simkv.schedulers.vllm.lora import VllmLoras
from simkv.schedulers.vllm.memory import VllmMemory
from simkv.schedulers.vllm.prefill_interval import PrefillInterval
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.remote_kv_queue import RemoteKvQueue, TakenBlocksMemory
from simkv.schedulers.vllm.request_state import (
    FcfsQueue,
    PriorityQueue,
    RequestState,
    build_queue,
)
from simkv.schedulers.vllm.size_bucketed_queue import SharedTokenIndex, SizeBucketedQueue
from simkv.schedulers.vllm.speculative_decoding import SpeculativeDecoding
from simkv.schedulers.vllm.state_chunking import StateChunking
from simkv.schedulers.vllm.state_memory import StateMemory
from simkv.schedulers.vllm.versions import find_rules
from simkv.schedulers.vllm.window_memory import WindowMemory


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmSchedulerBase:
    """Base class of vLLM's schedulers, with the requests in the engine and their memory.

    - ``waiting``: waiting requests in queue order.
    - ``running``: running requests in the order of admission.
    - ``decoding``: running requests that compute one token per step.
    - ``catching_up``: all other running requests.
    """

    # Requests that are catching up are in prefill or wait for their last token.

    def __init__(
        self, config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
    ) -> None:
        self.config = config
        self.rules = rules = rules or find_rules(config.variant)
        self.pipeline_depth = config.depth
        self.memory = build_memory(config, rules, tables=tables)
        keeps_states = config.has_states and config.states(rules) == "align"
        self.split = StateChunking(config, rules) if keeps_states else None
        self.decoding = DecodeGroup(self.memory)
        self.interval = PrefillInterval(config.prefill_schedule_interval)
        self.names = SharedTokenIndex(config.block_size, shared=self.memory.cache is not None)
        self.waiting: FcfsQueue | PriorityQueue | SizeBucketedQueue | RemoteKvQueue
        self.waiting = build_queue(config.policy, rules)
        # The bucketed queue skips requests without examining them, so a lack of blocks must be the
        # only reason to skip.
        self._holds = config.prefill_schedule_interval > 1
        if rules.skip_blocked and config.enable_chunked_prefill and not self._holds:
            self.waiting = SizeBucketedQueue(self._least, priority=config.policy == "priority")
        self.running: dict[int, RequestState] = {}
        self.catching_up: dict[int, RequestState] = {}
        self._max_running = config.max_num_active_seqs or config.max_num_seqs
        self._max_tokens = config.most_scheduled(rules)
        if rules.applies_both_budgets:
            self._max_tokens = min(self._max_tokens, config.max_num_batched_tokens)
        self.drafts = SpeculativeDecoding(config, rules) if config.num_speculative_tokens else None
        self.loras = VllmLoras(config.max_loras, config.max_cpu_loras or config.max_loras)
        self._live: dict[int, RequestState] = {}
        self._admissions = 0
        self._refused: list[int] = []
        self._tokens_delivered = 0
        self._newest = Batch()
        # Whether a decode-only step would admit no waiting request.
        self._waiting_settled = False

    def add(self, prompt: Prompt) -> None:
        """Queue a request. A prompt of ``max_model_len`` tokens or more is rejected.

        The next batch lists a rejected request as ignored.
        """
        if prompt.prompt_tokens >= self.config.max_model_len:
            self._refused.append(prompt.id)
            return
        stop = min(prompt.prompt_tokens + prompt.max_tokens, self.config.max_model_len)
        r = RequestState(prompt, stop, self.memory.content(prompt))
        self._live[r.id] = r
        if self.rules.skip_blocked:
            self.names.see(prompt)
        self.waiting.add(r)

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Deliver the tokens of a batch. Free the blocks of requests that end.

        Tokens of requests that have ended or were aborted are discarded.
        """
        # Requests end by a stop token or at their maximum length. If a request was preempted while
        # a token was in flight, the token still counts.
        group, late, live = self.decoding, self.decoding.arrive(), self._live
        stopped: list[RequestState] = []
        if batch.decodes:
            group.delivered += 1
            self._tokens_delivered += 1
            stopped = group.stopped(group.delivered)
        completion = Completion([], [])
        if not (stopped or ended or late or batch.scheduled):
            return completion  # only members of the decode group get tokens
        rows, emits = dict(batch.scheduled), set(batch.emits)
        for r in late:
            rows[r.id] = 1
            emits.add(r.id)
        touched = {i: live[i] for i in (*rows, *ended, *(r.id for r in stopped)) if i in live}
        for r in sorted(touched.values(), key=attrgetter("order")):
            n, emit = rows.get(r.id, 0), r.id in emits
            lasting = not n or self._deliver(r, n, batch, emit=emit)
            if n and not emit:
                continue
            length = group.length(r) if r in group else r.length
            if lasting and not (self.drafts and self.drafts.late):
                self.memory.register(r, length - 1)  # all tokens except the new one have KV now
            if length >= r.stop_length or r.id in ended:
                self._remove(r)
                completion.finished.append(r.id)
        completion.delivered = [i for i in batch.emits if i in touched]
        self._tokens_delivered += len(completion.delivered)
        return completion

    def _deliver(self, r: RequestState, n: int, batch: Batch, *, emit: bool) -> bool:
        """Deliver the results of ``n`` computed tokens of ``r`` in the oldest batch.

        Returns whether their KV is still in the blocks of ``r``.
        """
        stale = r.stale > 0
        r.in_flight -= n
        if stale:
            r.stale -= n
        if emit:
            r.length += self.drafts.deliver(r, batch, stale=stale) if self.drafts else 1
            if not stale:
                r.placeholders -= 1
        return not stale

    def abort(self, request_id: int) -> None:
        """Remove a request and free its blocks at once."""
        if request_id in self._live:
            self._remove(self._live[request_id])

    def leap(self, most: int) -> int:
        """Return the number of decode-only steps until blocks run out or a request ends."""
        if self.catching_up or not self.decoding or not self._waiting_settled:
            return 1
        return self.decoding.leap(most)

    def skip(self, steps: int) -> list[int]:
        """Simulate ``steps`` decode-only steps.

        Returns the number of free blocks after each step.
        """
        self.interval.skipped(steps, waiting=self._left_behind())
        self._tokens_delivered += steps
        return self.decoding.skip(steps)

    @property
    def pool(self) -> BlockPool | BlockCounter:
        """The block pool."""
        return self.memory.pool

    @property
    def cache(self) -> BlockPool | None:
        """The block pool, or None.

        None means that prefix caching is off or that a request has several block tables.
        """
        return None if self.memory.frees_while_running else self.memory.cache

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""
        return self.config.block_size

    def prefix_keys(self, prompt: Prompt) -> list[int]:
        """Return the keys of a prompt's full blocks in the prefix cache."""
        r = RequestState(prompt, prompt.prompt_tokens, self.memory.content(prompt))
        self.memory.name(r, prompt.prompt_tokens)
        return r.keys.tolist()

    @property
    def num_blocks(self) -> int:
        return self.memory.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        return self.memory.pool.free

    @property
    def num_waiting(self) -> int:
        return len(self.waiting)

    @property
    def num_running(self) -> int:
        return len(self.running)

    def waiting_ids(self) -> list[int]:
        return [r.id for r in self.waiting]

    def running_ids(self) -> list[int]:
        return list(self.running)

    def blocks_held(self) -> Mapping[int, int]:
        return {
            i: self.memory.blocks_held_by(r, self._computed(r)) for i, r in self.running.items()
        }

    def fingerprint(self) -> Hashable:
        """Return the state that determines the following steps.

        This holds as long as no request arrives or is aborted.
        """
        # The order of the waiting requests is usually not included, because the running requests
        # determine it: under fcfs, the running requests followed by the waiting requests form one
        # sequence (unless requests can be skipped), and under priority the waiting queue is sorted.
        running = tuple(
            (r.id, self._computed(r), r.placeholders, r.in_flight, r.drafts)
            for r in self.running.values()
        )
        paced, blocks = self.interval.fingerprint(), self.memory.fingerprint()
        skips = self.rules.skip_blocked or self.config.enable_lora
        waiting = self.waiting_ids() if skips else ()
        if not self.rules.removes_victims:
            waiting = [r.computed for r in self.waiting]
        return (self._tokens_delivered, running, tuple(waiting), paced, blocks)

    def _left_behind(self) -> bool:
        """Return whether a waiting request is not ``deferred``."""
        # The result is always False without a prefill interval.
        return self._holds and any(not r.deferred for r in self.waiting)

    def _release(self, r: RequestState, unused: int = 0) -> None:
        """Free the blocks of ``r``, including ``unused`` ones."""
        # ``r`` is not in the decode group.
        self.memory.release(r, unused)

    def _leave(self, r: RequestState) -> None:
        """Remove ``r`` from the decode group."""
        # The tokens in flight of ``r`` are delivered separately.
        self.decoding.part(r)
        self.catching_up[r.id] = r

    def _computed(self, r: RequestState) -> int:
        return self.decoding.computed(r) if r in self.decoding else r.computed

    def _least(self, r: RequestState) -> int:
        """Return the minimum number of free blocks to admit a waiting request."""
        return self.names.least(r)

    def _all_rows(self) -> list[BatchRow]:
        """Return a row for each request of the newest batch, in the engine's order."""
        batch, group, running = self._newest, self.decoding, list(self.running.values())
        given = zip(batch.scheduled, batch.context, strict=True)
        rows = {i: BatchRow(i, n, context) for (i, n), context in given}
        if not self.rules.removes_victims:  # preempted requests may still be in the batch
            stayed = [r for i in rows if i not in self.running and (r := self._live.get(i))]
            running = sorted(running + stayed, key=attrgetter("order"))
        return [
            rows.get(r.id) or BatchRow(r.id, 1, group.computed(r) - 1)
            for r in running
            if r.id in rows or r in group
        ]

    def _remove(self, r: RequestState) -> None:
        del self._live[r.id]
        if r.id not in self.running:
            self.waiting.remove(r)
            return
        if r in self.decoding:
            self.decoding.drop(r)
        else:
            del self.catching_up[r.id]
        del self.running[r.id]
        self.loras.leave(r.prompt.lora)
        self._release(r)


def build_memory(config: VllmConfig, rules: VllmRules, *, tables: bool) -> VllmMemory:
    """Build the block memory for a config.

    With ``tables``, blocks have ids even if the config does not need them.
    """
    if config.num_speculative_tokens:
        return DraftMemory(config, rules)
    if config.offloads:
        return TakenBlocksMemory(config, rules, tables=tables)
    if config.kv_cache_groups == (0,):
        return VllmMemory(config, rules, tables=tables)
    return StateMemory(config, rules) if config.has_states else WindowMemory(config, rules)
