"""A candidate for the smallest workload, and simplifications of its rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

from simkv.scenario.scenario import Scenario
from simkv.study.whatif.workload_rows import change_row, renumber_rows
from simkv.workload.listed_requests import ListedRequest
from simkv.workload.workload_section import Workload


@dataclass(frozen=True)
class WorkloadDraft:
    """A candidate: rows with their original numbers, and a scenario with all other fields."""

    scenario: Scenario
    numbers: tuple[int, ...]
    rows: tuple[ListedRequest, ...]

    @property
    def listed_scenario(self) -> Scenario:
        """The scenario with these rows as its workload."""
        workload = Workload(requests=renumber_rows(self.rows, self.numbers))
        return self.scenario.model_copy(update={"workload": workload})

    def without(self, start: int, end: int) -> WorkloadDraft:
        """Return the draft without the rows from ``start`` to ``end`` (exclusive)."""
        return replace(
            self,
            numbers=self.numbers[:start] + self.numbers[end:],
            rows=self.rows[:start] + self.rows[end:],
        )

    def with_rows(
        self, change: Callable[[ListedRequest], ListedRequest], only: Collection[int] | None = None
    ) -> WorkloadDraft:
        """Return the draft with ``change`` applied to all rows, or to ``only`` these indices."""
        rows = (
            change(row) if only is None or index in only else row
            for index, row in enumerate(self.rows)
        )
        return replace(self, rows=tuple(rows))


def halve_fields(names: Iterable[str]) -> Callable[[ListedRequest], ListedRequest]:
    """Return a change that halves the fields with these names, rounded up."""
    return lambda row: change_row(row, **{name: -(-getattr(row, name) // 2) for name in names})


def set_fields(values: dict[str, Any]) -> Callable[[ListedRequest], ListedRequest]:
    """Return a change that sets fields by name."""
    return lambda row: change_row(row, **values)


def round_arrivals(digits: int | None) -> Callable[[ListedRequest], ListedRequest]:
    """Return a change that rounds arrivals down to ``digits`` decimals, or to 0 if it is None.

    An arrival never becomes a later time or a longer number.
    """

    def change(row: ListedRequest) -> ListedRequest:
        arrival = 0.0 if digits is None else int(row.arrival * 10**digits) / 10**digits
        shorter = (len(repr(arrival)), arrival) < (len(repr(row.arrival)), row.arrival)
        return change_row(row, arrival=arrival) if shorter else row

    return change
