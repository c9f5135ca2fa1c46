"""The real scheduler of an engine as a ``Scheduler``: a client of a ``SourceProcess``."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Collection, Hashable, Mapping, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch, Completion

#: Wall-clock limit of a call (s). A longer call counts as hanging even if it uses little CPU.
WALL_SECONDS = 60.0
#: The debugger starts before this step; None without a debugger.
_debugged: int | None = None


def debug_at(step: int | None) -> None:
    """Start the debugger in the real scheduler at this step of every native run."""
    global _debugged
    _debugged = step
    _process.cache_clear()


class NativeScheduler:
    """The real scheduler of an engine in a separate process; ``Batch.fatal`` reports errors.

    Raises InputError if the code cannot be imported.
    """

    def __init__(
        self,
        engine: str,
        folder: Path,
        knobs: Mapping[str, Any],
        native: Mapping[str, Mapping[str, Any]],
    ) -> None:
        self._process = _process(engine, folder, os.getpid())
        self._to = self._process.connect()
        self._folder = folder
        self.failure = ""
        self._now = 0.0
        self._news: list[tuple[Any, ...]] = []  # calls that the driver repeats, with arguments
        self._live: set[int] = set()
        self._copies: set[int] = set()  # under way between GPU and host memory
        self._disk: set[tuple[str, int]] = set()  # transfers and lookups under way
        self._transfers: dict[int, str] = {}  # send or load, by unfinished request
        self._loading: set[int] = set()  # requests whose KV is arriving
        self._sending: set[int] = set()  # ended requests whose KV another replica needs
        self._reported: list[int] = []
        self._has_news = False
        started = self._exchange("start", knobs, native, _debugged)
        if self.failure:
            raise InputError(f"{folder}: {self.failure}")
        self.num_blocks, self.pipeline_depth = started
        self._counts = (0, 0, self.num_blocks, 0)

    @property
    def free_blocks(self) -> int:
        """Number of blocks that can be allocated now."""
        return int(self._counts[2])

    @property
    def num_waiting(self) -> int:
        """Length of the waiting queue."""
        added = sum(1 for name, *_ in self._news if name == "add")
        return self._counts[0] + added

    @property
    def num_running(self) -> int:
        """Length of the running list."""
        return self._counts[1]

    def set_time(self, now: float) -> None:
        """Set the current time in seconds."""
        self._now = now

    def add(self, prompt: Prompt) -> None:
        """Add a request; the real scheduler receives it at the next decision."""
        self._live.add(prompt.id)
        transfer = self._transfers.get(prompt.id)
        self._news.append(("add", prompt, transfer) if transfer else ("add", prompt))

    def abort(self, request_id: int) -> None:
        """Abort a request; the real scheduler receives the abort at the next decision."""
        self._live.discard(request_id)
        self._transfers.pop(request_id, None)
        self._news.append(("abort", request_id))

    def schedule(self) -> Batch:
        """Return the decision of the real scheduler."""
        news, self._news = self._news, []
        answer = self._call("schedule", self._now, news)
        if answer is None:
            return Batch(fatal=self.failure, scheduled=[(i, 0) for i in sorted(self._live)])
        batch: Batch
        batch, self._counts = answer
        self._has_news = False
        if batch.moves:
            self._copies.update(move.job for move in (*batch.moves.loads, *batch.moves.stores))
            if disk := batch.moves.disk:
                self._disk.update(("job", move.job) for move in (*disk.reads, *disk.writes))
                if disk.look:
                    self._disk.add(("look", disk.look[0]))
        self._loading.update(i for i, tokens in batch.loads if tokens)
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        """Deliver the tokens of a batch."""
        accepted = batch.drafted.accepted if batch.drafted else {}
        done = dict.fromkeys((*self._reported, *(batch.moves.flush if batch.moves else ())))
        copied = [job for job in done if job in self._copies]
        self._copies.difference_update(copied)
        self._reported, self._has_news = [], self._has_news or bool(done)
        answer = self._call("complete", accepted, sorted(ended), copied)
        if answer is None:
            return Completion([], [])
        completion: Completion
        completion, self._counts = answer
        self._live.difference_update(completion.finished, completion.refused)
        ended_ids = (*completion.finished, *completion.refused)
        self._sending |= {i for i in ended_ids if self._transfers.pop(i, None) == "send"}
        return completion

    def moved(self, jobs: Sequence[int]) -> None:
        """Record finished copies, which the engine receives with the next completed batch."""
        self._reported += [job for job in jobs if job in self._copies]

    def finish_disk_transfers(self, jobs: Sequence[int], looks: Sequence[int]) -> None:
        """Record finished disk transfers and lookups, which affect the next decision."""
        self._disk.difference_update(("job", i) for i in jobs)
        self._disk.difference_update(("look", i) for i in looks)
        self._news.append(("finish_disk_transfers", jobs, looks))

    def keep(self, request_id: int) -> None:
        """Keep the blocks of a request after its end until ``sent`` is called."""
        self._transfers[request_id] = "send"

    def fetch(self, request_id: int) -> None:
        """Load the KV of a request from another replica."""
        self._transfers[request_id] = "load"

    def sent(self, request_id: int) -> None:
        """Free the blocks of a finished request. No other replica needs them any more."""
        self._transfers.pop(request_id, None)
        if request_id in self._sending:
            self._sending.remove(request_id)
            self._news.append(("sent", request_id))

    def loaded(self, request_id: int) -> None:
        """Record that the KV of a request has arrived."""
        if request_id in self._loading:
            self._loading.remove(request_id)
            self._news.append(("loaded", request_id))

    @property
    def awaits_kv(self) -> bool:
        """Whether copies or transfers are in flight."""
        under_way = self._copies or self._disk or self._loading or self._sending
        return bool(under_way) and not self._has_news

    @property
    def has_pending_copies(self) -> bool:
        """Whether there are writes to disk that no batch lists yet."""
        return self._counts[3] > 0

    def leap(self, most: int) -> int:  # noqa: ARG002
        """Return 1, because the real scheduler decides every step."""
        return 1

    def skip(self, steps: int) -> list[int]:
        """Never called, because ``leap`` returns 1."""
        raise NotImplementedError(f"cannot skip {steps} steps")

    def waiting_ids(self) -> list[int]:
        """Return the ids of waiting requests, head first."""
        return self._call("waiting_ids") or []

    def running_ids(self) -> list[int]:
        """Return the ids of running requests."""
        return self._call("running_ids") or []

    def blocks_held(self) -> Mapping[int, int]:
        """Return the number of blocks of each running request."""
        return self._call("blocks_held") or {}

    def block_tables(self) -> Mapping[int, list[int]]:
        """Return the block ids of each running request."""
        return self._call("block_tables") or {}

    def fingerprint(self) -> Hashable:
        """Return the state that determines the next decisions."""
        state: Hashable = self._call("fingerprint")
        return state

    def _call(self, name: str, *given: Any) -> Any:
        """Return the result of a call to the driver, or None if this or an earlier call failed."""
        return None if self.failure else self._exchange(name, *given)

    def _exchange(self, name: str, *given: Any) -> Any:
        """Send a message, and return the answer or None; on an error, set ``failure``."""
        try:
            self._to.send((name, *given))
            if not self._to.poll(None if _debugged is not None else WALL_SECONDS):
                self.failure = f"{name}: no answer within {WALL_SECONDS:g} s"
                self._process.stop()
                _process.cache_clear()
                return None
            status, answer = self._to.recv()
        except (EOFError, OSError):
            self.failure = f"{name}: the process of {self._folder} has ended"
            return None
        if status == "failed":
            self.failure = answer
            return None
        return answer

    def __del__(self) -> None:
        if to := self.__dict__.get("_to"):
            to.close()


class SourceProcess:
    """Process that runs an engine's code; raises InputError if the code cannot be imported."""

    def __init__(self, engine: str, folder: Path) -> None:
        self._control, child = Pipe()
        quiet = None if _debugged is not None else subprocess.DEVNULL
        root = str(Path(__file__).parents[2])
        # The environment is empty, so that no environment variable of the user affects a decision.
        environment = {"PYTHONHASHSEED": "0", "PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {"OMP_NUM_THREADS": "1"}  # threads do not survive a fork
        command = [sys.executable, "-P", "-s", "-m", "simkv.native.source_worker"]
        self._child = subprocess.Popen(
            [*command, str(child.fileno()), engine, str(folder)],
            pass_fds=[child.fileno()],
            env=environment,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            start_new_session=_debugged is None,
        )
        child.close()
        atexit.register(self.stop)
        try:
            failure = self._control.recv()
        except EOFError:
            failure = "the process that imports it has ended"
        if failure:
            self.stop()
            raise InputError(f"{folder}: {failure}")

    def connect(self) -> Connection:
        """Return a connection to a new child, which will build a scheduler."""
        ours, child = Pipe()
        send_handle(self._control, child.fileno(), self._child.pid)
        child.close()
        return ours

    def stop(self) -> None:
        """End the process and its children."""
        self._control.close()
        if _debugged is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)
        self._child.kill()
        self._child.wait()


@lru_cache(maxsize=8)
def _process(engine: str, folder: Path, owner: int) -> SourceProcess:  # noqa: ARG001
    """Return the process of a source; after a fork, a process starts its own."""
    return SourceProcess(engine, folder)
