"""Build and run the simulation of a scenario: one engine, or several behind a router."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import simpy

from simkv.core.errors import InputError
from simkv.core.request import Prompt, Request
from simkv.core.scheduler_protocol import Scheduler, prefix_reporter
from simkv.costs.cost_profile import CostProfile
from simkv.costs.front_end_costs import FrontEndCosts, find_front_end
from simkv.costs.offload_link import OffloadLink
from simkv.costs.profile_uncertainty import make_scaled_executor
from simkv.costs.scaled_executor import ScaledExecutor, StepKind
from simkv.costs.simulated_executor import DRAFTER_SHARE, SimulatedExecutor
from simkv.costs.step_load import Executor
from simkv.scenario.fleet_section import FleetSettings, PrefixKnowledge, ReplicaGroup
from simkv.scenario.scenario import FrontEndSection, Scenario
from simkv.scenario.scenario_costs import list_replica_costs
from simkv.schedulers.engine_registry import ENGINES, find_engine_spec
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.fleet.disaggregated_fleet import DisaggregatedFleet
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.fleet.replica_lifetime import ReplicaLifetime
from simkv.sim.fleet.routers import SessionLookup, build_router
from simkv.sim.front_end import attach_api_server
from simkv.sim.offload_copies import attach_copy_engine
from simkv.sim.replica_base import Replica, build_queue_limit
from simkv.sim.resumed_prefixes import find_resumed_prefixes
from simkv.sim.run_record import RunRecord
from simkv.workload.clients import Clients, find_sessions
from simkv.workload.workload_section import build_clients

#: Type of a function that takes an executor and returns a modified one.
ExecutorChange = Callable[[Executor], Executor]


@dataclass(frozen=True)
class ReplicaSpec:
    """Configuration of a replica's engine, and the cost profile of the engine's steps.

    - ``profile_name``: name of the profile in the scenario, or else the profile's own name.
    - ``draft_layers``: number of model layers if a further layer proposes draft tokens, else 0.
    """

    # The own name is used if the profile was derived from the scenario's hardware.

    engine: Any
    profile: CostProfile
    profile_name: str
    role: str = "both"
    draft_layers: int = 0


@dataclass(frozen=True)
class ScenarioRun:
    """A completed run: its record, its replica lifetimes and its clients."""

    # Without a ``fleet`` section, there is one lifetime, and ``record`` is the record of the only
    # engine.

    record: RunRecord
    lifetimes: Sequence[ReplicaLifetime]
    clients: Clients
    fleet: Fleet | None = None


def build_replica_specs(scenario: Scenario, folder: Path) -> list[ReplicaSpec]:
    """Return the configuration of each replica that the scenario can start.

    Profile files are resolved relative to ``folder``. Raises InputError if a profile cannot be
    used. Raises InputError if a router reads prefix caches that the replicas do not report.
    """
    found: list[ReplicaSpec] = []
    groups = scenario.fleet.groups if scenario.fleet else [ReplicaGroup()]
    for group, (_, costs) in zip(groups, list_replica_costs(scenario), strict=True):
        profile = costs.load(folder)
        name = costs.profile or profile.name
        spec = ReplicaSpec(costs.engine, profile, name, group.role, costs.count_draft_layers())
        if scenario.fleet:
            _check_prefix_knowledge(scenario.fleet, spec)
        found += [spec] * group.count
    if scenario.fleet is None:
        return found
    if scale := scenario.fleet.autoscale:  # all groups are equal
        found = found[:1] * scale.max_replicas
    return found


def _check_prefix_knowledge(fleet: FleetSettings, replica: ReplicaSpec) -> None:
    """Raise InputError if a router reads the prefix cache of a replica that does not report it."""
    field = "decode_router" if replica.role == "decode" else "router"
    config = getattr(fleet, field)
    if not isinstance(config, PrefixKnowledge) or not config.reads_caches:
        return
    if prefix_reporter(_build(replica)) is None:
        able = {name: e.published_cache_knob for name, e in ENGINES.items() if e.published_cache}
        expected = " or ".join(f"engine {name} with {knob}" for name, knob in able.items())
        raise InputError(
            f"fleet.{field}.prefix_knowledge: {config.prefix_knowledge} requires replicas that "
            f"report their prefix cache, but a replica with engine {replica.engine.name} does not; "
            f"expected {expected} and full attention in all layers, or prefix_knowledge: "
            "approximate"
        )


def simulate_scenario(
    scenario: Scenario,
    replicas: Sequence[ReplicaSpec],
    resolved: Callable[[], None] | None = None,
    *,
    leaping: bool = True,
    scheduler: Scheduler | None = None,
    changed: ExecutorChange | None = None,
    sent: Clients | None = None,
) -> ScenarioRun:
    """Simulate the scenario's workload on its replicas.

    - ``resolved``: called when a request ends.
    - ``scheduler``: replaces the scheduler, if there is only one engine.
    - ``changed``: modifies each executor before the scenario's factors apply.
    - ``sent``: replaces the workload.
    """
    # The duration of a step is the time that the cost profile predicts, multiplied by the
    # scenario's factors.

    def make(spec: ReplicaSpec, env: simpy.Environment, rank: int) -> Replica:
        replica = build_replica(scenario, spec, env, rank, leaping, scheduler, changed)
        costs = find_front_end_costs(scenario, spec)
        if costs and isinstance(replica, Engine):
            attach_api_server(replica, costs)
        return replica

    sent = sent or build_clients(scenario.workload, scenario.timeout)
    _check_loras(sent.requests, replicas)
    server = build_server(scenario, replicas, make, build_session_lookup(sent))
    server.resolved = resolved
    record = run_clients(server, sent, scenario.horizon)
    if isinstance(server, Fleet):
        run = ScenarioRun(record, server.lifetimes, sent, server)
    else:
        run = ScenarioRun(record, [ReplicaLifetime(0, server, 0)], sent)
    _note_resumed(run, replicas, sent)
    return run


def _note_resumed(run: ScenarioRun, replicas: Sequence[ReplicaSpec], sent: Clients) -> None:
    """Record the prefixes that later turns of a session could reuse."""
    # There are two kinds: prefixes on any replica, and prefixes on the replica that served the
    # turn.
    records = [(run.record, replicas[0])]
    if run.fleet:
        records += [(one.engine.record, replicas[one.replica]) for one in run.lifetimes]
    for record, replica in records:
        spec = find_engine_spec(replica.engine)
        record.prefix_cache = spec.caches_prefixes(replica.engine)
        if sent.after:
            block_size = spec.block_size(replica.engine)
            record.resumed = find_resumed_prefixes(record, sent.after, block_size)


def simulate_with_profile(
    scenario: Scenario,
    profile: CostProfile,
    requests: Sequence[Request] | None = None,
    *,
    changed: ExecutorChange | None = None,
) -> ScenarioRun:
    """Simulate the scenario with the step costs of ``profile`` on all replicas.

    If ``requests`` are given, they replace the workload. ``changed`` modifies each executor.
    """
    # The API server takes no time unless the scenario has a ``front_end`` section.
    spec = ReplicaSpec(scenario.engine, profile, profile.name)
    if scenario.front_end is None:
        scenario = scenario.model_copy(update={"front_end": "none"})
    sent = None if requests is None else Clients(requests)
    count = scenario.fleet.size if scenario.fleet else 1
    return simulate_scenario(scenario, [spec] * count, changed=changed, sent=sent)


def build_server(
    scenario: Scenario,
    replicas: Sequence[ReplicaSpec],
    make: Callable[[ReplicaSpec, simpy.Environment, int], Replica],
    session_of: SessionLookup,
) -> Replica | Fleet:
    """Return the engine or fleet of a scenario.

    ``make`` builds a replica from its spec, the environment and the rank of its events.
    """
    env, rules = simpy.Environment(), scenario.fleet
    makers = [partial(make, spec) for spec in replicas]
    if rules is None:
        return makers[0](env, 0)
    router = build_router(rules.router, session_of)
    if not rules.disaggregated:
        return Fleet(env, makers, router, rules, initial=rules.size)
    to_decode = build_router(rules.decode_router, session_of)
    return DisaggregatedFleet(
        env, makers, router, to_decode, [spec.role for spec in replicas], rules
    )


def build_replica(
    scenario: Scenario,
    spec: ReplicaSpec,
    env: simpy.Environment,
    rank: int,
    leaping: bool = True,
    scheduler: Scheduler | None = None,
    changed: ExecutorChange | None = None,
) -> Replica:
    """Build a replica of the scenario. The arguments are as in ``simulate_scenario``."""
    chosen = scheduler or _build(spec)
    executor = build_executor(scenario, spec, changed)
    ready, pacing = scenario.engine_ready, scenario.pipeline
    if pacing:
        from simkv.core.actor_protocol import Threads
        from simkv.sim.actor_pipeline import AsyncPipeline

        if isinstance(chosen, Threads):
            return AsyncPipeline(env, chosen, executor, pacing, ready, rank=rank)
    engine = Engine(env, chosen, executor, ready, leaping=leaping, rank=rank)
    engine.queue_limit = build_queue_limit(spec.engine)
    engine.too_long = partial(find_engine_spec(spec.engine).too_long, spec.engine)
    if find_engine_spec(spec.engine).offloads(spec.engine):
        asked = scenario.offload
        link = OffloadLink(asked.bytes_per_token, asked.host_gb_s * 1e9, asked.latency_us / 1e6)
        disk = None
        if find_engine_spec(spec.engine).uses_disk(spec.engine):
            read, write = asked.disk_read_gb_s * 1e9, asked.disk_write_gb_s * 1e9
            disk = OffloadLink(asked.bytes_per_token, read, asked.disk_latency_us / 1e6, write)
        attach_copy_engine(engine, link, disk)
    engine.record.tokens_per_chunk = find_engine_spec(spec.engine).tokens_per_chunk(spec.engine)
    return engine


def find_front_end_costs(scenario: Scenario, spec: ReplicaSpec) -> FrontEndCosts | None:
    """Return the times that a replica's API server needs, or None if they are not simulated."""
    said = scenario.front_end
    if said == "none" or (said is None and scenario.hardware is None):
        return None
    model = scenario.hardware.model if scenario.hardware else ""
    packaged = find_front_end(spec.engine.name, spec.engine.variant, model)
    if said is None:
        return packaged
    found = packaged or FrontEndCosts()

    def chosen(given: float | None, unit: float, otherwise: float) -> float:
        return otherwise if given is None else given * unit

    return FrontEndCosts(
        chosen(said.request_ms, 1e-3, found.request_s),
        chosen(said.prompt_token_us, 1e-6, found.prompt_token_s),
        chosen(said.output_token_us, 1e-6, found.output_token_s),
        chosen(said.latency_ms, 1e-3, found.latency_s),
        said.processes,
    )


def scale_front_end(scenario: Scenario, replicas: Sequence[ReplicaSpec], factor: float) -> Scenario:
    """Return a copy of the scenario in which the API server's times are multiplied by ``factor``.

    Only default times are multiplied. Times that the scenario specifies stay the same.
    """
    # A scenario is returned unchanged if it has no API server, or if its replicas have different
    # times.
    costs, *others = {find_front_end_costs(scenario, spec) for spec in replicas}
    if costs is None or others:
        return scenario
    given = scenario.front_end if isinstance(scenario.front_end, FrontEndSection) else None
    packaged = {
        "request_ms": 1e3 * costs.request_s,
        "prompt_token_us": 1e6 * costs.prompt_token_s,
        "output_token_us": 1e6 * costs.output_token_s,
        "latency_ms": 1e3 * costs.latency_s,
    }
    scaled = {
        name: factor * value
        for name, value in packaged.items()
        if given is None or getattr(given, name) is None
    }
    front_end = (given or FrontEndSection()).model_copy(update=scaled)
    return scenario.model_copy(update={"front_end": front_end})


def build_executor(
    scenario: Scenario, spec: ReplicaSpec, changed: ExecutorChange | None
) -> Executor:
    """Return the executor that determines the step durations of a replica."""
    share = scenario.drafter.share
    executor: Executor = SimulatedExecutor(
        spec.profile,
        scenario.lora.seconds,
        DRAFTER_SHARE if share is None else share,
        spec.draft_layers if share is None else 0,
    )
    if changed is not None:
        executor = changed(executor)
    if (scale := scenario.step_scale) is not None:
        factors: dict[StepKind, float] = {
            "decode": scale.decode,
            "prefill": scale.prefill,
            "mixed": scale.mixed,
        }
        executor = ScaledExecutor(executor, factors)
        if scale.error is not None:
            executor = make_scaled_executor(spec.profile, scale.error)(executor)
    return executor


def _check_loras(requests: Iterable[Request], replicas: Sequence[ReplicaSpec]) -> None:
    """Raise InputError if a request uses a LoRA adapter and an engine does not support adapters."""
    asks = next((r for r in requests if r.lora is not None), None)
    if asks is not None and asks.lora is not None:
        check_lora(f"workload: request {asks.id} uses", asks.lora, replicas)


def check_lora(subject: str, lora: str, replicas: Sequence[ReplicaSpec]) -> None:
    """Raise InputError if one of the engines cannot serve the LoRA adapter ``lora``.

    ``subject`` begins the message and names what uses the adapter.
    """
    for spec in replicas:
        if not find_engine_spec(spec.engine).takes_loras(spec.engine):
            able = {name: e.lora for name, e in ENGINES.items() if e.lora}
            knobs = " or ".join(f"engine {name} with {knob}: true" for name, knob in able.items())
            raise InputError(
                f"{subject} the LoRA adapter {lora!r}, but LoRA is off in the settings of "
                f"engine {spec.engine.name}; set {knobs}"
            )


def _build(replica: ReplicaSpec) -> Scheduler:
    spec = find_engine_spec(replica.engine)
    if spec.transfer and replica.role != "both":
        return spec.transfer.build(spec.transfer.in_role(replica.engine, replica.role))
    return spec.build(replica.engine)


def build_session_lookup(sent: Clients) -> SessionLookup:
    """Return a function that maps a request to its session.

    Requests that wait for each other's answers form one session. Other requests form a session if
    their prompts begin with the same token stream.
    """
    first = find_sessions(sent.after)

    def of(prompt: Prompt) -> Hashable:
        if prompt.id in first:
            return first[prompt.id]
        return prompt.segments[0].stream if prompt.segments else f"u{prompt.id}"

    return of
