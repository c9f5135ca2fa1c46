"""ResourceManagerV1 of PaddlePaddle/FastDeploy and PR #7038, 2026-01 to 2026-04, bugs included.

Three actors. The **resource manager** decides (here) and puts tasks; the **worker**
(``fastdeploy_worker``) keeps a slot for each request, where decodes run by themselves until their
blocks are used up, and sends one message per executed step; the **token processor** reads the
messages and shares the manager's memory (``fastdeploy_memory``). ``FastDeploy`` runs them in
lockstep; a pipeline may run them with delays between, where the ``preempt-sync`` variants part.

Common to all: a preempted request loses its blocks at once, keeps its outputs and its slot, stands
in ``pending`` until the worker acknowledges, and then prefills prompt and outputs again. Text only,
prefix caching off, ``mixed`` role.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from simkv.core.request import Prompt
from simkv.core.scheduler import (
    MOST_BLOCK_SIZE,
    MOST_BLOCKS,
    Batch,
    Completion,
    Kind,
    Variant,
    Why,
    blocks_for,
)
from simkv.schedulers.fastdeploy.memory import Heard, ResourceManager, Seq, Status, TokenProcessor
from simkv.schedulers.fastdeploy.worker import Task, Work, Worker, WorkerCrash

VariantName = Literal[
    "fixed-reserve",
    "fixed-reserve-full-need",
    "ratio",
    "ratio-worker-faithful",
    "decode-only-preempt",
    "preempt-sync-minus1",
    "preempt-sync-sentinel",
]

VARIANTS: Mapping[str, Variant] = {
    "fixed-reserve": Variant(
        "PaddlePaddle/FastDeploy@4fd877ed4 (2026-03-26)",
        "after a preemption admission keeps 16 blocks free per running request, decaying per call",
    ),
    "fixed-reserve-full-need": Variant(
        "PaddlePaddle/FastDeploy@74d0f1c01 (2026-01-14, in force until #6541)",
        "as fixed-reserve; while it reserves, the whole prefill must fit, not only the next chunk",
    ),
    "ratio": Variant(
        "Foriv/FastDeploy, PaddlePaddle/FastDeploy#7038 on 62ac1e543 (2026-02-10)",
        "reserves a decaying share of max_tokens; a prefill halts the growth of decodes",
    ),
    "ratio-worker-faithful": Variant(
        "Foriv/FastDeploy, PaddlePaddle/FastDeploy#7038 on 62ac1e543 (2026-02-10)",
        "as ratio; a request that retracts itself loses its acknowledgement and hangs",
    ),
    "decode-only-preempt": Variant(
        "PaddlePaddle/FastDeploy@93ac61ec9 (2026-04-28, merged #7444)",
        "only decodes are preempted and only for decodes; chunks pass the admission test too",
    ),
    "preempt-sync-minus1": Variant(
        "PaddlePaddle/FastDeploy@74d0f1c01^ (2026-01-14, before #5796)",
        "as fixed-reserve-full-need; any -1 in its slot acknowledges a preemption",
    ),
    "preempt-sync-sentinel": Variant(
        "PaddlePaddle/FastDeploy@74d0f1c01 (2026-01-14, merged #5796)",
        "as fixed-reserve-full-need; only a -9 in its slot acknowledges a preemption",
    ),
}


@dataclass(frozen=True)
class FastDeployConfig:
    """Knobs of the engine, under its own names; a variant ignores those that it does not read.

    All variants: ``block_size`` (tokens), ``num_blocks`` and ``max_num_seqs`` (slots).
    ``idle_worker_sends_ack``: whether a preemption that leaves the worker nothing to run is
    acknowledged (true since PR #7633 of 2026-04-30; before, it waited for somebody else's step).

    All but ``ratio…``: ``max_num_batched_tokens`` per call; a decode with at most
    ``prealloc_dec_block_slot_num_threshold`` free tokens in its table gets ``enc_dec_block_num``
    blocks. ``reserve_init`` (blocks per running request), ``reserve_decay`` (blocks per non-empty
    call) and ``reserve_min`` steer the fixed reserve.

    ``decode-only-preempt``: ``use_new_token_ratio_reserve`` 0 brings the fixed reserve back; with
    1 the share of ``max_tokens`` (at most ``clip_max_new_tokens``) kept free per running request
    starts at ``init_new_token_ratio`` and sinks by ``new_token_ratio_decay`` per non-empty call
    down to ``min_new_token_ratio``.

    ``ratio…``: the same with the floor ``init_new_token_ratio * min_new_token_ratio_factor``,
    reached in ``new_token_ratio_decay_steps`` decode calls, ``clip_max_new_tokens_estimation`` in
    place of the clip, at most ``chunked_prefill_size`` and ``rem_input_tokens`` prefill tokens per
    call, and ``retract_decode_steps`` tokens of headroom per request after a preemption.
    """

    name: Literal["fastdeploy"] = "fastdeploy"
    variant: VariantName = "fixed-reserve"
    block_size: Annotated[int, Gt(0), Le(MOST_BLOCK_SIZE)] = 64
    num_blocks: Annotated[int, Gt(0), Le(MOST_BLOCKS)] = 1024
    max_num_seqs: Annotated[int, Gt(0), Le(MOST_BLOCKS)] = 8
    max_num_batched_tokens: Annotated[int, Gt(0)] = 8192
    enc_dec_block_num: Annotated[int, Gt(0)] = 2
    prealloc_dec_block_slot_num_threshold: Annotated[int, Ge(0)] = 12
    reserve_init: Annotated[int, Ge(0)] = 16
    reserve_decay: Annotated[float, Ge(0)] = 0.025
    reserve_min: Annotated[int, Ge(0)] = 0
    use_new_token_ratio_reserve: Literal[0, 1] = 1
    init_new_token_ratio: Annotated[float, Ge(0), Le(1)] = 0.7
    min_new_token_ratio: Annotated[float, Ge(0), Le(1)] = 0.1
    new_token_ratio_decay: Annotated[float, Ge(0)] = 0.001
    clip_max_new_tokens: Annotated[int, Gt(0)] = 4096
    min_new_token_ratio_factor: Annotated[float, Ge(0), Le(1)] = 0.3
    new_token_ratio_decay_steps: Annotated[int, Gt(0)] = 600
    clip_max_new_tokens_estimation: Annotated[int, Gt(0)] = 4096
    chunked_prefill_size: Annotated[int, Gt(0)] = 8192
    rem_input_tokens: Annotated[int, Gt(0)] = 16384
    retract_decode_steps: Annotated[int, Ge(0)] = 20
    idle_worker_sends_ack: bool = True

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: {self.max_num_batched_tokens} must not be less than "
                f"max_num_seqs ({self.max_num_seqs}), as the engine asserts at start"
            )


class FixedReserve(ResourceManager):
    """``fixed-reserve`` and, with ``full_need``, ``fixed-reserve-full-need``.

    The second is also the scheduler of both ``preempt-sync`` variants.
    """

    #: What a running decode takes from the token budget in its turn.
    decode_cost = 1

    def __init__(self, config: FastDeployConfig, full_need: bool = False) -> None:
        super().__init__(config.block_size, config.num_blocks, config.max_num_seqs)
        self.config = config
        self.full_need = full_need
        self.relaxed = True  # nothing is reserved until the first preemption
        self.reserve = config.reserve_init
        self.reserve_exact: float = config.reserve_init
        self._admitting = True

    def _decide(self) -> None:
        budget = self._advance_running(self._budget())
        if self.preempted:
            self.why = "blocks"
        elif self._admitting:
            self._admit_waiting(budget)
        if self._tasks:
            self._decay()

    def _advance_running(self, budget: int) -> int:
        config, i, self._admitting = self.config, 0, True
        while i < len(self.running) and budget > 0:
            seq = self.running[i]
            if seq.decoding:
                if seq.total > seq.need:
                    seq.computed = seq.total - 1
                slack = self.pool.held(seq.id) * config.block_size - seq.total
                if slack <= config.prealloc_dec_block_slot_num_threshold:
                    if not self._room(seq, config.enc_dec_block_num):
                        self.why = "blocks"
                        break
                    self._grow(seq, config.enc_dec_block_num)
                budget -= self.decode_cost
            else:
                tokens = min(seq.need - seq.computed, budget)
                blocks = self._blocks_of_chunk(seq, tokens)
                if not self._room_for_chunk(seq, blocks):
                    self.why = self._lack(blocks)
                    break
                self._prefill(seq, tokens, blocks)
                budget -= tokens
            i += 1
        return budget

    def _admit_waiting(self, budget: int) -> None:
        while self.waiting and budget > 0:
            if self._seats_taken() >= self.config.max_num_seqs:
                self.why = "slot"
                break
            seq = self._head()
            tokens = min(seq.need - seq.computed, budget)
            blocks = self._blocks_of_chunk(seq, tokens)
            if self.pool.free < self._wanted(seq, blocks):
                self.why = self._lack(blocks)
                break
            self.waiting.popleft()
            self.running.append(seq)
            self._prefill(seq, tokens, blocks)
            budget -= tokens
            self._seat(seq)

    def _budget(self) -> int:
        return self.config.max_num_batched_tokens

    def _seats_taken(self) -> int:
        # Pending requests keep their slots but do not count: hence SlotOverrun under an ack lag.
        return len(self.running)

    def _wanted(self, seq: Seq, blocks: int) -> int:
        """Free blocks without which a chunk of ``blocks`` new ones is not admitted."""
        if self.relaxed:
            return blocks
        if self.full_need:
            blocks = blocks_for(seq.need, self.block_size)
        return blocks + len(self.running) * self.reserve

    def _room(self, seq: Seq, blocks: int) -> bool:
        """Preempt until ``blocks`` are free for ``seq``; False if that fails or hits itself."""
        if self.pool.free >= blocks:
            return True
        self._at_trigger()
        while self.pool.free < blocks and (victim := self._victim()):
            self._preempt(victim, seq)
            self._at_victim()
            if victim is seq:
                return False
        return self.pool.free >= blocks

    def _room_for_chunk(self, seq: Seq, blocks: int) -> bool:
        return self._room(seq, blocks)

    def _victim(self) -> Seq | None:
        return self.running[-1] if self.running else None

    def _at_trigger(self) -> None:
        self._reset_reserve()

    def _at_victim(self) -> None:
        pass

    def _reset_reserve(self) -> None:
        self.reserve = self.config.reserve_init
        self.reserve_exact = self.config.reserve_init
        self.relaxed = False

    def _decay(self) -> None:
        self.reserve_exact -= self.config.reserve_decay
        self.reserve = max(int(self.reserve_exact), self.config.reserve_min, 0)
        if self.reserve == 0:
            self.relaxed = True

    def fingerprint(self) -> Hashable:
        # Once at its minimum the reserve stays there, however far its exact value runs on.
        at_rest = int(self.reserve_exact) <= self.config.reserve_min
        exact = None if at_rest else self.reserve_exact
        return super().fingerprint(), self.reserve, exact, self.relaxed


class DecodeOnlyPreempt(FixedReserve):
    """``decode-only-preempt`` (PR #7444): what differs from ``fixed-reserve``."""

    decode_cost = 0

    def __init__(self, config: FastDeployConfig) -> None:
        super().__init__(config)
        self.by_ratio = config.use_new_token_ratio_reserve == 1
        self.ratio = config.init_new_token_ratio

    def _budget(self) -> int:
        return self.config.max_num_batched_tokens - sum(seq.decoding for seq in self.running)

    def _seats_taken(self) -> int:
        # Preempted requests come back to the head, so they stand before all new ones.
        back = takewhile(lambda seq: seq.status is Status.PREEMPTED, self.waiting)
        return len(self.running) + len(self.pending) + sum(1 for _ in back)

    def _wanted(self, seq: Seq, blocks: int) -> int:
        if not self.by_ratio:
            return super()._wanted(seq, blocks)
        for other in self.running:  # a running chunk reserves for itself, too
            left = min(other.max_tokens - other.out, self.config.clip_max_new_tokens)
            blocks += blocks_for(max(int(left * self.ratio), 0), self.block_size)
        return blocks

    def _room_for_chunk(self, seq: Seq, blocks: int) -> bool:
        self._admitting = self.pool.free >= self._wanted(seq, blocks)
        return self._admitting

    def _victim(self) -> Seq | None:
        decodes = (seq for seq in reversed(self.running) if seq.status is Status.RUNNING_DECODE)
        return next(decodes, None)

    def _at_trigger(self) -> None:
        pass

    def _at_victim(self) -> None:
        if not self.by_ratio:
            self._reset_reserve()
            return
        self.ratio = self.config.init_new_token_ratio
        if self.running:
            headroom = 16 * self.block_size
            late = sum(seq.total > seq.need for seq in self.running)
            emitted = sum(seq.out for seq in self.running) + headroom * late
            allowed = sum(seq.max_tokens for seq in self.running) + 1
            self.ratio = min(emitted / allowed, self.ratio)

    def _decay(self) -> None:
        if not self.by_ratio:
            super()._decay()
            return
        lower = self.ratio - self.config.new_token_ratio_decay
        self.ratio = max(lower, self.config.min_new_token_ratio)

    def fingerprint(self) -> Hashable:
        return super().fingerprint() if not self.by_ratio else (super().fingerprint(), self.ratio)


class Ratio(ResourceManager):
    """``ratio`` and ``ratio-worker-faithful`` (PR #7038): prefill first, then decodes.

    Floats are added in the order of the original, for the admission test is a floor over them.
    """

    requeue_at_head = False

    def __init__(self, config: FastDeployConfig) -> None:
        super().__init__(config.block_size, config.num_blocks, config.max_num_seqs)
        self.config = config
        self.ratio = min(config.init_new_token_ratio, 1)
        self.min_ratio = self.ratio * config.min_new_token_ratio_factor
        self.decay = (self.ratio - self.min_ratio) / config.new_token_ratio_decay_steps
        self.prefilled = False

    def _decide(self) -> None:
        decodes = [seq for seq in self.running if seq.decoding]
        self._chunk = self.config.chunked_prefill_size
        self._input = self.config.rem_input_tokens - len(decodes)
        self._reserved: float = 0
        for seq in decodes:  # no floor at 0
            self._reserved += min(seq.max_tokens - seq.out, self._clip) * self.ratio
        self._reserved_new = 0
        self.prefilled = False
        if self.active is None or self._continue_active(self.active):
            self._admit_waiting()
        if self.prefilled:
            return  # the gate: decodes run on, but none of them gets a block
        self._advance_decodes()
        if decodes and not self.preempted and self.ratio > self.min_ratio:
            self.ratio = max(self.ratio - self.decay, self.min_ratio)

    def _continue_active(self, seq: Seq) -> bool:
        """Give the unfinished prefill its next chunk, whatever the input budget says."""
        if not self._admit(seq, self._size(seq, bounded=False)):
            return False
        if seq.decoding:
            self.active = None
            self.running.append(seq)
        return True

    def _admit_waiting(self) -> None:
        while self.waiting and self._input > 0 and self._chunk > 0:
            if None not in self.slots:  # pending and preempted requests keep theirs
                self.why = "slot"
                break
            seq = self._head()
            if not self._admit(seq, self._size(seq, bounded=True)):
                break
            self.waiting.popleft()
            self._seat(seq)
            if not seq.decoding:
                self.active = seq
                break
            self.running.append(seq)

    def _size(self, seq: Seq, *, bounded: bool) -> int:
        """Tokens of the next chunk, 0 for none; ``bounded`` by what is left of the input budget."""
        left = seq.need - seq.computed
        tokens = left
        if bounded:
            if self._input <= 0 or (self.prefilled and self._page(left) >= self._input):
                return 0
            tokens = min(left, self._input)
        cut = tokens < left
        if self._page(tokens) > self._chunk:
            tokens = min(tokens, self._floor(self._chunk))
            cut = True
        return self._floor(tokens) if cut else tokens

    def _admit(self, seq: Seq, tokens: int) -> bool:
        if tokens <= 0:
            return False
        blocks = self._blocks_of_chunk(seq, tokens)
        last = seq.computed + tokens >= seq.need
        to_come = min(seq.max_tokens, self._clip) if last else 0
        size = self.block_size
        held_back = blocks * size + to_come + self._reserved + self._reserved_new
        if self.pool.free < (held_back + size - 1) // size:
            self.why = self._lack(blocks)
            return False
        self._prefill(seq, tokens, blocks)
        self.prefilled = True
        self._input -= self._page(tokens)
        self._chunk -= self._page(tokens)
        self._reserved_new += to_come  # in full, not times the ratio
        return True

    def _advance_decodes(self) -> None:
        i = 0
        while i < len(self.running):
            seq = self.running[i]
            if seq.total > seq.need:
                seq.computed = seq.total - 1
            blocks = 0
            if (seq.total - 1) % self.block_size == 0:  # a state, not an edge
                if self.pool.free < 1:
                    self._retract(seq)
                if self.pool.free < 1:
                    self._preempt(seq, seq)
                    continue
                blocks = 1
            # If it has just retracted itself it gets block and task all the same, and as the list
            # got shorter the next request is passed over.
            self._grow(seq, blocks)
            i += 1

    def _retract(self, by: Seq) -> None:
        """Preempt decodes until a block is free, fewest outputs first, but never the last one."""
        decodes = [seq for seq in self.running if seq.decoding]
        decodes.sort(key=lambda seq: (seq.out, -seq.prompt_tokens), reverse=True)
        if len(decodes) < 2:
            return
        while self.pool.free < 1 and len(decodes) > 1:
            self._preempt(decodes.pop(), by)
        emitted = sum(seq.out + self.config.retract_decode_steps for seq in decodes)
        allowed = sum(seq.max_tokens for seq in decodes) + 1
        self.ratio = min(max(emitted / allowed, 1e-6), 1.0)

    @property
    def _clip(self) -> int:
        return self.config.clip_max_new_tokens_estimation

    def _page(self, tokens: int) -> int:
        return blocks_for(tokens, self.block_size) * self.block_size

    def _floor(self, tokens: int) -> int:
        return tokens // self.block_size * self.block_size

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), self.ratio


def actors(config: FastDeployConfig) -> tuple[ResourceManager, Worker, TokenProcessor]:
    """The three actors of a variant, for whoever connects them."""
    variant = config.variant
    manager: ResourceManager
    if variant in ("ratio", "ratio-worker-faithful"):
        manager = Ratio(config)
    elif variant == "decode-only-preempt":
        manager = DecodeOnlyPreempt(config)
    else:
        manager = FixedReserve(config, full_need=variant != "fixed-reserve")
    sentinel = variant != "preempt-sync-minus1"
    worker = Worker(
        config.block_size,
        sentinel=sentinel,
        decode_clears_flag=variant != "ratio",
        idle_sends=config.idle_worker_sends_ack,
    )
    return manager, worker, TokenProcessor(manager, sentinel=sentinel)


class FastDeploy:
    """The three actors in lockstep: the results of a step are heard before the next decision.

    ``complete`` must be called for idle batches, too: they may carry the acknowledgement of a
    preemption. ``tasks`` and ``stalled`` describe the last batch, ``acked`` the last completion.
    """

    pipeline_depth = 1

    def __init__(self, config: FastDeployConfig) -> None:
        self.manager, self.worker, self.processor = actors(config)
        self.tasks: list[Task] = []
        self.stalled: list[int] = []
        self.acked: list[int] = []

    def add(self, prompt: Prompt) -> None:
        """Take a new request, just before a ``schedule`` call."""
        self.manager.add(prompt)

    def schedule(self) -> Batch:
        """Decide, hand the tasks to the worker and see what its next step will compute."""
        planned = self.manager.schedule()
        parcel = self.manager.put(planned)
        self.tasks = parcel.tasks
        try:
            self.worker.take(parcel)
        except WorkerCrash as crash:
            preempted, causes = self.manager.preempted, self.manager.causes
            return Batch(preempted=preempted, causes=causes, fatal=f"raised: {crash}")
        place = {id_: i for i, id_ in enumerate(self.running_ids())}
        self.stalled = sorted(self.worker.stalled(), key=lambda i: place.get(i, len(place)))
        work = self.worker.work()
        prefills = sum(task.kind == "prefill" for task in parcel.tasks)
        work[prefills:] = sorted(work[prefills:], key=lambda w: place.get(w.id, len(place)))
        batch = batch_of(work, prefills, self.manager.preempted)
        batch.causes, batch.held = self.manager.causes, self.manager.held()
        batch.aside = aside_of(self.manager, self.worker)
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Run the worker's step and hear its message; ``ended`` emit their last token."""
        del batch  # the worker knows what it was given
        message = self.worker.step(lambda id_, _: id_ in ended)
        heard = self.processor.receive(message) if message is not None else Heard()
        self.acked = heard.acked
        return Completion(heard.delivered, heard.finished)

    def abort(self, request_id: int) -> None:
        """Do nothing: how these revisions take an abort was not studied and is in no trace.

        A request whose client went away runs on to its end.
        """

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return self.manager.pool.num_blocks

    @property
    def free_blocks(self) -> int:
        """Free blocks."""
        return self.manager.pool.free

    @property
    def num_waiting(self) -> int:
        """Requests in ``waiting`` and preempted ones that the worker has not acknowledged."""
        return len(self.manager.waiting) + len(self.manager.pending)

    @property
    def num_running(self) -> int:
        """Requests in ``running`` and the unfinished prefill of the ``ratio`` variants."""
        return len(self.manager.running) + (self.manager.active is not None)

    def leap(self, most: int) -> int:  # noqa: ARG002
        """One step at a time: reservations decay with every call, and slots run by themselves."""
        return 1

    def skip(self, steps: int) -> list[int]:
        raise NotImplementedError("this scheduler does not leap")

    def waiting_ids(self) -> list[int]:
        """Ids in ``waiting``, head first."""
        return [seq.id for seq in self.manager.waiting]

    def running_ids(self) -> list[int]:
        """Ids in ``running``, in admission order; an unfinished ``ratio`` prefill is not there."""
        return [seq.id for seq in self.manager.running]

    def pending_ids(self) -> list[int]:
        """Ids of preempted requests that the worker has not acknowledged, oldest first."""
        return list(self.manager.pending)

    def active_id(self) -> int | None:
        """Id of the unfinished chunked prefill of the ``ratio`` variants."""
        return self.manager.active.id if self.manager.active else None

    def blocks_held(self) -> Mapping[int, int]:
        """Blocks by id of the requests that hold any."""
        return {i: len(table) for i, table in self.manager.pool.tables.items() if table}

    def fingerprint(self) -> Hashable:
        """All state of engine and worker that decides the following steps."""
        return self.manager.fingerprint(), self.worker.fingerprint()


def batch_of(work: list[Work], prefills: int, preempted: list[int]) -> Batch:
    """What the worker computes in a step, its ``prefills`` first, as a batch."""
    return Batch(
        scheduled=[(w.id, w.tokens) for w in work],
        context=[w.context for w in work],
        emits=[w.id for w in work if w.emits],
        kind=_kind(work, prefills),
        preempted=preempted,
    )


def aside_of(manager: ResourceManager, worker: Worker) -> dict[int, Why]:
    """Requests that lack the block for their next token, or the next chunk of their prompt.

    While the ``ratio`` variants prefill, they let nobody have a block, however many there are.
    """
    gated = isinstance(manager, Ratio) and manager.prefilled
    lacking: dict[int, Why] = {} if gated else dict.fromkeys(worker.stalled(), "blocks")
    chunks = (slot.id for slot in worker.slots.values() if slot.state == "chunk stopped")
    return lacking | dict.fromkeys(chunks, manager.why)


def _kind(work: list[Work], prefills: int) -> Kind:
    if not work:
        return "idle"
    if prefills == 0:
        return "decode"
    return "prefill" if prefills == len(work) else "mixed"
