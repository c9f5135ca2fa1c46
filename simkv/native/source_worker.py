"""Process that runs an engine's code, with a simulated clock, fixed seeds and no environment.

It imports the scheduler once and forks a child for each run, so that runs share no globals.
"""

from __future__ import annotations

import os
import pdb
import random
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from pathlib import Path
from types import FrameType
from typing import Any

from simkv.core.errors import InputError
from simkv.core.scheduler_protocol import Batch
from simkv.native.driver_protocol import Counts
from simkv.native.import_stubs import MissingImport
from simkv.native.native_engines import NATIVE_ENGINES

#: CPU time limit of one call of a scheduler (s).
CPU_SECONDS = 10.0


class CpuLimitExceeded(BaseException):
    """Raised if a call exceeds its time limit."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Return a context that raises CpuLimitExceeded after this CPU time (s); 0 means no limit."""

    def stop(*_: object) -> None:
        raise CpuLimitExceeded

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class SimulatedWorld:
    """Replacement of the clock and of all sources of random numbers of this process."""

    def __init__(self) -> None:
        self.now = 0.0
        seconds, nanoseconds = (lambda: self.now), (lambda: int(self.now * 1e9))
        for name in ("time", "monotonic", "perf_counter", "process_time"):
            setattr(time, name, seconds)
            setattr(time, f"{name}_ns", nanoseconds)
        time.sleep = lambda _: None
        random.seed(0)
        numbers = random.Random(0)
        os.urandom = numbers.randbytes
        uuid.uuid4 = lambda: uuid.UUID(int=numbers.getrandbits(128))


class EntryDebugger(pdb.Pdb):
    """Debugger that stops when the function ``entry`` of a file in ``folder`` is called."""

    def __init__(self, folder: Path, entry: str) -> None:
        super().__init__(nosigint=True)
        self._folder, self._entry, self._entered = str(folder), entry, False

    def stop_here(self, frame: FrameType) -> bool:
        """Return whether to stop in ``frame``; False until the function is called."""
        code = frame.f_code
        if code.co_name == self._entry and code.co_filename.startswith(self._folder):
            self._entered = True
        return self._entered and super().stop_here(frame)


class DriverServer:
    """Server for the calls of one ``NativeScheduler``."""

    def __init__(self, to: Connection, world: SimulatedWorld, engine: str, folder: Path) -> None:
        self.to, self.world, self.folder, self.engine = to, world, folder, engine
        _, knobs, native, self.debugged = to.recv()
        self.step = 0
        self.driver = NATIVE_ENGINES[engine].build(knobs, native)

    def serve(self) -> None:
        """Answer calls until the client closes the connection."""
        driver = self.driver
        self.to.send(("done", (driver.num_blocks, driver.pipeline_depth)))
        calls: dict[str, Any] = {
            "schedule": self._schedule,
            "complete": lambda *given: (driver.complete(*given), driver.counts()),
            "waiting_ids": driver.waiting_ids,
            "running_ids": driver.running_ids,
            "blocks_held": driver.blocks_held,
            "block_tables": driver.block_tables,
            "fingerprint": driver.fingerprint,
        }
        while True:
            name, *given = self.to.recv()
            try:
                with cpu_limit(0 if self.debugged else CPU_SECONDS):
                    answer = calls[name](*given)
            except CpuLimitExceeded as late:
                what = f"used more than {CPU_SECONDS:g} s of CPU time"
                self.to.send(("failed", f"{place_of(late, self.folder)}: {name}: {what}"))
            except (Exception, SystemExit) as error:
                self.to.send(
                    ("failed", f"{place_of(error, self.folder)}: {name}: {describe(error)}")
                )
            else:
                self.to.send(("done", answer))

    def _schedule(self, now: float, news: list[tuple[Any, ...]]) -> tuple[Batch, Counts]:
        """Repeat the calls in ``news`` on the driver, and return the scheduler's decision."""
        driver = self.driver
        self.world.now = now
        for name, *given in news:
            getattr(driver, name)(*given)
        decide: Any = driver.schedule
        if self.step == self.debugged:
            debugger = EntryDebugger(self.folder, NATIVE_ENGINES[self.engine].entry)
            decide = partial(debugger.runcall, decide)
        batch: Batch = decide()
        self.step += 1
        return batch, driver.counts()


def place_of(error: BaseException, folder: Path) -> str:
    """Return file and line of the innermost frame of an error's traceback that is in ``folder``."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename, folder)}:{error.lineno}"
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if Path(frame.filename).is_relative_to(folder):
            return f"{_short(frame.filename, folder)}:{frame.lineno}"
    return str(folder)


def describe(error: BaseException) -> str:
    """Return the type and the message of an error in one line."""
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return f"{type(error).__name__}: {' '.join(message.split())}".rstrip(": ")


def _short(file: str, folder: Path) -> str:
    path = Path(file)
    return str(path.relative_to(folder) if path.is_relative_to(folder) else path)


def main() -> None:
    """Import the source, and fork a child for each socket that is received."""
    control = Connection(int(sys.argv[1]))
    engine, folder = sys.argv[2], Path(sys.argv[3])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    world = SimulatedWorld()
    with ExitStack() as stack:
        try:
            with cpu_limit(3 * CPU_SECONDS):
                stack.enter_context(NATIVE_ENGINES[engine].stub_imports(folder))
                NATIVE_ENGINES[engine].load()
        except BaseException as error:
            why = f"cannot be imported: {describe(error)}"
            why = str(error) if isinstance(error, InputError | MissingImport) else why
            why = "its import does not end" if isinstance(error, CpuLimitExceeded) else why
            control.send(f"{place_of(error, folder)}: {why}")
            return
        control.send(None)
        while True:
            try:
                to = Connection(recv_handle(control))
            except EOFError:
                return
            if os.fork() == 0:
                control.close()
                _run(to, world, engine, folder)
                os._exit(0)
            to.close()


def _run(to: Connection, world: SimulatedWorld, engine: str, folder: Path) -> None:
    try:
        server = DriverServer(to, world, engine, folder)
    except BaseException as error:
        to.send(("failed", f"{place_of(error, folder)}: {describe(error)}"))
        return
    try:
        server.serve()
    except (EOFError, OSError):
        return


if __name__ == "__main__":
    main()
