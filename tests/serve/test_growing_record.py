"""Tests that the file of --record can be read while the server runs, and after the server was
killed.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.core.request import Request, Segment
from simkv.metrics.scenario_runner import run_file
from simkv.scenario.scenario_loader import load
from simkv.serve.recorded_workload import GrowingTrace
from simkv.workload.workload_section import generate_requests
from tests.serve.running_server import COSTS, scenario, serving, wait_until


def request(number: int) -> Request:
    segments = (Segment("shared", 0, 7), Segment(f"u{number}", 0, 3))
    return Request(number, 10, 5, 0.1 * number, output_tokens=4, segments=segments)


def read(folder: Path) -> list[Request]:
    path = folder / "again.yaml"
    shutil.copy(COSTS, folder)
    path.write_text(scenario() + "workload: {trace: came.csv}\n")
    return list(generate_requests(load(path)["run"].workload, None))


def test_file_is_complete_after_each_save(tmp_path: Path) -> None:
    (tmp_path / "came.csv").write_text("an earlier recording")
    trace = GrowingTrace(tmp_path / "came.csv", pytest.fail)
    expected = {}
    for number in range(6):
        changes = [request(number)]
        if number % 2:
            changes.append(replace(request(number - 1), timeout=0.1 + 0.2))
        expected.update({one.id: one for one in changes})
        for change in changes:
            trace.add(change)
        trace.save()
        assert read(tmp_path) == list(expected.values())


def test_full_disk_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = [request(0), request(1)]
    trace = GrowingTrace(tmp_path / "came.csv", pytest.fail)
    trace.add(changes[0])
    trace.save()
    trace.add(changes[1])
    real = os.write

    def full(file: int, content: bytes) -> int:
        if len(content) < 20:
            raise OSError(28, "No space left on device")
        return real(file, content[:-10])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(InputError, match="no space left on device"):
            trace.save()
    assert read(tmp_path) == changes[:1]
    trace.save()
    assert read(tmp_path) == changes


def test_killed_server_leaves_its_requests(tmp_path: Path) -> None:
    with serving(tmp_path, scenario(), "--record", "came.csv") as served:
        assert served.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).status_code == 200
        stream: Any = served.stream({"prompt": [1, 2, 3], "max_tokens": 3000})
        served.wait_for_load(1)
        stream.close()
        served.wait_for_load(0)
        rows = tmp_path / "came.csv"
        wait_until(
            lambda: len(rows.read_text().split("\n")) == 4 and bool(read(tmp_path)[1].timeout)
        )
        served.process.kill()
        served.process.wait()
    lives = run_file(tmp_path / "again.yaml")["run"].record.requests
    assert [life.outcome for life in lives.values()] == ["finished", "timed_out"]
