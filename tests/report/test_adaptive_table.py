"""Tests of tables that adapt to the width of the terminal."""

from __future__ import annotations

import io

from rich.console import Console

from simkv.report.adaptive_table import AdaptiveTable, Column, make_adaptive_table

HEAD = ("case", "metric", "mean", "P50", "per request")
ROWS = [["a-case-with-a-long-name", "TTFT", "+0.10", "+0.20", "2.86"], ["", "TPOT", "+1", "", ""]]


def at(width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(make_adaptive_table(HEAD, ROWS, left=2, kept=2))
    return out.getvalue()


def test_omits_low_ranked_columns_first() -> None:
    assert "No room" not in at(80)
    assert all(cell in at(80) for cell in (*ROWS[0], *ROWS[1]))
    narrow = at(50)
    assert "a-case-with-a-long-name" in narrow
    assert "…" not in narrow
    assert "2.86" not in narrow
    assert "Omitted columns: P50, per request" in " ".join(narrow.split())
    assert "Omitted columns: mean, P50, per request" in " ".join(at(42).split())


def test_required_columns_are_wrapped() -> None:
    assert "…" not in at(20)
    assert "TPOT" in at(20)


def test_table_without_rows_has_a_heading() -> None:
    out = io.StringIO()
    Console(file=out, width=60).print(make_adaptive_table(HEAD, []))
    assert all(heading in out.getvalue() for heading in HEAD[:-1])


def test_narrow_tables_wrap_text_before_they_omit_numbers() -> None:
    columns = [
        Column("variant", ["before"], right=False),
        Column("ending", ["served, head-of-line blocking"], 1, right=False),
        Column("P99 TTFT", ["12.5 s"], 2),
    ]

    def lines(width: int) -> list[str]:
        out = io.StringIO()
        Console(file=out, width=width).print(AdaptiveTable(columns))
        return out.getvalue().splitlines()

    assert any("served, head-of-line blocking" in line for line in lines(160))
    narrow = [line.strip() for line in lines(40)]
    assert "before    served,        12.5 s" in narrow
    assert "head-of-line" in narrow
    assert not any("Omitted" in line for line in narrow)


def test_words_longer_than_the_width_of_a_column_are_split_after_underscores() -> None:
    cells = ["max_num_queued_tokens: none -> 256"]
    assert Column("Change", cells, right=False, width=18).wrapped.cells == [
        "max_num_queued_\ntokens: none ->\n256"
    ]
    assert Column("Change", cells, right=False).wrapped.cells == [
        "max_num_queued_tokens:\nnone -> 256"
    ]
