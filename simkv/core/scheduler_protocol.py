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

from simkv.core.block_pool import BlockPool
from simkv.core.request import Prompt

BatchKind = Literal["prefill", "decode", "mixed", "idle"]


#: Maximum size of a KV cache and of a block in an engine's config; larger values are rejected as
#: typos.
MAX_BLOCKS = 10_000_000
MAX_BLOCK_SIZE = 1_000_000
#: Maximum number of idle passes; larger values are rejected as typos.
MAX_PASSES = 10_000_000


def blocks_for(tokens: int, block_size: int) -> int:
    """Return the number of blocks for ``tokens`` tokens (ceiling division)."""
    return -(-tokens // block_size)


@dataclass(frozen=True)
class Variant:
    """A variant of a scheduler.

    ``source`` is its repository, commit or pull request.
    """

    source: str
    summary: str


class BatchRow(NamedTuple):
    """A request in a step.

    - ``tokens``: number of tokens that the step computes.
    - ``context``: number of tokens whose KV is already cached.
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
    """First waiting request after a decision, and the reason why it was not scheduled."""

    id: int
    why: WaitReason


class Refusal(NamedTuple):
    """Rejection of a request: the exceeded limit and the engine's message."""

    knob: str
    words: str


#: Why a request was preempted: there were too few ``blocks``; only another ``bucket`` of equal
#: lengths runs; or the ``patience`` of the queue's head was exhausted.
PreemptionReason = Literal["blocks", "bucket", "patience"]


class KvCopy(NamedTuple):
    """Copy of a request's KV between GPU, host memory and disk.

    ``tokens`` is the size of the copy. For a copy to the GPU, ``disk`` is the number of these
    tokens that were read from disk before.
    """

    job: int
    id: int
    tokens: int
    disk: int = 0


class DiskTransfers(NamedTuple):
    """Disk transfers that start with a step.

    - ``reads``: copies from disk to host memory.
    - ``writes``: copies from host memory to disk.
    - ``look``: lookup of blocks on disk, as a pair of job number and number of blocks.
    """

    reads: list[KvCopy]
    writes: list[KvCopy]
    look: tuple[int, int] | None


class KvCopies(NamedTuple):
    """KV copies that start with a step.

    - ``loads``: copies to the GPU. They start at once.
    - ``stores``: copies to host memory. They start after the step.
    - ``flush``: numbers of the copies that must finish before the step starts.
    - ``disk``: disk transfers. They start at once.
    """

    # Stores in ``flush`` start at once. Some of the jobs in ``flush`` may have started with earlier
    # steps.

    loads: list[KvCopy]
    stores: list[KvCopy]
    flush: list[int]
    disk: DiskTransfers | None = None


class PreemptionCause(NamedTuple):
    """Reason for a preemption, and the request for which the victim was preempted."""

    # ``by`` is None if all requests that still run caused it.

    by: int | None
    why: PreemptionReason = "blocks"


@dataclass(slots=True)
class DraftedTokens:
    """Draft tokens that the model verifies in a batch.

    - ``passes``: number of times that the drafter runs after the step.
    - ``tokens``: number of draft tokens by request id.
    - ``padding``: requests whose draft tokens are only fillers. Fillers are never accepted.
    - ``accepted``: number of accepted draft tokens by request id.
    """

    # Drafts follow the other tokens of a request. The request receives its accepted drafts and one
    # more token. The simulation sets ``accepted`` before the batch is completed, because schedulers
    # cannot know it.

    passes: int = 0
    tokens: dict[int, int] = field(default_factory=dict)
    padding: set[int] = field(default_factory=set)
    accepted: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True, init=False)
class Batch:
    """Scheduling decision: the work of the next step. Requests are given by id.

    - ``scheduled``: pairs of a request and its number of new tokens, in the engine's order.
    - ``context``: number of tokens whose KV is already cached, for each scheduled request.
    - ``emits``: requests that receive a token after the step.
    - ``preempted``: preempted requests in order. ``causes``: causes of the preemptions.
    - ``ignored``: requests that the engine drops.
    - ``refused``: requests rejected because of a limit.
    - ``lost``: unfinished requests that are in no queue.
    - ``fatal``: reason why the real engine crashes on this batch, or None.
    - ``held``: first waiting request, and the reason why it waits.
    - ``aside``: waiting or running requests that the step skips, each with the reason.
    - ``joined``, ``left``: requests that entered and left the decode group. The requests of this
      group decode in every step.
    - ``decodes``: size of the decode group. ``decode_context``: its total number of cached tokens.
    - ``expand``: function that returns all rows of the batch; valid until the next decision.
    - ``moves``: copies to and from host memory.
    - ``loads``: requests whose KV another replica sends, each with the number of tokens sent.
    - ``lora_loads``: number of LoRA adapters copied to the GPU, and number of adapters that had to
      be read into host memory first.
    - ``drafted``: draft tokens.
    """

    # An id may occur twice in ``preempted``. A held request whose KV is in transfer is reported
    # only if no other request waits. A scheduler may keep requests that decode in lockstep as a
    # group and report only how the group changes. ``moves`` are concurrent with the steps. A
    # request in ``loads`` has blocks and waits for the KV. Adapters are copied before the step.

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
        """Add ``victim`` to the preempted requests.

        ``by`` is the request that needed the memory, and ``why`` is the reason.
        """
        self.preempted.append(victim)
        self.causes.append(PreemptionCause(by, why))

    def __bool__(self) -> bool:
        """Whether the batch has tokens to compute."""
        return bool(self.scheduled or self.decodes)

    def rows(self) -> list[BatchRow]:
        """Return a row for each scheduled request, in the engine's order."""
        # With a decode group, the rows are available only until the next decision.
        if self.expand is not None:
            return self.expand()
        return [BatchRow(i, n, c) for (i, n), c in zip(self.scheduled, self.context, strict=True)]


@dataclass(slots=True, init=False)
class Completion:
    """Result of a batch.

    The fields list the ids of the requests that received a token, ended or were rejected.
    """

    # ``delivered`` omits the members of a decode group, because each of them received a token.

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
    """Raised if a ``schedule`` call of the real engine would never return.

    ``cycle`` lists the ids of the requests involved. ``why`` explains the livelock in one sentence.
    """

    def __init__(self, why: str, cycle: Sequence[int]) -> None:
        super().__init__(why)
        self.why = why
        self.cycle = list(cycle)


class Scheduler(Protocol):
    """Methods of a scheduler that the engine loop uses."""

    @property
    def pipeline_depth(self) -> int:
        """Maximum number of batches in flight."""
        # With 1, a batch is completed before the next ``schedule`` call. With 2, a batch is
        # completed after the next ``schedule`` call.

    def add(self, prompt: Prompt) -> None:
        """Add a new request to the waiting queue."""

    def schedule(self) -> Batch:
        """Decide the next step.

        Raises Livelock if the call would never return in the real engine.
        """

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Record the results of a batch that has run.

        The requests in ``ended`` received their last token.
        """

    def abort(self, request_id: int) -> None:
        """Abort a request whose client has disconnected."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks, not counting the null block."""

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated.

        Cached blocks count if no request holds them.
        """

    @property
    def num_waiting(self) -> int:
        """Length of the waiting queue."""

    @property
    def num_running(self) -> int:
        """Length of the running list."""

    def leap(self, most: int) -> int:
        """Return for how many steps ``schedule`` would repeat its last batch.

        The result is between 1 and ``most``.
        """
        # The number is valid if no request arrives, is aborted or ends.

    def skip(self, steps: int) -> list[int]:
        """Simulate ``steps`` steps with the last batch.

        Returns the number of free blocks after each step. ``steps`` must be at most the result of
        ``leap``.
        """

    def waiting_ids(self) -> list[int]:
        """Return the ids of the waiting requests, in queue order."""

    def running_ids(self) -> list[int]:
        """Return the ids of the running requests, in the engine's own order."""

    def blocks_held(self) -> Mapping[int, int]:
        """Return the number of blocks of each unfinished request, by request id.

        A shared block counts for each request.
        """

    def fingerprint(self) -> Hashable:
        """Return the state that determines future ``schedule`` calls."""
        # If the value is equal at two steps without an external event in between, the engine
        # repeats the same steps forever.


class ClockedScheduler(Scheduler, Protocol):
    """Scheduler whose decisions depend on the current time."""

    def set_time(self, now: float) -> None:
        """Set the current time in seconds."""
        # Called before the ``add`` and ``schedule`` calls of each iteration.


class KvWaiter(Scheduler, Protocol):
    """Scheduler whose requests can wait for KV that is being copied or sent."""

    @property
    def awaits_kv(self) -> bool:
        """Whether KV is in transfer. If so, an idle engine resumes later."""


class OffloadingScheduler(KvWaiter, Protocol):
    """Scheduler that copies KV to host memory and back (``Batch.moves``)."""

    @property
    def has_pending_copies(self) -> bool:
        """Whether there are copies that are not listed in a batch yet."""

    def moved(self, jobs: Sequence[int]) -> None:
        """Record the completion of copies. ``jobs`` are their numbers."""
        # The copies take effect with the next completed batch.

    def finish_disk_transfers(self, jobs: Sequence[int], looks: Sequence[int]) -> None:
        """Record the completion of disk transfers (``jobs``) and lookups (``looks``)."""


class KvConnector(KvWaiter, Protocol):
    """Scheduler of a replica that sends or loads KV."""

    # A prefill replica keeps KV until a decode replica has loaded it.

    def keep(self, request_id: int) -> None:
        """Keep the blocks of a request after its end until ``sent`` is called.

        Must be called just before ``add``.
        """

    def sent(self, request_id: int) -> None:
        """Free the blocks of an ended request. No other replica needs them any more."""

    def fetch(self, request_id: int) -> None:
        """Load the KV of a request from another replica. Must be called just before ``add``."""

    def loaded(self, request_id: int) -> None:
        """Record that the KV of a request has arrived."""


class PrefixReporter(Scheduler, Protocol):
    """Scheduler that reports the contents of its prefix cache."""

    @property
    def cache(self) -> BlockPool | None:
        """The prefix cache, or None.

        None means that prefix caching is off or that the scheduler cannot report the contents.
        """

    @property
    def block_size(self) -> int:
        """Number of tokens per block."""

    def prefix_keys(self, prompt: Prompt) -> list[int]:
        """Return the keys of a prompt's full blocks in the prefix cache."""


# Custom schedulers implement none of the protocols above, and wrappers forward attributes, so
# isinstance and base classes do not work here. An engine checks these attributes once, when it is
# built.


def clocked(scheduler: Scheduler) -> ClockedScheduler | None:
    """Return the scheduler if it uses the clock, else None."""
    return cast(ClockedScheduler, scheduler) if hasattr(scheduler, "set_time") else None


def kv_waiter(scheduler: Scheduler) -> KvWaiter | None:
    """Return the scheduler if its requests can wait for KV, else None."""
    return cast(KvWaiter, scheduler) if hasattr(scheduler, "awaits_kv") else None


def offloader(scheduler: Scheduler) -> OffloadingScheduler | None:
    """Return the scheduler if it copies KV to host memory, else None."""
    return (
        cast(OffloadingScheduler, scheduler) if hasattr(scheduler, "has_pending_copies") else None
    )


def prefix_reporter(scheduler: Scheduler) -> PrefixReporter | None:
    """Return the scheduler if it reports the contents of its prefix cache, else None."""
    if not hasattr(scheduler, "prefix_keys"):
        return None
    found = cast(PrefixReporter, scheduler)
    return found if found.cache is not None else None
