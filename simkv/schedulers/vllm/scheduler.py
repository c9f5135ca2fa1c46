# mypyc: compile
"""vLLM's V1 scheduler, for a text-only model on one engine.

The scheduler does not distinguish prefill and decode: each request has tokens whose KV is not
computed yet. A step distributes its token budget to the running requests first, then to the waiting
requests. If a running request cannot get a block, the scheduler preempts the last running request
(under priority the least urgent one). The victim keeps its tokens and recomputes their KV.

The asynchronous scheduler differs in one point: it schedules a step before the tokens of the
previous step are known. ``RequestState`` counts tokens in flight, so one set of rules serves both.

The code follows the newest release; ``VllmRules`` has the differences of the other releases. This
module decides token counts, preemptions and admissions. ``VllmMemory`` manages blocks and the
prefix cache, the queue classes order the waiting requests, and ``DecodeGroup`` holds the decoding
requests.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter
from typing import Literal

from mypy_extensions import mypyc_attr

from simkv.core.scheduler_protocol import (
    Batch,
    Held,
    WaitReason,
    blocks_for,
)
from simkv.schedulers.vllm.memory import CacheHits
from simkv.schedulers.vllm.request_state import HeapQueue, RequestState
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler_base import VllmSchedulerBase
from simkv.schedulers.vllm.size_bucketed_queue import SizeBucketedQueue

#: Result of an admission attempt: the request is admitted or starts to load KV; it is skipped and
#: later requests are tried; or the admission phase stops.
AdmissionStep = Literal["is taken", "steps aside", "stops"]


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmScheduler(VllmSchedulerBase):
    """Scheduling rules of ``vllm.v1.core.sched``.

    A step first schedules the running requests and then admits waiting requests.
    """

    def schedule(self) -> Batch:
        """Schedule one step."""
        slots = self.drafts.slots if self.drafts else 0
        inputs = self.config.max_num_batched_tokens
        step = ScheduleStep(self._max_tokens, self._threshold(), self._hold(), inputs, slots)
        self.memory.begin()
        self._sort_out_decodes()
        self._continue_running(step)
        self._waiting_settled = False
        self.loras.begin(self._sat_out(step))
        if not step.batch.preempted:
            self._admit_waiting(step)
        return self._dispatch(step)

    def _sat_out(self, step: ScheduleStep) -> list[str | None]:
        """Return the adapters of running requests that this step skips."""
        # The list is empty in releases where these adapters count towards ``max_loras``.
        if self.rules.counts_all_loras or not self.config.enable_lora:
            return []
        return [r.prompt.lora for r in self.catching_up.values() if r not in step.tokens]

    def _threshold(self) -> int:
        """Return the maximum number of tokens per request in this step; 0 for no limit."""
        threshold = self.config.long_prefill_token_threshold
        requests = len(self.running) + len(self.waiting)
        if threshold == 0 or (requests == 1 and self.rules.exempts_single_request):
            return 0
        if self.config.long_prefill_token_threshold_adaptive and requests:
            return max(threshold, self.config.max_num_batched_tokens // requests)
        return threshold

    def _hold(self) -> bool:
        """Return whether this step excludes prefills because of the prefill interval."""
        return self.interval.too_early() and (
            len(self.decoding) > 0 or not all(r.chunk for r in self.catching_up.values())
        )

    def _sort_out_decodes(self) -> None:
        """Move requests into the decode group at their first decode, and out of it after their
        last.
        """
        if self.drafts:
            return  # the number of accepted draft tokens is unknown
        for r in self.decoding.stopped(self.decoding.scheduled):
            self._leave(r)
        for r in list(self.catching_up.values()):
            if not r.chunk and not self._last_is_under_way(r):
                del self.catching_up[r.id]
                self.decoding.enter(r)

    def _continue_running(self, step: ScheduleStep) -> None:
        """Schedule the running requests in order and preempt where blocks run out."""
        rows = self._running_to_visit(step)
        for r in sorted(rows, key=attrgetter("order")):
            if r.id not in self.running or r.id in step.batch.aside:
                continue  # preempted by an earlier request, or skipped
            decodes = r in self.decoding
            n = 1 if decodes else self._next_tokens(r, step)
            if n == 0:
                if step.budget == 0 or r.chunk:
                    step.batch.aside[r.id] = "budget" if step.budget == 0 else "rule"
                continue
            computed = self.decoding.computed(r) if decodes else r.computed
            if self.memory.frees_while_running:
                under_way = self.decoding.in_flight(r) if decodes else r.in_flight
                self.memory.free_unneeded(r, computed, under_way)
            needed = self.memory.blocks_to_grow(computed, n)
            needed += 0 if decodes else self.memory.beyond(r, computed, n)
            lost, stuck = 0, False
            while needed > self.memory.pool.free:
                victim = self._victim()
                if stuck := not self._gives_way(victim):
                    break
                sat_out = victim not in self.decoding and victim not in step.tokens
                counted_back = self.rules.removes_victims and not sat_out
                lost += victim.order < r.order and not counted_back
                self._preempt(victim, r, step)
                if victim is r:
                    break
            else:
                step.blocks[r] = needed
                if decodes:
                    self.decoding.grow(r, needed)
                else:
                    step.prefill |= r.chunk
                    self._grant(r, n, needed, step)
                if lost and not self.rules.keeps_position:
                    self._pass_over_after(r, lost, step)
                continue
            if stuck:
                self._pass_over(r, step)
            if stuck or not self.rules.continues_after_self_preemption:
                self._pass_over_after(r, len(self.running), step)

    def _running_to_visit(self, step: ScheduleStep) -> list[RequestState]:
        """Return the running requests to schedule one by one."""
        # The step's budget covers all other running requests.
        group, memory = self.decoding, self.memory
        others = list(self.catching_up.values())
        if not group and memory.tables is not None:
            return others
        wanted = [self._next_tokens(r, step) for r in others]
        if len(group) + sum(wanted) > step.budget and not self._decodes_come_first(step):
            # The budget does not cover the last requests, so each request is scheduled by itself.
            for r in list(group.members.values()):
                self._leave(r)
            others = list(self.catching_up.values())
            wanted = [self._next_tokens(r, step) for r in others]
        step.spend(len(group), len(group))
        if memory.tables is None:
            blocks = len(group.full_block_members())
            for r, n in zip(others, wanted, strict=True):
                blocks += memory.blocks_to_grow(r.computed, n)
            if blocks <= memory.pool.free:
                group.grow_all()
                return others
        return [*group.members_to_update(), *others]

    def _pass_over_after(self, r: RequestState, count: int, step: ScheduleStep) -> None:
        """Skip up to ``count`` running requests after ``r`` in this step."""
        behind = [other for other in self.running.values() if other.order > r.order]
        for other in behind[:count]:
            self._pass_over(other, step)

    def _pass_over(self, r: RequestState, step: ScheduleStep) -> None:
        """Skip the running request ``r`` in this step."""
        if r in self.decoding:
            self._leave(r)
            step.restore(1)
        step.batch.aside[r.id] = "rule"

    def _decodes_come_first(self, step: ScheduleStep) -> bool:
        """Return whether the step can schedule the whole decode group before all other requests."""
        if len(self.decoding) > step.budget:
            return False
        last = reversed(self.running)
        return all(next(last) in self.catching_up for _ in range(len(self.catching_up)))

    def _next_tokens(self, r: RequestState, step: ScheduleStep) -> int:
        """Return the number of tokens to compute for a running request. 0 skips the request."""
        if step.hold and r.chunk:
            return 0
        if self.drafts:
            n = self.drafts.wanted(r)
        elif self._last_is_under_way(r) and self._sees_the_end(r):
            return 0
        else:
            n = r.length + r.placeholders - r.computed
        if 0 < step.threshold < n:
            n = step.threshold
        n = min(n, step.budget)
        return self.split.clip(r, r.computed, n, waits=False) if self.split else n

    def _last_is_under_way(self, r: RequestState) -> bool:
        return r.placeholders > 0 and r.length + r.placeholders >= r.stop_length

    def _sees_the_end(self, r: RequestState) -> bool:
        """Return whether ``r`` is skipped while its last token is in flight."""
        at_most = r.length + r.placeholders >= self.config.max_model_len
        return self.rules.skips_last_token_in_flight or at_most

    def _victim(self) -> RequestState:
        """Return the running request to preempt."""
        if self.config.policy != "priority":
            return self.running[next(reversed(self.running))]
        return max(self.running.values(), key=lambda r: (r.prompt.priority, r.prompt.arrival))

    def _gives_way(self, victim: RequestState) -> bool:  # noqa: ARG002
        """Return whether ``victim`` can be preempted. If not, no request is preempted."""
        return True

    def _preempt(self, r: RequestState, by: RequestState, step: ScheduleStep) -> None:
        """Free all blocks of ``r`` and remove ``r`` from the step."""
        # The tokens in flight of ``r`` become stale.
        had = step.tokens.pop(r, 0)
        if r in self.decoding:
            self._leave(r)
            had = 1
        if self.rules.removes_victims or r.order >= by.order:
            if had:
                step.restore(had)
        elif had:
            step.tokens[r] = had
        del self.running[r.id]
        del self.catching_up[r.id]
        self.loras.leave(r.prompt.lora)
        step.batch.aside.pop(r.id, None)
        kept = self._keep(r)
        self._release(r, step.blocks.pop(r, 0))
        r.computed, r.placeholders = kept, 0
        r.stale = r.in_flight
        if self.drafts:
            self.drafts.preempted(r, had)
        self.waiting.put_back(r)
        step.batch.preempt(r.id, by.id)
        step.skip_request("blocks")

    def _keep(self, r: RequestState) -> int:  # noqa: ARG002
        """Return the number of tokens of a victim whose KV stays valid."""
        return 0

    def _admit_waiting(self, step: ScheduleStep) -> None:
        """Admit waiting requests in order until one cannot be admitted."""
        # With ``skip_blocked``, a request that lacks blocks does not stop the admission; it is set
        # aside and is tried first in the next step.
        self._waiting_settled = True
        step.begin_admission()
        while step.budget > 0 and self.waiting and len(self.running) < self._max_running:
            r = self._next_waiting(step)
            if r is None:
                break
            turn = self._consider(r, step)
            if turn == "stops":
                break
            if turn == "steps aside":
                self.waiting.set_aside(r)
        aside = self.waiting.restore_aside()
        stale = any(r.stale for r in aside)
        if not step.hold:
            self.interval.admitted(left_behind=self._left_behind())
        if (
            self.memory.frees_while_running
            and self.waiting
            and len(self.running) < self._max_running
        ):
            self._waiting_settled = False  # running requests may free blocks
        # A request that was set aside for lack of blocks may be excluded by the prefill interval in
        # the next step.
        # the order of these requests is reversed in each step
        turns = len(aside) > 1 and self.rules.reverses_skipped
        # The wait for an adapter is reported only while enough blocks are free for the request.
        told = self.rules.skip_blocked and bool(step.batch.aside)
        if stale or turns or told or (aside and self._holds) or self._may_be_hit_soon():
            self._waiting_settled = False

    def _consider(self, r: RequestState, step: ScheduleStep) -> AdmissionStep:
        """Try to admit a waiting request and schedule its first tokens."""
        if r.stale:  # its previous step is still in flight: try the next request
            r.deferred = True
            step.skip_request("rule")
            return "steps aside"
        if not self.loras.admit(r.prompt.lora):
            r.deferred = True
            step.batch.aside[r.id] = "adapter"
            step.skip_request("adapter")
            return "steps aside"
        if (turn := self._load(r, step)) is not None:
            return turn
        hits = self.memory.hits(r)
        start = max(hits.tokens, r.computed)
        n = r.length - start
        prefill = n > 1
        if prefill and step.hold:
            self._waiting_settled = False
            step.skip_request("rule")
            return "stops"
        if self.drafts and n == 1:
            n = self.drafts.count_padded_tokens(start, step.ran, step.chunks, step.budget)
            if not n:
                step.skip_request("budget")
                return "stops"
        if 0 < step.threshold < n:
            n = step.threshold
        if n > step.budget:
            if not self.config.enable_chunked_prefill:
                step.skip_request("budget")
                return "stops"
            n = step.budget
        wanted, r.is_padded = n, n > r.length - start
        if self.split and not (n := self.split.clip(r, start, n, waits=True)):
            step.skip_request("budget")
            return "stops"
        if r.is_padded and n < wanted and self.rules.skips_padding_without_room:
            n, r.is_padded = 1, False
        if not self._fits(r, hits, start + n):
            step.skip_request("rule" if self.memory.has_unready_hits(r, hits) else "blocks")
            return "steps aside" if self.rules.skip_blocked else "stops"
        self.waiting.remove(r)
        self._admissions += 1
        r.order = self._admissions
        r.deferred, r.fresh = False, True
        self.loras.enter(r.prompt.lora)
        self.running[r.id] = self.catching_up[r.id] = r
        self.memory.share(r, hits)
        r.computed = start
        step.prefill |= prefill
        self._grant(r, n, self.memory.missing(hits, start + n), step)
        return "is taken"

    def _next_waiting(self, step: ScheduleStep) -> RequestState | None:
        """Return the waiting request to try next, or None if none can fit."""
        if not isinstance(self.waiting, SizeBucketedQueue):
            return self.waiting.head()
        room = self.memory.room(running=len(self.running) > 0)
        most = min(step.budget, step.threshold or step.budget)
        enough = blocks_for(most, self.config.block_size) <= room and not self.memory.whole
        r = self.waiting.first(inf if enough or self.names.others else room)
        if r is not self.waiting.head():
            step.skip_request("blocks")
        return r

    def _load(self, r: RequestState, step: ScheduleStep) -> AdmissionStep | None:  # noqa: ARG002
        """Return the result for ``r`` if its KV is loaded from elsewhere, else None."""
        return None

    def _may_be_hit_soon(self) -> bool:
        """Return whether decodes may soon fill blocks that a waiting request could reuse."""
        if not self.waiting or not self.memory.cache:
            return False
        if self.rules.skip_blocked:
            return self.names.outputs
        return any(s.stream.startswith("o") for s in self.waiting.head().prompt.segments)

    def _fits(self, r: RequestState, hits: CacheHits, end: int) -> bool:
        """Return whether enough blocks are free to admit ``r`` with its tokens up to ``end``."""
        return self.memory.fits(r, hits, end, running=len(self.running) > 0)

    def _grant(self, r: RequestState, n: int, blocks: int, step: ScheduleStep) -> None:
        """Schedule ``n`` tokens of ``r`` with ``blocks`` new blocks."""
        # The blocks that these tokens fill are registered in the prefix cache at once, so other
        # requests can reuse them in the same step. The blocks stay registered even if a preemption
        # removes ``r`` from the step, so that their KV is never computed (an engine bug).
        self.memory.take(r, blocks, r.computed + n)
        self.memory.register(r, min(r.computed + n, r.length))
        step.tokens[r] = n
        step.spend(n)

    def _dispatch(self, step: ScheduleStep) -> Batch:
        """Count the step's tokens as computed and complete the batch."""
        group = self.decoding
        batch = step.batch
        batch.ignored = self._refused
        if self.waiting:
            full: WaitReason = "slot" if step.budget > 0 else "budget"
            batch.held = Held(self.waiting.head().id, step.why or full)
        batch.decodes, batch.decode_context = len(group), group.context
        batch.joined, batch.left = group.depart()
        batch.lora_loads = self.loras.load()
        self._refused = []
        step.dispatch(group, self.drafts)
        self._newest = batch
        self.interval.note_step(empty=batch.kind == "idle", prefill=step.prefill)
        if isinstance(self.waiting, HeapQueue) and self.waiting.tied:
            batch.fatal = "TypeError: two waiting requests of equal priority and arrival"
        if self.rules.asserts_victims_run and len(step.tokens) + len(group) > len(self.running):
            batch.fatal = "AssertionError: more requests are scheduled than run"
        if self.loras.exceeds_limit:
            batch.fatal = "AssertionError: adapters of more than max_loras in a step"
        batch.expand = self._all_rows
        return batch
