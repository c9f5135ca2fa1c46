"""A candidate for the smallest workload, and the ways to make its rows plainer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from simkv.scenario.scenario import Scenario
from simkv.search.whatif.rows import changed, renumbered
from simkv.workload.forms import Listed
from simkv.workload.workload import Workload


@dataclass(frozen=True)
class Draft:
    """A candidate: rows with the numbers that they had, and a scenario that says all else."""

    scenario: Scenario
    numbers: tuple[int, ...]
    rows: tuple[Listed, ...]

    @property
    def small(self) -> Scenario:
        """The scenario with these rows for its workload."""
        workload = Workload(requests=renumbered(self.rows, self.numbers))
        return self.scenario.model_copy(update={"workload": workload})

    def without(self, start: int, end: int) -> Draft:
        """Less the rows from ``start`` to ``end`` (exclusive)."""
        return replace(
            self,
            numbers=self.numbers[:start] + self.numbers[end:],
            rows=self.rows[:start] + self.rows[end:],
        )

    def with_rows(
        self, change: Callable[[Listed], Listed], only: Collection[int] | None = None
    ) -> Draft:
        """With ``change`` applied to all rows, or to the ``only`` ones of these indexes."""
        rows = (
            change(row) if only is None or index in only else row
            for index, row in enumerate(self.rows)
        )
        return replace(self, rows=tuple(rows))


def halved(names: Iterable[str]) -> Callable[[Listed], Listed]:
    """The fields of these names half as large, rounded up."""
    return lambda row: changed(row, **{name: -(-getattr(row, name) // 2) for name in names})


def with_values(values: dict[str, Any]) -> Callable[[Listed], Listed]:
    """Fields by name with these values."""
    return lambda row: changed(row, **values)


def rounded(digits: int | None) -> Callable[[Listed], Listed]:
    """Arrivals with so many digits behind the point, or 0; never a longer or later number."""

    def change(row: Listed) -> Listed:
        arrival = 0.0 if digits is None else int(row.arrival * 10**digits) / 10**digits
        shorter = (len(repr(arrival)), arrival) < (len(repr(row.arrival)), row.arrival)
        return changed(row, arrival=arrival) if shorter else row

    return change
