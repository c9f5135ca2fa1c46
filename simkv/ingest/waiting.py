"""What requests of the simulated incident waited for, and whether that is too much."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from simkv.measure.result import Result
from simkv.why.ledger import WAITS, Kind, totals
from simkv.why.verdicts.verdict import Verdict

#: A server is well whose requests wait for less than this share of their time, and of whom the
#: worst decile waits for less than the second share.
WELL, WORST = 0.05, 0.3
#: Nor is it well if requests take so many times as long as alone, and be it that all of them run.
SLOW = 2.0
#: Waits that the operator can do something about: not the moments between steps.
BLAMED = (WAITS | {Kind.HELD_UP, Kind.STALLED, Kind.RECOMPUTE}) - {Kind.UNSEEN}


@dataclass(frozen=True)
class Waiting:
    """What the simulated requests waited for: seconds by kind, their share of all time and that of
    the worst decile, who these are, and the seconds ``lost`` by each request."""

    kinds: dict[Kind, float]
    share: float
    worst: float
    victims: list[int]
    lost: dict[int, float]


def waiting(result: Result) -> Waiting:
    """Who waited, how long and for what; ``victims`` are the worst decile, the worst first."""
    lived, lost = {}, {}
    ledger = result.diagnosis.ledger
    for i, tiles in ledger.items():
        lived[i] = sum(tile.seconds for tile in tiles) or 1e-9
        lost[i] = sum(tile.seconds for tile in tiles if tile.kind in BLAMED)
    kinds = totals(tile for tiles in ledger.values() for tile in tiles if tile.kind in BLAMED)
    worst = sorted(lost, key=lambda i: (-lost[i], i))[: max(len(lost) // 10, 1)]
    share = sum(lost.values()) / max(sum(lived.values()), 1e-9)
    decile = float(np.mean([lost[i] / lived[i] for i in worst])) if worst else 0.0
    return Waiting(kinds, share, decile, [i for i in worst if lost[i] > 0.0], lost)


def victims_of(observed: pd.DataFrame, simulated: list[int]) -> list[int]:
    """The worst decile by how long they were seen to queue, the worst first; where nobody tells how
    long that was, those that waited longest when ``simulated``."""
    queued = observed["queue_ms"].nlargest(max(len(observed) // 10, 1))
    return queued[queued > 0].index.tolist() or simulated


def is_well(result: Result) -> bool:
    """Whether nothing is wrong: no verdict, and next to no waiting."""
    waits = waiting(result)
    calm = waits.share < WELL and waits.worst < WORST
    return not verdicts_of(result) and calm and slowdown(result) < SLOW


def slowdown(result: Result) -> float:
    """How many times as long all requests took as they would have taken one by one, alone."""
    record = result.record
    both = [
        (life.last_token - life.request.arrival, record.alone_s[i])
        for i, life in record.lives.items()
        if life.last_token is not None and record.alone_s.get(i)
    ]
    return sum(took for took, _ in both) / (sum(alone for _, alone in both) or 1.0) if both else 1.0


def verdicts_of(result: Result) -> list[Verdict]:
    """What went wrong; a request that was too long for its client is no fault of the server."""
    return [verdict for verdict in result.diagnosis.verdicts if verdict.name != "timed out"]
