"""Tests of requests in custom files whose columns are mapped with ``--columns``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.incident.diagnose_stages import read_stage, rebuild_stage
from simkv.incident.mapped_records import parse_record_columns
from simkv.incident.server_setup import UserSettings

COLUMNS = "arrival=ts,prompt_tokens=in,output_tokens=out,ttft_s=first,e2e_ms=total,session=sid"
ROWS = [
    {"ts": 10.0 + i, "in": 100 * (1 + i // 2), "out": 5, "first": 0.5, "total": 900, "sid": i % 2}
    for i in range(6)
]


def write(tmp_path: Path, kind: str, rows: list[dict[str, object]]) -> Path:
    path = tmp_path / f"own.{kind}"
    if kind == "csv":
        text = ",".join(rows[0]) + "\n"
        text += "".join(",".join(map(str, row.values())) + "\n" for row in rows)
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_text(text)
    return path


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_reads_own_names_and_units(tmp_path: Path, kind: str) -> None:
    path, out = write(tmp_path, kind, list(ROWS)), tmp_path / "out"
    columns = parse_record_columns(COLUMNS)
    requests = read_stage([path], out, columns=columns).requests
    assert requests is not None
    assert requests["ttft_ms"].tolist() == [500.0] * 6
    assert requests["e2e_ms"].tolist() == [900.0] * 6
    assert requests["tpot_ms"].tolist() == [100.0] * 6
    rebuilt, _ = rebuild_stage(out, UserSettings(engine="vllm"))
    assert rebuilt.rows.pieces is not None
    assert any("assumed to extend the previous one" in note for note in rebuilt.notes)


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_rejects_column_that_the_file_does_not_have(tmp_path: Path, kind: str) -> None:
    rows = [{name: value for name, value in row.items() if name != "sid"} for row in ROWS]
    path = write(tmp_path, kind, rows)
    with pytest.raises(InputError, match="session=sid: no such column; found ts, in, out"):
        read_stage([path], tmp_path / "out", columns=parse_record_columns(COLUMNS))


def test_rejects_unknown_names_and_bad_values(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown column .arival. .did you mean 'arrival'"):
        parse_record_columns("arival=ts")
    with pytest.raises(InputError, match="missing output_tokens"):
        parse_record_columns("arrival=ts,prompt_tokens=in")
    path = write(tmp_path, "csv", [*ROWS[:1], {**ROWS[1], "in": "many"}])
    with pytest.raises(InputError, match="row 2: in: expected a number of at least 0, got 'many'"):
        read_stage([path], tmp_path / "out", columns=parse_record_columns(COLUMNS))
