"""A job: one fully specified run of a scenario, identified by a digest.

Two jobs with the same digest have the same result.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.metrics.fleet_metrics import find_peak_load
from simkv.metrics.goodput import goodput
from simkv.metrics.run_metrics import e2e
from simkv.metrics.scenario_runner import run_scenario
from simkv.metrics.steady_state import check_steady_state
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.study.run_digest import compute_digest

#: The metrics of a run as in ``summary.json``, with the additional results that its job requests.
Summary = dict[str, Any]


class RunsFailed(Exception):
    """Raised if some runs failed. The results of the other runs are stored."""


@dataclass(frozen=True)
class SimulationJob:
    """A scenario to run. Paths of its files are relative to ``folder``.

    ``rules`` replaces the scheduling rules of the engine variant (see ``EngineSpec``). ``limits``
    are the latency limits (ms) of the goodput, which is added to the summary. ``peak`` adds the
    time with the most requests in flight. ``endings`` adds the id, outcome and E2E latency (s) of
    each request. ``growth`` adds whether the number of requests in flight kept growing
    (``saturated``).
    """

    scenario: Scenario
    folder: Path
    limits: tuple[tuple[str, float], ...] = ()
    peak: bool = False
    endings: bool = False
    growth: bool = False
    rules: Any = None
    digest: str = ""

    def compute_digest(self) -> str:
        """Return the job's digest.

        Raises InputError if a file cannot be used.
        """
        return compute_digest(
            self.scenario,
            self.folder,
            limits=self.limits,
            peak=self.peak,
            endings=self.endings,
            growth=self.growth,
            rules=self.rules and asdict(self.rules),
        )


@dataclass(frozen=True)
class JobResult:
    """Result of a job: its summary, or an ``error``."""

    digest: str
    summary: Summary | None
    error: Exception | None = None


def make_job(
    scenario: Scenario, folder: Path, limits: Mapping[str, float] | None = None, **more: Any
) -> SimulationJob:
    """Return the job that runs ``scenario``. ``more`` contains further fields of ``SimulationJob``.

    Raises InputError if a file cannot be used.
    """
    job = SimulationJob(scenario, folder, tuple(sorted((limits or {}).items())), **more)
    return replace(job, digest=job.compute_digest())


def run_job(job: SimulationJob) -> JobResult:
    """Run a job and return its result or its error.

    A job from another process fails if simkv, the profile or the trace has changed.
    """
    try:
        if job.compute_digest() != job.digest:
            raise InputError(
                "a worker process and the main process use different versions of simkv, of the "
                "cost profile or of the trace; if you changed a file during the run, run the "
                "command again"
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
    if job.growth:
        found["saturated"] = check_steady_state(result.record).grows
    if job.endings:
        lives = sorted(result.record.requests.items())
        found["endings"] = [[i, str(life.outcome), e2e(life)] for i, life in lives]
    return found
