"""Try scenarios by the hundred: each once, and in several processes where that pays.

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
from simkv.core.figure_registry import FIGURE_NAMES, figure
from simkv.scenario.scenario import Scenario
from simkv.study.job_runner import JobExecutor, JobRunner
from simkv.study.simulation_job import (
    SimulationJob,
    Summary,
    make_job,
    run_job,
)
from simkv.study.worker_pool import WorkerPool


class RequestEnding(NamedTuple):
    """How one request ended: its outcome, and seconds from arrival to its last token if served."""

    id: int
    outcome: str
    e2e_s: float | None


@dataclass(frozen=True)
class RunFigures:
    """What came of one run: the verdict, why, the numbers of ``summary.json``, all endings by id.

    ``figures["e2e_ms.median"]`` is one number; the names are those of ``core.figures.FIGURES``. A
    latency without a sample is missing: None in ``values``, NaN where it is computed with.
    """

    verdict: str
    detail: str
    values: Mapping[str, float | None]
    endings: tuple[RequestEnding, ...]

    def __getitem__(self, name: str) -> float:
        value = self.values[name]
        return nan if value is None else value

    @property
    def shown(self) -> str:
        """The verdict and whom it concerns, as in ``starved (24 of 40: requests 16, …)``."""
        return self.verdict if self.verdict == "served" else f"{self.verdict} ({self.detail})"


def make_trial_job(scenario: Scenario, folder: Path, rules: Any = None) -> SimulationJob:
    """The job of running a scenario of which all endings are told; see ``make_job``."""
    return make_job(scenario, folder, endings=True, rules=rules)


def evaluate_job(job: SimulationJob) -> RunFigures:
    """Run a job once. Raises InputError if its files cannot be used."""
    done = run_job(job)
    if done.error:
        raise done.error
    assert done.summary is not None
    return parse_run_figures(done.summary)


def parse_run_figures(summary: Summary) -> RunFigures:
    """What a summary with endings tells."""
    return RunFigures(
        summary["verdict"],
        summary["verdict_detail"],
        {name: figure(summary, name) for name in FIGURE_NAMES},
        tuple(RequestEnding(*ending) for ending in summary["endings"]),
    )


class TooManyRuns(InputError):
    """The limit on runs is reached."""


class _Memory:
    """The figures of the jobs that are ``done``, by digest; the oldest are forgotten.

    ``tick`` is called whenever there are new ones.
    """

    #: Endings that are kept in mind, of all runs together (about 100 bytes each).
    MOST = 5_000_000

    def __init__(self, tick: Callable[[], None]) -> None:
        self.done: dict[str, RunFigures] = {}
        self._tick, self._kept = tick, 0

    def add(self, digest: str, summary: Summary) -> None:
        self.done[digest] = parse_run_figures(summary)
        self._kept += len(summary["endings"])
        while self._kept > self.MOST and len(self.done) > 1:
            self._kept -= len(self.done.pop(next(iter(self.done))).endings)
        self._tick()


class Evaluator:
    """Evaluates jobs, each once. Its answers do not depend on ``workers``, only the time does.

    Profiles given as files are looked for beside ``folder``. Other processes are started when the
    work at hand would take longer than ``POOL_PAYS`` seconds. ``runs`` counts the jobs that were
    asked for; at the first one beyond ``most_runs`` it raises TooManyRuns. ``tick`` is called after
    every run.

    Use it as a context manager, so that its processes end with it.
    """

    POOL_PAYS = 3.0
    #: Seconds that a run takes at least which is worth sending to another process.
    POOL_LEAST = 0.02

    def __init__(
        self,
        folder: Path,
        workers: int = 1,
        most_runs: int | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self._workers, self._most = folder, workers, most_runs
        self._pool, self._memory = WorkerPool(workers), _Memory(tick)
        self._bench = JobRunner(self._pool.run, self._memory)
        self._asked: set[str] = set()
        self._seconds = 0.0
        self._ahead: set[str] = set()

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
        """How many different jobs were asked for."""
        return len(self._asked)

    @property
    def expected(self) -> int | None:
        """How many jobs there will have been when those now at hand are done, if that is known."""
        return len(self._asked | self._ahead) if self._ahead else None

    def job(self, scenario: Scenario, rules: Any = None) -> SimulationJob:
        """The job of running a scenario. Raises InputError if its files cannot be used."""
        return make_trial_job(scenario, self.folder, rules)

    def evaluate(self, job: SimulationJob) -> RunFigures:
        """The figures of one job."""
        if job.digest not in self._asked and self.runs == self._most:
            raise TooManyRuns(f"{self._most} runs are not enough for this")
        self._asked.add(job.digest)
        if job.digest not in self._memory.done:
            self._run([job], map)
        return self._memory.done[job.digest]

    def evaluate_all(self, jobs: Iterable[SimulationJob]) -> list[RunFigures]:
        """The figures of all jobs, in order."""
        jobs = list(jobs)
        self._ahead = {job.digest for job in jobs}
        new = {job.digest: job for job in jobs if job.digest not in self._memory.done}
        if len(new) > 1:
            self.evaluate(new.pop(next(iter(new))))  # which tells how long the others will take
            if self._pays(len(new)):
                self._run(list(new.values()))
        found = [self.evaluate(job) for job in jobs]
        self._ahead = set()
        return found

    def stream(self, jobs: Iterable[SimulationJob]) -> Iterator[RunFigures]:
        """The figures of one job after the other, for as long as the caller takes them.

        Other processes look ahead, which changes nothing but the time.
        """
        left = iter(jobs)
        while group := list(islice(left, self._workers)):
            new = [job for job in group if job.digest not in self._memory.done]
            if self._pays(len(new), likely_more=True):
                self._run(new)
            for job in group:
                yield self.evaluate(job)

    def _pays(self, jobs: int, *, likely_more: bool = False) -> bool:
        """Whether other processes would be faster, by how long the last runs took."""
        if self._workers < 2 or jobs < 2 or self._seconds < self.POOL_LEAST:
            return False
        expected = jobs * (10 if likely_more else 1)
        return self._pool.started or expected * self._seconds > self.POOL_PAYS

    def _run(self, jobs: Sequence[SimulationJob], execute: JobExecutor | None = None) -> None:
        """Run jobs, by default in other processes. Raises what one of them fails with."""
        start, at_once = perf_counter(), 1 if execute else min(self._workers, len(jobs))
        failed = self._bench.run(jobs, execute=execute)
        self._seconds = (perf_counter() - start) * at_once / len(jobs)
        for error in failed.values():
            raise error
