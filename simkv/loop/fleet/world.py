"""From the ``fleet`` section of a scenario to a fleet."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import simpy

from simkv.core.request import Prompt
from simkv.core.scheduler import Scheduler
from simkv.costs.load import Executor
from simkv.costs.profile import Profile, load_profile
from simkv.costs.simulated import SimulatedExecutor
from simkv.loop.engine import Engine
from simkv.loop.fleet.fleet import Fleet, Maker
from simkv.loop.fleet.routers import SessionOf
from simkv.loop.fleet.routers import build as build_router
from simkv.loop.fleet.split import SplitFleet
from simkv.loop.pipeline import Pipeline
from simkv.scenario.scenario import Scenario
from simkv.schedulers.fastdeploy.scheduler import FastDeploy
from simkv.schedulers.registry import spec_of
from simkv.workload.clients import Clients


@dataclass(frozen=True)
class Plan:
    """What a replica is made of: its engine's config, and what its steps cost.

    ``profile_name`` is what the scenario calls the profile.
    """

    engine: Any
    profile: Profile
    profile_name: str
    role: str = "both"


def plans(scenario: Scenario, folder: Path) -> list[Plan]:
    """One plan per replica that there may be.

    Profiles given as files are looked for beside ``folder``. Raises InputError if a profile cannot
    be used.
    """
    assert scenario.fleet is not None
    found: list[Plan] = []
    for group in scenario.fleet.groups:
        name = group.profile or scenario.profile
        plan = Plan(group.engine or scenario.engine, load_profile(name, folder), name, group.role)
        found += [plan] * group.count
    if scale := scenario.fleet.autoscale:  # all are equal
        found = found[:1] * scale.max_replicas
    return found


def least_known(replicas: Sequence[Plan]) -> Profile:
    """The profile that tells the least of its error, or the largest: the fleet is no surer."""

    def error(plan: Plan) -> float:
        errors = plan.profile.fit.held_out.values()
        return max((error.p95 for error in errors), default=inf)

    return max(replicas, key=error).profile


def build_fleet(
    scenario: Scenario,
    replicas: list[Plan],
    sent: Clients,
    resolved: Callable[[], None] | None = None,
    *,
    leaping: bool = True,
    changed: Callable[[Executor], Executor] | None = None,
) -> Fleet:
    """The fleet of a scenario, in a world of its own; ``changed`` changes all executors."""
    assert scenario.fleet is not None
    rules = scenario.fleet
    router = build_router(rules.router, sessions(sent))
    makers = [_maker(scenario, plan, changed, leaping=leaping) for plan in replicas]
    env = simpy.Environment()
    if not rules.disaggregated:
        return Fleet(env, makers, router, rules, resolved, rules.size)
    to_decode = build_router(rules.decode_router, sessions(sent))
    roles = [plan.role for plan in replicas]
    return SplitFleet(env, makers, router, to_decode, roles, rules, resolved)


def _maker(
    scenario: Scenario,
    plan: Plan,
    changed: Callable[[Executor], Executor] | None,
    *,
    leaping: bool,
) -> Maker:
    def make(env: simpy.Environment, rank: int) -> Engine:
        spec = spec_of(plan.engine)
        transfer = spec.transfer if plan.role != "both" else None
        scheduler: Scheduler = (transfer or spec).build(plan.engine)
        executor: Executor = SimulatedExecutor(plan.profile)
        if changed is not None:
            executor = changed(executor)
        ready = scenario.engine_ready
        if scenario.pipeline and isinstance(scheduler, FastDeploy):
            return Pipeline(env, scheduler, executor, scenario.pipeline, ready, rank=rank)
        return Engine(env, scheduler, executor, ready, leaping=leaping, rank=rank)

    return make


def sessions(sent: Clients) -> SessionOf:
    """What session a request belongs to.

    Turns that wait for each other's answers are one; else requests whose prompts begin with the
    same named tokens are; else each is its own.
    """
    first: dict[int, int] = {}
    for i in sent.after:
        chain = [i]
        while chain[-1] in sent.after and chain[-1] not in first:
            chain.append(sent.after[chain[-1]][0])
        first.update(dict.fromkeys(chain, first.get(chain[-1], chain[-1])))

    def of(prompt: Prompt) -> Hashable:
        if prompt.id in first:
            return first[prompt.id]
        return prompt.segments[0].stream if prompt.segments else f"u{prompt.id}"

    return of
