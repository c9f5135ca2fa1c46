"""Run many jobs (simulations), each at most once, and store their results.

Example:

    with open_pooled_runner(Path("points.jsonl"), jobs=4) as runner:
        failed = runner.run(jobs)
        runner.done[jobs[0].digest]
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from simkv.core.atomic_files import translate_disk_errors
from simkv.study.simulation_job import (
    JobResult,
    SimulationJob,
    Summary,
    run_job,
)
from simkv.study.worker_pool import open_executor

#: Function that runs another function on jobs and yields the results as they arrive.
JobExecutor = Callable[
    [Callable[[SimulationJob], JobResult], Sequence[SimulationJob]], Iterable[JobResult]
]
#: Called with the number of finished jobs and the total, at the start and after each job.
ProgressCallback = Callable[[int, int], None]


class ResultStore(Protocol):
    """Interface for the storage of job results."""

    done: dict[str, Any]

    def add(self, digest: str, summary: Summary) -> None:
        """Store the result of a job."""


@dataclass(frozen=True)
class JobRunner:
    """Runner that executes jobs with ``execute`` and stores their results in ``store``."""

    execute: JobExecutor
    store: ResultStore

    @property
    def done(self) -> dict[str, Any]:
        """Stored results by digest."""
        return self.store.done

    def run(
        self,
        jobs: Iterable[SimulationJob],
        advance: ProgressCallback | None = None,
        execute: JobExecutor | None = None,
    ) -> dict[str, Exception]:
        """Run the jobs without a stored result, and return the errors of failed jobs by digest.

        ``execute`` replaces the executor of the runner.
        """
        wanted = {job.digest: job for job in jobs}
        todo = [job for digest, job in wanted.items() if digest not in self.done]
        failed: dict[str, Exception] = {}
        finished = len(wanted) - len(todo)
        if advance:
            advance(finished, len(wanted))
        for result in (execute or self.execute)(run_job, todo) if todo else ():
            if result.summary is None:
                assert result.error is not None
                failed[result.digest] = result.error
                continue
            self.store.add(result.digest, result.summary)
            finished += 1
            if advance:
                advance(finished, len(wanted))
        return failed


@contextmanager
def open_runner(execute: JobExecutor, file: Path | None = None) -> Iterator[JobRunner]:
    """Yield a runner that writes each result to ``file`` as soon as it is available."""
    with ResultFile(file) as store:
        yield JobRunner(execute, store)


@contextmanager
def open_pooled_runner(
    file: Path | None,
    jobs: int | None = None,
    executor: Literal["local", "ray"] = "local",
    address: str | None = None,
) -> Iterator[JobRunner]:
    """Yield a runner that executes jobs in a process pool or on Ray (see ``open_executor``)."""
    with open_executor(executor, jobs, address) as execute, open_runner(execute, file) as runner:
        yield runner


class ResultFile:
    """File with the summaries of finished jobs. ``done`` contains the summaries by digest of the
    job.

    Must be used as a context manager. Without a ``path``, no file is written. Raises InputError if
    the file cannot be read or written.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._file = path, -1
        self.done: dict[str, Summary] = {} if path is None else _read(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def add(self, digest: str, summary: Summary) -> None:
        """Append a job's summary to the file and to ``done``."""
        line = json.dumps({"digest": digest, "summary": summary}, allow_nan=False).encode() + b"\n"
        if self._path is not None:
            with translate_disk_errors(self._path, "written"):
                self._append(self._path, line)
        self.done[digest] = json.loads(line)["summary"]

    def _append(self, path: Path, line: bytes) -> None:
        if self._file < 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            # An incomplete line stays in the file, and nothing is appended to it.
            if os.lseek(self._file, 0, os.SEEK_END):
                os.lseek(self._file, -1, os.SEEK_END)
                if os.read(self._file, 1) != b"\n":
                    line = b"\n" + line
        while line:  # usually one write; a signal may split it
            line = line[os.write(self._file, line) :]


def _read(path: Path) -> dict[str, Summary]:
    with translate_disk_errors(path, "read"):
        lines = path.read_bytes().split(b"\n") if path.exists() else []
    done: dict[str, Any] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            done[str(entry["digest"])] = dict(entry["summary"])
        except (ValueError, KeyError, TypeError):
            continue
    return done
