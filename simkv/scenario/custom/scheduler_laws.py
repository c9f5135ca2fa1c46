"""Laws of custom schedulers, checked at each call by ``simkv check-scheduler``.

A ``CheckedScheduler`` behaves like the scheduler that it wraps. It raises ``LawViolation`` if the
scheduler violates a law. A normal run uses only ``simkv.scenario.custom.scheduler_guard``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from simkv.core.block_pool import BlockPool
from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch, Completion, blocks_for
from simkv.scenario.custom.call_limit import CallTimeout, call_in_time, limits_exceeded
from simkv.scenario.custom.code_source import CustomCode, find_error_line, line_of_method
from simkv.scenario.custom.file_access import watch_file_reads
from simkv.scenario.custom.request_tracking import BatchError
from simkv.scenario.custom.scheduler_guard import is_engine_class, tracker_of

Answer = TypeVar("Answer")

#: Description of each law, by name.
LAWS = {
    "exceptions": "no call raises an exception",
    "answers": "every call returns a valid value of the protocol",
    "requests": "a request is in exactly one queue until it ends, and at most once in a step",
    "tokens": "a step computes existing tokens after those with KV, and emits one token for each "
    "request with all known tokens computed",
    "blocks": "free and held blocks add up to all blocks, and running requests hold enough",
    "limits": "at most max_num_seqs requests run, a step computes max_num_batched_tokens at most",
    "future": "decisions do not depend on the future",
    "chance": "the same scenario gives the same result",
    "leaps": "leaping does not change the result",
    "ends": "every run ends",
}


class LawViolation(InputError):
    """Raised if a scheduler violates ``law``.

    ``step`` is the number of the schedule call, and ``line`` is a line of the scheduler's file.
    """

    def __init__(self, law: str, what: str, path: str, line: int, step: int | None) -> None:
        super().__init__(law, what, path, line, step)  # required for copies by SimPy and pickle
        self.law, self.what, self.path, self.line, self.step = law, what, path, line, step

    def __str__(self) -> str:
        at = "" if self.step is None else f" at step {self.step}"
        law = f"violates the invariant of {self.law}{at}"
        return f"{self.path}:{self.line}: {law}: {self.what} ({LAWS[self.law]})"


class CheckedScheduler:
    """Custom scheduler that is checked against the laws at each call.

    Implements ``simkv.core.scheduler_protocol.Scheduler``.
    """

    def __init__(self, build: Callable[[], Any], of: type[Any], source: CustomCode) -> None:
        self._of, self._source = of, source
        self.step = 0
        #: Hash of each decision, with request ids relative to the first request.
        self.trail: list[int] = []
        #: Step in which each request ended, by request id.
        self.over: dict[int, int] = {}
        self.leapt = False
        self._first: int | None = None
        self.inner = self._call("__init__", build)
        # Packaged engines with a custom policy have their own laws, and the tokens of pipelined
        # schedulers are not tracked.
        self._ours = is_engine_class(of)
        self._tracker = tracker_of(self.inner, self.num_blocks, of)
        self._follows = self._tracker.tokens

    # Scheduler protocol.

    @property
    def pipeline_depth(self) -> int:
        """Number of batches in flight."""
        return int(getattr(self.inner, "pipeline_depth", 1))

    def add(self, prompt: Prompt) -> None:
        """Add a request, with only the fields that a client sends."""
        seen = Prompt(*(getattr(prompt, field.name) for field in fields(Prompt)))
        self._tracker.add(seen)
        self._first = prompt.id if self._first is None else self._first
        self._call("add", lambda: self.inner.add(seen))

    def schedule(self) -> Batch:
        """Return the batch of the next step. Raises LawViolation if it is invalid."""
        self.step += 1
        batch: Batch = self._call("schedule", self.inner.schedule)
        self._track("schedule", lambda: self._tracker.check_batch(batch))
        self._judge_limits(batch)
        self._judge_state()
        first = self._first or 0
        rows = tuple((i - first, n) for i, n in batch.scheduled)
        moved = (*batch.joined, -1, *batch.left, -1, *batch.preempted, -1, *batch.ignored)
        self.trail.append(hash((rows, tuple(i - first if i >= 0 else None for i in moved))))
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Report a completed step to the scheduler. Raises LawViolation for an invalid answer."""
        completion: Completion = self._call("complete", lambda: self.inner.complete(batch, ended))
        self._track("complete", lambda: self._tracker.check_completion(batch, ended, completion))
        for i in completion.finished:
            self.over[i] = self.step
        self._judge_state("complete")
        return completion

    def abort(self, request_id: int) -> None:
        """Remove a request whose client has disconnected."""
        self._call("abort", lambda: self.inner.abort(request_id))
        self._tracker.remove([request_id])
        self.over[request_id] = self.step
        self._judge_state("abort")

    def leap(self, most: int) -> int:
        """Return the number of steps, at most ``most``, for which the batch stays the same."""
        steps = self._call("leap", lambda: self.inner.leap(most))
        self._track("leap", lambda: self._tracker.check_steps(steps, most))
        return int(steps)

    def skip(self, steps: int) -> list[int]:
        """Report ``steps`` steps with the same batch to the scheduler.

        Returns the number of free blocks after each step.
        """
        free = self._call("skip", lambda: self.inner.skip(steps))
        self._track("skip", lambda: self._tracker.check_skipped(free, steps))
        self.step += steps
        self.leapt = True
        return list(free)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return int(self._call("num_blocks", lambda: self.inner.num_blocks))

    @property
    def free_blocks(self) -> int:
        """Number of free blocks."""
        return int(self._call("free_blocks", lambda: self.inner.free_blocks))

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        return int(self._call("num_waiting", lambda: self.inner.num_waiting))

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return int(self._call("num_running", lambda: self.inner.num_running))

    def waiting_ids(self) -> list[int]:
        """Return the ids of waiting requests."""
        return list(self._call("waiting_ids", self.inner.waiting_ids))

    def running_ids(self) -> list[int]:
        """Return the ids of running requests."""
        return list(self._call("running_ids", self.inner.running_ids))

    def blocks_held(self) -> Mapping[int, int]:
        """Return the number of blocks by request id."""
        return dict(self._call("blocks_held", self.inner.blocks_held))

    def fingerprint(self) -> Hashable:
        """Return the state that determines the next step."""
        found: Hashable = self._call("fingerprint", self.inner.fingerprint)
        return found

    # Checks.

    def _judge_limits(self, batch: Batch) -> None:
        config = getattr(self.inner, "config", None)
        if self._ours or config is None:
            return
        tokens = sum(n for _, n in batch.scheduled) + batch.decodes
        most, seats = config.max_num_batched_tokens, config.max_num_seqs
        self._expect(
            tokens <= most, "limits", f"the step computes {tokens} tokens, the limit is {most}"
        )
        self._expect(
            self.num_running <= seats, "limits", f"{self.num_running} run, the limit is {seats}"
        )

    def _judge_state(self, call: str = "schedule") -> None:
        if self._ours:
            return
        known = self._tracker.requests
        queues = [*self.waiting_ids(), *self.running_ids()]
        if sorted(queues) != sorted(known):
            twice = [i for i in set(queues) if queues.count(i) > 1]
            gone = sorted(known.keys() - set(queues))
            more = sorted(set(queues) - known.keys())
            what = (
                f"request {twice[0]} is in the queues twice"
                if twice
                else f"request {gone[0]} is in no queue"
                if gone
                else f"request {more[0]} has ended but is still in a queue"
            )
            self._break("requests", what, call)
        pool = getattr(self.inner, "pool", None)
        if isinstance(pool, BlockPool):
            try:
                pool.check()
            except AssertionError as error:
                self._break("blocks", str(error), call)
        held, free, total = self.blocks_held(), self.free_blocks, self.num_blocks
        if not self._follows:
            return
        good = sum(held.values()) + free == total and free >= 0
        self._expect(
            good,
            "blocks",
            f"{sum(held.values())} held and {free} free blocks do not add up to {total}",
            call,
        )
        size: int = getattr(getattr(self.inner, "config", None), "block_size", 0)
        for i, r in known.items():
            if not (size and self._tracker.tokens):
                break
            least = blocks_for(r.computed, size)
            what = (
                f"request {i} has {r.computed} tokens in {held.get(i, 0)} blocks of {size} tokens"
            )
            self._expect(held.get(i, 0) >= least, "blocks", what, call)

    # Reporting of violations.

    def _call(self, name: str, call: Callable[[], Answer]) -> Answer:
        try:
            with watch_file_reads() as read:
                answer = call_in_time(call)
        except LawViolation:
            raise
        except CallTimeout as late:
            line = find_error_line(late, self._source.path) or self._line(name)
            what = f"{name} {limits_exceeded()}"
            raise LawViolation("answers", what, self._source.shown, line, self.step) from None
        except (Exception, SystemExit) as error:
            line = find_error_line(error, self._source.path) or self._line(name)
            what = f"{name} raised {type(error).__name__}: {error}"
            law = "future" if "output_tokens" in str(error) else "exceptions"
            raise LawViolation(law, what, self._source.shown, line, self.step) from error
        if read and name != "__init__":
            self._break("future", f"{name} reads {read[0]}", name)
        return answer

    def _track(self, name: str, check: Callable[[], None]) -> None:
        try:
            check()
        except BatchError as error:
            self._break(error.law, error.what, name)

    def _expect(self, good: bool, law: str, what: str, call: str = "schedule") -> None:
        if not good:
            self._break(law, what, call)

    def _break(self, law: str, what: str, call: str = "schedule") -> None:
        raise LawViolation(law, what, self._source.shown, self._line(call), self.step)

    def broken(self, law: str, what: str, step: int | None) -> LawViolation:
        """Return a violation that was detected by comparing two runs of the same requests."""
        return LawViolation(law, what, self._source.shown, self._line("schedule"), step)

    def _line(self, name: str) -> int:
        return line_of_method(self._of, self._source.path, name)


def watched_scheduler(config: Any) -> CheckedScheduler:
    """Return a new checked scheduler for the config of a custom engine.

    Raises LawViolation if the scheduler cannot be built.
    """
    of: type[Any] = config.own_class
    return CheckedScheduler(lambda: of(config), of, config.own_source)
