"""A prefill pass of SGLang: from the head of the queue on, as many as the budgets take."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.sglang.decode_step import drop_ending_rows
from simkv.schedulers.sglang.loop_state import LoopState, ScheduleBatch
from simkv.schedulers.sglang.memory import EngineCrash, Req
from simkv.schedulers.sglang.preemption import preempt_for
from simkv.schedulers.sglang.prefill_adder import AddReqResult, PrefillAdder
from simkv.schedulers.sglang.prefill_delayer import PrefillDelayer
from simkv.schedulers.sglang.queue_order import QueueOrder


class PrefillPass:
    """Makes the next batch that computes prompts, if there is to be one."""

    def __init__(self, state: LoopState) -> None:
        self.state = state
        self.order = QueueOrder(state)
        self.preempted_requests: list[Req] = []
        self.fewest_free = _fewest_free(state)
        self.delayer = PrefillDelayer(state) if state.config.enable_prefill_delayer else None

    def run(self, noted: Batch) -> ScheduleBatch | None:
        """Sort the queue, take its head, give that its memory. Raises EngineDies.

        Notes in ``noted`` who is passed over and who gave way.
        """
        if self.delayer is None:
            return self._run(noted)
        self.delayer.begin()
        batch = self._run(noted)
        self.delayer.end(len(batch.rows) if batch else 0, batch.prefills if batch else 0)
        return batch

    def _run(self, noted: Batch) -> ScheduleBatch | None:
        state = self.state
        if not self._looks_at_queue():
            return None
        self.order.sort()
        adder = PrefillAdder(state, self.delayer)
        continued = 0
        if state.chunked:
            adder.continue_chunked(state.chunked, self.order.limit(state.chunked, adder.chunk or 0))
            continued = 1
        self.preempted_requests = []
        passed = self._admit(adder, continued, noted)
        noted.aside.update((r.id, "adapter") for r in passed)
        if not adder.can:
            self._put_back(noted, lost=not state.rules.keeps_preempted)
            return None
        del state.waiting[: len(adder.can) - continued + len(passed)]
        state.waiting[:0] = passed
        self._put_back(noted)
        state.chunked = adder.chunked
        state.admit(adder.can)
        batch = ScheduleBatch(
            adder.can,
            "prefill",
            prefills=len(adder.can),
            extend_tokens=sum(r.end - r.prefix for r in adder.can),
            chunked=adder.chunked,
            prefill_only=not any(r.max_new for r in adder.can),
        )
        state.memory.extend(batch.rows)
        if state.config.mixes and state.running.rows and not _asks_logprobs(state, batch):
            self._mix(batch)
        return batch

    def ranks(self) -> Hashable:
        """Who was queued before whom, and how much of whom a pass has looked at."""
        live = sorted(self.state.live.values(), key=lambda r: r.entry)
        return tuple((r.id, r.looked, r.matched) for r in live)

    def _looks_at_queue(self) -> bool:
        """Whether there is anybody to take; the rest of a prompt is in any case."""
        state, running = self.state, self.state.running
        if state.config.preempts or (not running.rows and state.rules.empty_opens):
            running.full = False
        if state.chunked:
            return True
        if running.full or not state.waiting:
            return False
        if running.rows and self._slots() < self.fewest_free:
            state.why = "slot"
            return False
        if self._slots() <= 0 and not state.config.preempts:
            running.full = True
            state.why = "slot"
            return False
        return True

    def _admit(self, adder: PrefillAdder, continued: int, noted: Batch) -> list[Req]:
        """Let ``adder`` take from the head of the queue on; returns who was passed over.

        It has ``continued`` one prompt, or none. Only those whose adapter cannot run are passed
        over.
        """
        state, running, rules = self.state, self.state.running, self.state.rules
        admission, holding = AddReqResult.GO, continued if rules.counts_held_rows else 0
        passed: list[Req] = []
        for r in self._candidates(adder, passed):
            if rules.spent_budget_stops and adder.verdict is AddReqResult.OTHER:
                admission = AddReqResult.OTHER
                break
            if len(adder.can) >= self._slots(holding):
                running.full = True
                state.why = "slot"
            if running.full and not self._make_way(adder, r, noted):
                break
            admission = adder.add(r)
            if admission is AddReqResult.NO_TOKEN:
                running.full = bool(adder.can or running.rows or not rules.full_if_served)
            if admission is not AddReqResult.GO:
                break
        seen = len(adder.can) - continued + len(passed)
        if admission is not AddReqResult.GO and seen < len(state.waiting):
            state.why = adder.find_wait_reason(state.waiting[seen], admission)
        if passed:
            state.why = "adapter"
        return passed

    def _make_way(self, adder: PrefillAdder, r: Req, noted: Batch) -> bool:
        """Whether less urgent requests have given way to ``r``."""
        gone = preempt_for(self.state, adder, r) if self.state.config.preempts else []
        for victim in gone:
            noted.preempt(victim.id, r.id)
        self.preempted_requests += gone
        return bool(gone)

    def _put_back(self, noted: Batch, *, lost: bool = False) -> None:
        """Who gave way waits again, or is ``lost``."""
        for r in self.preempted_requests:
            if lost:
                noted.lost.append(r.id)
                del self.state.live[r.id]
            else:
                self.state.queue(r)

    def _candidates(self, adder: PrefillAdder, passed: list[Req]) -> Iterator[Req]:
        """The queue from its head on; those whose adapter cannot run are ``passed`` over."""
        state = self.state
        if state.loras is None:
            yield from state.waiting
            return
        state.loras.begin(state.waiting, state.running.rows, adder.can, state.now)
        for r in state.waiting:
            if state.loras.admit(r):
                yield r
                state.loras.note_candidate(r)
            else:
                passed.append(r)

    def _slots(self, holding: int = 0) -> int:
        """Requests that a pass may choose; ``holding`` of those chosen have a row already."""
        most = self.state.config.rows
        return min(most - len(self.state.running.rows), most - len(self.state.admitted) + holding)

    def _mix(self, batch: ScheduleBatch) -> None:
        """Let the running requests decode in the step of this prefill, if they all fit.

        Older releases do not ask first, and die where they do not. Raises EngineDies.
        """
        state, running, full = self.state, self.state.running, self.state.running.full
        if not drop_ending_rows(state):
            running.full = full  # those that had finished do not open the queue here
        if not running.rows:
            return
        if not state.rules.mixes_if_it_fits or state.memory.fits(running.rows):
            state.memory.grow(running.rows)
            if state.memory.free < 0:
                why = f"out of memory: {len(running.rows)} decodes beside a prefill"
                raise EngineCrash(why, batch.rows)
            batch.kind, batch.prefill_only = "mixed", False
            batch.rows = batch.rows + running.rows
            batch.extend_tokens += len(running.rows)
            state.running = ScheduleBatch(full=running.full)


def _asks_logprobs(state: LoopState, batch: ScheduleBatch) -> bool:
    """Whether anybody asks for log probabilities: such batches are not mixed."""
    return any(r.logprobs_from is not None for r in (*batch.rows, *state.running.rows))


def _fewest_free(state: LoopState) -> int:
    """Rows that must be free before anybody is taken beside those that run; 0 if none must."""
    asked, rows = state.config.min_free_slots_delay or 0, state.config.rows
    if state.rules.caps_free_slots:
        most = min(4, max(2, (rows + 5) // 6)) if rows >= 8 else 0
    else:
        most = rows
    fewest = min(asked, most)
    return fewest if fewest > 1 else 0
