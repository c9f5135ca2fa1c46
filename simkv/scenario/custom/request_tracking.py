"""Validation of the results of a custom scheduler against the requests that it received.

The tracker counts the computed and emitted tokens of each request itself. An invalid result raises
``BatchError`` before the engine uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, get_args

from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Batch,
    BatchKind,
    Completion,
    Held,
    PreemptionCause,
    PreemptionReason,
    Refusal,
    WaitReason,
    blocks_for,
)

#: Maximum number of consecutive decisions without a token while there are requests.
MOST_IDLE = 20_000
#: Fields of a batch that are lists, and fields that custom schedulers cannot set.
LISTS = (
    "scheduled",
    "context",
    "emits",
    "preempted",
    "ignored",
    "lost",
    "causes",
    "joined",
    "left",
)
UNSUPPORTED = ("drafted", "moves", "loads")
KINDS, WHYS, NEEDS = get_args(BatchKind), get_args(WaitReason), get_args(PreemptionReason)


class BatchError(Exception):
    """Raised for an invalid result of a custom scheduler.

    ``law`` is the name of the violated law, ``what`` describes the error, and ``requests`` are the
    ids of the affected requests.
    """

    def __init__(self, law: str, what: str, requests: Iterable[int] = ()) -> None:
        super().__init__(law, what)
        self.law, self.what, self.requests = law, what, tuple(requests)


@dataclass(slots=True)
class TrackedRequest:
    """A request with the numbers of its computed and emitted tokens."""

    prompt: Prompt
    computed: int = 0
    emitted: int = 0

    @property
    def length(self) -> int:
        """Number of prompt tokens and emitted tokens in total."""
        return self.prompt.prompt_tokens + self.emitted

    @property
    def at_limit(self) -> bool:
        """Whether the request has emitted ``max_tokens`` tokens."""
        return self.emitted >= self.prompt.max_tokens


class RequestTracker:
    """Unfinished requests of a scheduler, by id.

    ``rows`` is true if batches are checked request by request, which excludes packaged engines with
    a custom policy. ``tokens`` is true if computed tokens can be counted, which excludes schedulers
    with several batches in flight.
    """

    def __init__(self, num_blocks: int, block_size: int, *, rows: bool, tokens: bool) -> None:
        self.requests: dict[int, TrackedRequest] = {}
        self.rows, self.tokens = rows, tokens
        self._num_blocks, self._block_size = num_blocks, block_size
        self._blocks = 0  # number of blocks needed for the computed tokens
        self._group: set[int] = set()
        self._emits: list[int] = []
        self._idle = 0

    def add(self, prompt: Prompt) -> None:
        """Add a request that has arrived."""
        self.requests[prompt.id] = TrackedRequest(prompt)

    def remove(self, ids: Iterable[int]) -> None:
        """Remove requests that have ended."""
        for i in ids:
            if r := self.requests.pop(i, None):
                self._blocks -= self._needs(r.computed)

    def check_batch(self, batch: Any) -> None:
        """Check a batch and update the tracked requests. Raises BatchError if it is invalid."""
        if not isinstance(batch, Batch):
            raise BatchError("answers", f"found {batch!r}, expected a Batch")
        if self.rows:
            self._check_fields(batch)
            self._check_references(batch)
        ids = [i for i, _ in batch.scheduled]
        if len(set(ids)) < len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            what = f"request {twice} is listed {ids.count(twice)} times in one step"
            raise BatchError("requests", f"{what}, expected once", [twice])
        if self.rows:
            self._check_group(batch)
            self._check_rows(batch, ids)
        self._emits = batch.emits
        self.remove({*batch.ignored, *batch.lost, *batch.refused})
        self._count_idle(0 if batch.emits or batch.decodes or not self.requests else 1)

    def check_completion(self, batch: Batch, ended: Collection[int], completion: Any) -> None:
        """Check the completion of a step and update the tracked requests.

        Raises BatchError if it is invalid.
        """
        if not isinstance(completion, Completion):
            raise BatchError("answers", f"found {completion!r}, expected a Completion")
        if not self.rows:
            self.remove(completion.finished)
            return
        for name in ("delivered", "finished", "refused"):
            _expect_list(completion, name, "Completion")
            self._expect_known(getattr(completion, name), f"Completion.{name}")
        delivered = completion.delivered
        for i in (
            set(delivered) ^ set(batch.emits) if self.tokens else set(delivered) - set(batch.emits)
        ):
            raise BatchError(
                "tokens", f"request {i}: Batch.emits and Completion.delivered differ", [i]
            )
        if len(set(delivered)) < len(delivered):
            raise BatchError(
                "tokens", "a request receives two tokens in one step; expected at most one"
            )
        for i in (*delivered, *(self._group if batch.decodes else ())):
            if r := self.requests.get(i):
                r.emitted += 1
        finished = set(completion.finished)
        limits = {i for i in batch.emits if i in self.requests and self.requests[i].at_limit}
        due = set(ended) & set(batch.emits) | limits
        for i in finished ^ due if self.tokens else due - finished:
            what = (
                "ends before its last token" if i in finished else "continues after its last token"
            )
            raise BatchError("requests", f"request {i} {what}", [i])
        self.remove([*finished, *completion.refused])
        if not self.tokens:
            self._check_limits()

    def check_steps(self, steps: Any, most: int) -> None:
        """Raise BatchError unless ``leap`` returned a valid number of steps."""
        if not (isinstance(steps, int) and 1 <= steps <= most):
            raise BatchError("leaps", f"found {steps!r}, expected 1 to {most}")

    def check_skipped(self, free: Any, steps: int) -> None:
        """Update the tracked requests after skipped steps.

        ``free`` is the number of free blocks after each step. Raises BatchError if it is invalid.
        """
        good = isinstance(free, list) and len(free) == steps
        if not (good and all(isinstance(n, int) and 0 <= n <= self._num_blocks for n in free)):
            what = f"found {free!r}, expected {steps} numbers of 0 to {self._num_blocks}"
            raise BatchError("leaps", what)
        for i in {*self._emits, *self._group}:
            if r := self.requests.get(i):
                self._blocks += self._needs(r.computed + steps) - self._needs(r.computed)
                r.computed += steps
                r.emitted += steps
        self._count_idle(0 if self._emits or self._group or not self.requests else steps)

    # Checks of the parts of a batch.

    def _check_fields(self, batch: Batch) -> None:
        for name in LISTS:
            _expect_list(batch, name, "Batch")
        for name in UNSUPPORTED:
            if getattr(batch, name):
                what = f"Batch.{name}: custom schedulers cannot set this, expected no value"
                raise BatchError("answers", what)
        if batch.kind not in KINDS:
            what = f"Batch.kind: found {batch.kind!r}, expected one of {', '.join(KINDS)}"
            raise BatchError("answers", what)
        loads = batch.lora_loads
        pair = loads if isinstance(loads, tuple) and len(loads) == 2 else (-1,)
        if not all(
            isinstance(n, int) and n >= 0 for n in (batch.decodes, batch.decode_context, *pair)
        ):
            what = "Batch.decodes and decode_context: must be at least 0; lora_loads: two numbers"
            raise BatchError("answers", what)
        if batch.fatal is not None and not isinstance(batch.fatal, str):
            raise BatchError("answers", f"Batch.fatal: found {batch.fatal!r}, expected text")
        for row in batch.scheduled:
            if not (isinstance(row, tuple) and len(row) == 2):
                what = f"Batch.scheduled: found {row!r}, expected (request id, tokens)"
                raise BatchError("answers", what)

    def _check_references(self, batch: Batch) -> None:
        """Check that the batch names only unfinished requests and valid reasons."""
        self._expect_known([i for i, _ in batch.scheduled], "Batch.scheduled")
        for name in ("emits", "preempted", "ignored", "lost", "joined"):
            self._expect_known(getattr(batch, name), f"Batch.{name}")
        for name in ("aside", "refused"):
            if not isinstance(getattr(batch, name), dict):
                raise BatchError("answers", f"Batch.{name}: must be a dict by request id")
            self._expect_known(getattr(batch, name), f"Batch.{name}")
        self._check_reasons(batch)
        for cause in batch.causes:
            if not (isinstance(cause, PreemptionCause) and cause.why in NEEDS):
                raise BatchError("answers", f"Batch.causes: found {cause!r}, expected a Cause")
            self._expect_known([] if cause.by is None else [cause.by], "Batch.causes")

    def _check_reasons(self, batch: Batch) -> None:
        """Check the reasons for which requests wait or are rejected."""
        reasons = dict(batch.aside)
        if batch.held is not None:
            if not isinstance(batch.held, Held):
                raise BatchError("answers", f"Batch.held: found {batch.held!r}, expected a Held")
            self._expect_known([batch.held.id], "Batch.held")
            reasons[batch.held.id] = batch.held.why
        for i, why in reasons.items():
            if why not in WHYS:
                what = f"request {i} is held for {why!r}, expected one of {', '.join(WHYS)}"
                raise BatchError("answers", what, [i])
        for i, refusal in batch.refused.items():
            if not isinstance(refusal, Refusal):
                what = f"request {i} is refused with {refusal!r}, expected a Refusal"
                raise BatchError("answers", what, [i])

    def _check_group(self, batch: Batch) -> None:
        """Update the decode group (requests that decode in every step).

        A batch lists only the requests that join or leave the group.
        """
        if not (batch.decodes or batch.joined or batch.left or self._group):
            return
        self.tokens = False
        if wrong := [i for i in batch.left if i not in self._group]:
            raise BatchError(
                "answers", f"Batch.left: request {wrong[0]!r} is not in the decode group"
            )
        self._group -= set(batch.left)
        if wrong := [i for i in batch.joined if i in self._group]:
            raise BatchError(
                "answers", f"Batch.joined: request {wrong[0]} is already in the decode group"
            )
        self._group |= set(batch.joined)
        if batch.decodes != len(self._group):
            what = f"Batch.decodes: found {batch.decodes}, expected {len(self._group)} members"
            raise BatchError("answers", what)

    def _check_rows(self, batch: Batch, ids: list[int]) -> None:
        for i in batch.preempted:
            self._blocks -= self._needs(self.requests[i].computed)
            self.requests[i].computed = 0
        if len(batch.context) != len(ids):
            raise BatchError(
                "answers", f"{len(ids)} scheduled requests, but {len(batch.context)} contexts"
            )
        emits = set()
        for (i, tokens), context in zip(batch.scheduled, batch.context, strict=True):
            if self._compute(i, tokens, context):
                emits.add(i)
        if len(set(batch.emits)) < len(batch.emits):
            raise BatchError("tokens", "Batch.emits contains a request twice, expected once")
        for i in emits ^ set(batch.emits) if self.tokens else set(batch.emits) - set(ids):
            what = "gets no token" if i in emits else "gets a token before its prompt is complete"
            raise BatchError("tokens", f"request {i} {what}", [i])
        if self._blocks > self._num_blocks:
            what = (
                f"the computed tokens need {self._blocks} blocks, but only {self._num_blocks} exist"
            )
            raise BatchError("blocks", what, ids)

    def _compute(self, i: int, tokens: Any, context: Any) -> bool:
        """Count the tokens that a batch computes for request ``i``.

        Return whether all tokens of the request are then computed.
        """
        r = self.requests[i]
        if not self.tokens:  # tokens are not tracked, so only the total is checked
            most = r.prompt.prompt_tokens + r.prompt.max_tokens
            numbers = isinstance(tokens, int) and isinstance(context, int)
            if not (numbers and tokens >= 1 and 0 <= context <= most - tokens):
                what = f"request {i} computes {tokens!r} tokens after {context!r}"
                raise BatchError("tokens", f"{what}, expected at most {most} in total", [i])
            return False
        left = r.length - r.computed
        known = f"request {i} has {r.computed} of {r.length} tokens computed"
        if context != r.computed:
            raise BatchError("tokens", f"{known}, but the step states {context!r}", [i])
        if not (isinstance(tokens, int) and 1 <= tokens <= left):
            what = f"{known}; the step computes {tokens!r} more, expected 1 to {left}"
            raise BatchError("tokens", what, [i])
        self._blocks += self._needs(r.computed + tokens) - self._needs(r.computed)
        r.computed += tokens
        return tokens == left

    def _check_limits(self) -> None:
        for i in [*self._emits, *self._group]:
            r = self.requests.get(i)
            if r and r.emitted > r.prompt.max_tokens + 1:  # one token may be in flight
                what = f"request {i} continues after its {r.prompt.max_tokens} tokens"
                raise BatchError("requests", what, [i])

    def _expect_known(self, ids: Iterable[Any], field: str) -> None:
        for i in ids:
            if not (isinstance(i, int) and i in self.requests):
                raise BatchError("requests", f"{field}: request {i!r} has ended or does not exist")

    def _count_idle(self, steps: int) -> None:
        self._idle = self._idle + steps if steps else 0
        if self._idle >= MOST_IDLE:
            what = f"{self._idle} consecutive decisions produced no token"
            raise BatchError("ends", what, sorted(self.requests)[:1])

    def _needs(self, tokens: int) -> int:
        return blocks_for(tokens, self._block_size) if self._block_size else 0


def _expect_list(of: Any, name: str, kind: str) -> None:
    if not isinstance(getattr(of, name), list | tuple):
        what = f"{kind}.{name}: found {getattr(of, name)!r}, expected a list"
        raise BatchError("answers", what)
