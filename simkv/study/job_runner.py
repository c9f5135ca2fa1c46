"""Run many jobs, each at most once, and store their results.

Example:

    with open_pooled_runner(Path("points.jsonl"), jobs=4) as runner:
        failed = runner.run(jobs)
        runner.done[jobs[0].digest]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from simkv.study.result_store import ResultFile
from simkv.study.simulation_job import (
    JobResult,
    SimulationJob,
    Summary,
    run_job,
)
from simkv.study.worker_pool import open_executor

#: Runs a function on jobs and yields the results as they arrive.
JobExecutor = Callable[
    [Callable[[SimulationJob], JobResult], Sequence[SimulationJob]], Iterable[JobResult]
]
#: Called with the number of finished jobs and the total, at the start and after each job.
ProgressCallback = Callable[[int, int], None]


class ResultStore(Protocol):
    """Storage of job results: a file, or the memory of this process."""

    done: dict[str, Any]

    def add(self, digest: str, summary: Summary) -> None:
        """Store the result of a job."""


@dataclass(frozen=True)
class JobRunner:
    """Runs jobs with ``execute`` and keeps their results in ``store``."""

    execute: JobExecutor
    store: ResultStore

    @property
    def done(self) -> dict[str, Any]:
        """Stored results by digest; a file stores summaries."""
        return self.store.done

    def run(
        self,
        jobs: Iterable[SimulationJob],
        advance: ProgressCallback | None = None,
        execute: JobExecutor | None = None,
    ) -> dict[str, Exception]:
        """Run the ``jobs`` that are not done; return the errors of failed jobs, by digest.

        ``execute`` replaces the runner's own executor.
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
    """Yield a runner that stores results in a file immediately, so that they survive a crash."""
    with ResultFile(file) as store:
        yield JobRunner(execute, store)


@contextmanager
def open_pooled_runner(
    file: Path | None,
    jobs: int | None = None,
    executor: Literal["local", "ray"] = "local",
    address: str | None = None,
) -> Iterator[JobRunner]:
    """Yield a runner for the options of commands; see ``open_executor`` and ``open_runner``."""
    with open_executor(executor, jobs, address) as execute, open_runner(execute, file) as runner:
        yield runner
