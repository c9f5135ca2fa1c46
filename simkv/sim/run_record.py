# mypyc: compile
"""Records of a run, with one row per step and a short list of segments per request."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import NamedTuple

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import (
    Batch,
    DraftedTokens,
    Held,
    KvCopies,
    PreemptionCause,
    Refusal,
    WaitReason,
)
from simkv.costs.step_load import StepLoad
from simkv.sim.segments import (
    DECODE,
    EMITS,
    Chunk,
    RowSegment,
    append_row,
    emitting_ranges,
    pack_segments,
    read_chunks,
    read_segments,
)
from simkv.sim.step_log import QueueState, StepLog

#: Cause of a preemption if the scheduler does not report it.
UNKNOWN_CAUSE = PreemptionCause(None)


@dataclass(slots=True)
class Interruptions:
    """Rare events of a request, such as preemptions. ``RequestRecord`` describes the fields."""

    preempted_at: list[float] = field(default_factory=list)
    preempted_rows: list[int] = field(default_factory=list)
    causes: list[PreemptionCause] = field(default_factory=list)
    dropped_rows: list[int] = field(default_factory=list)
    aside: list[tuple[float, str]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class RequestRecord:
    """Record of one request. Times are in seconds since the start of the run.

    A row is the entry of a step in the step log.

    - ``received_at``: time at which the scheduler received the request.
    - ``entered_at``: time at which the engine received the request from the API server.
    - ``preempted_at``: times of preemptions. ``causes``: causes of the preemptions.
      ``preempted_rows``: number of rows at each preemption.
    - ``bounces``: number of preemptions before any KV was computed.
    - ``recomputed_tokens``: number of tokens that were computed again.
    - ``tokens``: number of tokens that reached the client. ``first_token``, ``last_token``: times
      of the first and last token.
    - ``dropped_rows``: rows whose tokens the engine discarded.
    - ``chunks``: tokens and context of prefill rows and of some decode rows.
    - ``aside``: times at which the scheduler began to skip the request, each with the reason. At
      the end of such a period, the reason is empty.
    - ``tokens_per_chunk``: number of tokens per chunk sent to the client.
    - ``accepted_drafts``: pairs of row and number of accepted draft tokens.
    - ``accepted_tokens``: number of accepted draft tokens in ``tokens``.
    - ``drafted``: whether decodes of the request verify draft tokens.
    - ``refusal``: limit that caused the rejection of the request, or None.
    - ``loaded_tokens``: number of tokens loaded from host memory before the first step.
    - ``disk_tokens``: number of tokens read from disk before the first step.
    """

    # ``entered_at`` is None unless the API server is simulated. ``preempted_rows`` determines the
    # order of preemptions and steps that a pipelined scheduler decides at the same time. ``tokens``
    # and the token times are computed from the segments at the end of the run. ``chunks`` contains
    # three kinds of rows: the prefill rows, the rows with draft tokens, and the first row of each
    # decode segment outside the decode group (requests that decode in every step). The first and
    # the last token are sent to the client without delay.

    request: Request
    outcome: Outcome | None = None
    reason: str = ""
    first_token: float | None = None
    last_token: float | None = None
    ended_at: float | None = None
    tokens: int = 0
    bounces: int = 0
    recomputed_tokens: int = 0
    received_at: float | None = None
    entered_at: float | None = None
    tokens_per_chunk: int = 1
    refusal: Refusal | None = None
    # Number of tokens computed so far, whether their KV still exists, and whether the request has
    # emitted a token.
    computed: int = 0
    has_kv: bool = False
    emitting: bool = False
    # Encoded segments and chunks; see ``simkv.sim.segments``.
    segment_data: array[int] = field(default_factory=lambda: array("i"))
    chunk_rows: array[int] = field(default_factory=lambda: array("i"))
    interruptions: Interruptions | None = None
    accepted_drafts: array[int] | None = None
    accepted_tokens: int = 0
    drafted: bool = False
    loaded_tokens: int = 0
    disk_tokens: int = 0

    def extra_tokens_in(self, first: int, last: int) -> int:
        """Return the number of accepted draft tokens in the rows from ``first`` to ``last``."""
        if self.accepted_drafts is None:
            return 0
        rows, counts = self.accepted_drafts[::2], self.accepted_drafts[1::2]
        return sum(counts[bisect_left(rows, first) : bisect_right(rows, last)])

    @property
    def segments(self) -> list[RowSegment]:
        return read_segments(self.segment_data)

    @property
    def chunks(self) -> list[Chunk]:
        return read_chunks(self.chunk_rows)

    @property
    def preempted_at(self) -> list[float]:
        return self.interruptions.preempted_at if self.interruptions else []

    @property
    def preempted_rows(self) -> list[int]:
        return self.interruptions.preempted_rows if self.interruptions else []

    @property
    def causes(self) -> list[PreemptionCause]:
        return self.interruptions.causes if self.interruptions else []

    @property
    def dropped_rows(self) -> list[int]:
        return self.interruptions.dropped_rows if self.interruptions else []

    @property
    def aside(self) -> list[tuple[float, str]]:
        return self.interruptions.aside if self.interruptions else []

    def ensure_interruptions(self) -> Interruptions:
        """Return ``interruptions`` for writing. Create the object if it does not exist."""
        if self.interruptions is None:
            self.interruptions = Interruptions()
        return self.interruptions

    @property
    def deadline(self) -> float | None:
        """Time (s) at which the client gives up, or None."""
        timeout = self.request.timeout
        return None if timeout is None else self.request.arrival + timeout


@dataclass(slots=True)
class EngineHalt:
    """Permanent stop of the engine at ``since`` (s): a crash, deadlock or livelock.

    ``cycle_start`` is the time (s) at which a repeated state first occurred. ``held`` contains the
    number of blocks of each request.
    """

    kind: str
    since: float
    why: str
    requests: list[int]
    held: dict[int, int] = field(default_factory=dict)
    cycle_start: float | None = None


class Shortfall(NamedTuple):
    """Time that a request still needed when its client gave up, in seconds.

    - ``isolated_s``: duration of the request without other requests; None if it exceeds ten times
      the timeout.
    - ``remaining_s``: part of ``isolated_s`` that was left when the client gave up.
    - ``delay_s``: delay that other requests had caused.
    """

    isolated_s: float | None
    remaining_s: float | None
    delay_s: float


class ResumedPrefix(NamedTuple):
    """Prefix of a prompt. An earlier turn of the session has computed its KV.

    ``row`` is the last row of the step log in which the earlier turn computed tokens.
    """

    # The length is in full blocks.

    tokens: int
    row: int


@dataclass(slots=True)
class DraftCounts:
    """Counts of draft tokens, as in vLLM's ``SpecDecodingStats``.

    ``num_drafts`` counts each step once for each request that has draft tokens in it.
    """

    # Padded draft tokens are included. Tokens past the end of an output do not count as accepted.

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class KvCopyCounts:
    """Numbers of tokens whose KV was copied.

    - ``loaded_tokens``: from host memory to the GPU.
    - ``stored_tokens``: from the GPU to host memory.
    - ``read_tokens``: from disk to host memory; None without a disk.
    - ``written_tokens``: from host memory to disk; None without a disk.
    """

    loaded_tokens: int = 0
    stored_tokens: int = 0
    read_tokens: int | None = None
    written_tokens: int | None = None


class RunRecord:
    """Complete record of a run.

    - ``isolated_s``: duration (s) of each request if it ran without other requests, if known.
    - ``queue_heads``: changes of the first waiting request. Each entry has the time, the request
      and the reason why it waits. Instead of request and reason, it has None if no request waits.
    - ``shortfalls``: entry for each request that timed out.
    - ``tokens_per_chunk``: number of tokens per chunk sent to clients.
    - ``drafting``: counts of draft tokens, or None.
    - ``copied``: counts of KV copies; None without KV offloading.
    - ``resumed``: entry for each request whose prompt repeats an earlier turn.
    - ``prefix_cache``: whether the engine caches prefixes.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.tokens_per_chunk = 1
        self.requests: dict[int, RequestRecord] = {}
        self.steps = StepLog()
        self.delivered: array[float] | None = None
        self.idle_passes = 0
        self.drafting: DraftCounts | None = None
        self.copied: KvCopyCounts | None = None
        self.engine_halt: EngineHalt | None = None
        self.end = 0.0
        self.isolated_s: dict[int, float] = {}
        self.queue_heads: list[tuple[float, Held | None]] = []
        self.shortfalls: dict[int, Shortfall] = {}
        self.resumed: dict[int, ResumedPrefix] = {}
        self.prefix_cache = False
        self._held: Held | None = None
        self._aside: dict[int, WaitReason] = {}
        self._decoding_since: dict[int, int] = {}

    def arrive(self, request: Request) -> RequestRecord:
        """Record the arrival of a request at the engine."""
        life = self.requests[request.id] = RequestRecord(
            request, tokens_per_chunk=self.tokens_per_chunk
        )
        return life

    def decided(self, batch: Batch, now: float) -> None:
        """Record the events of a scheduling decision.

        These are preemptions, KV copies and a change of the first waiting request.
        """
        if batch.preempted:
            self._note_preempted(batch, now)
        if batch.moves and self.copied:
            self._note_copied(batch.moves, self.copied)
        if batch.held != self._held:
            self._held = batch.held
            self.queue_heads.append((now, batch.held))

    def _note_copied(self, moves: KvCopies, counts: KvCopyCounts) -> None:
        counts.stored_tokens += sum(move.tokens for move in moves.stores)
        for move in moves.loads:
            counts.loaded_tokens += move.tokens
            if not (life := self.requests[move.id]).segment_data:
                life.loaded_tokens, life.disk_tokens = move.tokens, move.disk
        if moves.disk:
            reads, writes = (sum(m.tokens for m in jobs) for jobs in moves.disk[:2])
            counts.read_tokens = (counts.read_tokens or 0) + reads
            counts.written_tokens = (counts.written_tokens or 0) + writes

    def _note_preempted(self, batch: Batch, now: float) -> None:
        for i, cause in zip(batch.preempted, batch.causes or repeat(UNKNOWN_CAUSE), strict=False):
            life = self.requests[i]
            if life.has_kv:
                life.has_kv = False
                mishaps = life.ensure_interruptions()
                mishaps.preempted_at.append(now)
                mishaps.preempted_rows.append(len(self.steps))
                mishaps.causes.append(cause)
            else:
                life.bounces += 1

    def set_aside(self, aside: dict[int, WaitReason], now: float) -> None:
        """Record that the scheduler skips the requests in ``aside`` from now on, and no others."""
        if aside == self._aside:
            return
        for i in self._aside.keys() - aside.keys():
            self.requests[i].ensure_interruptions().aside.append((now, ""))
        for i, why in aside.items():
            if why != self._aside.get(i):
                self.requests[i].ensure_interruptions().aside.append((now, why))
        self._aside = aside

    def step(
        self,
        batch: Batch,
        load: StepLoad,
        start: float,
        end: float,
        queues: QueueState,
        decided: float | None = None,
    ) -> int:
        """Append the row of a step and return its index.

        ``decided`` is the time at which the step was decided (default: ``start``).
        """
        # The requests of the step are updated, too.
        row = len(self.steps)
        times = (start if decided is None else decided, start, end)
        self.steps.append(times, batch.kind, load, len(batch.preempted), queues)
        emits = set(batch.emits)
        lives = self.requests
        for (i, tokens), context in zip(batch.scheduled, batch.context, strict=True):
            life = lives[i]
            drafts = batch.drafted.tokens.get(i, 0) if batch.drafted else 0
            decode = tokens - drafts == 1 and life.emitting and i in emits
            if decode and batch.drafted:  # this may overwrite rejected drafts
                life.computed, life.has_kv = max(life.computed, context + tokens), True
                life.drafted = True
            else:
                _count_tokens(life, context, tokens)
            goes_on = append_row(life.segment_data, row, decode=decode, emits=i in emits) and decode
            if not goes_on or batch.drafted:
                life.chunk_rows.extend((row, tokens, context))
        for i in emits:
            lives[i].emitting = True
        for i in batch.joined:
            self._decoding_since[i] = row
        return row

    def verified(self, drafted: DraftedTokens, delivered: Iterable[int], row: int) -> None:
        """Record the draft tokens that the step in row ``row`` has verified."""
        counts = self.drafting = self.drafting or DraftCounts()
        for i in delivered:
            if tokens := drafted.tokens.get(i, 0):
                counts.num_drafts += 1
                counts.num_draft_tokens += tokens
                if accepted := drafted.accepted[i]:
                    counts.num_accepted_tokens += accepted
                    life = self.requests[i]
                    life.accepted_drafts = (
                        array("i") if life.accepted_drafts is None else life.accepted_drafts
                    )
                    life.accepted_drafts.extend((row, accepted))

    def repeat(self, batch: Batch, ends: array[float], free_blocks: list[int], lag: int) -> None:
        """Append rows for steps that repeat the newest step.

        ``ends`` (s) and ``free_blocks`` have one entry for each of these steps.
        """
        # The steps have the same batch of decodes. Each step was decided when the step ``lag`` rows
        # earlier ended.
        steps = len(ends)
        self.steps.repeat(ends, free_blocks, lag)
        for i, _ in batch.scheduled:
            life = self.requests[i]
            life.segment_data[-1] += steps
            life.computed += steps

    def leave_decode_group(self, i: int, last: int) -> int:
        """Remove request ``i`` from the decode group after row ``last``.

        Returns the number of steps in which the request was in the group.
        """
        first = self._decoding_since.pop(i)
        steps = last - first + 1
        if steps > 0:
            life = self.requests[i]
            life.segment_data.extend((DECODE + EMITS, first, last))
            life.computed += steps
        return steps

    def decoding(self) -> tuple[int, ...]:
        """Return the requests in the decode group. They decode in every step."""
        return tuple(self._decoding_since)

    @property
    def token_times(self) -> array[float]:
        """Time (s) at which the tokens of each step reach their clients."""
        return self.steps.end if self.delivered is None else self.delivered

    def decoding_since(self, i: int) -> int | None:
        """Return the row in which request ``i`` joined the decode group, or None."""
        return self._decoding_since.get(i)

    def close(self, last: int) -> None:
        """Complete the record at the end of the run.

        Open periods are closed, and delivered tokens are counted.
        """
        for i in list(self._decoding_since):
            self.leave_decode_group(i, last)
        for life in self.requests.values():
            life.computed = 0  # these arrays are no longer needed; a million integers take 32 MB
            if life.dropped_rows:
                _drop(life)
            self._settle(life)

    def _settle(self, life: RequestRecord) -> None:
        """Count the tokens delivered to the client before the request ended."""
        assert life.ended_at is not None
        ends, until = self.token_times, life.ended_at
        if self.engine_halt and life.outcome is Outcome.STALLED:
            until = min(until, self.engine_halt.since)
        inclusive = life.outcome not in (Outcome.STARVED, Outcome.CUT_OFF)
        for first, last in emitting_rows(life):
            count = (bisect_right if inclusive else bisect_left)(
                ends, until, first, last + 1
            ) - first
            if not count:
                break
            if life.first_token is None:
                life.first_token = ends[first]
            beyond = life.extra_tokens_in(first, first + count - 1)
            life.accepted_tokens += beyond
            life.tokens += count + beyond
            last_token = ends[first + count - 1]
            # all requests share one float object
            life.last_token = until if last_token == until else last_token


def _count_tokens(life: RequestRecord, context: int, tokens: int) -> None:
    if life.computed > context:
        life.recomputed_tokens += min(life.computed, context + tokens) - context
    life.computed = max(life.computed, context + tokens)
    life.has_kv = True


def emitting_rows(life: RequestRecord) -> Iterator[tuple[int, int]]:
    """Yield ranges (first, last) of rows of the step log in which the request emits tokens."""
    return emitting_ranges(life.segment_data)


def _drop(life: RequestRecord) -> None:
    """Mark the rows whose token the engine discarded as rows without a token."""
    gone = set(life.dropped_rows)
    kept: list[RowSegment] = []
    for segment in life.segments:
        here = [row for row in range(segment.first, segment.last + 1) if row in gone]
        if segment.kind == "prefill":
            kept.append(segment._replace(emits=segment.emits and segment.last not in gone))
            continue
        start = segment.first
        for row in here:
            if row > start:
                kept.append(RowSegment("decode", start, row - 1, segment.emits))
            kept.append(RowSegment("decode", row, row, False))
            start = row + 1
        if start <= segment.last:
            kept.append(RowSegment("decode", start, segment.last, segment.emits))
    life.segment_data = pack_segments(kept)
