"""Request times and server state of a simulated incident, for the comparison with its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.core.outcome import Outcome
from simkv.sim.run_record import RunRecord
from simkv.sim.simulation import ScenarioRun

#: Times of a request in ms: from arrival to first scheduling, from first scheduling to first token,
#: from arrival to first token and to last token, and the mean time between tokens.
LATENCY_COLUMNS = ("queue_ms", "prefill_ms", "ttft_ms", "e2e_ms", "tpot_ms")


def rank_records(run: ScenarioRun) -> list[RunRecord]:
    """Return the record of each data-parallel rank. A single engine has one record."""
    return [lifetime.engine.record for lifetime in run.lifetimes]


def request_times(record: RunRecord, front_s: float = 0.0) -> pd.DataFrame:
    """Return a table with one row per request, ordered by id, with times in ms.

    A time is NaN if the request did not get that far. TTFT and E2E include ``front_s``, the time in
    seconds before a request reaches the engine core.
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
    """Return the running requests, waiting requests and cache usage at the times ``at`` (s).

    Requests are sums over the ranks, and the cache usage is the mean.
    """
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
