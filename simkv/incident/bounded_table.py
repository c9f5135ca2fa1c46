"""Tables with a bounded number of rows, for logs of any length."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

import pandas as pd

#: Maximum numbers of rows for server lines, steps and requests. With one server line per ten
#: seconds, the limit is eleven days; larger simulations would take too long.
MAX_LINES, MAX_STEPS, MAX_REQUESTS = 100_000, 200_000, 100_000
#: Largest number that a log may contain.
LARGEST = 1e15


def check_size(name: str, value: object) -> None:
    """Raise ValueError if a number is too large to be real, such as 10**20 running requests."""
    if isinstance(value, int | float) and abs(value) > LARGEST:
        raise ValueError(f"{name} is larger than {LARGEST:g}")


class BoundedTable:
    """Table of at most ``most`` rows, stored as columns.

    A full table drops its oldest rows, or every second row if ``thinned`` is true. ``seen`` is the
    number of appended rows.
    """

    def __init__(self, most: int, *, thinned: bool = False) -> None:
        self.most, self.thinned, self.seen = most, thinned, 0
        self._columns: dict[str, Any] = {}
        self._every = 1

    def __len__(self) -> int:
        return len(next(iter(self._columns.values()), ()))

    def append(self, row: Mapping[str, Any]) -> None:
        """Append a row. All rows must have the same columns."""
        self.seen += 1
        if (self.seen - 1) % self._every:
            return
        if not self._columns:
            self._columns = {name: _column(value) for name, value in row.items()}
        for (name, column), value in zip(self._columns.items(), row.values(), strict=True):
            check_size(name, value)
            column.append(value)
        if len(self) >= 2 * self.most:
            for column in self._columns.values():
                if self.thinned:
                    del column[1::2]
                else:
                    del column[: self.most]
            self._every *= 2 if self.thinned else 1

    def frame(self) -> pd.DataFrame | None:
        """Return the table, or None if it is empty."""
        if not self._columns:
            return None
        kept = slice(None) if self.thinned else slice(-self.most, None)
        return pd.DataFrame({name: column[kept] for name, column in self._columns.items()})

    def note(self, what: str) -> list[str]:
        """Return a list with one sentence about dropped rows, or an empty list.

        ``what`` is the noun for the rows.
        """
        table = self.frame()
        if table is None or len(table) == self.seen:
            return []
        which = f"every {self._every}th" if self.thinned else f"the last {len(table):,}"
        return [f"{self.seen:,} {what} found; {which} are used"]


def _column(value: Any) -> Any:
    if isinstance(value, str):
        return []
    return array("q" if isinstance(value, int) else "d")


class AccessCounts:
    """Number of HTTP requests by status in each interval of a log (see ``Evidence.access``).

    Uvicorn's access lines have no time. They are counted in the interval between the nearest times.
    """

    def __init__(self, most: int) -> None:
        self.table = BoundedTable(most)
        self._open: list[int] = [0, 0, 0]
        self._since: float | None = None

    def __len__(self) -> int:
        return len(self.table) or sum(self._open)

    def add(self, status: int, at: float | None, timed: bool) -> None:
        """Count one request with the HTTP status ``status``.

        ``at`` (s) is the last time in the log. ``timed`` is true if the access line itself has a
        time.
        """
        if timed and at is not None:
            self.close(at)
            self._since = at
        elif self._since is None and not any(self._open):
            self._since = at
        kind = 0 if status < 400 else 1 if status < 500 else 2
        self._open[kind] += 1
        if timed and at is not None:
            self.close(at)

    def close(self, at: float | None) -> None:
        """End the current interval at ``at`` (s), and start the next one."""
        if any(self._open):
            accepted, rejected, failed = self._open
            row = {"from_s": self._since, "t_s": at, "accepted": accepted}
            nan = float("nan")
            row = {name: nan if value is None else float(value) for name, value in row.items()}
            self.table.append(row | {"rejected": float(rejected), "failed": float(failed)})
            self._open = [0, 0, 0]
        self._since = at

    def frame(self) -> pd.DataFrame | None:
        """Return the table, or None if there is no access line."""
        self.close(self._since)
        return self.table.frame()


class BoundedArrivals:
    """Table of the last ``most`` requests that arrived, by request id."""

    def __init__(self, most: int) -> None:
        self.most, self.seen = most, 0
        self._rows: dict[str, list[float]] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def came(self, request: str, t_s: float, max_tokens: int, prompt_tokens: int) -> None:
        """Add a request that arrived at ``t_s`` (s). Unknown numbers of tokens are 0."""
        self.seen += 1
        check_size("max_tokens", max_tokens)
        self._rows[request] = [t_s, max_tokens, prompt_tokens, float("nan")]
        if len(self._rows) >= 2 * self.most:
            self._rows = dict(list(self._rows.items())[self.most :])

    def add_abort(self, request: str, t_s: float) -> None:
        """Record that the client of a request disconnected at ``t_s`` (s)."""
        if row := self._rows.get(request):
            row[3] = t_s - row[0]

    def frame(self) -> pd.DataFrame | None:
        """Return the table, or None if it is empty."""
        if not self._rows:
            return None
        rows = [(name, *row) for name, row in list(self._rows.items())[-self.most :]]
        names = ("request", "t_s", "max_tokens", "prompt_tokens", "gave_up_s")
        return pd.DataFrame(rows, columns=list(names))

    def note(self) -> list[str]:
        """Return a list with one sentence about dropped requests, or an empty list."""
        kept = min(len(self), self.most)
        if self.seen <= self.most:
            return []
        return [f"{self.seen:,} requests arrived; the last {kept:,} are used"]
