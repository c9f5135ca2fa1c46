"""A prefill pass of SGLang: admit requests from the head of the queue until a budget is used up."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.sglang.decode_step import drop_ending_rows
from simkv.schedulers.sglang.loop_state import LoopState, ScheduleBatch
from simkv.schedulers.sglang.memory import EngineCrash, Req
from simkv.schedulers.sglang.prefill_adder import AddReqResult, PrefillAdder, preempt_for
from simkv.schedulers.sglang.prefill_delayer import PrefillDelayer
from simkv.schedulers.sglang.queue_order import QueueOrder


class PrefillPass:
    """Builder of the next prefill batch."""

    def __init__(self, state: LoopState) -> None:
        self.state = state
        self.order = QueueOrder(state)
        self.preempted_requests: list[Req] = []
        self.fewest_free = _fewest_free(state)
        self.delayer = PrefillDelayer(state) if state.config.enable_prefill_delayer else None

    def run(self, noted: Batch) -> ScheduleBatch | None:
        """Sort the queue, admit requests from its head and allocate their memory.

        The skipped and the preempted requests are recorded in ``noted``. Raises EngineCrash if
        memory runs out.
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
        """Return the unfinished requests in the order in which they entered the queue.

        Each entry also contains the values of ``looked`` and ``matched``.
        """
        live = sorted(self.state.live.values(), key=lambda r: r.entry)
        return tuple((r.id, r.looked, r.matched) for r in live)

    def _looks_at_queue(self) -> bool:
        """Return whether the pass has candidates. An incomplete prompt is always a candidate."""
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
        """Admit requests from the head of the queue. Return the skipped requests.

        ``continued`` is 1 if the pass continues an incomplete prompt, otherwise 0. Only requests
        whose adapter cannot run are skipped.
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
        """Preempt less urgent requests in favor of ``r``; return whether any were preempted."""
        gone = preempt_for(self.state, adder, r) if self.state.config.preempts else []
        for victim in gone:
            noted.preempt(victim.id, r.id)
        self.preempted_requests += gone
        return bool(gone)

    def _put_back(self, noted: Batch, *, lost: bool = False) -> None:
        """Queue the preempted requests again; drop them instead if ``lost``."""
        for r in self.preempted_requests:
            if lost:
                noted.lost.append(r.id)
                del self.state.live[r.id]
            else:
                self.state.queue(r)

    def _candidates(self, adder: PrefillAdder, passed: list[Req]) -> Iterator[Req]:
        """Yield the requests of the queue in order.

        Requests whose adapter cannot run are appended to ``passed`` instead.
        """
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
        """Return the maximum number of requests that a pass may choose.

        The ``holding`` admitted requests that the pass continues do not count.
        """
        most = self.state.config.rows
        return min(most - len(self.state.running.rows), most - len(self.state.admitted) + holding)

    def _mix(self, batch: ScheduleBatch) -> None:
        """Add the decodes of all running requests to this prefill step if they fit.

        Raises EngineCrash if they do not fit and the release does not check it.
        """
        state, running, full = self.state, self.state.running, self.state.running.full
        if not drop_ending_rows(state):
            running.full = full  # finished requests do not clear the batch-full flag here
        if not running.rows:
            return
        if not state.rules.mixes_if_it_fits or state.memory.fits(running.rows):
            state.memory.grow(running.rows)
            if state.memory.free < 0:
                why = f"out of memory: {len(running.rows)} decodes in a step with a prefill"
                raise EngineCrash(why, batch.rows)
            batch.kind, batch.prefill_only = "mixed", False
            batch.rows = batch.rows + running.rows
            batch.extend_tokens += len(running.rows)
            state.running = ScheduleBatch(full=running.full)


def _asks_logprobs(state: LoopState, batch: ScheduleBatch) -> bool:
    """Return whether any request needs log probabilities; such batches are not mixed."""
    return any(r.logprobs_from is not None for r in (*batch.rows, *state.running.rows))


def _fewest_free(state: LoopState) -> int:
    """Return the number of request slots that must be free to admit requests while others run."""
    asked, rows = state.config.min_free_slots_delay or 0, state.config.rows
    if state.rules.caps_free_slots:
        most = min(4, max(2, (rows + 5) // 6)) if rows >= 8 else 0
    else:
        most = rows
    fewest = min(asked, most)
    return fewest if fewest > 1 else 0
