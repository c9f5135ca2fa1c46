"""Tests of custom logs: mapped, duplicate and missing columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.workload.formats.mapped_columns import parse_columns
from simkv.workload.trace_conversion import convert_trace
from simkv.workload.trace_reader import TraceReader, read_trace

COLUMNS = "arrival=ts,prompt_tokens=in_tok,output_tokens=out_tok"
ROWS = [
    {"ts": "2026-05-01T12:00:00Z", "in_tok": 100, "out_tok": 20, "user": 'a "b", c'},
    {"ts": "2026-05-01T12:00:00.25Z", "in_tok": 7, "out_tok": 3, "user": ""},
    {"ts": "2026-05-01T12:00:02Z", "in_tok": 50, "out_tok": 0, "user": "aborted"},
]
CSV = "user,ts,in_tok,out_tok\n" + "".join(
    f'"{row["user"]}",{row["ts"]},{row["in_tok"]},{row["out_tok"]}\n'.replace('"b"', '""b""')
    for row in ROWS
)
WANTED = "arrival,prompt_tokens,output_tokens\n0.0,100,20\n0.25,7,3\n"


def converted(folder: Path, text: str, columns: str = COLUMNS, name: str = "log.csv") -> str:
    (folder / name).write_text(text)
    reader = TraceReader(folder / name, columns=parse_columns(columns))
    convert_trace(reader, folder / "out.csv")
    return (folder / "out.csv").read_text()


def test_reads_a_csv_log(tmp_path: Path) -> None:
    assert converted(tmp_path, CSV) == WANTED


def test_reads_json_lines(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    assert converted(tmp_path, text, name="log.jsonl") == WANTED


def test_rejects_json_key_that_no_record_has(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    with pytest.raises(InputError, match=r"session=sid: no such key; found "):
        converted(tmp_path, text, "arrival=ts,session=sid", name="log.jsonl")


def test_simkv_names_need_no_mapping(tmp_path: Path) -> None:
    text = "ts,prompt_tokens,output_tokens,priority\n1714564800.5,9,2,1\n1714564801.5,8,1,0\n"
    assert converted(tmp_path, text, "arrival=ts") == (
        "arrival,prompt_tokens,output_tokens,priority\n0.0,9,2,1\n1.0,8,1,0\n"
    )


def test_mapped_column_replaces_one_with_a_simkv_name(tmp_path: Path) -> None:
    text = "arrival,ts,prompt_tokens,output_tokens\nhome,3,9,2\n"
    assert converted(tmp_path, text, "arrival=ts").endswith("\n3.0,9,2\n")


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ("arrival", "expected OURS=THEIRS"),
        ("arrivl=ts", r"unknown column 'arrivl' \(did you mean 'arrival'\?\)"),
        ("arrival=ts,arrival=x", "given twice"),
        ("arrival=ts,timeout=ts", "given twice"),
        ("arrival=time", r"log.csv:1: --columns arrival=time: missing column; found user"),
        ("arrival=ts", r"log.csv:1: header: missing prompt_tokens, output_tokens"),
        ("prompt_tokens=user,output_tokens=out_tok", "log.csv:2: prompt_tokens: should be a whole"),
    ],
)
def test_rejects_invalid_mappings(tmp_path: Path, columns: str, what: str) -> None:
    with pytest.raises(InputError, match=what):
        converted(tmp_path, CSV, columns)


def test_invalid_json_line_is_reported_with_its_number(tmp_path: Path) -> None:
    text = "".join(json.dumps(row) + "\n" for row in ROWS) + "[1]\n"
    with pytest.raises(InputError, match=r"log.jsonl:4: should be a JSON object"):
        converted(tmp_path, text, name="log.jsonl")


@pytest.mark.parametrize(
    "header",
    ["arrival,arrival,prompt_tokens,output_tokens", "arrival,Arrival,prompt_tokens,output_tokens"],
)
def test_rejects_duplicate_columns(tmp_path: Path, header: str) -> None:
    (tmp_path / "t.csv").write_text(f"{header}\n0,5,6,7\n")
    with pytest.raises(InputError, match=r"t.csv:1: header: 2 columns have the name arrival"):
        read_trace(tmp_path / "t.csv")


def test_accepts_duplicates_of_unused_columns(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,x,arrival,prompt_tokens,output_tokens\n1,2,0,6,7\n")
    assert len(read_trace(tmp_path / "t.csv").rows) == 1


@pytest.mark.parametrize(
    ("header", "lacking"),
    [
        ("arrival,prompt_tokens", "output_tokens"),
        ("arrival,output_tokens", "prompt_tokens"),
        ("ts,prompt_tokens,output_tokens", "arrival"),
    ],
)
def test_missing_columns_are_named(tmp_path: Path, header: str, lacking: str) -> None:
    (tmp_path / "t.csv").write_text(f"{header}\n0,5,6\n")
    with pytest.raises(InputError, match=f"t.csv: missing {lacking}; found a CSV file with"):
        read_trace(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("unit", "per_second"), [("milliseconds", 1e3), ("microseconds", 1e6), ("nanoseconds", 1e9)]
)
def test_recognizes_the_unit_of_times_since_1970(
    unit: str, per_second: float, tmp_path: Path
) -> None:
    times = [int((1.7e9 + late) * per_second) for late in (0, 0.25)]
    (tmp_path / "log.csv").write_text(f"ts,in_tok,out_tok\n{times[0]},100,20\n{times[1]},7,3\n")
    reader = TraceReader(tmp_path / "log.csv", columns=parse_columns(COLUMNS))
    arrivals = [time for rows in reader for time in rows.arrival.tolist()]
    assert arrivals[1] - arrivals[0] == pytest.approx(0.25)
    assert f"arrival: read as {unit} since 1970" in " ".join(reader.tally.notes)
