"""One point of a sweep: a scenario with nothing left to choose, known by a digest of all it is.

Two points with the same digest come out the same, so that what is done need not be done again.
"""

from __future__ import annotations

import hashlib
import json
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from simkv.core.errors import InputError
from simkv.core.version import __version__
from simkv.costs.profile import load_profile
from simkv.measure.goodput import goodput
from simkv.measure.peak import peak
from simkv.measure.simulate import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.workload.workload import Workload

#: Fields of a scenario that say what it is about and change nothing in its run.
WORDS = {"name", "report", "summary", "provenance", "published", "expect"}
#: Parts of simkv that take no part in a run.
_BESIDE = ("report", "sweeps", "planner", "gpu", "conform", "counterfactual")


#: Limits of goodput in ms, by name and in that order.
Limits = tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Job:
    """A scenario to run; its files lie beside ``folder``.

    Its figures tell the goodput too if there are ``limits`` (ms, by ``ttft``, ``tpot`` or
    ``e2el``), and if ``peak`` when the most requests were in flight.
    """

    digest: str
    scenario: Scenario
    folder: Path
    limits: Limits = ()
    peak: bool = False


@dataclass(frozen=True)
class Done:
    """What came of a job: the figures as in ``summary.json``, or None and an ``error``."""

    digest: str
    summary: dict[str, Any] | None
    error: str = ""


def job_of(
    scenario: Scenario,
    folder: Path,
    limits: Mapping[str, float] | None = None,
    peak: bool = False,
) -> Job:
    """The job of running ``scenario``; raises InputError if its files cannot be used."""
    good = tuple(sorted((limits or {}).items()))
    return Job(digest_of(scenario, folder, good, peak), scenario, folder, good, peak)


def simulate(job: Job) -> Done:
    """Run a job, here or in another process; an error comes back as text.

    It is an error if this process has not the same simkv, profile and trace as the one that made
    the job, for then the result would be another one's.
    """
    try:
        if digest_of(job.scenario, job.folder, job.limits, job.peak) != job.digest:
            raise InputError(
                "this worker has another simkv, cost profile or trace than the sweep had; "
                "was one of them changed meanwhile?"
            )
        result = run_scenario(job.scenario, job.folder, intervals=False)
        good = goodput(result.record, dict(job.limits)) if job.limits else {}
        when = {"peak": peak(result)} if job.peak else {}
        return Done(job.digest, {**result.summary, **good, **when})
    except InputError as error:
        return Done(job.digest, None, str(error))
    except Exception:
        return Done(job.digest, None, traceback.format_exc())


def digest_of(scenario: Scenario, folder: Path, limits: Limits = (), peak: bool = False) -> str:
    """A name for all that decides how a scenario comes out.

    It covers every field that takes part in the run, with defaults filled in; the contents of its
    profile and trace; what else its figures tell (see Job); and the version and code of simkv.
    Raises InputError if the profile or the trace cannot be used.
    """
    whole = {
        "version": __version__,
        "code": _code(),
        "scenario": scenario.model_dump(exclude=WORDS | {"engine"}),
        "engine": asdict(scenario.engine),
        "profile": load_profile(scenario.profile, folder).model_dump(),
        "replicas": _replica_profiles(scenario, folder),
        "trace": _trace(scenario.workload),
        **({"goodput": limits} if limits else {}),
        **({"peak": True} if peak else {}),
    }
    text = json.dumps(whole, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _replica_profiles(scenario: Scenario, folder: Path) -> list[Any]:
    """The profiles of replicas that have their own."""
    groups = scenario.fleet.groups if scenario.fleet else []
    names = [group.profile for group in groups if group.profile]
    return [load_profile(name, folder).model_dump() for name in names]


@lru_cache(maxsize=1)
def _code() -> str:
    """A hash of the source of all modules that take part in a run."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] not in _BESIDE and not name.name.startswith("cli"):
            digest.update(f"{name.as_posix()}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def _trace(workload: Workload) -> str | None:
    """A hash of the trace file, if the workload takes one."""
    if workload.trace is None:
        return None
    path = workload.loaded.path
    return _hash(path, path.stat().st_mtime_ns, path.stat().st_size)


@lru_cache(maxsize=256)
def _hash(path: Path, _changed: int, _size: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def seed_of(workload: Workload) -> int | None:
    """The seed of what a workload draws by chance; None if it draws nothing."""
    form = workload.arrivals or workload.sessions
    if form is not None:
        return form.seed
    drawn = workload.sample is not None or workload.request_rate is not None
    return workload.seed if workload.trace is not None and drawn else None


def repeated(scenario: Scenario, repeat: int) -> Scenario:
    """The scenario with a seed of its own for each ``repeat``, derived from its own seed.

    Repeat 0 is the scenario itself, and so is every other if nothing is drawn by chance.
    """
    workload = scenario.workload
    seed = seed_of(workload)
    if repeat == 0 or seed is None:
        return scenario
    derived = int(np.random.SeedSequence(seed, spawn_key=(repeat,)).generate_state(1)[0])
    changed: dict[str, Any] = {"seed": derived}
    form = workload.arrivals or workload.sessions
    if form is not None:
        # Built anew, for a copy would keep what has been drawn from the former seed.
        given = {name: getattr(form, name) for name in form.model_fields_set}
        name = "sessions" if workload.sessions else "arrivals"
        changed = {name: type(form)(**{**given, **changed})}
    return scenario.model_copy(update={"workload": workload.model_copy(update=changed)})
