"""Summarize the waiting of requests in a simulated incident, and decide whether the server is
healthy.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from simkv.explain.ledger_kinds import WAIT_KINDS, LedgerKind
from simkv.explain.verdicts.unserved_requests import TimedOutRequests
from simkv.explain.verdicts.verdict import Verdict
from simkv.explain.wait_ledger import total_by_kind
from simkv.metrics.run_metrics import compute_slowdown
from simkv.metrics.run_result import RunResult

#: A server is healthy if requests wait for less than the first fraction of their time, and the 10 %
#: of requests that wait longest for less than the second fraction.
MAX_WAIT_SHARE, MAX_VICTIM_WAIT_SHARE = 0.05, 0.3
#: Slowdown compared with requests in isolation above which a server is unhealthy even without
#: waits.
MAX_SLOWDOWN = 2.0
#: Kinds of waiting that an operator can influence; the time between steps is excluded.
BLAMED_KINDS = (WAIT_KINDS | {LedgerKind.HELD_UP, LedgerKind.STALLED, LedgerKind.RECOMPUTE}) - {
    LedgerKind.UNSEEN
}


@dataclass(frozen=True)
class WaitSummary:
    """Waiting of the simulated requests.

    ``kinds`` is the waiting time in seconds by kind, and ``lost`` is the waiting time by request.
    ``share`` is the fraction of time that all requests spent waiting. ``worst`` is the mean
    fraction for the 10 % of requests that wait longest. ``victims`` lists these requests.
    """

    kinds: dict[LedgerKind, float]
    share: float
    worst: float
    victims: list[int]
    lost: dict[int, float]


def summarize_waits(result: RunResult) -> WaitSummary:
    """Summarize waiting by request and by kind of waiting."""
    lived, lost = {}, {}
    ledger = result.diagnosis.ledger
    for i, tiles in ledger.items():
        lived[i] = sum(tile.seconds for tile in tiles) or 1e-9
        lost[i] = sum(tile.seconds for tile in tiles if tile.kind in BLAMED_KINDS)
    kinds = total_by_kind(
        tile for tiles in ledger.values() for tile in tiles if tile.kind in BLAMED_KINDS
    )
    worst = sorted(lost, key=lambda i: (-lost[i], i))[: max(len(lost) // 10, 1)]
    share = sum(lost.values()) / max(sum(lived.values()), 1e-9)
    decile = float(np.mean([lost[i] / lived[i] for i in worst])) if worst else 0.0
    return WaitSummary(kinds, share, decile, [i for i in worst if lost[i] > 0.0], lost)


def find_victims(observed: pd.DataFrame, simulated: list[int]) -> list[int]:
    """Return the 10 % of requests with the longest observed queue times, the longest first.

    Without observed queue times, return the ``simulated`` victims.
    """
    queued = observed["queue_ms"].nlargest(max(len(observed) // 10, 1))
    return queued[queued > 0].index.tolist() or simulated


def is_healthy(result: RunResult) -> bool:
    """Return whether the run has no verdict and little waiting."""
    waits = summarize_waits(result)
    calm = waits.share < MAX_WAIT_SHARE and waits.worst < MAX_VICTIM_WAIT_SHARE
    return not server_verdicts(result) and calm and compute_slowdown(result.record) < MAX_SLOWDOWN


def server_verdicts(result: RunResult) -> list[Verdict]:
    """Return the verdicts except ``timed_out``, which is not the server's fault."""
    found = result.diagnosis.verdicts
    return [verdict for verdict in found if verdict.name != TimedOutRequests.name]
