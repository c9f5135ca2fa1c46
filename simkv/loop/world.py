"""From a scenario to the record of its run: one engine, or several behind a router."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import simpy

from simkv.core.errors import InputError
from simkv.core.request import Prompt, Request
from simkv.core.scheduler import Scheduler
from simkv.costs.erring import Erring, StepKind
from simkv.costs.load import Executor
from simkv.costs.offloadlink import OffloadLink
from simkv.costs.profile import Profile
from simkv.costs.simulated import SimulatedExecutor
from simkv.costs.widening import off_by
from simkv.loop.copies import with_copies
from simkv.loop.door import door_of
from simkv.loop.engine import Engine
from simkv.loop.fleet.fleet import Fleet
from simkv.loop.fleet.routers import SessionOf
from simkv.loop.fleet.routers import build as build_router
from simkv.loop.fleet.split import SplitFleet
from simkv.loop.fleet.stint import Stint
from simkv.loop.record import Record
from simkv.loop.replica import Replica
from simkv.loop.serve import serve
from simkv.scenario.costs import all_costs
from simkv.scenario.fleet import ReplicaGroup
from simkv.scenario.scenario import Scenario, StepScale
from simkv.schedulers.registry import ENGINES, spec_of
from simkv.workload.clients import Clients
from simkv.workload.workload import clients

#: Makes another executor of one.
Change = Callable[[Executor], Executor]


@dataclass(frozen=True)
class ReplicaSpec:
    """What a replica is made of: its engine's config, and what its steps cost.

    ``profile_name`` is what the scenario calls the profile, or its own name where that was made
    for the scenario's hardware.
    """

    engine: Any
    profile: Profile
    profile_name: str
    role: str = "both"


@dataclass(frozen=True)
class ScenarioRun:
    """A scenario that was run: one ``record`` for all, and the ``stints`` of its replicas.

    Without a ``fleet`` there is one stint, and the record is its engine's.
    """

    record: Record
    stints: Sequence[Stint]
    fleet: Fleet | None = None


def specs(scenario: Scenario, folder: Path) -> list[ReplicaSpec]:
    """One per replica that there may be; without a fleet, that of the one engine.

    Profiles given as files are looked for beside ``folder``. Raises InputError if a profile cannot
    be used.
    """
    found: list[ReplicaSpec] = []
    groups = scenario.fleet.groups if scenario.fleet else [ReplicaGroup()]
    for group, (_, costs) in zip(groups, all_costs(scenario), strict=True):
        profile = costs.load(folder)
        name = costs.profile or profile.name
        found += [ReplicaSpec(costs.engine, profile, name, group.role)] * group.count
    if scenario.fleet is None:
        return found
    if scale := scenario.fleet.autoscale:  # all are equal
        found = found[:1] * scale.max_replicas
    return found


def serve_scenario(
    scenario: Scenario,
    replicas: Sequence[ReplicaSpec],
    resolved: Callable[[], None] | None = None,
    *,
    leaping: bool = True,
    scheduler: Scheduler | None = None,
    changed: Change | None = None,
    sent: Clients | None = None,
) -> ScenarioRun:
    """Send the scenario's workload to its replicas, in a world of its own.

    ``resolved`` is called whenever a request ends. A ``scheduler`` decides in place of the one that
    the only engine names. Steps take as long as the profiles say, times the scenario's own factors;
    ``changed`` changes all executors before that. ``sent`` comes in place of the workload.
    """

    def make(spec: ReplicaSpec, env: simpy.Environment, rank: int) -> Replica:
        return replica_of(scenario, spec, env, rank, leaping, scheduler, changed)

    sent = sent or clients(scenario.workload, scenario.timeout)
    _check_loras(sent.requests, replicas)
    server = server_of(scenario, replicas, make, sessions(sent))
    server.resolved = resolved
    record = serve(server, sent, scenario.horizon)
    if isinstance(server, Fleet):
        return ScenarioRun(record, server.stints, server)
    return ScenarioRun(record, [Stint(0, server, 0)])


def server_of(
    scenario: Scenario,
    replicas: Sequence[ReplicaSpec],
    make: Callable[[ReplicaSpec, simpy.Environment, int], Replica],
    session_of: SessionOf,
) -> Replica | Fleet:
    """What serves the scenario, in a world of its own: the engine, or all behind their router.

    ``make`` makes a replica, given the rank of its moments.
    """
    env, rules = simpy.Environment(), scenario.fleet
    makers = [partial(make, spec) for spec in replicas]
    if rules is None:
        return makers[0](env, 0)
    router = build_router(rules.router, session_of)
    if not rules.disaggregated:
        return Fleet(env, makers, router, rules, initial=rules.size)
    to_decode = build_router(rules.decode_router, session_of)
    return SplitFleet(env, makers, router, to_decode, [spec.role for spec in replicas], rules)


def replica_of(
    scenario: Scenario,
    spec: ReplicaSpec,
    env: simpy.Environment,
    rank: int,
    leaping: bool = True,
    scheduler: Scheduler | None = None,
    changed: Change | None = None,
) -> Replica:
    """A replica of the scenario; see serve_scenario."""
    chosen = scheduler or _build(spec)
    executor = executor_of(scenario, spec, changed)
    ready, pacing = scenario.engine_ready, scenario.pipeline
    if pacing:
        from simkv.core.threads import Threads
        from simkv.loop.pipeline import Pipeline

        if isinstance(chosen, Threads):
            return Pipeline(env, chosen, executor, pacing, ready, rank=rank)
    engine = Engine(env, chosen, executor, ready, leaping=leaping, rank=rank)
    engine.door = door_of(spec.engine)
    engine.too_long = partial(spec_of(spec.engine).too_long, spec.engine)
    if spec_of(spec.engine).offloads(spec.engine):
        asked = scenario.offload
        link = OffloadLink(asked.bytes_per_token, asked.host_gb_s * 1e9, asked.latency_us / 1e6)
        disk = None
        if spec_of(spec.engine).uses_disk(spec.engine):
            read, write = asked.disk_read_gb_s * 1e9, asked.disk_write_gb_s * 1e9
            disk = OffloadLink(asked.bytes_per_token, read, asked.disk_latency_us / 1e6, write)
        with_copies(engine, link, disk)
    engine.record.every = spec_of(spec.engine).tokens_per_chunk(spec.engine)
    return engine


def executor_of(scenario: Scenario, spec: ReplicaSpec, changed: Change | None) -> Executor:
    """What tells how long the steps of a replica take."""
    executor: Executor = SimulatedExecutor(
        spec.profile, scenario.lora.seconds, scenario.drafter.share
    )
    if changed is not None:
        executor = changed(executor)
    if scenario.step_scale is not None:
        executor = Erring(executor, _factors(scenario.step_scale))
        if scenario.step_scale.error is not None:
            executor = off_by(spec.profile, scenario.step_scale.error)(executor)
    return executor


def _check_loras(requests: Iterable[Request], replicas: Sequence[ReplicaSpec]) -> None:
    """Raise InputError if somebody asks for an adapter and an engine has none."""
    asks = next((r for r in requests if r.lora is not None), None)
    if asks is not None and asks.lora is not None:
        check_lora(f"workload: request {asks.id} asks for", asks.lora, replicas)


def check_lora(who: str, lora: str, replicas: Sequence[ReplicaSpec]) -> None:
    """Raise InputError if an engine has no place for the adapter that ``who`` names."""
    for spec in replicas:
        if not spec_of(spec.engine).takes_loras(spec.engine):
            able = {name: e.lora for name, e in ENGINES.items() if e.lora}
            knobs = " or ".join(f"engine {name} with {knob}: true" for name, knob in able.items())
            raise InputError(
                f"{who} the LoRA adapter {lora!r}, and engine "
                f"{spec.engine.name} as it is set up takes none; expected {knobs}"
            )


def _factors(scale: StepScale) -> dict[StepKind, float]:
    return {"decode": scale.decode, "prefill": scale.prefill, "mixed": scale.mixed}


def _build(replica: ReplicaSpec) -> Scheduler:
    spec = spec_of(replica.engine)
    if spec.transfer and replica.role != "both":
        return spec.transfer.build(spec.transfer.in_role(replica.engine, replica.role))
    return spec.build(replica.engine)


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
