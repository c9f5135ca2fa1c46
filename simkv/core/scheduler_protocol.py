# mypyc: compile
"""The protocol between an engine's scheduler and the rest of simkv.

A scheduler is deterministic: it has no clock except the arrival times of its requests, does no I/O,
uses no random numbers and never sees the output length of a request. It imports neither SimPy nor
torch nor pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, cast

from simkv.core.request import Prompt

BatchKind = Literal["prefill", "decode", "mixed", "idle"]


#: Maximum size of a KV cache and of a block in an engine's config; larger values are rejected as
#: typos.
MAX_BLOCKS = 10_000_000
MAX_BLOCK_SIZE = 1_000_000
#: Maximum number of idle passes; larger values are rejected as typos.
MAX_PASSES = 10_000_000


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks that hold ``tokens`` tokens (ceiling division)."""
    return -(-tokens // block_size)


@dataclass(frozen=True)
class Variant:
    """The source of a variant (repository, commit or pull request) and its summary."""

    source: str
    summary: str


class BatchRow(NamedTuple):
    """A request in a step: the step computes ``tokens`` tokens; the KV of the ``context`` tokens
    before them is already cached.
    """

    id: int
    tokens: int
    context: int


#: Why a request was not scheduled in a step:
#:
#: - ``blocks``: too few free blocks
#: - ``reserved``: enough free blocks, but they are reserved for other requests
#: - ``slot``: no free slot
#: - ``adapter``: no free slot for its LoRA adapter
#: - ``budget``: the token budget of the step is spent
#: - ``deferred``: its bucket (of length or modality) does not run in this step
#: - ``rule``: another rule of the engine excludes it
#: - ``kv``: its KV is being copied from host memory
#: - ``disk``: its KV is being read from disk into host memory
#: - ``remote``: its KV is being sent by another replica
WaitReason = Literal[
    "blocks",
    "reserved",
    "slot",
    "adapter",
    "budget",
    "deferred",
    "rule",
    "kv",
    "disk",
    "remote",
]


class Held(NamedTuple):
    """The head of the waiting queue after a decision, and the reason why it was not scheduled."""

    id: int
    why: WaitReason


class Refusal(NamedTuple):
    """Rejection of a request: the exceeded limit (``knob``) and the engine's message."""

    knob: str
    words: str


#: Why a request was preempted: there were too few ``blocks``; only another ``bucket`` of equal
#: lengths runs; or the ``patience`` of the queue's head was exhausted.
PreemptionReason = Literal["blocks", "bucket", "patience"]


class KvCopy(NamedTuple):
    """A copy of a request's KV between GPU and host memory, or between host memory and disk.

    ``tokens`` is the size of the copy. For a copy to the GPU, ``disk`` is the number of its tokens
    that were read from disk for the request.
    """

    job: int
    id: int
    tokens: int
    disk: int = 0


class DiskTransfers(NamedTuple):
    """Disk transfers that start with a step.

    ``reads`` copy from disk to host memory, and ``writes`` copy from host memory to disk. ``look``
    is a query for blocks on disk, given as its job number and the number of blocks.
    """

    reads: list[KvCopy]
    writes: list[KvCopy]
    look: tuple[int, int] | None


class KvCopies(NamedTuple):
    """KV copies that start with a step.

    ``loads`` copy to the GPU and start at once. ``stores`` copy to host memory and start after the
    step, or at once if their job is in ``flush``. The step starts only after all jobs in ``flush``
    have finished; some of these jobs may have started with earlier steps. ``disk`` transfers start
    at once.
    """

    loads: list[KvCopy]
    stores: list[KvCopy]
    flush: list[int]
    disk: DiskTransfers | None = None


class PreemptionCause(NamedTuple):
    """Reason for a preemption, and the request that caused it (None: all requests that still
    run).
    """

    by: int | None
    why: PreemptionReason = "blocks"


@dataclass(slots=True)
class DraftedTokens:
    """Draft tokens of a batch, which the model verifies.

    ``tokens`` maps a request to the number of its scheduled tokens that are drafts; drafts follow
    the other tokens. Drafts of requests in ``padding`` are fillers and are never accepted.
    ``accepted`` maps a request to its number of accepted drafts; the request receives these drafts
    and one more token. The simulation sets ``accepted`` before the batch is completed, because
    schedulers cannot know it. The drafter runs ``passes`` times after the step.
    """

    passes: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    padding: set[int] = field(default_factory=set)
    accepted: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, init=False)
class Batch:
    """A scheduling decision: the work of the next step.

    ``scheduled`` lists ``(request id, new tokens)`` in the engine's order. ``context`` has, for
    each of these requests, the number of tokens whose KV is already cached. ``emits`` are the ids
    of the requests that receive a token after the step. ``preempted`` are the ids of the preempted
    requests, in order; an id may occur twice. ``ignored`` are the ids of requests that the engine
    drops, ``refused`` the ids of requests rejected because of a limit, and ``lost`` the ids of
    requests that are in no queue although they have not ended. ``fatal`` is the reason why the real
    engine crashes on this batch, or None. ``moves`` are copies to and from host memory, concurrent
    with the steps. ``loads`` are pairs ``(request id, tokens)``: the request has blocks and waits
    for the KV of this number of tokens from another replica. ``lora_loads`` contains two counts:
    the LoRA adapters that are copied to the GPU before the step, and the number of these adapters
    that are first read into host memory.

    Three fields explain waiting. ``held`` is the head of the queue, which blocks all requests
    behind it; a request whose KV is in transfer is reported only if no other request waits.
    ``aside`` are requests that this step skips, in the queue or running. ``causes`` has one entry
    per entry of ``preempted``.

    A scheduler may keep requests that decode in lockstep as a group and report only how the group
    changes: the members that ``joined`` and ``left`` since the previous batch, the number of
    current members (``decodes``) and the total number of their tokens whose KV is cached
    (``decode_context``). ``expand`` returns all rows, but only while this is the newest batch.
    """

    scheduled: list[tuple[int, int]]
    context: list[int]
    emits: list[int]
    kind: BatchKind
    preempted: list[int]
    ignored: list[int]
    refused: dict[int, Refusal]
    lost: list[int]
    fatal: str | None
    held: Held | None
    aside: dict[int, WaitReason]
    causes: list[PreemptionCause]
    decodes: int
    decode_context: int
    joined: list[int]
    left: list[int]
    expand: Callable[[], list[BatchRow]] | None
    loads: list[tuple[int, int]]
    lora_loads: tuple[int, int]
    drafted: DraftedTokens | None
    moves: KvCopies | None

    # This ``__init__`` is written by hand for speed: every step creates a batch, and the generated
    # ``__init__`` of a dataclass is slower, especially when compiled.
    def __init__(
        self,
        scheduled: list[tuple[int, int]] | None = None,
        context: list[int] | None = None,
        emits: list[int] | None = None,
        kind: BatchKind = "idle",
        preempted: list[int] | None = None,
        ignored: list[int] | None = None,
        lost: list[int] | None = None,
        fatal: str | None = None,
        held: Held | None = None,
        aside: dict[int, WaitReason] | None = None,
        causes: list[PreemptionCause] | None = None,
        decodes: int = 0,
        decode_context: int = 0,
        joined: list[int] | None = None,
        left: list[int] | None = None,
        expand: Callable[[], list[BatchRow]] | None = None,
        loads: list[tuple[int, int]] | None = None,
        refused: dict[int, Refusal] | None = None,
        lora_loads: tuple[int, int] = (0, 0),
        drafted: DraftedTokens | None = None,
        moves: KvCopies | None = None,
    ) -> None:
        self.scheduled = [] if scheduled is None else scheduled
        self.context = [] if context is None else context
        self.emits = [] if emits is None else emits
        self.kind = kind
        self.preempted = [] if preempted is None else preempted
        self.ignored = [] if ignored is None else ignored
        self.refused = {} if refused is None else refused
        self.lost = [] if lost is None else lost
        self.fatal = fatal
        self.held = held
        self.aside = {} if aside is None else aside
        self.causes = [] if causes is None else causes
        self.decodes = decodes
        self.decode_context = decode_context
        self.joined = [] if joined is None else joined
        self.left = [] if left is None else left
        self.expand = expand
        self.loads = [] if loads is None else loads
        self.lora_loads = lora_loads
        self.drafted = drafted
        self.moves = moves

    def preempt(self, victim: int, by: int | None, why: PreemptionReason = "blocks") -> None:
        """Add ``victim`` to the preempted requests, with its cause (see ``PreemptionCause``)."""
        self.preempted.append(victim)
        self.causes.append(PreemptionCause(by, why))

    def __bool__(self) -> bool:
        """Whether the batch contains any tokens to compute."""
        return bool(self.scheduled or self.decodes)

    def rows(self) -> list[BatchRow]:
        """Return a row for each scheduled request, in the engine's order.

        With a decode group, the rows are available only until the next decision.
        """
        if self.expand is not None:
            return self.expand()
        return [BatchRow(i, n, c) for (i, n), c in zip(self.scheduled, self.context, strict=True)]


@dataclass(slots=True, init=False)
class Completion:
    """The result of a batch: the ids of the requests that received a token, and of the requests
    that ended, in order.

    ``refused`` are the ids of requests that are rejected. ``delivered`` omits the members of a
    decode group, because each of them received a token.
    """

    delivered: list[int]
    finished: list[int]
    refused: list[int]

    def __init__(
        self, delivered: list[int], finished: list[int], refused: list[int] | None = None
    ) -> None:
        self.delivered = delivered
        self.finished = finished
        self.refused = [] if refused is None else refused


class Livelock(Exception):
    """Raised when a single ``schedule`` call of the real engine would never return.

    ``cycle`` are the ids of the requests in the cycle; ``why`` explains the cycle in one sentence.
    """

    def __init__(self, why: str, cycle: Sequence[int]) -> None:
        super().__init__(why)
        self.why = why
        self.cycle = list(cycle)


class Scheduler(Protocol):
    """The methods of a scheduler that the engine loop uses."""

    @property
    def pipeline_depth(self) -> int:
        """Maximum number of batches in flight.

        With 1, a batch is completed before the next ``schedule`` call. With 2, a batch is completed
        after the next ``schedule`` call.
        """

    def add(self, prompt: Prompt) -> None:
        """Add a new request to the waiting queue."""

    def schedule(self) -> Batch:
        """Decide the next step. Raises Livelock if the call would never return in the real
        engine.
        """

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Record the results of a batch that has run; the requests ``ended`` received their last
        token.
        """

    def abort(self, request_id: int) -> None:
        """Abort a request whose client has disconnected."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that requests can use, without the null block."""

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated now, including cached blocks that no request
        holds.
        """

    @property
    def num_waiting(self) -> int:
        """Length of the waiting queue."""

    @property
    def num_running(self) -> int:
        """Length of the running list."""

    def leap(self, most: int) -> int:
        """Return the number of steps, 1 to ``most``, for which ``schedule`` would repeat its last
        batch.

        The number is valid if no request arrives, is aborted or ends.
        """

    def skip(self, steps: int) -> list[int]:
        """Advance the state as if ``complete`` and ``schedule`` were called ``steps`` times, each
        time with the last batch.

        ``steps`` must be at most the result of ``leap``. Returns the number of free blocks after
        each ``schedule`` call.
        """

    def waiting_ids(self) -> list[int]:
        """Return the ids in the waiting queue, head first."""

    def running_ids(self) -> list[int]:
        """Return the ids in the running list, in the engine's own order."""

    def blocks_held(self) -> Mapping[int, int]:
        """Return the number of blocks of each unfinished request, as a mapping from request id.

        A shared block counts for each request that shares it.
        """

    def fingerprint(self) -> Hashable:
        """Return a hashable value of all state that determines future ``schedule`` calls.

        If the value is equal at two steps without an external event in between, the engine repeats
        the same steps forever.
        """


class ClockedScheduler(Scheduler, Protocol):
    """A scheduler whose decisions depend on the current time."""

    def set_time(self, now: float) -> None:
        """Set the current time in seconds, before the ``add`` and ``schedule`` calls of each
        iteration.
        """


class KvWaiter(Scheduler, Protocol):
    """A scheduler whose requests may wait for KV that is being copied or sent."""

    @property
    def awaits_kv(self) -> bool:
        """Whether KV is in transfer; an engine without other work resumes when the KV arrives."""


class OffloadingScheduler(KvWaiter, Protocol):
    """A scheduler that copies KV to host memory and back (``Batch.moves``)."""

    @property
    def has_pending_copies(self) -> bool:
        """Whether copies are pending that no batch has listed so far."""

    def moved(self, jobs: Sequence[int]) -> None:
        """Report the numbers of finished copies; they take effect with the next completed batch."""

    def finish_disk_transfers(self, jobs: Sequence[int], looks: Sequence[int]) -> None:
        """Report the numbers of finished disk transfers (``jobs``) and of finished queries
        (``looks``).
        """


class KvConnector(KvWaiter, Protocol):
    """A scheduler in a disaggregated fleet: a prefill replica keeps KV until a decode replica has
    loaded it.
    """

    def keep(self, request_id: int) -> None:
        """Keep a request's blocks after it ends, until ``sent`` is called. Must be called just
        before ``add``.
        """

    def sent(self, request_id: int) -> None:
        """Free the blocks of an ended request, because its KV has been read or is not needed."""

    def fetch(self, request_id: int) -> None:
        """Load the KV of this request from another replica. Must be called just before ``add``."""

    def loaded(self, request_id: int) -> None:
        """Report that the KV of a request has arrived."""


# Custom schedulers implement none of the protocols above, and wrappers forward attributes, so
# isinstance and base classes do not work here. An engine checks these attributes once, when it is
# built.


def clocked(scheduler: Scheduler) -> ClockedScheduler | None:
    """Return the scheduler if it uses the clock, else None."""
    return cast(ClockedScheduler, scheduler) if hasattr(scheduler, "set_time") else None


def kv_waiter(scheduler: Scheduler) -> KvWaiter | None:
    """Return the scheduler if its requests may wait for KV, else None."""
    return cast(KvWaiter, scheduler) if hasattr(scheduler, "awaits_kv") else None


def offloader(scheduler: Scheduler) -> OffloadingScheduler | None:
    """Return the scheduler if it copies KV to host memory, else None."""
    return (
        cast(OffloadingScheduler, scheduler) if hasattr(scheduler, "has_pending_copies") else None
    )
