"""SGLang's scheduler: it prefills first, reserves memory by a ratio, and retracts requests when
memory runs out.

Source: the PyPI wheels ``sglang``, ``managers/scheduler.py`` and the modules it calls; ``versions``
lists the differences between releases. The scheduler models one rank; with data-parallel attention,
``sim/fleet/data_parallel_lockstep.py`` steps the ranks together. Speculative decoding, grammars,
images, sliding windows and disaggregation are not modelled.

This module runs one iteration of the loop. Its parts are ``request_intake`` (arrivals and aborts),
``prefill_pass`` (with ``queue_order``, the admission of ``prefill_adder`` and the adapters of
``lora``), ``decode_step`` (with retraction) and ``batch_results``. All parts share ``loop_state``;
``memory`` has the token pool.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch, Completion, Held
from simkv.schedulers.sglang import batch_results, decode_leap
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.decode_interval import DecodeInterval
from simkv.schedulers.sglang.decode_step import decode_step
from simkv.schedulers.sglang.loop_state import LoopState, ScheduleBatch
from simkv.schedulers.sglang.memory import EngineCrash, Req, SglangMemory
from simkv.schedulers.sglang.prefill_pass import PrefillPass
from simkv.schedulers.sglang.request_intake import RequestIntake
from simkv.schedulers.sglang.versions import RULES, SglangRules


class SglangScheduler:
    """SGLang's scheduler loop.

    ``schedule`` launches a batch, and ``complete`` processes its results. If ``memory`` is given,
    it is used instead of the KV pool that the config describes.
    """

    def __init__(
        self,
        config: SglangConfig,
        memory: SglangMemory | None = None,
        rules: SglangRules | None = None,
    ) -> None:
        self.config = config
        self.pipeline_depth = 1 if config.disable_overlap_schedule else 2
        rules = rules or RULES[config.variant]
        memory = memory or SglangMemory(
            config.max_total_num_tokens, config.page_size, not config.disable_radix_cache, rules
        )
        self.state = LoopState(config, rules, memory)
        self.intake = RequestIntake(self.state)
        self.interval = DecodeInterval(config)
        self.prefill = PrefillPass(self.state)
        self._skipped = False

    def set_time(self, now: float) -> None:
        """Set the current time in seconds."""
        self.state.now = now

    def add(self, prompt: Prompt) -> None:
        """Add a request; the loop receives it at its next check."""
        self.intake.add(prompt)

    def abort(self, request_id: int) -> None:
        """Record that the client has disconnected.

        The loop receives the abort like a new request.
        """
        self.intake.abort(request_id)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> Batch:
        """Choose and launch the next batch."""
        state = self.state
        self.intake.receive()
        batch = Batch(refused=state.rejections)
        try:
            chosen = self._choose(batch)
        except EngineCrash as error:
            batch.fatal = error.why
            batch.scheduled = [(r.id, r.end - r.prefix) for r in error.rows]
            return batch
        if chosen:
            batch_results.launch(state, chosen, batch)
            if state.loras:
                batch.lora_loads = state.loras.load(chosen.rows), 0
        elif state.idle:
            state.ratio.reset()
        state.last = chosen
        state.rejections = {}
        self._skipped = bool(batch.aside)
        if state.waiting:
            batch.held = Held(state.waiting[0].id, state.why)
        elif unread := self.intake.receiver.prompts:
            batch.held = Held(unread[0], "rule")
        return batch

    def _choose(self, batch: Batch) -> ScheduleBatch | None:
        """Return a prefill batch if possible, otherwise a decode batch, or None."""
        state = self.state
        self._merge()
        if self.interval.defers(len(state.running.rows)):
            state.why = "rule"
            chosen = None
        else:
            chosen = self.prefill.run(batch)
        if chosen is None and state.chunked:
            batch.aside[state.chunked.id] = "rule"
        if chosen is None and state.running.rows and not state.running.prefill_only:
            chosen = decode_step(state, batch)
        if chosen and chosen.kind != "decode":
            self.interval.begin()
        return chosen

    def _merge(self) -> None:
        """Merge the last prefilled batch into the running batch and drop finished requests."""
        state = self.state
        if (chunked := state.chunked) and chunked.end > chunked.prefix:
            state.memory.publish(chunked, chunked.end)
            chunked.prefix = chunked.end
        if (last := state.last) and last.kind != "decode":
            gone = (chunked, last.chunked)
            if last.keep([r for r in last.rows if not (r.finished or r in gone)]):
                state.running.full = False
            if last.rows and state.running.rows:
                state.running.rows += last.rows
                state.running.prefill_only &= last.prefill_only
            elif last.rows:
                state.running = last  # the batch-full flag of the old batch is lost
        going_on = [r for r in state.running.rows if not r.finished]
        if state.rules.drops_finished or (state.running.prefill_only and not going_on):
            state.running.keep(going_on)
        elif state.running.prefill_only:
            state.running.rows = going_on  # the batch-full flag is unchanged

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Process the results of the oldest launched batch."""
        return batch_results.complete(self.state, batch, ended)

    # ------------------------------------------------------------------ leaping

    def leap(self, most: int) -> int:
        """Return the number of decode-only steps without admissions and evictions."""
        if self.interval.left:
            return self.intake.receiver.quiet(min(most, 1 + self._rest()))
        if self._skipped:  # the next pass skips no request, because the batch is full
            return 1
        return decode_leap.leap(self.state, self.intake.receiver, self.pipeline_depth - 1, most)

    def skip(self, steps: int) -> list[int]:
        self.intake.receiver.skip(steps)
        if self.interval.left:
            self.interval.left -= steps
            return [self.free_blocks] * steps
        return decode_leap.skip(self.state, steps)

    def _rest(self) -> int:
        """Return the number of further iterations that only count down to the next prefill."""
        state, interval = self.state, self.interval
        alone = not (state.running.rows or state.last or state.flights or interval.least)
        return interval.left if alone and state.why == "rule" else 0

    # ------------------------------------------------------------------ public state

    @property
    def num_waiting(self) -> int:
        return len(self.state.waiting) + len(self.intake.receiver.prompts)

    @property
    def num_running(self) -> int:
        return len(self.running_ids())

    @property
    def num_blocks(self) -> int:
        """Number of pages in the pool."""
        return self.config.max_total_num_tokens // self.config.page_size

    @property
    def free_blocks(self) -> int:
        """Number of pages that are free or evictable."""
        return self.state.memory.room // self.config.page_size

    def waiting_ids(self) -> list[int]:
        """Return the ids of the waiting requests in queue order."""
        # Requests that the loop has not received yet come last.
        return [r.id for r in self.state.waiting] + self.intake.receiver.prompts

    def decode_ids(self) -> list[int]:
        """Return the ids of the requests in the decode batch at the start of the next step."""
        rows = self.state.running.rows
        if (last := self.state.last) and last.kind != "decode":
            rows = rows + [r for r in last.rows if r is not last.chunked]
        return [r.id for r in rows if not r.finished]

    def running_ids(self) -> list[int]:
        """Return the ids of the admitted requests. The requests of the decode batch come first."""
        # Other admitted requests have a partly computed prompt, or their last token is in flight.
        decoding, admitted = self.decode_ids(), self.state.admitted
        if len(decoding) == len(admitted):
            return decoding
        seen = set(decoding)
        return decoding + [i for i in admitted if i not in seen]

    def blocks_held(self) -> Mapping[int, int]:
        """Return the number of pages of each admitted request, by request id."""
        # Ended and retracted requests are not included.
        page, memory = self.config.page_size, self.state.memory
        return {r.id: memory.round_up(r.kv) // page for r in self.state.admitted.values()}

    def fingerprint(self) -> Hashable:
        """Return the state that determines the next ``schedule`` call."""
        state, receiver = self.state, self.intake.receiver
        last, tree = state.last, state.memory.tree
        freshest = min((r.passes for r in state.waiting), default=0)
        return (
            tuple(
                (r.id, r.out, state.processed_tokens - r.stamp, r.passes - freshest)
                for r in state.waiting
            ),
            self.config.enable_priority_scheduling and self.prefill.ranks(),
            _batch(state.running),
            last is state.running or (last and _batch(last)),
            state.chunked and state.chunked.id,
            tuple((_rows(f.prefills), _rows(f.decodes)) for f in state.flights),
            state.ratio.current,
            self.interval.left,
            self.prefill.delayer and self.prefill.delayer.fingerprint(),
            receiver.counter,
            state.loras and state.loras.fingerprint(),
            len(receiver.unread),
            state.memory.free,
            self.prefill.order.fingerprint(),
            state.counters and state.counters.fingerprint(),
            tree and tree.fingerprint(),
        )


def _rows(rows: Sequence[Req]) -> Hashable:
    return tuple(
        (r.id, r.out, r.prefix, r.end, r.kv, r.owned, r.pending, r.finished, r.aborted)
        for r in rows
    )


def _batch(batch: ScheduleBatch) -> Hashable:
    chunked = batch.chunked and batch.chunked.id
    kind = batch.kind, batch.prefill_only
    return _rows(batch.rows), kind, batch.full, chunked, batch.extend_tokens
