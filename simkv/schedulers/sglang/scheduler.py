"""The SGLang 0.5.23 scheduler: prefill first, memory promised by ratio, retraction when it lied.

Source: the PyPI wheel ``sglang==0.5.23``, ``managers/scheduler.py`` and what it calls. One rank,
also of dp attention (ranks step together: ``loop/fleet/lockstep.py``);
no speculative decoding, LoRA, grammar, images, sliding window, priorities or disaggregation.
Here are the steps; ``prefill`` has the queue order and the admission, ``memory``
the ownership of the pool.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from simkv.core.prefix import Content
from simkv.core.request import Prompt
from simkv.core.scheduler import Batch, Completion, Held, Kind, Why
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.memory import EngineDies, Memory, Req
from simkv.schedulers.sglang.prefill import REFRESH_INTERVAL, Admission, PrefillAdder, QueueOrder
from simkv.schedulers.sglang.receive import Receiver
from simkv.schedulers.sglang.versions import RULES, SglangRules


@dataclass(slots=True, eq=False)
class ScheduleBatch:
    """The engine's batch object; the running batch is one, and may have begun as a prefill.

    ``full`` ("batch_is_full") on the running batch keeps the queue from being looked at.
    A batch that was built to prefill has ``prefills`` such rows before any others, and
    ``extend_tokens`` to compute; ``chunked`` is the one whose prompt that does not finish.
    """

    rows: list[Req] = field(default_factory=list)
    kind: Kind = "decode"
    full: bool = False
    prefills: int = 0
    extend_tokens: int = 0
    chunked: Req | None = None


class Flight(NamedTuple):
    """A launched batch and the rows that will emit; a prompt's middle chunk is not among them."""

    batch: Batch
    prefills: list[Req]
    decodes: list[Req]


class SglangScheduler:
    """SGLang's loop body, cut into ``schedule`` (its next batch) and ``complete`` (its results).

    ``memory`` is one like the config's own that knows more, such as which page is whose.
    """

    def __init__(
        self,
        config: SglangConfig,
        memory: Memory | None = None,
        rules: SglangRules | None = None,
    ) -> None:
        self.config = config
        self.rules = rules or RULES[config.variant]
        self.pipeline_depth = 1 if config.disable_overlap_schedule else 2
        self.memory = memory or Memory(
            config.max_total_num_tokens, config.page_size, not config.disable_radix_cache
        )
        self.order = QueueOrder(
            config.schedule_policy,
            self.memory,
            config.in_batch_prefix_caching_check_threshold,
            config.in_batch_prefix_caching_deprioritize_threshold,
            config.lpm_aging_tokens_per_pass,
            refreshes=self.rules.refreshes,
        )
        self.chunk_size = config.chunk if config.chunk > 0 else None
        self.mixed = config.enable_mixed_chunk and self.chunk_size is not None
        self.init_ratio = min(config.init_new_token_ratio * config.conservativeness, 1.0)
        self.min_ratio = min(self.init_ratio * config.min_new_token_ratio_factor, 1.0)
        self.decay = (self.init_ratio - self.min_ratio) / config.new_token_ratio_decay_steps

        self.receiver = Receiver(config.scheduler_recv_interval)
        self.waiting: list[Req] = []
        self.running = ScheduleBatch()
        self.last: ScheduleBatch | None = None
        self.chunked: Req | None = None
        self.ratio = self.init_ratio
        self.hold = 0
        self.processed_tokens = 0
        self._live: dict[int, Req] = {}
        self._admitted: dict[int, Req] = {}  # each holds one of the max_running_requests rows
        self._flights: deque[Flight] = deque()
        self._refused: list[int] = []
        self._why: Why = "rule"  # the head of the queue was passed over when last looked at

    # ------------------------------------------------------------------ arrivals

    def add(self, prompt: Prompt) -> None:
        """A request has come; the loop receives it when it looks next."""
        if self.receiver.always:
            self._take(prompt)
        else:
            self.receiver.unread.append(prompt)

    def abort(self, request_id: int) -> None:
        """The client has gone; the loop hears of it as of a request."""
        if self.receiver.always:
            self._drop(request_id)
        else:
            self.receiver.unread.append(request_id)

    def _receive(self) -> None:
        for message in self.receiver.receive(self.last.kind if self.last else None):
            if isinstance(message, Prompt):
                self._take(message)
            else:
                self._drop(message)

    def _take(self, prompt: Prompt) -> None:
        """Queue a request, its output limit clipped to what the pool can hold beside its prompt.

        A prompt of the pool's size less 6 tokens or more is refused with the next batch.
        """
        pool, page = self.config.max_total_num_tokens, self.config.page_size
        length = prompt.prompt_tokens
        if length >= pool - 6:
            self._refused.append(prompt.id)
            return
        fits_alone = pool - self.memory.up(length) - page - 1
        max_new = max(0, min(prompt.max_tokens, (pool - 1) - length - 1, fits_alone))
        req = Req(prompt.id, length, max_new, prompt.ignore_eos, Content(prompt))
        self._live[req.id] = req
        self._queue(req)

    def _drop(self, request_id: int) -> None:
        """The client has gone, as by an AbortReq.

        A waiting request leaves the queue and one in the middle of its prompt is freed, both at
        once. A running one computes one more token and is freed with it; neither that token nor
        its end is reported.
        """
        req = self._live.get(request_id)
        if req is None:
            return
        if req is self.chunked:
            self.chunked = None
            self._end(req)
        elif req.id in self._admitted:
            req.aborted = True
        else:
            self.waiting.remove(req)
            del self._live[req.id]

    def _queue(self, req: Req) -> None:
        req.stamp = self.processed_tokens
        self.waiting.append(req)

    # ------------------------------------------------------------------ one step

    def schedule(self) -> Batch:
        """Choose and launch the next batch."""
        self._receive()
        batch = Batch(ignored=self._refused)
        self._refused = []
        try:
            chosen = self._choose(batch)
        except EngineDies as error:
            batch.fatal = error.why
            batch.scheduled = [(r.id, r.end - r.prefix) for r in error.rows]
            return batch
        if chosen:
            self._launch(chosen, batch)
        elif not (self.waiting or self.running.rows or self.chunked or self._flights):
            self.ratio = self.init_ratio
        self.last = chosen
        if self.waiting:
            batch.held = Held(self.waiting[0].id, self._why)
        elif unread := self.receiver.prompts:
            batch.held = Held(unread[0], "rule")
        return batch

    def _choose(self, batch: Batch) -> ScheduleBatch | None:
        self._merge()
        chosen = None if self._defers_prefill() else self._prefill()
        if chosen is None and self.chunked:
            batch.aside[self.chunked.id] = "rule"
        if chosen is None and self.running.rows:
            chosen = self._decode(batch)
        if chosen and chosen.kind != "decode":
            self.hold = self.config.prefill_decode_interval
        return chosen

    def _merge(self) -> None:
        """Move what the last batch prefilled into the running batch; drop who has finished."""
        if (chunked := self.chunked) and chunked.end > chunked.prefix:
            self.memory.publish(chunked, chunked.end)
            chunked.prefix = chunked.end
        if (last := self.last) and last.kind != "decode":
            before = len(last.rows)
            last.rows = [
                r for r in last.rows if not (r.finished or r is chunked or r is last.chunked)
            ]
            if len(last.rows) < before:
                self.running.full = False
            if last.rows and self.running.rows:
                self.running.rows += last.rows
            elif last.rows:
                self.running = last  # and with it goes the old flag
        if self.rules.drops_finished:
            self._leave([r for r in self.running.rows if not r.finished])

    def _leave(self, staying: list[Req]) -> bool:
        """Keep only ``staying`` in the running batch; whether somebody left, who makes room."""
        left = len(staying) < len(self.running.rows)
        if left:
            self.running.rows = staying
            self.running.full = False
        return left

    def _defers_prefill(self) -> bool:
        """Whether ``--prefill-decode-interval`` keeps this step for decoding."""
        if self.hold == 0:
            return False
        if len(self.running.rows) < self.config.prefill_decode_interval_min_bs:
            self.hold = 0
            return False
        self.hold -= 1
        self._why = "rule"
        return True

    # ------------------------------------------------------------------ prefill

    def _prefill(self) -> ScheduleBatch | None:
        running = self.running
        if not running.rows and self.rules.empty_opens:
            running.full = False
        if self.chunked is None:
            if running.full or not self.waiting:
                return None
            if self._slots() <= 0:
                running.full = True
                self._why = "slot"
                return None
        self.order.sort(self.waiting, self.processed_tokens)
        adder = PrefillAdder(
            self.memory,
            running.rows,
            self.ratio,
            clip=self.config.clip_max_new_tokens_estimation,
            max_prefill_tokens=self.config.max_prefill_tokens,
            chunked_prefill_size=self.chunk_size,
            prefill_max_requests=self.config.prefill_max_requests,
            mixed=self.mixed,
            promises_fixed=self.rules.promises_fixed,
            page_to_spare=self.rules.page_to_spare,
        )
        continued, admission = 0, Admission.GO
        if self.chunked:
            adder.continue_chunked(self.chunked)
            continued = 1
        holding = continued if self.rules.counts_held_rows else 0
        for r in self.waiting:
            if self.rules.spent_budget_stops and adder.state is Admission.OTHER:
                admission = Admission.OTHER
                break
            if len(adder.can) >= self._slots(holding):
                running.full = True
                self._why = "slot"
            if running.full:
                break
            admission = adder.add(r)
            if admission is Admission.NO_TOKEN:
                running.full = bool(adder.can or running.rows or not self.rules.full_if_served)
            if admission is not Admission.GO:
                break  # nobody is passed over
        taken = len(adder.can) - continued
        if admission is not Admission.GO and taken < len(self.waiting):
            self._why = adder.why_not(self.waiting[taken], admission)
        if not adder.can:
            return None
        del self.waiting[: len(adder.can) - continued]
        self.chunked = adder.chunked
        self._admitted.update((r.id, r) for r in adder.can)
        batch = ScheduleBatch(
            adder.can,
            "prefill",
            prefills=len(adder.can),
            extend_tokens=sum(r.end - r.prefix for r in adder.can),
            chunked=adder.chunked,
        )
        self.memory.extend(batch.rows)
        if self.mixed and running.rows:
            self._mix(batch)
        return batch

    def _slots(self, holding: int = 0) -> int:
        """Requests that a pass may choose; ``holding`` of those chosen have a row already."""
        most = self.config.rows
        return min(most - len(self.running.rows), most - len(self._admitted) + holding)

    def _mix(self, batch: ScheduleBatch) -> None:
        """Let the running requests decode in the step of this prefill, if they all fit."""
        running, full = self.running, self.running.full
        if not self._leave_out_ending():
            running.full = full  # those that had finished do not open the queue here
        if running.rows and (not self.rules.mixes_if_it_fits or self.memory.fits(running.rows)):
            self.memory.grow(running.rows)
            batch.kind = "mixed"
            batch.rows = batch.rows + running.rows
            batch.extend_tokens += len(running.rows)
            self.running = ScheduleBatch(full=running.full)

    # ------------------------------------------------------------------ decode

    def _decode(self, batch: Batch) -> ScheduleBatch | None:
        running = self.running
        some_end = self._leave_out_ending()
        if not running.rows:
            return None
        if self.memory.fits(running.rows):
            self.ratio = max(self.ratio - self.decay, self.min_ratio)
        elif some_end:
            return None  # their memory comes back at the end of this step
        else:
            self._retract(batch)
            if not running.rows:
                return None
        self.memory.grow(running.rows)
        running.kind = "decode"
        return running

    def _leave_out_ending(self) -> bool:
        """Drop those whose token in flight is their last by length; whether there were any.

        Those that have finished go with them, where they are still there.
        """
        rows = self.running.rows
        going_on = rows
        if self.rules.foresees_ends:
            going_on = [r for r in rows if not (r.pending and r.out + 1 >= r.max_new)]
        some_end = len(going_on) < len(rows)
        self._leave([r for r in going_on if not r.finished])
        return some_end

    def _retract(self, batch: Batch) -> None:
        """Take requests out of the running batch until the others can decode.

        The least output goes first, then the longest prompt, then the last in running order; the
        order of this choice becomes the running order. Whoever goes keeps its outputs and queues
        at the tail.
        """
        steps = self.config.retract_decode_steps
        keep = sorted(self.running.rows, key=lambda r: (r.out, -r.prompt_tokens), reverse=True)
        victims: list[Req] = []
        while len(keep) > 1 and not (victims and self.memory.fits(keep)):
            victims.append(keep.pop())
            self._release(victims[-1])
            self.memory.reclaim(len(keep) * steps)
        if len(keep) == 1 and not self.memory.fits(keep):
            alone = keep.pop()
            self._end(alone)
            batch.ignored.append(alone.id)
        self._leave(keep)
        emitted, at_most = sum(r.out for r in keep), sum(r.max_new for r in keep)
        self.ratio = min(1.0, (emitted + steps * len(keep)) / (at_most + 1))
        for r in victims:
            self._queue(r)
            batch.preempt(r.id, None)

    # ------------------------------------------------------------------ launch and results

    def _launch(self, chosen: ScheduleBatch, batch: Batch) -> None:
        """Describe ``chosen`` in ``batch`` and expect its tokens.

        The batch object counts its prefill tokens as processed at every launch: also at each
        decode step of a running batch that began as a prefill (a quirk; hrrn ages by it).
        """
        self.processed_tokens += chosen.extend_tokens
        batch.kind = chosen.kind
        prefills = 0 if chosen.kind == "decode" else chosen.prefills
        flight = Flight(batch, [], chosen.rows[prefills:])
        for r in chosen.rows[:prefills]:
            batch.scheduled.append((r.id, r.end - r.prefix))
            batch.context.append(r.prefix)
            if r is not chosen.chunked:
                flight.prefills.append(r)
        for r in flight.decodes:
            batch.scheduled.append((r.id, 1))
            batch.context.append(r.kv - 1)
        for r in (*flight.prefills, *flight.decodes):
            batch.emits.append(r.id)
            r.pending += 1
        self._flights.append(flight)

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Process the results of the oldest launched batch: tokens emitted, requests finished."""
        done = Completion([], [])
        if batch.fatal or not batch.scheduled:
            return done
        flight = self._flights.popleft()
        assert flight.batch is batch, "batches are completed in the order of their launch"
        for r in flight.prefills:
            if self._emit(r, ended, done):
                self.memory.publish(r, r.end)
        for r in flight.decodes:
            self._emit(r, ended, done)
        return done

    def _emit(self, r: Req, ended: Collection[int], done: Completion) -> bool:
        """Count a token of ``r`` and whether ``r`` goes on; void if it ended since the launch."""
        if not r.pending:
            return False
        r.pending -= 1
        r.out += 1
        if not r.aborted:
            done.delivered.append(r.id)
        if not (r.aborted or r.id in ended or r.out >= r.max_new):
            return True
        self.memory.publish(r, r.kv)  # with overlap also of the last token, if it ended early
        self._end(r)
        if not r.aborted:
            done.finished.append(r.id)
        return False

    def _end(self, r: Req) -> None:
        r.finished = True
        self._release(r)
        del self._live[r.id]

    def _release(self, r: Req) -> None:
        self.memory.release(r)
        del self._admitted[r.id]

    # ------------------------------------------------------------------ many decodes at once

    def leap(self, most: int) -> int:
        """Decodes alone, while the queue is not looked at and nothing has to be evicted."""
        rows, memory = self.running.rows, self.memory
        if self.last is not self.running or self.running.kind != "decode" or self.chunked:
            return 1
        if self.hold or (self.waiting and not self.running.full):
            return 1
        most = self.receiver.quiet(most)
        ahead = self.pipeline_depth - 1  # the loop sees one step early that a limit is reached
        for r in rows:
            most = min(most, 1 if r.aborted else r.max_new - r.out - ahead)
        steps, free, reserve = 1, memory.free, memory.page_size * len(rows)
        for taken in memory.growth(rows, most - 1):
            if free < reserve:
                break
            free -= taken
            steps += 1
        return steps

    def skip(self, steps: int) -> list[int]:
        free = []
        for taken in self.memory.growth(self.running.rows, steps):
            self.memory.free -= taken
            free.append(self.free_blocks)
            self.ratio = max(self.ratio - self.decay, self.min_ratio)
            self.processed_tokens += self.running.extend_tokens
        for r in self.running.rows:
            r.kv += steps
            r.out += steps
        self._flights = deque([self._flights[-1]] * len(self._flights))
        self.receiver.skip(steps)
        return free

    # ------------------------------------------------------------------ what others may see

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.receiver.prompts)

    @property
    def num_running(self) -> int:
        return len(self.running_ids())

    @property
    def num_blocks(self) -> int:
        """Pages in the pool."""
        return self.config.max_total_num_tokens // self.config.page_size

    @property
    def free_blocks(self) -> int:
        """Pages that are free or hold only cached prefixes that nobody has locked."""
        return self.memory.room // self.config.page_size

    def waiting_ids(self) -> list[int]:
        """Ids in the queue, as the last pass that sorted left it, then those not received yet."""
        return [r.id for r in self.waiting] + self.receiver.prompts

    def decode_ids(self) -> list[int]:
        """Ids of the decode batch that the next step starts from."""
        rows = self.running.rows
        if (last := self.last) and last.kind != "decode":
            rows = rows + [r for r in last.rows if r is not last.chunked]
        return [r.id for r in rows if not r.finished]

    def running_ids(self) -> list[int]:
        """Ids of the decode batch, then of who else holds a row.

        That is the one in the middle of its prompt, and those whose last token is in flight.
        """
        decoding = self.decode_ids()
        if len(decoding) == len(self._admitted):
            return decoding
        seen = set(decoding)
        return decoding + [i for i in self._admitted if i not in seen]

    def blocks_held(self) -> Mapping[int, int]:
        """Pages of every request that was admitted and has not ended or been retracted."""
        page = self.config.page_size
        return {r.id: self.memory.up(r.kv) // page for r in self._admitted.values()}

    def fingerprint(self) -> Hashable:
        """All state that decides what ``schedule`` does next."""
        last, tree = self.last, self.memory.tree
        freshest = min((r.passes for r in self.waiting), default=0)
        return (
            tuple(
                (r.id, r.out, self.processed_tokens - r.stamp, r.passes - freshest)
                for r in self.waiting
            ),
            _state(self.running),
            last is self.running or (last and _state(last)),
            self.chunked and self.chunked.id,
            tuple((_states(f.prefills), _states(f.decodes)) for f in self._flights),
            self.ratio,
            self.hold,
            self.receiver.counter,
            len(self.receiver.unread),
            self.memory.free,
            self.order.fcfs_passes % REFRESH_INTERVAL,
            tree and tree.fingerprint(),
        )


def _states(rows: Sequence[Req]) -> Hashable:
    return tuple(
        (r.id, r.out, r.prefix, r.end, r.kv, r.owned, r.pending, r.finished, r.aborted)
        for r in rows
    )


def _state(batch: ScheduleBatch) -> Hashable:
    chunked = batch.chunked and batch.chunked.id
    return _states(batch.rows), batch.kind, batch.full, chunked, batch.extend_tokens
