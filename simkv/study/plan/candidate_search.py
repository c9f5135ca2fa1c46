"""Search for the first candidate that meets the objectives.

Candidates are numbered in an order in which later candidates should do better: more replicas, a
larger cache, a lower rate. ``known`` contains the candidates tried so far, and whether they meet
the objectives. The next candidates depend only on ``known``, so an interrupted search resumes with
the same steps.

    known = {}
    while probes := next_probes(known, 20):
        known |= {probe: meets(probe) for probe in probes}
    find_edge(known)

The results need not be monotone: a larger cache may cause a request to starve. Therefore the
``neighbours`` candidates after the answer must also meet the objectives. The same number of
candidates before the answer is also tried. If the results are not monotone, the number of
neighbours doubles.
"""

from __future__ import annotations

from collections.abc import Mapping

KnownAnswers = Mapping[int, bool]

#: Number of candidates tried on each side of an answer.
NEIGHBOURS = 2
#: Number of candidates tried at a time, so that several cores are used. It does not depend on the
#: number of cores, so that all machines try the same candidates.
PROBES_AT_ONCE = 2
#: Number of additional candidates, spread over the range, to try if no candidate tried so far meets
#: the objectives.
SCAN_PROBES = 5


def next_probes(
    known: KnownAnswers,
    count: int,
    neighbours: int = NEIGHBOURS,
    width: int = PROBES_AT_ONCE,
    hint: int | None = None,
) -> tuple[int, ...]:
    """Return which of ``count`` candidates to try next. The result is empty at the end of the
    search.

    The search finds an interval that contains the answer, bisects it and tries the neighbours of
    the answer. With a ``hint``, the search starts at this candidate and continues in growing
    strides.
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
    """Return up to ``width`` evenly spaced candidates between two others."""
    places = [low + (high - low) * step // (width + 1) for step in range(1, width + 1)]
    return tuple(sorted({min(max(place, low + 1), high - 1) for place in places}))


def find_edge(known: KnownAnswers, neighbours: int = NEIGHBOURS) -> int | None:
    """Return the first candidate that meets the objectives and is followed by no failing candidate.

    Only the next ``neighbours`` candidates are considered, or twice as many if the results are not
    monotone. Return None if there is no such candidate.
    """
    reach = _reach(known, neighbours)
    bad = [i for i in known if not known[i]]
    for found in sorted(i for i in known if known[i]):
        if not any(found < i <= found + reach for i in bad):
            return found
    return None


def find_nonmonotone_candidates(known: KnownAnswers) -> list[int]:
    """Return candidates that fail the objectives although an earlier candidate meets them."""
    first = min((i for i in known if known[i]), default=None)
    return sorted(i for i in known if first is not None and i > first and not known[i])


def _reach(known: KnownAnswers, neighbours: int) -> int:
    return 2 * neighbours if find_nonmonotone_candidates(known) else neighbours


def _unknown(known: KnownAnswers, wanted: list[int], most: int) -> tuple[int, ...]:
    return tuple([i for i in wanted if i not in known][:most])


def _spread(count: int) -> list[int]:
    """Return evenly spaced candidates between the first and the last, in descending order."""
    return [count - 1 - count * step // (SCAN_PROBES + 1) for step in range(1, SCAN_PROBES + 1)]


def _upwards(known: KnownAnswers, count: int) -> tuple[int, ...]:
    """Return the next candidates above the known candidates, which all fail."""
    highest, stride = max(known), max(known) - min(known) + 1
    steps = {min(highest + stride, count - 1), min(highest + 3 * stride, count - 1)}
    return tuple(sorted(steps - {highest}))


def _downwards(known: KnownAnswers) -> tuple[int, ...]:
    """Return the next candidates below the known candidates, which all meet the objectives."""
    lowest, stride = min(known), max(known) - min(known) + 1
    return tuple(sorted({max(lowest - stride, 0), max(lowest - 3 * stride, 0)}))
