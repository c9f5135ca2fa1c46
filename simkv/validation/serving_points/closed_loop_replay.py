"""Replay a measured point: closed-loop clients on the scheduler of its engine.

The client sends ``concurrency`` requests at once, and another request whenever one finishes. The
warm-up of the engine is simulated only if prefixes are cached (``warm_up``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import simpy

from simkv.core.outcome import Outcome
from simkv.core.request import Request, Segment
from simkv.costs.cost_profile import CostProfile, ErrorSource
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.metrics.run_metrics import tpot, ttft
from simkv.scenario.fleet_section import FleetSettings, LeastLoadedConfig
from simkv.schedulers.engine_registry import build_scheduler
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.fleet.routers import build_router
from simkv.validation.serving_points.client_lengths import INFERENCEMAX_RANGE, sample_lengths
from simkv.validation.serving_points.latency_gradients import Floats, slopes
from simkv.validation.serving_points.measured_rows import Latency
from simkv.workload.clients import Clients, Dependency


@dataclass(frozen=True)
class ClosedLoop:
    """Workload of a closed-loop benchmark: ``prompts`` requests, at most ``concurrency`` in flight.

    Lengths are sampled between two fractions (``shares``) of ``isl`` prompt tokens and ``osl``
    output tokens. One in ``fresh`` prompts is not in the prefix cache. ``warm_up`` is the number of
    requests before the counted ones. The engine first checks its queue after ``cold_s`` seconds.
    """

    isl: int
    osl: int
    concurrency: int
    prompts: int
    shares: tuple[float, float] = INFERENCEMAX_RANGE
    fresh: int = 1
    warm_up: int = 0
    cold_s: float = 0.0

    def warm_up_requests(self) -> list[Request]:
        """Return the warm-up requests, which have equal prompts and precede the counted
        requests.
        """
        prompt = int(self.isl * self.shares[1])
        return [_request(number, prompt, self.osl, "cached") for number in range(self.warm_up)]

    def counted(self, first: int) -> list[Request]:
        """Return the requests whose latency is counted. Their ids start at ``first``."""
        lengths = sample_lengths(self.prompts, self.isl, self.osl, self.shares)
        return [
            _request(first + i, prompt, output, "cached" if i % self.fresh else "")
            for i, (prompt, output) in enumerate(lengths)
        ]


def _request(number: int, prompt: int, output: int, stream: str) -> Request:
    """Return a request that arrives at 0 s.

    Requests with the same ``stream`` share their prompt prefix, unless it is empty.
    """
    return Request(
        id=number,
        prompt_tokens=prompt,
        max_tokens=output,
        ignore_eos=True,
        segments=(Segment(stream, 0, prompt),) if stream else (),
        output_tokens=output,
    )


@dataclass(frozen=True)
class PointReplay:
    """Mean latencies of a simulated run, or the reason (``why``) for missing latencies.

    ``moved`` has the derivatives of mean TTFT and mean TPOT with respect to each constant in
    ``FITTED_CONSTANTS``, in ms per unit of the constant. ``sources`` are the sources of error of
    the step costs. ``unmeasured`` is true if some kernels were not measured.
    """

    latency: Latency | None
    preemptions: int = 0
    why: str = ""
    moved: Floats | None = None
    sources: tuple[ErrorSource, ...] = ()
    unmeasured: bool = False


def replay_point(
    engine: Any, profile: CostProfile, load: ClosedLoop, ranks: int = 1, *, leaping: bool = True
) -> PointReplay:
    """Simulate the workload ``load`` on an engine with the step costs of ``profile``.

    ``ranks`` is the number of data-parallel ranks in lockstep. Each rank serves the requests that
    are routed to it.
    """
    env = simpy.Environment()

    def make(env: simpy.Environment, rank: int) -> Engine:
        executor = SimulatedExecutor(profile)
        return Engine(
            env, build_scheduler(engine), executor, load.cold_s, leaping=leaping, rank=rank
        )

    server: Engine | Fleet = make(env, 0)
    if ranks > 1:
        rules = FleetSettings(router=LeastLoadedConfig(), lockstep=True)
        server = Fleet(env, [make] * ranks, build_router(rules.router, lambda p: p.id), rules)
    before = load.warm_up_requests()
    counted = load.counted(len(before))
    # The counted requests arrive when the last warm-up request finishes.
    after = {r.id: Dependency((before[-1].id,), 0.0) for r in counted} if before else {}
    record = run_clients(server, Clients([*before, *counted], after, load.concurrency), None)
    lives = [record.requests[r.id] for r in counted if r.id in record.requests]
    unserved = len(counted) - sum(life.outcome is Outcome.FINISHED for life in lives)
    if unserved:
        why = next((life.reason for life in lives if life.reason), "the engine is deadlocked")
        return PointReplay(None, why=f"{unserved} of {len(counted)} requests did not finish: {why}")
    preempted = sum(len(life.preempted_at) for life in lives)
    first = math.fsum(ttft(life) or 0.0 for life in lives) / len(lives)
    found = [value for life in lives if (value := tpot(life)) is not None]
    per_token = math.fsum(found) / len(found) if found else 0.0
    parts = list(server.replica_records.values()) if isinstance(server, Fleet) else [record]
    moved = slopes([part.steps for part in parts], lives, profile)
    return PointReplay(Latency(1e3 * first, 1e3 * per_token), preempted, moved=moved)
