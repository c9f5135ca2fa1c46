"""Classification of requests whose clients gave up: starved or timed out.

A request has *starved* if it waited and would have finished within its timeout in isolation, on the
same engine and profile. Other requests have *timed out*; ``RunRecord.shortfalls`` then states the
additional time that they needed. Only requests whose clients gave up are simulated in isolation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, log
from typing import NamedTuple

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Scheduler
from simkv.costs.step_load import Executor, StepLoad, count_attention_pairs
from simkv.explain.computed_runs import compute_runs
from simkv.explain.ledger_kinds import WAIT_KINDS, LedgerKind
from simkv.explain.verdicts.verdict import MAX_TIMEOUT_MULTIPLE, describe_shortfall
from simkv.explain.wait_ledger import build_ledger
from simkv.scenario.scenario import Scenario
from simkv.sim.run_record import RequestRecord, RunRecord, Shortfall
from simkv.sim.simulation import (
    ExecutorChange,
    ReplicaSpec,
    ScenarioRun,
    build_executor,
    simulate_scenario,
)
from simkv.workload.clients import Clients

#: Kinds that count as waiting. A request that the scheduler never received has waited as well.
WAITED_KINDS = WAIT_KINDS - {LedgerKind.UNSEEN} | {LedgerKind.HELD_UP}
#: Maximum number of simulations in isolation. If more are needed, the requests whose estimated
#: duration is farthest from their timeout are classified by the estimate.
MAX_ISOLATED_RUNS = 100
#: Arrival time (s) in the isolated simulation of a request that arrived after the engine was ready.
LATE_ARRIVAL_S = 1.0


class IsolatedRequest(NamedTuple):
    """Inputs that determine the duration of a request in isolation.

    ``request`` is a copy of the request with id 0, which arrives at 0 s or at ``LATE_ARRIVAL_S``.
    ``ready`` is the time from the arrival of the request until the engine is ready, in seconds.
    ``replica`` is the index of a replica with the same setup as the serving replica.
    """

    request: Request
    ready: float
    replica: int

    @property
    def timeout(self) -> float:
        """Timeout of the client in seconds, or infinity."""
        return self.request.timeout or inf


@dataclass(frozen=True)
class IsolatedRuns:
    """Inputs for simulations of single requests in isolation.

    ``scheduler`` is copied before each run.
    """

    scenario: Scenario
    replicas: Sequence[ReplicaSpec]
    leaping: bool = True
    scheduler: Scheduler | None = None
    changed: ExecutorChange | None = None

    def shape(self, run: ScenarioRun, request: Request) -> IsolatedRequest:
        """Return the inputs for a simulation of ``request`` in isolation, on the last replica that
        served it.
        """
        replica = 0
        if run.fleet and not self._split and (places := run.fleet.sent.get(request.id)):
            spec = self.replicas[run.fleet.lifetimes[places[-1]].replica]
            replica = next(i for i, other in enumerate(self.replicas) if other is spec)
        ready = max(self.scenario.engine_ready - request.arrival, 0.0)
        arrival = LATE_ARRIVAL_S if request.arrival > self.scenario.engine_ready else 0.0
        plain = replace(request, id=0, arrival=arrival, priority=0, segments=())
        return IsolatedRequest(plain, ready, replica)

    @property
    def _split(self) -> bool:
        return self.scenario.fleet is not None and self.scenario.fleet.disaggregated

    def alone(self, shape: IsolatedRequest) -> RunRecord:
        """Simulate a request in isolation and return the record of the run.

        The simulation is cut off after ``MAX_TIMEOUT_MULTIPLE`` times the timeout of the request.
        It uses one replica, or the whole fleet if prefill and decode are disaggregated.
        """
        horizon = shape.request.arrival + MAX_TIMEOUT_MULTIPLE * shape.timeout
        changes = {"engine_ready": shape.ready, "horizon": horizon}
        scenario = self.scenario.model_copy(update={**changes, "timeout": None})
        replicas = self.replicas
        if not self._split:
            scenario = scenario.model_copy(update={"fleet": None})
            replicas = [replicas[shape.replica]]
        return simulate_scenario(
            scenario,
            replicas,
            leaping=self.leaping,
            scheduler=deepcopy(self.scheduler),
            changed=self.changed,
            sent=Clients([replace(shape.request, timeout=None)]),
        ).record

    @cached_property
    def _executors(self) -> Sequence[Executor]:
        return [build_executor(self.scenario, spec, self.changed) for spec in self.replicas]

    def estimate_seconds(self, shape: IsolatedRequest) -> float:
        """Return an estimate of the duration in isolation, in seconds.

        The estimate is one prefill, and decodes at batch size 1 with the mean context length.
        """
        executor = self._executors[shape.replica]
        prompt, decodes = shape.request.prompt_tokens, shape.request.output_tokens - 1
        prefill = executor.run(StepLoad(1, prompt, 0, 0, 0, count_attention_pairs(prompt, 0), 1))
        decode = executor.run(StepLoad(0, 0, 0, 1, prompt + decodes // 2, 0, 1)) if decodes else 0.0
        return shape.ready + prefill + decodes * decode


def classify_timeouts(run: ScenarioRun, world: IsolatedRuns) -> None:
    """Change the outcome of starved requests that could not have finished in time to ``TIMED_OUT``.

    A request could not have finished in time if it times out even in isolation, or never waited.
    All records of ``run`` are changed. ``RunRecord.shortfalls`` gets the additional time that the
    requests needed.
    """
    record = run.record
    by_shape: dict[IsolatedRequest, list[RequestRecord]] = {}
    for life in record.requests.values():
        if life.outcome is Outcome.STARVED:
            by_shape.setdefault(world.shape(run, life.request), []).append(life)
    if not by_shape:
        return
    roughly = {shape: world.estimate_seconds(shape) for shape in by_shape}
    waited = set(_waited(run, [life for lives in by_shape.values() for life in lives]))
    nearest = sorted(by_shape, key=lambda shape: abs(log((roughly[shape] or 1e-9) / shape.timeout)))
    for shape in nearest[:MAX_ISOLATED_RUNS]:
        solo = world.alone(shape)
        end = _end(solo)
        for life in by_shape[shape]:
            if end is None or end >= shape.timeout or life.request.id not in waited:
                _time_out(run, life, _shortfall(record, life, solo, end))
    for shape in nearest[MAX_ISOLATED_RUNS:]:
        for life in by_shape[shape]:
            if roughly[shape] >= shape.timeout or life.request.id not in waited:
                _time_out(run, life, None)


def _waited(run: ScenarioRun, lives: Sequence[RequestRecord]) -> Iterator[int]:
    ids = {life.request.id for life in lives}
    for lifetime in run.lifetimes:
        here = lifetime.engine.record
        for i, tiles in build_ledger(here, [i for i in here.requests if i in ids]).items():
            if here.requests[i].received_at is None or any(
                tile.kind in WAITED_KINDS for tile in tiles
            ):
                yield i
    known = {i for lifetime in run.lifetimes for i in lifetime.engine.record.requests}
    yield from ids - known  # these requests waited for any replica to start


def _end(solo: RunRecord) -> float | None:
    """Return the E2E latency (s) of the only request in ``solo``, or None if it did not finish."""
    life = solo.requests[0]
    if life.outcome is not Outcome.FINISHED or life.last_token is None:
        return None
    return life.last_token - life.request.arrival


def _shortfall(
    record: RunRecord, life: RequestRecord, solo: RunRecord, end: float | None
) -> Shortfall:
    assert life.ended_at is not None
    lasted = life.ended_at - life.request.arrival
    there = _reached_at(solo, solo.requests[0], _reached(record, life, life.ended_at))
    company = 0.0 if there is None else max(lasted - there, 0.0)
    lacked = None if end is None or there is None else end - there
    return Shortfall(end, lacked, company)


def _rows(life: RequestRecord) -> Iterator[tuple[int, int, int]]:
    """Yield the steps of a request as row numbers, with its cached tokens before and after each
    step.
    """
    for run in compute_runs(life):
        context = run.context
        for row in range(run.first, run.last + 1):
            yield row, context, context + run.tokens
            context += run.tokens


def _reached(record: RunRecord, life: RequestRecord, until: float) -> float:
    """Return the largest number of cached tokens of the request until the time ``until`` (s).

    A step in progress counts in proportion to the elapsed time.
    """
    log, most = record.steps, 0.0
    for row, before, after in _rows(life):
        if log.start[row] >= until:
            break
        share = min((until - log.start[row]) / max(log.end[row] - log.start[row], 1e-12), 1.0)
        most = max(most, before + share * (after - before))
    return most


def _reached_at(record: RunRecord, life: RequestRecord, tokens: float) -> float | None:
    """Return the seconds from arrival until ``tokens`` tokens were computed, or None."""
    log = record.steps
    for row, before, after in _rows(life):
        if after >= tokens:
            share = max(tokens - before, 0.0) / (after - before)
            reached = log.start[row] + share * (log.end[row] - log.start[row])
            return reached - life.request.arrival
    return None


def _time_out(run: ScenarioRun, life: RequestRecord, lacked: Shortfall | None) -> None:
    """Set the outcome of the request to ``TIMED_OUT`` in every record that contains it."""
    i = life.request.id
    reason = "the client gave up" + (
        f": {describe_shortfall(lacked, life.request.timeout or 0.0)}" if lacked else ""
    )
    for record in (run.record, *(lifetime.engine.record for lifetime in run.lifetimes)):
        here = record.requests.get(i)
        if here is not None and (here is life or here.outcome is Outcome.STARVED):
            here.outcome, here.reason = Outcome.TIMED_OUT, reason
            if lacked:
                record.shortfalls[i] = lacked
