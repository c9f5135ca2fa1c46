"""The seam between an engine's rules and the rest of simkv.

A scheduler is pure: it has no clock but the arrival stamps it was told, does no I/O, draws no
random numbers and never sees how many tokens a request will emit. It imports neither SimPy nor
torch nor pandas.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, cast

from simkv.core.request import Prompt

BatchKind = Literal["prefill", "decode", "mixed", "idle"]


#: Larger sizes of a pool and of a block, in any engine's config, are refused as typos.
MAX_BLOCKS = 10_000_000
MAX_BLOCK_SIZE = 1_000_000
#: So are larger counts of passes in which an engine may do nothing.
MAX_PASSES = 10_000_000


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens (ceiling division)."""
    return -(-tokens // block_size)


@dataclass(frozen=True)
class Variant:
    """Where a set of rules comes from (repository, commit or pull request) and what it is."""

    source: str
    summary: str


class BatchRow(NamedTuple):
    """A request in a step: ``tokens`` to compute on top of ``context`` tokens that have KV."""

    id: int
    tokens: int
    context: int


#: Why somebody was passed over: ``blocks`` are too few, or enough but ``reserved`` for others; no
#: ``slot`` is free, or none for its LoRA ``adapter``; the token ``budget`` of the step is spent; it
#: is ``deferred`` with its bucket (of length, of modality), which does not run now; or another
#: ``rule`` keeps it out. Or its ``kv`` is on its way from host memory, or from ``disk`` to there,
#: or from a ``remote`` replica.
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
    """The head of the waiting queue after a decision, and why it was not taken."""

    id: int
    why: WaitReason


class Refusal(NamedTuple):
    """Why a request is turned away: the ``knob`` whose limit it is, and the engine's ``words``."""

    knob: str
    words: str


#: Why somebody was preempted: too few ``blocks``; it was not in the ``bucket`` of equal lengths
#: that runs; or the ``patience`` of the head of the queue was at its end.
PreemptionReason = Literal["blocks", "bucket", "patience"]


class KvCopy(NamedTuple):
    """A copy of the KV of ``tokens`` between GPU and host memory, for a request's sake, or between
    that and a disk. Of a load ``disk`` tokens were read from there for the request."""

    job: int
    id: int
    tokens: int
    disk: int = 0


class DiskTransfers(NamedTuple):
    """What begins between host memory and a disk with a step: ``reads`` into host memory,
    ``writes`` from there, and a ``look`` (its number, and for how many blocks) for what is there.
    """

    reads: list[KvCopy]
    writes: list[KvCopy]
    look: tuple[int, int] | None


class KvCopies(NamedTuple):
    """Copies that begin with a step: ``loads`` to the GPU at once, ``stores`` to host memory when
    it has run. Before it runs all of ``flush`` have to be done, which may have begun earlier.
    ``disk`` begins at once, too."""

    loads: list[KvCopy]
    stores: list[KvCopy]
    flush: list[int]
    disk: DiskTransfers | None = None


class PreemptionCause(NamedTuple):
    """For whose sake a request was preempted, None for that of all who stay, and why."""

    by: int | None
    why: PreemptionReason = "blocks"


@dataclass(slots=True)
class DraftedTokens:
    """Drafts of a batch that the model verifies, by request.

    ``tokens``: so many of a request's tokens in the step are drafts, the last ones. Those of
    ``padding`` are no drafter's, and none of them is accepted. ``accepted`` is written by whoever
    knows the model, before the batch is completed: the request gets so many tokens more than one.
    When the step has run, the drafter runs ``passes`` times.
    """

    passes: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    padding: set[int] = field(default_factory=set)
    accepted: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, init=False)
class Batch:
    """One decision: what the model is to compute in the next step.

    ``scheduled`` lists ``(request id, new tokens)`` in the engine's order and ``context`` the
    tokens whose KV each of them already has. ``emits`` are the ids that get a token when the step
    has run. ``preempted`` are the ids whose blocks were taken back, in order (an id may stand
    twice), ``ignored`` those refused, ``refused`` those turned away for a limit, ``lost`` those
    that no queue holds any more though they never ended. ``fatal`` says why the real engine dies on
    this batch, if it does.
    ``moves`` are copies to and from host memory beside the steps.
    ``loads`` are requests that have blocks now and wait for so many tokens of KV from elsewhere.
    ``lora_loads`` are the LoRA adapters that are copied to the GPU before the step runs, and how
    many of them are read into host memory before that.

    For who wants to know why somebody waits: ``held`` is the head of the queue, which stops all
    behind it (while others wait not one whose KV is on its way), ``aside`` are those that sit this
    step out though they are not in the queue, or are passed over in it, and ``causes`` belong to
    ``preempted``, one for each.

    A scheduler may keep requests that decode in lockstep as a group and then lists its changes
    only: ``joined`` and ``left`` since the batch before, with the ``decodes`` members that are left
    and the ``decode_context`` tokens of KV that they have in all. ``expand`` then gives all rows,
    while the batch is the newest.
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

    # Written out, as every step makes one: that of a dataclass takes longer, compiled much longer.
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
        """Note that the blocks of ``victim`` were taken back, and the cause (see
        ``PreemptionCause``)."""
        self.preempted.append(victim)
        self.causes.append(PreemptionCause(by, why))

    def __bool__(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self.scheduled or self.decodes)

    def rows(self) -> list[BatchRow]:
        """All rows in the engine's order; with a group, only until the next decision."""
        if self.expand is not None:
            return self.expand()
        return [BatchRow(i, n, c) for (i, n), c in zip(self.scheduled, self.context, strict=True)]


@dataclass(slots=True, init=False)
class Completion:
    """What became of a batch: ids that were given a token, and ids that ended, in order.

    ``refused`` are answered that they were refused. ``delivered`` does not repeat the members of a
    decode group, who all got one.
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
    """A single ``schedule`` call of the real engine would never return.

    ``cycle`` names the requests that go round; ``why`` says how, in one sentence.
    """

    def __init__(self, why: str, cycle: Sequence[int]) -> None:
        super().__init__(why)
        self.why = why
        self.cycle = list(cycle)


class Scheduler(Protocol):
    """What the engine loop needs from a scheduler."""

    @property
    def pipeline_depth(self) -> int:
        """Batches in flight: 1 completes a batch before the next ``schedule``, 2 after it."""

    def add(self, prompt: Prompt) -> None:
        """Take a new request, just before a ``schedule`` call."""

    def schedule(self) -> Batch:
        """Decide the next step. Raises Livelock where the real call would never return."""

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Account for a batch that has run; ``ended`` are the ids whose token was their last."""

    def abort(self, request_id: int) -> None:
        """The client of this request has gone away."""

    @property
    def num_blocks(self) -> int:
        """Blocks that requests can use (a null block is not one of them)."""

    @property
    def free_blocks(self) -> int:
        """Blocks that can be had now, cached but unreferenced ones included."""

    @property
    def num_waiting(self) -> int:
        """Length of the waiting queue."""

    @property
    def num_running(self) -> int:
        """Length of the running list."""

    def leap(self, most: int) -> int:
        """For how many steps, at least 1 and at most ``most``, ``schedule`` would return the batch
        that it has just returned, if nothing came from outside and nobody ended."""

    def skip(self, steps: int) -> list[int]:
        """Do what that many pairs of ``complete`` and ``schedule`` would do in such a stretch.

        Returns the free blocks after each of the ``schedule`` calls.
        """

    def waiting_ids(self) -> list[int]:
        """Ids in the waiting queue, head first."""

    def running_ids(self) -> list[int]:
        """Ids in the running list, in the engine's own order."""

    def blocks_held(self) -> Mapping[int, int]:
        """Blocks in each live request's table, by id (shared blocks count for each sharer)."""

    def fingerprint(self) -> Hashable:
        """All state that decides what ``schedule`` does next.

        If it is equal at two steps and nothing came from outside in between, the engine goes
        round in a circle for ever.
        """


class ClockedScheduler(Scheduler, Protocol):
    """A scheduler with a rule that looks at the clock."""

    def set_time(self, now: float) -> None:
        """It is ``now`` (s): said before each iteration's ``add`` and ``schedule``."""


class KvWaiter(Scheduler, Protocol):
    """A scheduler whose requests may wait for KV that is being copied or sent."""

    @property
    def awaits_kv(self) -> bool:
        """Whether KV is on its way, so that a standstill will end by itself."""


class OffloadingScheduler(KvWaiter, Protocol):
    """A scheduler that has KV copied to host memory and back (``Batch.moves``)."""

    @property
    def has_pending_copies(self) -> bool:
        """Whether something is to be copied that no batch has named yet."""

    def moved(self, jobs: Sequence[int]) -> None:
        """These copies are done; it hears of it with the batch that is completed next."""

    def finish_disk_transfers(self, jobs: Sequence[int], looks: Sequence[int]) -> None:
        """These transfers of a disk are done, and it is known what these looks were for."""


class KvConnector(KvWaiter, Protocol):
    """A scheduler that works with others: one replica keeps the KV that another one loads."""

    def keep(self, request_id: int) -> None:
        """When this request ends, which is about to be added, its blocks stay until ``sent``."""

    def sent(self, request_id: int) -> None:
        """The blocks of a request that has ended have been read, or nobody wants them."""

    def fetch(self, request_id: int) -> None:
        """The KV of this request, which is about to be added, is to come from elsewhere."""

    def loaded(self, request_id: int) -> None:
        """The KV of a request is there."""


# Custom schedulers need none of the above, and wrappers pass attributes on, so neither isinstance
# nor a base class can tell. An engine asks once, when it is built.


def clocked(scheduler: Scheduler) -> ClockedScheduler | None:
    """Return the scheduler if it looks at the clock, else None."""
    return cast(ClockedScheduler, scheduler) if hasattr(scheduler, "set_time") else None


def kv_waiter(scheduler: Scheduler) -> KvWaiter | None:
    """Return the scheduler if its requests may wait for KV, else None."""
    return cast(KvWaiter, scheduler) if hasattr(scheduler, "awaits_kv") else None


def offloader(scheduler: Scheduler) -> OffloadingScheduler | None:
    """Return the scheduler if it has KV copied to host memory, else None."""
    return (
        cast(OffloadingScheduler, scheduler) if hasattr(scheduler, "has_pending_copies") else None
    )
