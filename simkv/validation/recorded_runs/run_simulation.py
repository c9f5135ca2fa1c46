"""Simulate a recorded run from its arrivals, lengths and engine configuration.

Settings that were not recorded have the defaults of the engine's release. The result lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
import simpy
from pydantic import ValidationError

from simkv.core.engine_version import find_version, is_since
from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import blocks_for
from simkv.costs.cost_profile import CostProfile
from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.kv_capacity import compute_kv_capacity
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import make_hardware
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.costs.step_load import Executor
from simkv.metrics.run_metrics import e2e, tpot, ttft
from simkv.metrics.run_notes import unknown_error_share
from simkv.scenario.fleet_section import FleetSettings, LeastLoadedConfig
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.versions import (
    RELEASED,
    find_rules,
    find_variant,
    unrecorded_note,
)
from simkv.sim.client_loop import SimulatedServer, run_clients
from simkv.sim.engine import Engine
from simkv.sim.fleet.fleet import Fleet, ReplicaFactory
from simkv.sim.fleet.routers import build_router
from simkv.sim.run_record import RequestRecord, RunRecord
from simkv.validation.recorded_runs.recorded_run import RecordedRun
from simkv.workload.clients import Clients
from simkv.workload.trace_reader import read_trace

#: Interval at which vLLM's balancer of data-parallel ranks receives their queue lengths (s).
BALANCER_S = 0.1


@dataclass(frozen=True)
class SimulatedRun:
    """A simulated run: times (ms) per request in the order of the record, and totals of the run.

    ``outside`` is the fraction of busy time in steps outside the profile's range. ``unknown`` is
    the fraction of busy time with an unknown error.
    """

    requests: pd.DataFrame
    makespan_s: float
    preemptions: int
    steps: int
    outside: float
    unknown: float
    config: VllmConfig
    notes: list[str]


def simulate_run(
    case: RecordedRun,
    profile: CostProfile,
    config: VllmConfig,
    notes: list[str],
    changed: Callable[[Executor], Executor] | None = None,
) -> SimulatedRun:
    """Simulate ``case`` on an engine with the given ``config``.

    ``notes`` are added to the notes of the result. ``changed`` may wrap the executor. Raises
    InputError if the engine would reject a request.
    """
    executors: list[SimulatedExecutor] = []
    sent = [replace(r, arrival=r.arrival + profile.front_s) for r in requests_of(case)]

    def make(env: simpy.Environment, rank: int) -> Engine:
        executors.append(SimulatedExecutor(profile))
        executor = changed(executors[-1]) if changed else executors[-1]
        return Engine(env, build_scheduler(config), executor, rank=rank)

    if case.facts.max_concurrency is not None:
        # All requests arrive at the start and wait in the client.
        start = min(request.arrival for request in sent)
        sent = [replace(request, arrival=start) for request in sent]
    clients = Clients(sent, max_concurrency=case.facts.max_concurrency)
    record = run_clients(_server(case, make), clients, None)
    lives = [record.requests[request.id] for request in sent]
    _check(case, lives)
    shift = 0.0 if case.from_queue else profile.front_s
    ends = [life.last_token or 0.0 for life in lives]
    first = min(request.arrival for request in sent) - profile.front_s
    return SimulatedRun(
        pd.DataFrame([_row(life, record, case.from_queue, shift) for life in lives]),
        max(ends) - first,
        sum(len(life.preempted_at) for life in lives),
        len(record.steps),
        sum(e.outside_s for e in executors) / (sum(e.busy for e in executors) or 1.0),
        unknown_error_share(executors),
        config,
        [*notes, *_outside(executors)],
    )


def _server(case: RecordedRun, make: ReplicaFactory) -> SimulatedServer:
    """Return one engine, or data-parallel ranks behind vLLM's load balancer.

    The ranks of a mixture of experts run in lockstep.
    """
    env, ranks = simpy.Environment(), case.facts.engine.data_parallel
    if ranks == 1:
        return make(env, 0)
    lockstep = bool(case.facts.model_dims.experts)
    rules = FleetSettings(
        router=LeastLoadedConfig(), refresh_interval=BALANCER_S, lockstep=lockstep
    )
    router = build_router(rules.router, lambda prompt: prompt.id)
    return Fleet(env, [make] * ranks, router, rules)


def engine_of(case: RecordedRun, **changed: Any) -> tuple[VllmConfig, list[str]]:
    """Return the engine config of a recorded run, and notes about assumptions.

    ``changed`` contains fields that replace recorded values. Raises InputError for an engine other
    than vLLM, and for an invalid configuration.
    """
    setup = case.facts.engine
    if setup.engine.casefold() != "vllm":
        raise InputError(
            f"{case.folder / 'case.json'}: engine.engine: {setup.engine!r} cannot be replayed; "
            f"expected vLLM"
        )
    try:
        variant, notes = _variant(setup.version)
    except ValueError as error:
        raise InputError(f"{case.folder / 'case.json'}: engine.version: {error}") from error
    blocks, said = _blocks(case)
    nearby = bool(notes)
    notes += said
    notes += _not_recorded(case)
    longest = int((case.requests["prompt_tokens"] + case.requests["output_tokens"]).max())
    length = setup.max_model_len
    if length is None or length < longest:
        notes.append(
            f"max_model_len {'was not recorded' if length is None else 'is below what was served'}:"
            f" using {longest}, the longest request"
        )
        length = longest
    fields: dict[str, Any] = {
        "variant": variant,
        "block_size": setup.block_size,
        "num_gpu_blocks": blocks,
        "max_num_seqs": setup.max_num_seqs,
        "max_num_batched_tokens": setup.max_num_batched_tokens,
        "max_model_len": length,
        "enable_prefix_caching": setup.caches,
    }
    known = find_rules(variant).fixed
    for name in ("async_scheduling", "scheduler_reserve_full_isl"):
        value = getattr(setup, name)
        if nearby and name in known and value not in (known[name].value, None):
            notes.append(f"ignored {name} {value}: {variant} does not support it")
        elif value is not None:
            fields[name] = value
        elif name not in known:
            default = getattr(find_rules(variant), name)
            notes.append(f"{name} was not recorded: using {default}, the default of {variant}")
    try:
        return VllmConfig(**{**fields, **changed}), notes
    except (ValueError, ValidationError) as error:
        raise InputError(f"{case.folder / 'case.json'}: engine: {error}") from error


def _not_recorded(case: RecordedRun) -> list[str]:
    """Return notes about facts of a run that were not recorded."""
    setup, notes = case.facts.engine, []
    if setup.gpus > 1 and setup.link is None:
        notes.append("link was not recorded: using collective times measured on another host")
    if case.told:
        notes.append("only statistics are published: requests are not compared individually")
    if case.facts.arrivals is not None and case.table.name == "case.json":
        seed = case.facts.arrivals.seed
        notes.append(f"requests are sampled from the published statistics with seed {seed}")
    elif setup.caches and not case.has_prefixes:
        notes.append(
            "prefix_blocks.jsonl and column shared_prefix_tokens are missing: "
            "assuming no shared prefixes"
        )
    return notes


def _variant(version: str) -> tuple[Any, list[str]]:
    """Return the newest supported version up to ``version``, or else the oldest supported version.

    Raises ValueError for an invalid version.
    """
    if find_version(version) is None:
        raise ValueError(f"should be a release such as 0.19.0; found {version!r}")
    try:
        note = unrecorded_note(version)
        return find_variant(version), [note] if note else []
    except ValueError:
        older = [release for release in RELEASED if is_since(version, release)]
    taken = older[0] if older else RELEASED[-1]
    return taken, [f"vLLM {version} is not modelled; simulated with the rules of {taken}"]


def _blocks(case: RecordedRun) -> tuple[int, list[str]]:
    """Return the number of KV blocks of a recorded run, and notes.

    An unrecorded number is estimated from model and GPU. If these are unknown, the number is large
    enough for all requests at once.
    """
    setup = case.facts.engine
    if setup.num_gpu_blocks is not None:
        return setup.num_gpu_blocks, []
    try:
        hardware = make_hardware(
            find_gpu(setup.gpu),
            find_architecture(case.facts.model),
            tp=setup.tensor_parallel,
            ep=setup.expert_ranks,
            dp=max(setup.expert_ranks // setup.tensor_parallel, 1),
        )
        setting = ExecutionSettings(
            setup.engine.casefold(),
            setup.version,
            setup.max_num_batched_tokens,
            setup.max_num_seqs,
            block_size=setup.block_size,
            memory_share=setup.gpu_memory_utilization,
        )
        fit = compute_kv_capacity(hardware, setting)
        blocks, how = fit.num_gpu_blocks, "estimated from GPU, weights and gpu_memory_utilization"
    except InputError:
        blocks, how = 0, ""
    if blocks < 2:
        tokens = case.requests["prompt_tokens"] + case.requests["output_tokens"]
        blocks = 1 + sum(blocks_for(int(n), setup.block_size) for n in tokens)
        how = "enough for all requests at once, because model or GPU are unknown"
    return blocks, [f"num_gpu_blocks was not recorded: using {blocks}, {how}"]


def requests_of(case: RecordedRun) -> list[Request]:
    """Return the requests that the clients sent, in the order of the record."""
    if case.table.name == "case.json" and case.facts.arrivals is not None:
        sent = case.facts.arrivals.requests(None)
        return sorted(sent, key=lambda request: request.arrival)
    found = read_trace(case.table).requests()
    lengths = case.requests["prompt_tokens"].tolist()
    if [request.prompt_tokens for request in found] != lengths:
        raise InputError(
            f"{case.table}: only {len(found)} of {len(lengths)} rows are usable; every row must "
            "have an arrival time, a prompt length and an output length"
        )
    return found


def _check(case: RecordedRun, lives: list[RequestRecord]) -> None:
    """Raise InputError if a request finished in the record but not in the simulation."""
    for life in lives:
        if life.outcome is not Outcome.FINISHED:
            raise InputError(
                f"{case.folder}: request {life.request.id} finished in the recorded run, but is "
                f"{life.outcome} in the simulation: {life.reason or 'it never ended'}"
            )


def _row(life: RequestRecord, record: RunRecord, from_queue: bool, shift: float) -> dict[str, Any]:
    seen = life.request.arrival if life.received_at is None else life.received_at
    wait = seen - life.request.arrival if from_queue else -shift
    each, steps = tpot(life), record.steps
    return {
        "id": life.request.id,
        "ttft_ms": 1e3 * ((ttft(life) or 0.0) - wait),
        "tpot_ms": None if each is None else 1e3 * each,
        "e2e_ms": 1e3 * ((e2e(life) or 0.0) - wait),
        "queue_ms": 1e3 * (steps.decided[life.segments[0].first] - seen),
        "preemptions": len(life.preempted_at),
    }


def _outside(executors: Sequence[SimulatedExecutor]) -> list[str]:
    outside = sum(executor.outside_s for executor in executors)
    if not outside:
        return []
    share = 100 * outside / sum(executor.busy for executor in executors)
    parts = []
    for feature in sorted({feature for executor in executors for feature in executor.outside}):
        ends = [e.extremes[feature] for e in executors if feature in e.extremes]
        least, most = min(low for low, _ in ends), max(high for _, high in ends)
        low, high = executors[0].profile.range[feature]
        parts.append(f"{feature} {least:g} to {most:g} (measured: {low:g} to {high:g})")
    return [
        f"{share:.1f} % of the busy time was outside the measured range of the profile: "
        f"{'; '.join(parts)}"
    ]
