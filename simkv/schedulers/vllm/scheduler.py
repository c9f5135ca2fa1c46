"""vLLM's V1 scheduler, for a text-only model on one engine without speculative decoding.

There is no prefill phase and no decode phase: each request has tokens without KV to catch up on,
and a step gives the running requests, then the waiting ones, as many as the token budget allows.
A running request that cannot grow takes the blocks of the last one (of the least urgent one under
priority), which keeps its tokens and computes them all again.

The asynchronous scheduler differs in one thing only: it decides a step before the last one's
tokens are known. ``RequestState`` counts what is under way, so one set of rules serves both.

The code reads as 0.33.0; where other versions differ it asks ``Rules``.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Hashable, Mapping
from itertools import accumulate, takewhile
from math import inf
from operator import attrgetter, sub

from simkv.core.blocks import NO_BLOCKS, BlockCounter, BlockPool
from simkv.core.prefix import BlockKeys, Content
from simkv.core.request import Prompt
from simkv.core.scheduler import Batch, Completion, Held, Row, Why, blocks_for
from simkv.schedulers.decodes import DecodeGroup
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.requests import (
    FcfsQueue,
    HeapQueue,
    PriorityQueue,
    RequestState,
    Step,
    queue,
)
from simkv.schedulers.vllm.shelves import Shelves
from simkv.schedulers.vllm.versions import VllmRules, rules_of


class VllmScheduler:
    """Rules of ``vllm.v1.core.sched``: running requests first, then admissions, one budget.

    Running requests that decode stand in a ``DecodeGroup``, since all that the rules do to them
    in a step is to give each one token, and a block to those whose blocks are full.
    ``catching_up`` are the others that run: in prefill, or waiting for their last token.
    """

    def __init__(
        self, config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
    ) -> None:
        self.config = config
        self.rules = rules = rules or rules_of(config.variant)
        given, reserve = config.async_scheduling, config.scheduler_reserve_full_isl
        self.pipeline_depth = 2 if (rules.async_scheduling if given is None else given) else 1
        self._reserve = rules.scheduler_reserve_full_isl if reserve is None else reserve
        usable = config.num_gpu_blocks - 1
        cached = config.enable_prefix_caching
        cached = rules.enable_prefix_caching if cached is None else cached
        self.cache = BlockPool(usable) if cached else None
        self.tables = self.cache or (BlockPool(usable) if tables else None)
        self.pool = self.tables or BlockCounter(usable)
        self.waiting: FcfsQueue | PriorityQueue | Shelves
        self.waiting = queue(config.policy, breaks_ties=rules.breaks_ties)
        # Nothing but blocks may stop those that are passed over without a look.
        self._holds = config.prefill_schedule_interval > 1
        if rules.skip_blocked and config.enable_chunked_prefill and not self._holds:
            self.waiting = Shelves(self._least, priority=config.policy == "priority")
        self.running: dict[int, RequestState] = {}
        self.catching_up: dict[int, RequestState] = {}
        self.decoding: DecodeGroup[RequestState] = DecodeGroup(config.block_size)
        self._max_running = config.max_num_active_seqs or config.max_num_seqs
        self._max_tokens = config.max_num_scheduled_tokens or config.max_num_batched_tokens
        if rules.two_budgets:
            self._max_tokens = min(self._max_tokens, config.max_num_batched_tokens)
        self._watermark = int(config.watermark * config.num_gpu_blocks)
        self._keys = BlockKeys(config.block_size)
        self._live: dict[int, RequestState] = {}
        self._admissions = 0
        self._refused: list[int] = []
        self._tokens_delivered = 0
        # Per batch under way: requests that were in its decode group and have left it since.
        self._under_way: deque[list[RequestState]] = deque()
        self._joined: list[int] = []
        self._left: list[int] = []
        self._rows: dict[int, Row] = {}
        # For prefill_schedule_interval: non-empty steps since one with prefill, and whether an
        # admission phase left requests behind, which allows prefills in the next step too.
        self._since_prefill = config.prefill_schedule_interval
        self._backlog = False
        # Whether a prompt that has come names tokens of another request, and whether its outputs.
        self._names_others = self._names_outputs = False
        # Whether the waiting would be passed over again if nothing but decodes happened.
        self._waiting_settled = False

    def add(self, prompt: Prompt) -> None:
        """Queue a request; a prompt of ``max_model_len`` or more is refused, as by the API server.

        The next batch names it as ignored.
        """
        if prompt.prompt_tokens >= self.config.max_model_len:
            self._refused.append(prompt.id)
            return
        stop = min(prompt.prompt_tokens + prompt.max_tokens, self.config.max_model_len)
        content = Content(prompt) if self.cache else None
        r = RequestState(prompt, stop, content)
        self._live[r.id] = r
        if self.cache and self.rules.skip_blocked:
            self._look_at_names(prompt)
        self.waiting.add(r)

    def schedule(self) -> Batch:
        """One call of the engine's ``schedule``."""
        step = Step(self._max_tokens, self._threshold(), self._hold())
        self._sort_out_decodes()
        self._continue_running(step)
        self._waiting_settled = False
        if not step.batch.preempted:
            self._admit_waiting(step)
        return self._dispatch(step)

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Give the batch's requests their tokens; free those that end, by the model's word or ours.

        A token that was under way when its request was preempted still counts; one whose request
        has ended or was aborted since is dropped.
        """
        group, late, live = self.decoding, self._under_way.popleft(), self._live
        stopped: list[RequestState] = []
        if batch.decodes:
            group.delivered += 1
            self._tokens_delivered += 1
            stopped = group.stopped(group.delivered)
        completion = Completion([], [])
        if not (stopped or ended or late or batch.scheduled):
            return completion  # tokens for the group only
        rows, emits = dict(batch.scheduled), set(batch.emits)
        for r in late:
            rows[r.id] = 1
            emits.add(r.id)
        touched = {i: live[i] for i in (*rows, *ended, *(r.id for r in stopped)) if i in live}
        for r in sorted(touched.values(), key=lambda r: r.order):
            stale = False
            if n := rows.get(r.id, 0):
                stale = r.stale > 0
                r.in_flight -= n
                if stale:
                    r.stale -= n
                if r.id not in emits:
                    continue
                r.length += 1
                if not stale:
                    r.placeholders -= 1
            length = group.length(r) if r in group else r.length
            if not stale:
                self._register(r, length - 1)  # all but the new token have KV now
            if length >= r.stop_length or r.id in ended:
                self._remove(r)
                completion.finished.append(r.id)
        completion.delivered = [i for i in batch.emits if i in touched]
        self._tokens_delivered += len(completion.delivered)
        return completion

    def abort(self, request_id: int) -> None:
        """Drop a request and free its blocks at once, as vLLM does when the client disconnects."""
        if request_id in self._live:
            self._remove(self._live[request_id])

    def leap(self, most: int) -> int:
        """Steps of nothing but decodes: until blocks run out or a request is at its end."""
        group = self.decoding
        if self.catching_up or not group or not self._waiting_settled:
            return 1
        stop = group.next_stop()
        if stop is not None:
            most = min(most, stop - group.scheduled + 1)
        free = self.pool.free
        if free >= (most // self.config.block_size + 1) * len(group):
            return most  # enough for every member at every border
        taken = accumulate(group.growth(most - 1))
        return 1 + sum(1 for _ in takewhile(lambda blocks: blocks <= free, taken))

    def skip(self, steps: int) -> list[int]:
        """Let the group decode: blocks for those at a border, one step after the other."""
        group, before = self.decoding, self.pool.free
        free = list(accumulate(group.growth(steps), sub, initial=before))[1:]
        self._since_prefill += steps
        if self._backlog or self._since_prefill >= self.config.prefill_schedule_interval:
            self._backlog = len(self.waiting) > 0  # not all of these steps held prefills back
        self._tokens_delivered += steps
        if self.tables is None:
            self.pool.take(-1, before - free[-1])
            group.delivered += steps
            group.step(steps)
        else:
            while steps:
                quiet = min(group.quiet(1 if self.cache else 0), steps)
                group.delivered += quiet or 1
                if not quiet:
                    self._grow_all()
                group.step(quiet or 1)
                steps -= quiet or 1
        return free

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        return self.pool.free

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
        return {i: self._held(r) for i, r in self.running.items()}

    def fingerprint(self) -> Hashable:
        """State between two steps, not counting what only arrivals and aborts can change.

        Who waits follows from who runs, and in which order too: running and then waiting is
        always one sequence under fcfs (unless one may skip another), and waiting is sorted under
        priority.
        """
        running = tuple(
            (r.id, self._computed(r), r.placeholders, r.in_flight) for r in self.running.values()
        )
        since = min(self._since_prefill, self.config.prefill_schedule_interval)
        pool = self.pool.fingerprint()
        waiting = self.waiting_ids() if self.rules.skip_blocked else ()
        if not self.rules.drops_victims:
            waiting = [r.computed for r in self.waiting]
        return (self._tokens_delivered, running, tuple(waiting), since, self._backlog, pool)

    def _threshold(self) -> int:
        """Tokens that one request may get in this step; 0 for no limit."""
        threshold = self.config.long_prefill_token_threshold
        requests = len(self.running) + len(self.waiting)
        if threshold == 0 or (requests == 1 and self.rules.threshold_spares_lone):
            return 0
        if self.config.long_prefill_token_threshold_adaptive and requests:
            return max(threshold, self.config.max_num_batched_tokens // requests)
        return threshold

    def _hold(self) -> bool:
        """Whether it is too early for prefills and somebody decodes."""
        return (
            not self._backlog
            and self._since_prefill + 1 < self.config.prefill_schedule_interval
            and (len(self.decoding) > 0 or not all(r.chunk for r in self.catching_up.values()))
        )

    def _sort_out_decodes(self) -> None:
        """Who has only its next token to compute joins the group; who got its last one leaves."""
        for r in self.decoding.stopped(self.decoding.scheduled):
            self._leave(r)
        for r in list(self.catching_up.values()):
            if not r.chunk and not self._last_is_under_way(r):
                del self.catching_up[r.id]
                self.decoding.join(r)
                self._joined.append(r.id)

    def _continue_running(self, step: Step) -> None:
        """Give every running request its tokens, in order, preempting where blocks are short."""
        others = list(self.catching_up.values())
        wanted = [self._next_tokens(r, step) for r in others]
        if len(self.decoding) + sum(wanted) > step.budget and not self._decodes_come_first(step):
            # Whoever is late in the order goes without: look at each.
            for r in list(self.decoding.members.values()):
                self._leave(r)
            others = list(self.catching_up.values())
            wanted = [self._next_tokens(r, step) for r in others]
        step.budget -= len(self.decoding)
        blocks = sum(self._blocks_to_grow(r, n) for r, n in zip(others, wanted, strict=True))
        if self.tables is None and blocks + len(self.decoding.at_border()) <= self.pool.free:
            self._grow_all()
            rows = others
        else:
            rows = [*self._members_to_visit(), *others]
        for r in sorted(rows, key=lambda r: r.order):
            if r.id not in self.running or r.id in step.batch.aside:
                continue  # preempted in favour of one before it, or passed over
            decodes = r in self.decoding
            n = 1 if decodes else self._next_tokens(r, step)
            if n == 0:
                if step.budget == 0 or r.chunk:
                    step.batch.aside[r.id] = "budget" if step.budget == 0 else "rule"
                continue
            needed = self._blocks_to_grow(r, n)
            lost = 0
            while needed > self.pool.free:
                victim = self._victim()
                sat_out = victim not in self.decoding and victim not in step.tokens
                counted_back = self.rules.drops_victims and not sat_out
                lost += victim.order < r.order and not counted_back
                self._preempt(victim, r, step)
                if victim is r:
                    break
            else:
                step.blocks[r] = needed
                if decodes:
                    self._grow(r, needed)
                else:
                    step.prefill |= r.chunk
                    self._grant(r, n, needed, step)
                if lost and not self.rules.finds_next:
                    self._pass_over_after(r, lost, step)
                continue
            if not self.rules.goes_on:
                self._pass_over_after(r, len(self.running), step)

    def _pass_over_after(self, r: RequestState, count: int, step: Step) -> None:
        """Let up to ``count`` running requests behind ``r`` sit this step out."""
        behind = [other for other in self.running.values() if other.order > r.order]
        for other in behind[:count]:
            if other in self.decoding:
                self._leave(other)
                step.budget += 1
            step.batch.aside[other.id] = "rule"

    def _decodes_come_first(self, step: Step) -> bool:
        """Whether the budget reaches for all members of the group, as the others come last."""
        if len(self.decoding) > step.budget:
            return False
        last = reversed(self.running)
        return all(next(last) in self.catching_up for _ in range(len(self.catching_up)))

    def _members_to_visit(self) -> list[RequestState]:
        """Members of the group whose blocks are full; with a cache also whose will be."""
        rows, soon = self.decoding.at_border(), self.decoding.at_border(1)
        if not self.cache or not soon or rows is soon:
            return list(rows.values())
        return [*rows.values(), *soon.values()]

    def _grow_all(self) -> None:
        """The next token of every member of the group; the blocks for it are there."""
        if self.tables is None:
            self.pool.take(-1, len(self.decoding.at_border()))
            return
        members, rows = self._members_to_visit(), self.decoding.at_border()
        if len(members) > 1:  # which block goes to whom shows in the cache, so their order counts
            members.sort(key=attrgetter("order"))
        for r in members:
            self._grow(r, int(r.id in rows))

    def _grow(self, r: RequestState, blocks: int) -> None:
        """The next token of a member of the group."""
        if blocks:
            self.pool.take(r.id, blocks)
        if self.cache:
            tokens = self.decoding.computed(r) + 1
            self._register(r, min(tokens, self.decoding.length(r)))

    def _held(self, r: RequestState) -> int:
        """Blocks of a running request: just those that its computed tokens need."""
        return blocks_for(self._computed(r), self.config.block_size)

    def _blocks_to_grow(self, r: RequestState, n: int) -> int:
        computed, size = self._computed(r), self.config.block_size
        return blocks_for(computed + n, size) - blocks_for(computed, size)

    def _release(self, r: RequestState, unused: int = 0) -> None:
        """Take the blocks of ``r`` back, ``unused`` ones too; it is in no group."""
        if isinstance(self.pool, BlockPool):
            self.pool.release(r.id, keyless_first=self.rules.keyless_first)
        else:
            self.pool.give_back(blocks_for(r.computed, self.config.block_size) + unused)

    def _leave(self, r: RequestState) -> None:
        """Take ``r`` out of the group; tokens under way will reach it by itself."""
        under_way = self.decoding.leave(r)
        for late in list(self._under_way)[len(self._under_way) - under_way :]:
            late.append(r)
        self.catching_up[r.id] = r
        if r.id in self._joined:
            self._joined.remove(r.id)
        else:
            self._left.append(r.id)

    def _computed(self, r: RequestState) -> int:
        return self.decoding.computed(r) if r in self.decoding else r.computed

    def _next_tokens(self, r: RequestState, step: Step) -> int:
        """Tokens of a running request to compute now; 0 lets it sit out the step."""
        if step.hold and r.chunk:
            return 0
        if self._last_is_under_way(r) and self._sees_the_end(r):
            return 0
        n = r.length + r.placeholders - r.computed
        if 0 < step.threshold < n:
            n = step.threshold
        return min(n, step.budget)

    def _last_is_under_way(self, r: RequestState) -> bool:
        return r.placeholders > 0 and r.length + r.placeholders >= r.stop_length

    def _sees_the_end(self, r: RequestState) -> bool:
        """Whether ``r`` gets no more tokens when its last one is under way."""
        at_most = r.length + r.placeholders >= self.config.max_model_len
        return self.rules.sees_the_end or at_most

    def _victim(self) -> RequestState:
        """The running request to preempt."""
        if self.config.policy == "fcfs":
            return self.running[next(reversed(self.running))]
        return max(self.running.values(), key=lambda r: (r.prompt.priority, r.prompt.arrival))

    def _preempt(self, r: RequestState, by: RequestState, step: Step) -> None:
        """Take all blocks of ``r`` and its place in the step; its tokens under way go stale."""
        had = step.tokens.pop(r, 0)
        if r in self.decoding:
            self._leave(r)
            had = 1
        if self.rules.drops_victims or r.order >= by.order:
            step.budget += had
        elif had:
            step.tokens[r] = had
        del self.running[r.id]
        del self.catching_up[r.id]
        step.batch.aside.pop(r.id, None)
        kept = self._keep(r)
        self._release(r, step.blocks.pop(r, 0))
        r.computed, r.placeholders = kept, 0
        r.stale = r.in_flight
        self.waiting.put_back(r)
        step.batch.preempt(r.id, by.id)
        step.pass_over("blocks")

    def _keep(self, r: RequestState) -> int:  # noqa: ARG002
        """Tokens of a victim whose KV is not lost."""
        return 0

    def _admit_waiting(self, step: Step) -> None:
        """Start waiting requests in order; the first that cannot be admitted stops the rest.

        With ``skip-blocked`` one without blocks only steps aside, and is tried first next time.
        """
        self._waiting_settled = True
        while step.budget > 0 and self.waiting and len(self.running) < self._max_running:
            r = self._next_waiting(step)
            if r is None:
                break
            if r.stale:  # its old step is still under way: the next one gets the chance
                self.waiting.set_aside(r)
                step.pass_over("rule")
                continue
            if (loads := self._load(r)) is not None:
                if loads:
                    continue
                step.pass_over("blocks")
                break
            hits = self._hits(r)
            start = max(len(hits) * self.config.block_size, r.computed)
            n = r.length - start
            prefill = n > 1
            if prefill and step.hold:
                self._waiting_settled = False
                step.pass_over("rule")
                break
            if 0 < step.threshold < n:
                n = step.threshold
            if n > step.budget:
                if not self.config.enable_chunked_prefill:
                    step.pass_over("budget")
                    break
                n = step.budget
            if not self._fits(r, hits, start + n):
                step.pass_over("blocks")
                if not self.rules.skip_blocked:
                    break
                self.waiting.set_aside(r)
                continue
            self.waiting.remove(r)
            self._admissions += 1
            r.order = self._admissions
            self.running[r.id] = self.catching_up[r.id] = r
            if self.cache:
                self.cache.share(r.id, hits)
            r.computed = start
            r.registered = len(hits)
            step.prefill |= prefill
            blocks = blocks_for(start + n, self.config.block_size) - len(hits)
            self._grant(r, n, blocks, step)
        aside = self.waiting.come_back()
        if not step.hold:
            self._backlog = len(self.waiting) > sum(r.stale for r in aside)
        # Who has stepped aside for want of blocks may be kept out by the interval next time.
        kept_out_later = aside and self._holds
        if kept_out_later or any(r.stale for r in aside) or self._may_be_hit_soon():
            self._waiting_settled = False

    def _next_waiting(self, step: Step) -> RequestState | None:
        """Whom to try next; None if all who are left need more blocks than are free."""
        if not isinstance(self.waiting, Shelves):
            return self.waiting.head()
        room = self.pool.free - (self._watermark if self.running else 0)
        most = min(step.budget, step.threshold or step.budget)
        enough = blocks_for(most, self.config.block_size) <= room and not self._reserve
        r = self.waiting.first(inf if enough or self._names_others else room)
        if r is not self.waiting.head():
            step.pass_over("blocks")
        return r

    def _least(self, r: RequestState) -> int:
        """Blocks without which a waiting request is not admitted, whatever others have cached.

        They are those of its own prompt, unless others name its tokens (``_names_others``). One
        whose old step is under way is looked at in any case.
        """
        if r.stale:
            return 0
        own, shared = f"u{r.id}", 0
        if self.cache and r.prompt.segments:
            others = takewhile(lambda segment: segment.stream != own, r.prompt.segments)
            shared = sum(segment.end - segment.start for segment in others)
        size = self.config.block_size
        return max(blocks_for(r.length, size) - shared // size, 0)

    def _look_at_names(self, prompt: Prompt) -> None:
        """Note whose tokens a prompt names beside its own and those of a common prefix."""
        streams = {segment.stream for segment in prompt.segments}
        self._names_outputs |= any(stream.startswith("o") for stream in streams)
        others = streams - {f"u{prompt.id}", f"o{prompt.id}"}
        self._names_others |= any(stream[0] in "uo" for stream in others)

    def _load(self, r: RequestState) -> bool | None:  # noqa: ARG002
        """Whether there are blocks for the KV of ``r`` that comes from elsewhere; None if none."""
        return None

    def _may_be_hit_soon(self) -> bool:
        """Whether blocks that decodes are about to fill could become hits of one to be tried."""
        if not self.waiting or not self.cache:
            return False
        if self.rules.skip_blocked:
            return self._names_outputs
        return any(s.stream.startswith("o") for s in self.waiting.head().prompt.segments)

    def _hits(self, r: RequestState) -> array[int]:
        """Cached blocks that ``r`` can start from; at least its last token is left to compute."""
        if not self.cache or r.content is None or r.computed:
            return NO_BLOCKS
        blocks = (r.length - 1) // self.config.block_size
        self._keys.extend(r.keys, r.content, blocks * self.config.block_size)
        return self.cache.lookup(r.keys[:blocks])

    def _fits(self, r: RequestState, hits: array[int], end: int) -> bool:
        """Whether ``r`` may be admitted with ``hits`` to compute its tokens up to ``end``."""
        if self._reserve:
            end = r.length
        revived = self.cache.unheld(hits) if self.cache else 0
        reserve = self._watermark if self.running else 0
        needed = blocks_for(end, self.config.block_size) - len(hits)
        return needed + revived + reserve <= self.pool.free

    def _grant(self, r: RequestState, n: int, blocks: int, step: Step) -> None:
        """Let ``r`` compute ``n`` tokens in this step, with ``blocks`` new blocks.

        The blocks that they will fill are registered already: they can be hit in this very step,
        and stay even if a preemption drops ``r`` from it and they are never computed.
        """
        if blocks:
            self.pool.take(r.id, blocks)
        self._register(r, min(r.computed + n, r.length))
        step.tokens[r] = n
        step.budget -= n

    def _register(self, r: RequestState, tokens: int) -> None:
        """Enter the blocks filled by the first ``tokens`` tokens of ``r`` into the prefix cache."""
        full = tokens // self.config.block_size
        if not self.cache or r.content is None or full <= r.registered:
            return
        self._keys.extend(r.keys, r.content, tokens)
        table = self.cache.tables[r.id]
        self.cache.register_all(table[r.registered : full], r.keys[r.registered : full])
        r.registered = full

    def _dispatch(self, step: Step) -> Batch:
        """Count the step's tokens as computed and write down the batch."""
        group = self.decoding
        batch = step.batch
        batch.ignored = self._refused
        if self.waiting:
            full: Why = "slot" if step.budget > 0 else "budget"
            batch.held = Held(self.waiting.head().id, step.why or full)
        batch.joined, batch.left = self._joined, self._left
        batch.decodes, batch.decode_context = len(group), group.context
        self._refused, self._joined, self._left = [], [], []
        self._under_way.append([])
        decodes = len(group)
        rows: dict[int, Row] = {}
        for r, n in step.tokens.items():
            rows[r.id] = Row(r.id, n, r.computed)
            batch.scheduled.append((r.id, n))
            batch.context.append(r.computed)
            emitted = n == 1 and r.computed >= r.prompt.prompt_tokens
            r.computed += n
            r.in_flight += n
            r.chunk = r.computed < r.length + r.placeholders
            decodes += emitted and not r.chunk  # after a preemption older ones are prefill
            if not r.chunk:
                r.placeholders += 1
                batch.emits.append(r.id)
        if group:
            group.step()
        if batch:
            batch.kind = "mixed" if decodes else "prefill"
            if decodes == len(step.tokens) + len(group):
                batch.kind = "decode"
            self._since_prefill += 1
        if step.prefill:
            self._since_prefill = 0

        if isinstance(self.waiting, HeapQueue) and self.waiting.tied:
            batch.fatal = "TypeError: two waiting requests of equal priority and arrival"
        self._rows = rows
        batch.expand = self._all_rows
        return batch

    def _all_rows(self) -> list[Row]:
        """The rows of the newest batch, those of the decode group too, in the engine's order."""
        rows, group, running = self._rows, self.decoding, list(self.running.values())
        if not self.rules.drops_victims:  # some may be in the batch that run no more
            stayed = [r for i in rows if i not in self.running and (r := self._live.get(i))]
            running = sorted(running + stayed, key=attrgetter("order"))
        return [
            rows.get(r.id) or Row(r.id, 1, group.computed(r) - 1)
            for r in running
            if r.id in rows or r in group
        ]

    def _remove(self, r: RequestState) -> None:
        """Take a request out of the engine, wherever it is."""
        del self._live[r.id]
        if r.id not in self.running:
            self.waiting.remove(r)
            return
        if r in self.decoding:
            self.decoding.leave(r)
            self._left.append(r.id)
        else:
            del self.catching_up[r.id]
        del self.running[r.id]
        self._release(r)
