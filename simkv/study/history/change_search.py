"""Find neighbouring revisions of a history between which the result of a scenario changes.

Revisions that cannot be run are skipped. A skipped revision may then also have caused the change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, TypeVar

Found = TypeVar("Found")


@dataclass(frozen=True)
class SkippedRevision:
    """A revision that cannot be run, with the reason."""

    reason: str


@dataclass(frozen=True)
class HistoryChange(Generic[Found]):
    """A change of the result between two revisions.

    ``before`` and ``after`` are the indices of the revisions. All revisions between them were
    skipped.
    """

    before: int
    after: int
    result_before: Found
    result_after: Found

    @property
    def candidates(self) -> range:
        """Indices of the revisions that may have caused the change."""
        return range(self.before + 1, self.after + 1)


@dataclass(frozen=True)
class HistorySearch(Generic[Found]):
    """Results by revision index, the skipped revisions, and the changes in order."""

    results: dict[int, Found]
    skipped: dict[int, SkippedRevision]
    changes: tuple[HistoryChange[Found], ...]


def find_changes(
    count: int,
    run: Callable[[int], Found | SkippedRevision],
    state: Callable[[Found], str],
    samples: int = 2,
) -> HistorySearch[Found]:
    """Return the changes of a result among the revisions 0 to ``count - 1``.

    ``state`` returns the compared property of a result. First, ``samples`` evenly spaced revisions
    are run. Each interval between two of them is bisected if their states differ. Changes in the
    other intervals are not detected.
    """
    results: dict[int, Found] = {}
    skipped: dict[int, SkippedRevision] = {}

    def has_result(index: int) -> bool:
        if index not in results and index not in skipped:
            found = run(index)
            if isinstance(found, SkippedRevision):
                skipped[index] = found
            else:
                results[index] = found
        return index in results

    parts = max(samples, 2) - 1
    for part in range(parts + 1):
        has_result(round((count - 1) * part / parts))
    changes = []
    for low, high in pairwise(sorted(results)):
        if state(results[low]) == state(results[high]):
            continue
        while (middle := next(filter(has_result, _between(low, high)), None)) is not None:
            if state(results[middle]) == state(results[low]):
                low = middle
            else:
                high = middle
        changes.append(HistoryChange(low, high, results[low], results[high]))
    return HistorySearch(results, skipped, tuple(changes))


def _between(low: int, high: int) -> Iterator[int]:
    """Yield all indices between two others, in the order in which to try them.

    The order is the middle, its neighbors at the distances 1, 2, 4 and so on, and the rest. It
    needs few runs if many successive revisions cannot be run.
    """
    middle, seen = (low + high) // 2, set[int]()
    distances = [0] + [2**power for power in range((high - low).bit_length())]
    around = [middle + sign * distance for distance in distances for sign in (-1, 1)]
    for index in [*around, *range(low + 1, high)]:
        if low < index < high and index not in seen:
            seen.add(index)
            yield index
