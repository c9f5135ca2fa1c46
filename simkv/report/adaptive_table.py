"""Tables that fit the terminal: they omit columns if space is short, and never shorten names.

AdaptiveTable([Column("variant", names, right=False), Column("P99 TTFT (s)", cells, rank=2)])
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap
from typing import Literal

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

#: Width of the terminal below which text is wrapped before columns are omitted.
_NARROW = 120
#: Maximum width of wrapped text.
_WRAPPED = 14
#: A width larger than any table.
_ENDLESS = 100_000


@dataclass(frozen=True)
class Column:
    """A column of a table.

    If space is short, columns with the highest ``rank`` are omitted first. Columns of rank 0 are
    never omitted. ``width`` is the maximum width of wrapped text: longer words are split after
    underscores and hyphens. Without ``width``, words are not split.
    """

    heading: str
    cells: Sequence[str]
    rank: int = 0
    right: bool = True
    width: int | None = None

    @property
    def broken_heading(self) -> str:
        """Heading, wrapped to the width of the cells. Words are not split."""
        widest = max((len(line) for cell in self.cells for line in cell.split("\n")), default=0)
        words = self.heading.split()
        return "\n".join(wrap(self.heading, max([widest, *map(len, words), 1])))

    @property
    def wrapped(self) -> Column:
        """The column with text wrapped at spaces. Numbers are unchanged."""
        if self.right:
            return self
        cells = []
        for cell in self.cells:
            words = cell.split()
            if self.width:
                words = [part for word in words for part in _split_word(word, self.width)]
            lines = wrap(
                " ".join(words),
                self.width or _WRAPPED,
                break_long_words=False,
                break_on_hyphens=False,
            )
            cells.append("\n".join(lines))
        return replace(self, cells=cells)


@dataclass(frozen=True)
class AdaptiveTable:
    """Table that fits the terminal. ``bold`` contains the indices of bold rows.

    If the terminal has fewer columns than ``wraps_below``, text is wrapped and then columns are
    omitted. On a wider terminal, columns are omitted at once. A line below the table names the
    omitted columns. Columns of rank 0 are never omitted.
    """

    columns: Sequence[Column]
    bold: frozenset[int] = frozenset()
    wraps_below: int = _NARROW

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = list(self.columns)
        wide = _width(self._table(shown), console, options) > options.max_width
        if wide and options.max_width < self.wraps_below:
            shown = [column.wrapped for column in shown]
        while _width(self._table(shown), console, options) > options.max_width:
            highest = max(column.rank for column in shown)
            if not highest:
                break
            last = max(i for i, column in enumerate(shown) if column.rank == highest)
            del shown[last]
        yield self._table(shown)
        headings = {column.heading for column in shown}
        if omitted := [one.heading for one in self.columns if one.heading not in headings]:
            yield Text(f"Omitted columns: {', '.join(omitted)}")

    def _table(self, columns: Sequence[Column]) -> Table:
        return _table(columns, self.bold)


@dataclass(frozen=True)
class StackedTable:
    """Columns split into several tables that fit the terminal. Each table begins with the column
    ``first``.
    """

    first: Column
    columns: Sequence[Column]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        part: list[Column] = []
        for column in self.columns:
            more = _table([self.first, *part, column])
            if part and _width(more, console, options) > options.max_width:
                yield _table([self.first, *part])
                part = []
            part.append(column)
        yield _table([self.first, *part])


def make_adaptive_table(
    headings: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1, kept: int = 2
) -> AdaptiveTable:
    """Build a table that omits its last columns if space is short.

    The first ``left`` columns are left-aligned. The first ``kept`` columns are never omitted.
    """
    cells = list(zip(*rows, strict=True)) or [()] * len(headings)
    columns = [
        Column(heading, column, rank=0 if i < kept else i, right=i >= left)
        for i, (heading, column) in enumerate(zip(headings, cells, strict=True))
    ]
    return AdaptiveTable(columns)


def _split_word(word: str, width: int) -> list[str]:
    """Split a word after underscores and hyphens into parts of at most ``width`` if possible."""
    parts = [""]
    for part in re.findall(r"[^_-]*[_-]|[^_-]+", word):
        if parts[-1] and len(parts[-1]) + len(part) > width:
            parts.append("")
        parts[-1] += part
    return parts


def _width(table: Table, console: Console, options: ConsoleOptions) -> int:
    return Measurement.get(console, options.update(width=_ENDLESS), table).maximum


def _table(columns: Sequence[Column], bold: frozenset[int] = frozenset()) -> Table:
    table = Table(box=box.SIMPLE)
    for column in columns:
        side: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.broken_heading), justify=side, overflow="fold")
    for row, cells in enumerate(zip(*(column.cells for column in columns), strict=True)):
        table.add_row(*map(Text, cells), style="bold" if row in bold else None)
    return table
