"""A job: one run of a scenario with nothing left to choose, known by a digest of all it is.

Two jobs with the same digest come out the same, so that what is done need not be done again.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.metrics.goodput import goodput
from simkv.metrics.peak_load import find_peak_load
from simkv.metrics.run_metrics import e2e
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.study.run_digest import compute_digest

#: The figures of a run as in ``summary.json``, and what else its job tells.
Summary = dict[str, Any]


class RunsFailed(Exception):
    """Some runs could not be made; what the others gave is kept."""


@dataclass(frozen=True)
class SimulationJob:
    """A scenario to run; its files lie beside ``folder``.

    ``rules`` are those to go by instead of the variant's (see EngineSpec). Its summary tells the
    goodput too if there are ``limits`` (ms, by ``ttft``, ``tpot`` or ``e2el``, in that order), with
    ``find_peak_load`` when the most requests were in flight, and with ``endings`` of each request,
    by id, its id, outcome and seconds from arrival to the last token (None if it did not finish).
    """

    scenario: Scenario
    folder: Path
    limits: tuple[tuple[str, float], ...] = ()
    peak: bool = False
    endings: bool = False
    rules: Any = None
    digest: str = ""

    def compute_digest(self) -> str:
        """The digest that it should have. Raises InputError if its files cannot be used."""
        return compute_digest(
            self.scenario,
            self.folder,
            limits=self.limits,
            peak=self.peak,
            endings=self.endings,
            rules=self.rules and asdict(self.rules),
        )


@dataclass(frozen=True)
class JobResult:
    """What came of a job: its summary, or None and an ``error``."""

    digest: str
    summary: Summary | None
    error: Exception | None = None


def make_job(
    scenario: Scenario, folder: Path, limits: Mapping[str, float] | None = None, **more: Any
) -> SimulationJob:
    """The job of running ``scenario``, ``more`` as in Job.

    Raises InputError if its files cannot be used.
    """
    job = SimulationJob(scenario, folder, tuple(sorted((limits or {}).items())), **more)
    return replace(job, digest=job.compute_digest())


def run_job(job: SimulationJob) -> JobResult:
    """Run a job, here or in another process; an error is a part of what comes back.

    It is an error if this process has not the same simkv, profile and trace as the one that made
    the job, for then the result would be another one's.
    """
    try:
        if job.compute_digest() != job.digest:
            raise InputError(
                "this worker has another simkv, cost profile or trace than the job was made with; "
                "was one of them changed meanwhile?"
            )
        return JobResult(job.digest, _summary(job))
    except InputError as error:
        return JobResult(job.digest, None, error)
    except Exception:
        return JobResult(job.digest, None, RunsFailed(traceback.format_exc()))


def _summary(job: SimulationJob) -> Summary:
    engine, scheduler = job.scenario.engine, None
    if job.rules is not None:
        scheduler = find_engine_spec(engine).build(engine, job.rules)
    result = run_scenario(job.scenario, job.folder, scheduler=scheduler, intervals=False)
    found = dict(result.summary)
    if job.limits:
        found |= goodput(result.record, dict(job.limits))
    if job.peak:
        found["peak"] = find_peak_load(result)
    if job.endings:
        lives = sorted(result.record.requests.items())
        found["endings"] = [[i, str(life.outcome), e2e(life)] for i, life in lives]
    return found
