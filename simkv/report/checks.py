"""Expectations on the console."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from simkv.measure.expect import Check, show


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    """Print each expectation with ``ok`` or ``missed``, what was found and how far off it was."""
    table = Table(box=box.SIMPLE)
    for name in ("", "variant", "figure", "expected"):
        table.add_column(name)
    for name in ("found", "missed by"):
        table.add_column(name, justify="right")
    for check in checks:
        ok = "ok" if check.ok else "missed"
        by = "" if check.missed_by is None else f"{check.missed_by:+.6g}"
        table.add_row(ok, check.variant, check.figure, check.expected, show(check.found), by)
    console.print(table)
