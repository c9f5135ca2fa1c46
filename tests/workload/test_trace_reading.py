"""Tests of parts of traces, invalid rows, damaged files, and memory."""

from __future__ import annotations

import gzip
import tracemalloc
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_reader import (
    Selection,
    TraceReader,
    read_trace,
    select_rows,
)
from simkv.workload.trace_source import BATCH_ROWS, TraceSource

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def azure(path: Path, count: int, change: dict[int, str] | None = None) -> Path:
    """Write ``count`` rows 0.1 s apart; ``change`` replaces rows by their index."""
    start = np.datetime64("2024-05-10T00:00:00.000")
    rows = [
        f"{start + np.timedelta64(100 * i, 'ms')}+00:00,{100 + i},{1 + i % 7}".replace("T", " ")
        for i in range(count)
    ]
    for row, text in (change or {}).items():
        rows[row] = text
    text = HEADER + "\n".join(rows) + "\n"
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return azure(tmp_path / "t.csv", 1000)


def prompts(path: Path, **wanted: object) -> list[int]:
    return read_trace(path, Selection(**wanted)).rows.prompt_tokens.tolist()  # type: ignore[arg-type]


def test_selected_time_span_starts_at_zero(trace: Path) -> None:
    part = read_trace(trace, Selection(start=10, duration=5))
    assert part.rows.prompt_tokens.tolist() == list(range(200, 250))
    assert part.rows.arrival[0] == 0.0
    assert part.rows.arrival[-1] == pytest.approx(4.9)


def test_rate_scale_changes_only_times(trace: Path) -> None:
    plain, fast = (read_trace(trace, Selection(rate_scale=x)) for x in (1.0, 4.0))
    assert (plain.rows.arrival / 4).tolist() == fast.rows.arrival.tolist()
    assert plain.rows.prompt_tokens.tolist() == fast.rows.prompt_tokens.tolist()


def test_limit_takes_the_first_selected_requests(trace: Path) -> None:
    assert prompts(trace, limit=3) == [100, 101, 102]
    assert prompts(trace, start=50, limit=2) == [600, 601]
    assert len(prompts(trace, limit=10_000)) == 1000


def test_samples_are_seeded_nested_and_in_order(trace: Path) -> None:
    tenth, half = prompts(trace, sample=0.1), prompts(trace, sample=0.5)
    assert 60 < len(tenth) < 140
    assert set(tenth) < set(half)
    assert tenth == sorted(tenth) == prompts(trace, sample=0.1)
    assert tenth != prompts(trace, sample=0.1, seed=1)
    exactly = prompts(trace, sample=100)
    assert (len(exactly), exactly) == (100, sorted(exactly))
    assert prompts(trace, sample=1.0) == prompts(trace, sample=5000) == prompts(trace)


def test_time_span_does_not_change_the_sampled_requests(trace: Path) -> None:
    window = range(300, 500)
    everywhere = [p for p in prompts(trace, sample=0.3) if p in window]
    assert prompts(trace, sample=0.3, start=20, duration=20) == everywhere


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.integers(1, 60))
def test_exact_sample_does_not_depend_on_batches(sizes: list[int], n: int) -> None:
    total = sum(sizes)
    whole = RequestRows(np.arange(total) / 10, np.arange(1, total + 1), np.ones(total, np.int64))
    cuts = np.cumsum([0, *sizes])
    parts = [whole.take(np.arange(a, b)) for a, b in pairwise(cuts)]
    source = TraceSource(Path("x"), Selection(sample=n))
    once, many = (
        RequestRows.concat(list(select_rows(rows, source))).prompt_tokens.tolist()
        for rows in ([whole], parts)
    )
    assert once == many
    assert len(once) == min(n, total)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"start": -1.0}, "start: should be non-negative seconds; found -1"),
        ({"duration": 0.0}, "duration"),
        ({"rate_scale": 0.0}, "rate_scale"),
        ({"limit": 0}, "limit"),
        ({"sample": 1.5}, "sample: should be a fraction"),
        ({"sample": 0}, "sample"),
        ({"seed": -1}, "seed"),
    ],
)
def test_rejects_invalid_selections(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Selection(**wrong)  # type: ignore[arg-type]


BAD = [
    ("2024-05-10 00:00:01,x,3", "ContextTokens", "should be a whole number from 0.*found 'x'"),
    ("2024-05-10 00:00:01,-4,3", "ContextTokens", "found '-4'"),
    ("2024-05-10 00:00:01,4,3.5", "GeneratedTokens", "found '3.5'"),
    ("2024-05-10 00:00:01,4,1_000", "GeneratedTokens", "found '1_000'"),
    ("2024-05-10 00:00:01,4,", "GeneratedTokens", "found ''"),
    ("2024-05-10 00:00:01,4,nan", "GeneratedTokens", "found 'nan'"),
    ("2024-05-10 00:00:01,4,999999999999", "GeneratedTokens", "to 100,000,000; found"),
    ("2024-13-10 00:00:01,4,3", "TIMESTAMP", "should be a time like"),
    ("9999-05-10 00:00:01,4,3", "TIMESTAMP", "should be a time from 1700 to 2200"),
    ("yesterday,4,3", "TIMESTAMP", "found 'yesterday'"),
    ("2024-05-10,4,3", "TIMESTAMP", "found '2024-05-10'"),
    ("NaT                     ,4,3", "TIMESTAMP", "should be a time like"),
    ("2024-05-10 00:00:01,4", "row", "should have 3 fields; found 2"),
    ("2024-05-10 00:00:01,4,3,9", "row", "should have 3 fields; found 4"),
    ("2024-05-10 00:00:01,4,\udcff", "GeneratedTokens", "found"),
    ("garbage\0", "row", "should have 3 fields; found 1|comma-separated"),
]


@pytest.mark.parametrize(("row", "column", "what"), BAD)
def test_bad_row_is_reported_by_file_line_and_column(
    tmp_path: Path, row: str, column: str, what: str
) -> None:
    path = azure(tmp_path / "t.csv", 20)
    lines = path.read_text().splitlines()
    lines[11] = row
    path.write_bytes("\n".join(lines).encode(errors="surrogateescape"))
    with pytest.raises(InputError, match=rf"t\.csv:12: {column}: .*({what})"):
        read_trace(path)
    left = read_trace(path, Selection(skip_bad=True))
    assert len(left) == 19
    assert left.tally.bad.total() == 1
    assert next(iter(left.tally.first.values())) == 12
    assert left.tally.lines()[0].startswith(f"1 of 20 bad rows excluded: 1 {column}: should")


def test_stray_quote_affects_only_its_row(tmp_path: Path) -> None:
    path = azure(tmp_path / "t.csv", 50, {7: '2024-05-10 00:00:00.7,"9,3'})
    left = read_trace(path, Selection(skip_bad=True))
    assert len(left) == 49


def test_bad_rows_are_counted_by_reason_in_every_batch(tmp_path: Path) -> None:
    count = 2 * BATCH_ROWS + 100
    bad = {10: "x,1,1", BATCH_ROWS + 5: "x,1,1", 2 * BATCH_ROWS + 50: "2024-05-10 00:00:01,1,x"}
    path = azure(tmp_path / "t.csv", count, bad)
    left = read_trace(path, Selection(skip_bad=True))
    assert len(left) == count - 3
    assert left.tally.rows == count
    assert sorted(left.tally.bad.values()) == [1, 2]
    assert sorted(left.tally.first.values()) == [12, 2 * BATCH_ROWS + 52]


def test_empty_lines_are_ignored(tmp_path: Path) -> None:
    path = azure(tmp_path / "t.csv", 10, {3: "", 7: "   "})
    trace = read_trace(path)
    assert (len(trace), trace.tally.rows) == (8, 8)


def test_line_numbers_include_empty_lines(tmp_path: Path) -> None:
    path = azure(tmp_path / "t.csv", 10, {3: "", 7: "x,1,1"})
    with pytest.raises(InputError, match=r"t\.csv:9: TIMESTAMP"):
        read_trace(path)


def test_unordered_rows_are_sorted_and_start_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        HEADER + "2024-05-10 00:00:05,1,1\n2024-05-10 00:00:03,2,1\n2024-05-10 00:00:09,3,1\n"
    )
    rows = read_trace(path).rows
    assert rows.prompt_tokens.tolist() == [2, 1, 3]
    assert rows.arrival.tolist() == [0.0, 2.0, 6.0]


def test_wall_clock_starts_at_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "v.csv"
    path.write_text(
        "arrived_at,num_prefill_tokens,num_decode_tokens\n1787267980.5,1,1\n1787267982,1,1\n"
    )
    assert read_trace(path).rows.arrival.tolist() == [0.0, 1.5]


@pytest.mark.parametrize("keep", [0.3, 0.7, 0.999])
def test_truncated_gzip_is_one_clear_message(tmp_path: Path, keep: float) -> None:
    path = azure(tmp_path / "t.csv.gz", 3 * BATCH_ROWS)
    packed = path.read_bytes()
    path.write_bytes(packed[: int(len(packed) * keep)])
    with pytest.raises(
        InputError, match=r"incomplete gzip data: the file ends after line .* download"
    ):
        read_trace(path, Selection(skip_bad=True))


def test_damaged_gzip_is_one_clear_message(tmp_path: Path) -> None:
    path = azure(tmp_path / "t.csv.gz", 3 * BATCH_ROWS)
    packed = bytearray(path.read_bytes())
    packed[-6] ^= 255
    path.write_bytes(packed)
    with pytest.raises(InputError, match="damaged gzip data"):
        read_trace(path)


def test_rejects_traces_without_requests(tmp_path: Path, trace: Path) -> None:
    empty = tmp_path / "e.csv"
    empty.write_text(HEADER)
    with pytest.raises(InputError, match="the selection contains no requests of this trace"):
        read_trace(empty)
    with pytest.raises(InputError, match="the selection contains no requests"):
        read_trace(trace, Selection(start=1e6))


def test_rejects_too_many_requests_before_reading_all(trace: Path) -> None:
    with pytest.raises(InputError, match="more than 500 requests; select fewer"):
        read_trace(trace, most=500)


def test_progress_is_reported_in_bytes(trace: Path) -> None:
    told: list[int] = []
    for _ in TraceReader(trace, progress=told.append):
        pass
    assert told[-1] == trace.stat().st_size
    assert told == sorted(told)


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """The peak memory of reading 40,000 and 160,000 rows with a limit of 50 is compared."""
    peaks = []
    for count in (40_000, 160_000):
        path = tmp_path / f"{count}.csv"
        rows = "".join(f"{number},100,1\n" for number in range(count))
        path.write_text("arrival,prompt_tokens,output_tokens\n" + rows)
        tracemalloc.start()
        assert len(read_trace(path, Selection(sample=50))) == 50
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]
