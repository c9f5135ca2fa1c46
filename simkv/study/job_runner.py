"""The one service that does many runs: each job once, somewhere, and kept.

with bench_for(Path("points.jsonl"), jobs=4) as bench:
    failed = bench.run(jobs)
    bench.done[jobs[0].digest]
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

#: Runs a function on jobs somewhere and yields what came of them as it comes.
JobExecutor = Callable[
    [Callable[[SimulationJob], JobResult], Sequence[SimulationJob]], Iterable[JobResult]
]
#: Is told how many of how many jobs are done, at first and after each.
ProgressCallback = Callable[[int, int], None]


class ResultStore(Protocol):
    """What keeps that which came of jobs: a file, or the memory of this process."""

    done: dict[str, Any]

    def add(self, digest: str, summary: Summary) -> None:
        """Note what came of a job."""


@dataclass(frozen=True)
class JobRunner:
    """Where jobs are run, by ``execute``, and the ``store`` of what came of them."""

    execute: JobExecutor
    store: ResultStore

    @property
    def done(self) -> dict[str, Any]:
        """What the store has of all that has been run, by digest: a file has the summaries."""
        return self.store.done

    def run(
        self,
        jobs: Iterable[SimulationJob],
        advance: ProgressCallback | None = None,
        execute: JobExecutor | None = None,
    ) -> dict[str, Exception]:
        """Run those of the ``jobs`` that are not done; returns the errors of the rest, by digest.

        ``execute`` takes the place of the bench's own.
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
    """A bench that keeps what is done in a file, whatever happens to this process."""
    with ResultFile(file) as store:
        yield JobRunner(execute, store)


@contextmanager
def open_pooled_runner(
    file: Path | None,
    jobs: int | None = None,
    executor: Literal["local", "ray"] = "local",
    address: str | None = None,
) -> Iterator[JobRunner]:
    """A bench as the options of commands say; see ``open_executor`` and ``open_runner``."""
    with open_executor(executor, jobs, address) as execute, open_runner(execute, file) as bench:
        yield bench
