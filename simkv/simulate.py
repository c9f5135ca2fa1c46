"""Run scenarios: from a checked scenario to its record and figures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import simpy

from simkv.diagnosis import Diagnosis, block_size, diagnose
from simkv.engine import Engine, serve
from simkv.executors import Executor
from simkv.executors.simulated import SimulatedExecutor
from simkv.fidelity import Fidelity, fidelity
from simkv.metrics import summary
from simkv.pipeline import Pipeline, remarks
from simkv.profile import Profile, load_profile
from simkv.record import Record
from simkv.request import Request
from simkv.scenario import Scenario, load
from simkv.schedulers import build
from simkv.schedulers.base import Scheduler, blocks_for
from simkv.schedulers.fastdeploy import FastDeploy
from simkv.workload import clients


@dataclass(frozen=True)
class Result:
    """One variant of a scenario, run: its record, its figures and what a reader must know.

    ``notes`` say where the result leaves the range of the cost profile, which requests can never
    fit into the cache, and what went wrong in a pipeline. ``fidelity`` is how far the seconds can
    be trusted.
    """

    scenario: Scenario
    record: Record
    summary: dict[str, Any]
    notes: list[str]
    profile: Profile
    fidelity: Fidelity

    @cached_property
    def diagnosis(self) -> Diagnosis:
        """Why it went as it did; worked out when first asked for."""
        return diagnose(self.record, block_size(self.scenario.engine))


def run_file(path: Path, overrides: Sequence[str] = ()) -> dict[str, Result]:
    """Run all variants of a scenario file, in the file's order, and return them by name.

    ``overrides`` are ``path=value`` assignments. Raises InputError if the file, an override or
    a profile cannot be used.
    """
    return {
        name: run_scenario(scenario, path.parent)
        for name, scenario in load(path, overrides).items()
    }


def run_scenario(
    scenario: Scenario,
    folder: Path,
    resolved: Callable[[], None] | None = None,
    *,
    leaping: bool = True,
    scheduler: Scheduler | None = None,
    intervals: bool = True,
) -> Result:
    """Run one scenario; profiles given as files are looked for beside ``folder``.

    ``resolved`` is called whenever a request ends. ``leaping`` changes nothing but the work. A
    ``scheduler`` decides in place of the one that the scenario names. With ``intervals`` a profile
    that knows its error has the run simulated twice more, for the interval of each figure; not
    with a ``scheduler`` of one's own, which can run only once.
    Raises InputError if the profile cannot be used.
    """
    profile = load_profile(scenario.profile, folder)
    executor = SimulatedExecutor(profile)
    once = scheduler or build(scenario.engine)
    record = _serve(scenario, once, executor, resolved, leaping=leaping)
    requests = [life.request for life in record.lives.values()]
    record.alone_s = {r.id: executor.alone(r.prompt_tokens, r.output_tokens) for r in requests}
    notes = [
        *scenario.workload.notes,
        *_never_fit(requests, once, scenario),
        *(remarks(record) if scenario.pipeline else []),
        *_outside(executor),
    ]
    figures = summary(record)

    def again(changed: Callable[[Executor], Executor]) -> dict[str, Any]:
        other = changed(SimulatedExecutor(profile))
        return summary(_serve(scenario, build(scenario.engine), other, None, leaping=leaping))

    found = fidelity(
        profile,
        executor.outside_s / executor.busy if executor.busy else 0.0,
        figures,
        again if intervals and not scheduler else None,
    )
    figures |= {"notes": notes, "fidelity": found.to_json()}
    return Result(scenario, record, figures, notes, profile, found)


def _serve(
    scenario: Scenario,
    scheduler: Scheduler,
    executor: Executor,
    resolved: Callable[[], None] | None,
    *,
    leaping: bool,
) -> Record:
    """The scenario's workload through ``scheduler``, its steps as long as ``executor`` says."""
    env, ready, pacing = simpy.Environment(), scenario.engine_ready, scenario.pipeline
    if pacing and isinstance(scheduler, FastDeploy):
        engine: Engine = Pipeline(env, scheduler, executor, pacing, ready, resolved)
    else:
        engine = Engine(env, scheduler, executor, ready, resolved, leaping=leaping)
    return serve(engine, clients(scenario.workload, scenario.timeout), scenario.horizon)


def check_scenario(scenario: Scenario, folder: Path) -> None:
    """Raise the InputError that running the scenario would raise, without running it."""
    load_profile(scenario.profile, folder)
    build(scenario.engine)
    clients(scenario.workload, scenario.timeout)


def _never_fit(requests: list[Request], scheduler: Scheduler, scenario: Scenario) -> list[str]:
    """Requests whose KV needs more blocks than the whole cache has."""
    block_size = getattr(scenario.engine, "block_size", None)
    if block_size is None:
        return []
    too_large = [
        (blocks_for(r.prompt_tokens + r.output_tokens - 1, block_size), r.id)
        for r in requests
        if blocks_for(r.prompt_tokens + r.output_tokens - 1, block_size) > scheduler.num_blocks
    ]
    if not too_large:
        return []
    need, worst = max(too_large)
    return [
        f"{len(too_large)} requests can never fit: request {worst} needs {need} blocks of "
        f"{block_size} tokens, the cache has {scheduler.num_blocks}"
    ]


def _outside(executor: SimulatedExecutor) -> list[str]:
    """How much of the run lies where the cost profile has no data."""
    notes = []
    for feature, seconds in sorted(executor.outside.items()):
        low, high = executor.profile.range[feature]
        least, most = executor.extremes[feature]
        share = 100.0 * seconds / executor.busy
        notes.append(
            f"outside the range of profile {executor.profile.name} for {share:.1f} % of the busy "
            f"time: {feature} {least:g} to {most:g}, data from {low:g} to {high:g}"
        )
    return notes
