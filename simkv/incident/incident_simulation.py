"""The incident simulated: what each request took, beside what it was seen to take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.costs.cost_profile import CostProfile
from simkv.scenario.scenario import Scenario
from simkv.sim.run_record import RunRecord
from simkv.sim.simulation import ReplicaSpec, ScenarioRun, simulate_scenario
from simkv.workload.clients import Clients

#: What is told of a request, in ms: until it is first scheduled, from there to its first token, to
#: its first and last token, and between two.
LATENCY_COLUMNS = ("queue_ms", "prefill_ms", "ttft_ms", "e2e_ms", "tpot_ms")


def simulate_incident(
    scenario: Scenario, profile: CostProfile, requests: Sequence[Request] | None = None
) -> ScenarioRun:
    """A run on engines whose steps cost what ``profile`` says.

    ``requests`` come in place of the scenario's own.
    """
    spec = ReplicaSpec(scenario.engine, profile, profile.name)
    sent = None if requests is None else Clients(requests)
    ranks = scenario.fleet.size if scenario.fleet else 1
    return simulate_scenario(scenario, [spec] * ranks, sent=sent)


def rank_records(run: ScenarioRun) -> list[RunRecord]:
    """The records of each rank, in the order in which that of the run has their steps."""
    return [stint.engine.record for stint in run.lifetimes]


def request_times(record: RunRecord, front_s: float = 0.0) -> pd.DataFrame:
    """A row per request by id, in ms as spans have them; NaN for what it did not reach.

    ``front_s`` is what passes before the engine core has a request; TTFT and E2E count it.
    """
    starts = record.steps.start
    rows = {}
    for i, life in record.requests.items():
        begun = starts[life.segments[0].first] if life.segments else np.nan
        arrival = life.request.arrival
        first = np.nan if life.first_token is None else life.first_token
        last = (
            np.nan
            if life.last_token is None or life.outcome is not Outcome.FINISHED
            else life.last_token
        )
        steps = life.tokens - 1
        rows[i] = (
            begun - arrival,
            first - begun,
            first - arrival + front_s,
            last - arrival + front_s,
            (last - first) / steps if steps > 0 else np.nan,
        )
    table = pd.DataFrame.from_dict(rows, orient="index", columns=list(LATENCY_COLUMNS)) * 1e3
    return table.sort_index()


def sample_state(parts: Sequence[RunRecord], at: npt.NDArray[np.float64]) -> pd.DataFrame:
    """Running, waiting and the share of the cache in use at some times (s), as a log tells them, of
    all ranks together."""
    found = [_at_times(record, at) for record in parts]
    whole = found[0]
    for other in found[1:]:
        whole = whole + other
    return whole.assign(usage=whole["usage"] / len(found))


def _at_times(record: RunRecord, at: npt.NDArray[np.float64]) -> pd.DataFrame:
    log = record.steps
    ends = np.frombuffer(log.decided, np.float64) if len(log) else np.zeros(0)
    row = np.searchsorted(ends, at, "right") - 1
    seen = row >= 0
    row = np.maximum(row, 0)

    def column(values: Sequence[int]) -> npt.NDArray[np.float64]:
        found = np.asarray(values, np.float64)
        return np.where(seen, found[row], 0.0) if len(found) else np.zeros(len(at))

    done = np.asarray(log.end, np.float64)
    over = np.zeros(len(at), bool) if not len(done) else at > done[-1]
    free = column(log.free_blocks)
    usage = np.where(seen, 1 - free / record.num_blocks, 0.0)
    stuck = record.engine_halt is not None
    running = np.where(over & ~stuck, 0.0, column(log.running))
    return pd.DataFrame(
        {"running": running, "waiting": column(log.waiting), "usage": np.where(over, 0.0, usage)}
    )
