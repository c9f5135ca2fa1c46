"""Evaluate many scenarios, each only once, in several processes if that is faster.

Example:

    with Evaluator(folder, workers=4) as evaluator:
        figures = evaluator.evaluate(evaluator.job(scenario))
        print(figures.verdict, figures["preemptions"])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import nan
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Self

from simkv.core.errors import InputError
from simkv.core.figure_registry import FIGURE_NAMES, figure, is_lower_bound
from simkv.scenario.scenario import Scenario
from simkv.study.job_runner import JobExecutor, JobRunner, ResultFile
from simkv.study.simulation_job import (
    SimulationJob,
    Summary,
    make_job,
    run_job,
)
from simkv.study.worker_pool import WorkerPool


class RequestEnding(NamedTuple):
    """End of a request: its outcome, and its E2E latency in seconds if it finished."""

    id: int
    outcome: str
    e2e_s: float | None


@dataclass(frozen=True)
class RunFigures:
    """Result of a run: the verdict and its details, the metrics, and the ends of requests by id.

    ``figures["e2e_ms.median"]`` returns one metric. The names of the metrics are listed in
    ``core.figure_registry.FIGURE_NAMES``. A latency without a sample is None in ``values``, but
    ``figures[name]`` returns NaN. ``lower_bounds`` contains the metrics whose value is only a lower
    bound, because some requests have not ended.
    """

    verdict: str
    detail: str
    values: Mapping[str, float | None]
    endings: tuple[RequestEnding, ...]
    lower_bounds: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> float:
        value = self.values[name]
        return nan if value is None else value

    @property
    def summary(self) -> str:
        """The verdict and the affected requests, as in ``starved (24 of 40: requests 16, …)``."""
        return self.verdict if self.verdict == "served" else f"{self.verdict} ({self.detail})"


def make_trial_job(scenario: Scenario, folder: Path, rules: Any = None) -> SimulationJob:
    """Return the job that runs a scenario and adds the ends of all requests to its summary."""
    return make_job(scenario, folder, endings=True, rules=rules)


def evaluate_job(job: SimulationJob) -> RunFigures:
    """Run a job without using stored results.

    Raises InputError if a file cannot be used.
    """
    done = run_job(job)
    if done.error:
        raise done.error
    assert done.summary is not None
    return parse_run_figures(done.summary)


def parse_run_figures(summary: Summary) -> RunFigures:
    """Return the result of a run from a summary that has the ends of all requests."""
    return RunFigures(
        summary["verdict"],
        summary["verdict_detail"],
        {name: figure(summary, name) for name in FIGURE_NAMES},
        tuple(RequestEnding(*ending) for ending in summary["endings"]),
        frozenset(name for name in FIGURE_NAMES if is_lower_bound(summary, name)),
    )


class TooManyRuns(InputError):
    """Raised if the limit on the number of runs is reached."""


class _Memory:
    """Results of finished jobs (``done``) by digest. Old results are dropped if there are too many.

    ``tick`` is called for each new result. ``file`` contains results of an earlier run of the
    command, and receives new results.
    """

    #: Maximum number of stored ends of requests over all runs (about 100 bytes each).
    MOST = 5_000_000

    def __init__(self, tick: Callable[[], None], file: ResultFile | None) -> None:
        stored = file.done if file else {}
        self.done = {digest: parse_run_figures(one) for digest, one in stored.items()}
        self._tick, self._file, self._kept = tick, file, 0

    def add(self, digest: str, summary: Summary) -> None:
        if self._file:
            self._file.add(digest, summary)
        self.done[digest] = parse_run_figures(summary)
        self._kept += len(summary["endings"])
        while self._kept > self.MOST and len(self.done) > 1:
            self._kept -= len(self.done.pop(next(iter(self.done))).endings)
        self._tick()


class Evaluator:
    """Evaluator that runs jobs (simulations). Equal jobs run only once.

    Must be used as a context manager. ``workers`` is the number of processes. Paths of profiles are
    relative to ``folder``. ``runs`` is the number of different jobs so far. ``tick`` is called
    after every run. ``file`` stores results, and jobs with a stored result do not run again. Raises
    TooManyRuns after ``most_runs`` jobs.
    """

    POOL_PAYS = 3.0
    #: Minimum total duration in seconds of jobs that are sent to worker processes.
    POOL_LEAST = 0.02

    def __init__(
        self,
        folder: Path,
        workers: int = 1,
        most_runs: int | None = None,
        tick: Callable[[], None] = lambda: None,
        file: ResultFile | None = None,
    ) -> None:
        self.folder, self._workers, self._most = folder, workers, most_runs
        self._pool, self._memory = WorkerPool(workers), _Memory(tick, file)
        self._runner = JobRunner(self._pool.run, self._memory)
        self._asked: set[str] = set()
        self._seconds = 0.0
        self._batch: set[str] = set()
        self._planned: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._pool.__exit__(kind, error, at)

    @property
    def runs(self) -> int:
        """Number of different jobs requested so far."""
        return len(self._asked)

    @property
    def expected(self) -> int | None:
        """Number of different jobs requested so far, plus the jobs of the current batch and the
        planned jobs.

        The value is None if there is neither a batch nor a planned job.
        """
        later = self._batch | self._planned
        return len(self._asked | later) if later else None

    def plan_jobs(self, jobs: Iterable[SimulationJob]) -> None:
        """Count jobs in ``expected`` that will be evaluated later."""
        self._planned |= {job.digest for job in jobs}

    def skip_jobs(self, jobs: Iterable[SimulationJob]) -> None:
        """Stop counting planned jobs in ``expected``, because they will not be evaluated."""
        self._planned -= {job.digest for job in jobs}

    def job(self, scenario: Scenario, rules: Any = None) -> SimulationJob:
        """Return the job that runs a scenario.

        Raises InputError if a file cannot be used.
        """
        return make_trial_job(scenario, self.folder, rules)

    def find(self, job: SimulationJob) -> RunFigures | None:
        """Return the result of a job that has run, or None."""
        return self._memory.done.get(job.digest)

    def evaluate(self, job: SimulationJob) -> RunFigures:
        """Return the result of one job.

        Raises TooManyRuns if the limit on runs is reached.
        """
        if job.digest not in self._asked and self.runs == self._most:
            raise TooManyRuns(
                f"reached the limit of {self._most} runs without a result; increase --max-runs"
            )
        self._asked.add(job.digest)
        if job.digest not in self._memory.done:
            self._run([job], map)
        return self._memory.done[job.digest]

    def evaluate_all(self, jobs: Iterable[SimulationJob]) -> list[RunFigures]:
        """Return the results of all jobs, in order.

        Raises TooManyRuns if the limit on runs is reached.
        """
        jobs = list(jobs)
        self._batch = {job.digest for job in jobs}
        new = {job.digest: job for job in jobs if job.digest not in self._memory.done}
        if len(new) > 1:
            # the duration of the first job predicts the duration of the others
            self.evaluate(new.pop(next(iter(new))))
            if self._pays(len(new)):
                self._run(list(new.values()))
        found = [self.evaluate(job) for job in jobs]
        self._batch = set()
        return found

    def stream(self, jobs: Iterable[SimulationJob]) -> Iterator[RunFigures]:
        """Yield the result of each job in order, until the caller stops."""
        left = iter(jobs)
        while group := list(islice(left, self._workers)):
            new = [job for job in group if job.digest not in self._memory.done]
            if self._pays(len(new), likely_more=True):
                self._run(new)
            for job in group:
                yield self.evaluate(job)

    def _pays(self, jobs: int, *, likely_more: bool = False) -> bool:
        """Return whether the jobs would finish earlier in worker processes."""
        if self._workers < 2 or jobs < 2 or self._seconds < self.POOL_LEAST:
            return False
        expected = jobs * (10 if likely_more else 1)
        return self._pool.started or expected * self._seconds > self.POOL_PAYS

    def _run(self, jobs: Sequence[SimulationJob], execute: JobExecutor | None = None) -> None:
        """Run jobs, by default in worker processes. Raises the error of a failed job."""
        start, at_once = perf_counter(), 1 if execute else min(self._workers, len(jobs))
        failed = self._runner.run(jobs, execute=execute)
        self._seconds = (perf_counter() - start) * at_once / len(jobs)
        for error in failed.values():
            raise error
