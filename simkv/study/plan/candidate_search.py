"""Where to look next for the first candidate that meets the objectives.

The candidates are numbers 0, 1, 2 … in an order in which later ones should do better: more
replicas, a larger cache, a lower rate. What has been found out is ``known``: whether each candidate
that was tried meets the objectives. Nothing here runs anything, and what is tried next depends on
``known`` alone, so that a search that was interrupted goes on as if it had not been.

    known = {}
    while probes := next_probes(known, 20):
        known |= {probe: meets(probe) for probe in probes}
    edge(known)

Schedulers are not monotone: a larger cache may starve somebody whom a smaller one served. So a
candidate that meets the objectives counts only if its neighbours on the safe side do too, and the
neighbours on the other side are tried as well; a surprise there doubles how far is looked.
"""

from __future__ import annotations

from collections.abc import Mapping

KnownAnswers = Mapping[int, bool]

#: So many candidates on both sides of an answer are tried.
NEIGHBOURS = 2
#: So many candidates are tried at a time where one would do, for there is more than one core. It
#: does not follow the number of cores, so that all machines try the same ones.
PROBES_AT_ONCE = 2
#: If none of those tried meets the objectives, so many more in between are.
SCAN_PROBES = 5


def next_probes(
    known: KnownAnswers,
    count: int,
    neighbours: int = NEIGHBOURS,
    width: int = PROBES_AT_ONCE,
    hint: int | None = None,
) -> tuple[int, ...]:
    """The candidates of ``count`` to try next; none if the search is over.

    Bracket, bisect, check the neighbours. A bracket's ends need not have been tried: before the
    first candidate none meets the objectives, after the last one all would. With a ``hint`` it
    begins there, and goes on in growing strides: from 0 at first 0, then 1 and 3, then 7 and 15.
    """
    if not known:
        if hint is None:
            return _between(-1, count, width)
        return tuple(sorted({max(hint - 1, 0), min(hint, count - 1)}))
    found = find_edge(known, neighbours)
    if found is None:
        low = max(known)
        if low == count - 1:
            return _unknown(known, _spread(count), width)
        return _between(low, count, width) if hint is None else _upwards(known, count)
    low = max((i for i in known if i < found and not known[i]), default=-1)
    if found - low == 1:
        reach = _reach(known, neighbours)
        around = range(max(found - reach, 0), min(found + reach + 1, count))
        return tuple(i for i in around if i not in known)
    if low == -1 and hint is not None and 0 not in known:
        return _downwards(known)
    return _between(low, found, width)


def _between(low: int, high: int, width: int) -> tuple[int, ...]:
    """Up to ``width`` places between two others, evenly."""
    places = [low + (high - low) * step // (width + 1) for step in range(1, width + 1)]
    return tuple(sorted({min(max(place, low + 1), high - 1) for place in places}))


def find_edge(known: KnownAnswers, neighbours: int = NEIGHBOURS) -> int | None:
    """The first candidate that meets the objectives, as does all that is known just above it."""
    reach = _reach(known, neighbours)
    bad = [i for i in known if not known[i]]
    for found in sorted(i for i in known if known[i]):
        if not any(found < i <= found + reach for i in bad):
            return found
    return None


def find_nonmonotone_candidates(known: KnownAnswers) -> list[int]:
    """Candidates that do not meet the objectives although an earlier one does."""
    first = min((i for i in known if known[i]), default=None)
    return sorted(i for i in known if first is not None and i > first and not known[i])


def _reach(known: KnownAnswers, neighbours: int) -> int:
    return 2 * neighbours if find_nonmonotone_candidates(known) else neighbours


def _unknown(known: KnownAnswers, wanted: list[int], most: int) -> tuple[int, ...]:
    return tuple([i for i in wanted if i not in known][:most])


def _spread(count: int) -> list[int]:
    """Places evenly between the ends, the upper ones first."""
    return [count - 1 - count * step // (SCAN_PROBES + 1) for step in range(1, SCAN_PROBES + 1)]


def _upwards(known: KnownAnswers, count: int) -> tuple[int, ...]:
    """Nothing holds so far, and the end has not been tried: in growing strides towards it."""
    highest, stride = max(known), max(known) - min(known) + 1
    steps = {min(highest + stride, count - 1), min(highest + 3 * stride, count - 1)}
    return tuple(sorted(steps - {highest}))


def _downwards(known: KnownAnswers) -> tuple[int, ...]:
    """All that was tried holds, and the end has not been: in growing strides towards it."""
    lowest, stride = min(known), max(known) - min(known) + 1
    return tuple(sorted({max(lowest - stride, 0), max(lowest - 3 * stride, 0)}))
