"""Tests that the comparison of results finds changed numbers and permits changed texts."""

import json
from pathlib import Path

from tests.digests.compare_results import compare


def write(folder: Path, *, text: str, figure: float, cell: str) -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(
        json.dumps({"version": folder.name, "why": text, "p99": [figure]})
    )
    (folder / "requests.csv").write_text(f"id,ttft\n1,{cell}\n")
    return folder


def test_permits_changed_texts(tmp_path: Path) -> None:
    before = write(tmp_path / "a", text="kept", figure=1.5, cell="2.5")
    found = compare(before, write(tmp_path / "b", text="stored", figure=1.5, cell="2.5"))
    assert not found.differences
    assert len(found.texts) == 1
    assert found.figures == 3


def test_finds_changed_figures_fields_and_files(tmp_path: Path) -> None:
    before = write(tmp_path / "a", text="kept", figure=1.5, cell="2.5")
    after = write(tmp_path / "b", text="kept", figure=1.6, cell="2.6")
    (after / "steps.csv").write_text("step\n1\n")
    assert compare(before, after).differences == [
        "requests.csv: line 2 ttft: '2.5' -> '2.6'",
        "steps.csv: only in one folder",
        "summary.json: /p99/0: 1.5 -> 1.6",
    ]
