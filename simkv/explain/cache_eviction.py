"""Prefixes that were evicted between two turns of a session, and the requests that evicted them.

lost = find_lost_prefixes(record)
evictors = find_evictors(record, lost)  # tokens by request, the largest share first
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from simkv.explain.computed_runs import compute_runs
from simkv.sim.run_record import RunRecord


class LostPrefix(NamedTuple):
    """Prefix of a prompt that was computed again, because the KV of an earlier turn was evicted.

    ``tokens`` is the number of tokens computed again. ``prefix`` is the number of prompt tokens
    that the earlier turn had computed. ``before`` is the last step of the earlier turn, and
    ``after`` is the first step of the request, as row numbers of the step log. ``idle`` is the time
    between these steps in seconds.
    """

    request: int
    tokens: int
    prefix: int
    before: int
    after: int
    idle: float


def find_lost_prefixes(record: RunRecord) -> list[LostPrefix]:
    """Return the prefixes of earlier turns that the cache had evicted when requests needed them.

    ``record`` must be the record of one replica. The result is empty without a prefix cache.
    """
    if not record.prefix_cache:
        return []
    found, log = [], record.steps
    for i, resumed in record.resumed.items():
        life = record.requests[i]
        if not life.chunk_rows:
            continue
        first = life.chunks[0]
        if (tokens := resumed.tokens - first.context) > 0:
            idle = log.start[first.row] - log.end[resumed.row]
            found.append(LostPrefix(i, tokens, resumed.tokens, resumed.row, first.row, idle))
    return found


def find_moved_prefixes(fleet: RunRecord, replica: RunRecord) -> dict[int, int]:
    """Return the tokens that requests computed again because another replica had computed them.

    ``fleet`` is the merged record of all replicas. The keys are ids of requests of ``replica``. The
    numbers are upper bounds, because the other replica may have evicted the tokens.
    """
    if not replica.prefix_cache:
        return {}
    found = {}
    for i, resumed in fleet.resumed.items():
        life = replica.requests.get(i)
        if life is None or not life.chunk_rows:
            continue
        here = replica.resumed.get(i)
        known = max(life.chunks[0].context, here.tokens if here else 0)
        if resumed.tokens > known:
            found[i] = resumed.tokens - known
    return found


def find_evictors(record: RunRecord, lost: Sequence[LostPrefix]) -> list[tuple[int, float]]:
    """Return the requests that evicted the prefixes ``lost``, with their numbers of evicted tokens.

    The tokens of a lost prefix are divided among the requests that computed tokens between the two
    turns, in proportion to the computed tokens. The request with the most evicted tokens comes
    first.
    """
    if not lost:
        return []
    ids, first, last, tokens = [], [], [], []
    for i, life in record.requests.items():
        for run in compute_runs(life):
            ids.append(i)
            first.append(run.first)
            last.append(run.last + 1)
            tokens.append(run.tokens)
    size = len(record.steps)
    amount, begin, end = np.array(tokens, float), np.array(first), np.array(last)
    change = np.zeros(size + 1)
    np.add.at(change, begin, amount)
    np.subtract.at(change, end, amount)
    computed = np.concatenate([[0.0], np.cumsum(np.cumsum(change)[:size])])
    weight = np.zeros(size + 1)
    own: dict[int, float] = {}
    for prefix in lost:
        mine = next(c.tokens for c in record.requests[prefix.request].chunks)
        others = float(computed[prefix.after + 1] - computed[prefix.before + 1]) - mine
        if others < 0.5:
            continue
        share = prefix.tokens / others
        weight[prefix.before + 1] += share
        weight[prefix.after + 1] -= share
        own[prefix.request] = mine * share
    upto = np.concatenate([[0.0], np.cumsum(np.cumsum(weight)[:size])])
    sums: dict[int, float] = {i: -evicted for i, evicted in own.items()}
    for i, evicted in zip(ids, (amount * (upto[end] - upto[begin])).tolist(), strict=True):
        sums[i] = sums.get(i, 0.0) + evicted
    found = [(i, evicted) for i, evicted in sums.items() if evicted > 0.5]
    return sorted(found, key=lambda pair: (-round(pair[1], 6), pair[0]))


def count_idle_tokens(record: RunRecord) -> int:
    """Return the largest number of tokens in the prefixes of idle sessions at any time.

    A cache with additional room for these tokens would not evict any prefix before the next turn. A
    prefix that several sessions share counts for each session.
    """
    size = len(record.steps)
    change = np.zeros(size + 1, np.int64)
    for i, resumed in record.resumed.items():
        life = record.requests[i]
        if life.chunk_rows and (after := life.chunks[0].row) > resumed.row:
            change[resumed.row + 1] += resumed.tokens
            change[after + 1] -= resumed.tokens
    return int(np.cumsum(change).max(initial=0))
