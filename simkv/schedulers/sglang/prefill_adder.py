"""Admission of requests to a prefill pass of SGLang."""

from __future__ import annotations

from enum import Enum

from simkv.core.scheduler_protocol import WaitReason
from simkv.schedulers.sglang.loop_state import LoopState
from simkv.schedulers.sglang.memory import EngineCrash, Req
from simkv.schedulers.sglang.prefill_delayer import PrefillDelayer


class AddReqResult(Enum):
    """Result of the attempt to add a candidate to a prefill pass."""

    GO = "try the next request"
    NO_TOKEN = "stop: no unpromised memory is left"
    OTHER = "stop: the budget of the pass is used up"


class PrefillAdder:
    """Token budgets of one prefill pass and the requests chosen for it.

    - ``promised``: memory reserved for running and chosen requests, in tokens.
    - ``needed``: memory that the chosen requests need now, in tokens.
    - ``inputs``: number of tokens that the pass may still compute.
    - ``chunk``: number of tokens left in the chunk; None without chunked prefill.

    Source: class PrefillAdder in ``managers/schedule_policy.py``.
    """

    # ``promised`` and ``needed`` are compared with the memory that is free or evictable at that
    # moment, because locking a prefix makes it unavailable for eviction.

    def __init__(self, state: LoopState, delayer: PrefillDelayer | None = None) -> None:
        config, rules, running = state.config, state.rules, state.running.rows
        decodes = len(running) if config.mixes else 0
        self.memory = state.memory
        self.running = running
        self.ratio = state.ratio.current
        self.clip = config.clip_max_new_tokens_estimation
        self.most = config.prefill_max_requests
        self.rules = rules
        self.delayer = delayer
        total = 0.0
        for r in running:  # sum() compensates for rounding since Python 3.12; the engine does not
            total += self.promise(r)
        self.promised = decodes + total
        self.needed = decodes
        self.inputs = config.max_prefill_tokens - decodes
        self.chunk = config.chunk - decodes if config.chunk > 0 else None
        self.can: list[Req] = []
        self.chunked: Req | None = None
        # This policy admits other requests in the same pass as an unfinished prompt.
        self._cuts_one = config.schedule_policy == "shortest-prefill-first"
        self._continues = False
        self._lasting: list[tuple[float, int]] | None = None

    def promise(self, r: Req) -> float:
        """Return the number of tokens reserved for the running request ``r``."""
        share = 1.0 if r.ignore_eos and self.rules.promises_fixed else self.ratio
        return min(r.max_new - r.out, self.clip) * share

    @property
    def verdict(self) -> AddReqResult:
        """Result for the next candidate if only the token budgets are considered."""
        if not (self.left > 0 and self.memory.room - self.needed > 0):
            return AddReqResult.NO_TOKEN
        if self.inputs <= 0 or (self.chunk is not None and self.chunk <= 0):
            return AddReqResult.OTHER
        return AddReqResult.GO

    def continue_chunked(self, r: Req, most: int | None = None) -> None:
        """Add the next chunk of the incomplete prompt of ``r`` without an admission test.

        ``most`` is the maximum chunk size that the queue order allows. None means no limit.
        """
        # No memory is reserved for the rest of the prompt, and the chunk may use reserved memory.
        # Decodes between the chunks can therefore exhaust the memory and crash the engine.
        assert self.chunk is not None
        if self.delayer and self.rules.bounds_delays:
            self.delayer.allows(len(self.running))  # the engine ignores the result
        limit = min(self.chunk, int(self.left))
        if limit <= 0:
            limit = self.chunk
        if limit < 0:
            why = f"request {r.id}: {len(self.running)} decodes leave a chunk of {limit} tokens"
            raise EngineCrash(why, [r])
        if most is not None:
            limit = min(limit, most)
        todo = r.fill - r.prefix
        self._continues = todo > limit
        self._take(r, min(todo, limit), cut=self._continues)

    def add(self, r: Req) -> AddReqResult:
        """Add the prompt of ``r`` or its first chunk to the pass, if the budgets allow it.

        The memory must suffice for the whole prompt and output.
        """
        # The test counts the tokens that ``r`` may still emit, but the budget is charged with its
        # whole output limit.
        prefix, node = self.memory.match(r, r.max_cached_tokens)
        r.looked, r.matched = r.fill, prefix
        if not self.rules.bounds_delays and self._delayed():
            return AddReqResult.OTHER
        if self.most is not None and len(self.can) >= self.most:
            return AddReqResult.OTHER
        if r.ignore_eos and self.memory.tree is None:
            return self._add_lasting(r)
        self.memory.lock(node)
        tokens = self._admit(r, prefix)
        if not isinstance(tokens, AddReqResult) and self._delayed():
            tokens = AddReqResult.OTHER
        if isinstance(tokens, AddReqResult):
            self.memory.unlock(node)
            return tokens
        r.node, r.prefix, r.owned = node, prefix, prefix
        self._take(r, tokens, cut=tokens < r.fill - prefix)
        return self.verdict

    def find_wait_reason(self, r: Req, admission: AddReqResult) -> WaitReason:
        """Return why ``r`` waits. ``r`` is the first request that the pass does not admit."""
        if admission is AddReqResult.OTHER:
            return "rule" if self._delayed() else "budget"
        fits = self.memory.round_up(r.fill) <= self.memory.room - self.needed
        return "reserved" if fits else "blocks"

    def _delayed(self) -> bool:
        return self.delayer is not None and not self.delayer.allows(len(self.running))

    @property
    def left(self) -> float:
        """Number of free or evictable tokens that are not reserved."""
        return self.memory.room - self.promised

    def _admit(self, r: Req, prefix: int) -> int | AddReqResult:
        """Return the number of tokens of ``r`` to compute now, or why it is not admitted."""
        up, page = self.memory.round_up, self.memory.page_size
        tokens = r.fill - prefix
        want = tokens + min(max(r.max_new - r.out, 0), self.clip) + page
        if not want < self.left:
            return AddReqResult.NO_TOKEN
        if self.chunk is None:
            enough = bool(self.can) and up(tokens) >= self.inputs
            return AddReqResult.OTHER if enough else tokens
        if up(tokens) > self.chunk:
            if self._cuts_one and self._continues:
                return AddReqResult.OTHER
            tokens = self.chunk // page * page
        return tokens if tokens > 0 else AddReqResult.OTHER

    def _add_lasting(self, r: Req) -> AddReqResult:
        """Add a request that ignores the end-of-sequence token, if prefix caching is off.

        Requests are assumed to end in the order of their remaining tokens. At each end, the memory
        must suffice for the tokens that the running requests have emitted by then.
        """
        paged = self.memory.round_up(r.fill) + (
            self.memory.page_size if self.rules.page_to_spare else 0
        )
        now = self.memory.room - self.needed
        if paged > min(now, self.left):
            return AddReqResult.NO_TOKEN
        self._foresee(r)
        assert self._lasting is not None
        left, freed, alive = now - paged, 0, len(self._lasting)
        for emits, occupies in self._lasting:
            if left + freed - emits * alive <= alive:
                return AddReqResult.NO_TOKEN
            freed += occupies
            alive -= 1
        if self._delayed():
            return AddReqResult.OTHER
        if self.chunk is None or r.fill <= self.chunk:
            self._take(r, r.fill, cut=False)
        elif self.chunk <= 0:
            return AddReqResult.OTHER
        else:
            self._take(r, self.chunk, cut=True)  # not rounded to pages
        return self.verdict

    def _foresee(self, r: Req) -> None:
        """Insert ``r`` into the list of remaining tokens and of tokens freed at the end."""
        # The list is sorted by remaining tokens; the first such candidate of a pass builds it. If a
        # later candidate has more remaining tokens than all others, it is inserted before the last
        # entry, which is an off-by-one error of the engine.
        if self._lasting is None:
            entries = [self._entry(x) for x in (r, *self.running, *self.can)]
            self._lasting = sorted((e for e in entries if e[0] > 0), key=lambda e: e[0])
            return
        entry = self._entry(r)
        if entry[0] > 0:
            last = max(len(self._lasting) - 1, 0)
            later = (i for i, e in enumerate(self._lasting) if entry[0] <= e[0])
            self._lasting.insert(next(later, last), entry)

    def _entry(self, r: Req) -> tuple[float, int]:
        return r.max_new * (1.0 if r.ignore_eos else self.ratio) - r.out, r.fill

    def _take(self, r: Req, tokens: int, *, cut: bool) -> None:
        """Choose ``r`` with ``tokens`` prefill tokens and charge the budgets."""
        # Each request is charged one additional page. Its output is charged only when the chunk
        # completes its prompt.
        r.end = r.prefix + tokens
        self.can.append(r)
        if cut:
            self.chunked = r
        page, up = self.memory.page_size, self.memory.round_up(tokens)
        self.promised += up + page + (0 if cut else min(r.max_new, self.clip))
        self.needed += up + page
        self.inputs -= up
        if self.chunk is not None:
            self.chunk -= up


def preempt_for(state: LoopState, adder: PrefillAdder, r: Req) -> list[Req]:
    """Preempt less urgent requests until ``r`` has enough memory. Return the victims, sorted by id.

    The least urgent request is preempted first. Among equally urgent requests, the one queued last
    is preempted first. If too little memory can be freed, no request is preempted.
    """
    # The engine uses the length of ``r`` at the last prefill pass that considered it, which is 0 if
    # none did; it then frees too little memory to admit ``r``. The engine stores the victims in an
    # unordered set, so their order is not defined.
    config, running = state.config, state.running
    lacking = r.looked - r.matched + min(r.max_new, adder.clip) - adder.left
    going: list[Req] = []
    staying = [x for x in running.rows if not x.finished]
    for x in sorted(staying, key=lambda x: (-state.urgency(x), -x.entry)):
        more_urgent = state.urgency(x) - state.urgency(r)
        if more_urgent <= config.priority_scheduling_preemption_threshold:
            break
        going.append(x)
        lacking -= adder.promise(x)
        if lacking <= 0:
            break
    if not going or lacking > 0:
        return []
    left = len(running.rows)
    for x in [x for x in running.rows if x in going]:
        left -= 1
        adder.promised -= adder.promise(x)
        state.release(x)
        state.memory.reclaim(left * config.retract_decode_steps)
    running.rows = [x for x in running.rows if x not in going]  # the batch-full flag is unchanged
    adder.running = running.rows
    return sorted(going, key=lambda x: x.id)
