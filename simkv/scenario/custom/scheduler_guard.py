"""Guard of a custom scheduler in a run: time limit per call and validation of results.

A call that raises an exception, exceeds its time limit or returns an invalid result ends the run
with a verdict (``Batch.fatal``). ``simkv.scenario.custom.scheduler_laws`` has further checks for
``simkv check-scheduler``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import fields
from typing import Any, TypeVar

from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    MAX_BLOCKS,
    Batch,
    Completion,
    Livelock,
)
from simkv.scenario.custom.call_limit import CallTimeout, call_in_time, limits_exceeded
from simkv.scenario.custom.code_source import CustomCode, find_error_line, line_of_method
from simkv.scenario.custom.request_tracking import BatchError, RequestTracker

Answer = TypeVar("Answer")

#: Methods that only some schedulers have (``ClockedScheduler``, ``OffloadingScheduler``); the
#: engine looks for them when it is built.
OPTIONAL_PROPERTIES = ("awaits_kv", "has_pending_copies")
OPTIONAL_METHODS = ("set_time", "moved", "finish_disk_transfers")


def is_engine_class(of: type[Any]) -> bool:
    """Return whether a class extends a packaged scheduler."""
    return any(base.__module__.startswith("simkv.schedulers.") for base in of.__mro__)


def tracker_of(inner: Any, num_blocks: int, of: type[Any]) -> RequestTracker:
    """Return a ``RequestTracker`` for a scheduler of class ``of``."""
    depth, config = getattr(inner, "pipeline_depth", 1), getattr(inner, "config", None)
    rows = not is_engine_class(of)
    size = getattr(config, "block_size", 0)
    return RequestTracker(num_blocks, size, rows=rows, tokens=rows and depth == 1)


class GuardedScheduler:
    """Custom scheduler whose failures cannot break the engine.

    Implements ``simkv.core.scheduler_protocol.Scheduler``. ``failure`` describes the first failure,
    or is empty. After a failure, the next batch ends the run (``Batch.fatal``). Raises InputError
    if the scheduler cannot be built.
    """

    def __init__(self, build: Callable[[], Any], of: type[Any], source: CustomCode) -> None:
        self._of, self._source = of, source
        self.failure = ""
        self._about: tuple[int, ...] = ()
        self._decision = self._unique = 0
        self._inner = self._call("__init__", build, None)
        self._blocks = self._free = self._call("num_blocks", self._count_blocks, 0)
        self._depth = self._call("pipeline_depth", self._count_batches, 1)
        if self.failure:
            raise InputError(self.failure)
        self._tracker = tracker_of(self._inner, self._blocks, of)

    # The protocol.

    @property
    def pipeline_depth(self) -> int:
        """Number of batches in flight."""
        return self._depth

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self._blocks

    @property
    def free_blocks(self) -> int:
        """Number of free blocks."""
        self._free = self._count("free_blocks", lambda: self._inner.free_blocks, self._free)
        return self._free

    @property
    def num_waiting(self) -> int:
        """Number of waiting requests."""
        left = len(self._tracker.requests)
        return self._count("num_waiting", lambda: self._inner.num_waiting, left)

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return self._count("num_running", lambda: self._inner.num_running, 0)

    def add(self, prompt: Prompt) -> None:
        """Add a request, with only the fields that a client sends."""
        seen = Prompt(*(getattr(prompt, field.name) for field in fields(Prompt)))
        self._tracker.add(seen)
        self._call("add", lambda: self._inner.add(seen), None, prompt.id)

    def schedule(self) -> Batch:
        """Return the batch of the next step."""
        self._decision += 1
        batch = self._call("schedule", self._decide, None)
        if batch is None:
            known = [i for i in self._about if i in self._tracker.requests]
            return Batch(fatal=self.failure, scheduled=[(i, 0) for i in known])
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Report a completed step to the scheduler and return its answer."""

        def complete() -> Completion:
            completion: Completion = self._inner.complete(batch, ended)
            self._tracker.check_completion(batch, ended, completion)
            return completion

        return self._call("complete", complete, None) or Completion([], [])

    def abort(self, request_id: int) -> None:
        """Remove a request whose client has disconnected."""
        self._tracker.remove([request_id])
        self._call("abort", lambda: self._inner.abort(request_id), None, request_id)

    def leap(self, most: int) -> int:
        """Return the number of steps, at most ``most``, for which the batch stays the same."""

        def leap() -> int:
            steps: int = self._inner.leap(most)
            self._tracker.check_steps(steps, most)
            return steps

        return self._call("leap", leap, 1)

    def skip(self, steps: int) -> list[int]:
        """Report ``steps`` steps with the same batch to the scheduler.

        Returns the number of free blocks after each step.
        """

        def skip() -> list[int]:
            free: list[int] = self._inner.skip(steps)
            self._tracker.check_skipped(free, steps)
            return free

        return self._call("skip", skip, None) or [self._free] * steps

    def waiting_ids(self) -> list[int]:
        """Return the ids of waiting requests."""
        return self._ids("waiting_ids", lambda: self._inner.waiting_ids())

    def running_ids(self) -> list[int]:
        """Return the ids of running requests."""
        return self._ids("running_ids", lambda: self._inner.running_ids())

    def blocks_held(self) -> Mapping[int, int]:
        """Return the number of blocks by request id."""

        def held() -> dict[int, int]:
            found = dict(self._inner.blocks_held())
            if not all(isinstance(n, int) and n >= 0 for pair in found.items() for n in pair):
                raise BatchError("answers", f"found {found!r}, expected blocks by request id")
            return found

        return self._call("blocks_held", held, None) or {}

    def fingerprint(self) -> Hashable:
        """Return the state that determines the next step.

        After a failure, each call returns a different value.
        """

        def state() -> tuple[Hashable]:
            found = self._inner.fingerprint()
            hash(found)  # unhashable values may not be comparable either
            return (found,)

        self._unique += 1
        return self._call("fingerprint", state, None) or self._unique

    def __getattr__(self, name: str) -> Any:
        """Return an optional method of the scheduler protocol, if the inner scheduler has it."""
        inner = self.__dict__.get("_inner")
        if name in OPTIONAL_PROPERTIES and hasattr(inner, name):
            return self._call(name, lambda: bool(getattr(inner, name)), False)
        if name in OPTIONAL_METHODS and hasattr(inner, name):
            return lambda *args: self._call(name, lambda: getattr(inner, name)(*args), None)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    # Guarded calls.

    def _decide(self) -> Batch:
        batch: Batch = self._inner.schedule()
        self._tracker.check_batch(batch)
        if batch.expand is not None and self._tracker.rows:
            expand = batch.expand
            batch.expand = lambda: self._call("Batch.expand", lambda: list(expand()), None) or []
        return batch

    def _call(
        self, name: str, call: Callable[[], Answer], otherwise: Answer, about: int | None = None
    ) -> Answer:
        """Return the result of ``call``, or ``otherwise`` if a call has failed."""
        if self.failure:
            return otherwise
        try:
            return call_in_time(call)
        except CallTimeout as late:
            self._fail(name, limits_exceeded(), find_error_line(late, self._source.path))
        except BatchError as error:
            self._about = error.requests
            self._fail(name, error.what, None)
        except Livelock:
            if name == "schedule":  # part of the scheduler protocol
                raise
            self._fail(name, "raised Livelock", None)
        except (Exception, SystemExit) as error:
            what = f"raised {type(error).__name__}: {error}"
            self._fail(name, what, find_error_line(error, self._source.path))
        if about is not None:
            self._about = (about,)
        return otherwise

    def _fail(self, name: str, what: str, line: int | None) -> None:
        line = line or line_of_method(self._of, self._source.path, name)
        at = f" at decision {self._decision}" if self._decision else ""
        shown = self._source.shown
        self.failure = (
            f"{shown}:{line}: {name}{at}: {' '.join(what.split())}; "
            f"run simkv check-scheduler {shown}"
        )

    def _count_blocks(self) -> int:
        return _expect_count(self._inner.num_blocks, 1, MAX_BLOCKS)

    def _count_batches(self) -> int:
        return _expect_count(getattr(self._inner, "pipeline_depth", 1), 1, 2)

    def _count(self, name: str, call: Callable[[], Any], otherwise: int) -> int:
        return self._call(name, lambda: _expect_count(call(), 0, MAX_BLOCKS), otherwise)

    def _ids(self, name: str, call: Callable[[], Any]) -> list[int]:
        known = self._tracker.requests

        def ids() -> list[int]:
            found = list(call())
            wrong = [i for i in found if not (isinstance(i, int) and i in known)]
            if wrong and self._tracker.rows:
                raise BatchError("requests", f"request {wrong[0]!r} has ended or does not exist")
            return found

        return self._call(name, ids, list(known))


def _expect_count(found: Any, least: int, most: int) -> int:
    if not (isinstance(found, int) and least <= found <= most):
        raise BatchError("answers", f"found {found!r}, expected a number of {least} to {most}")
    return found
