"""Tests of the log of a GPU's clocks, with a script in place of nvidia-smi."""

from __future__ import annotations

import csv
import subprocess
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import pytest

from simkv.gpu import device_clocks, machine_info
from simkv.gpu.device_clocks import log_clocks

TOOL = """#!/bin/sh
echo "$@" >> "$(dirname "$0")/calls"
at="2026/11/23 20:37:34.123"
while :; do echo "$at, 580.95, 1980 MHz, 2619 MHz, 699.50 W, 61"; sleep 0.02; done
"""


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    path = folder / "nvidia-smi"
    path.write_text(TOOL)
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setattr(device_clocks, "gpu_id_option", lambda device: [f"--id=GPU-of-{device}"])
    return folder


def test_one_process_logs_continuously(tool: Path, tmp_path: Path) -> None:
    path = tmp_path / "clocks.csv"
    with log_clocks(path, "cuda"):
        end = monotonic() + 60
        while not (path.exists() and path.read_text().count("\n") > 5):
            assert monotonic() < end, "nothing was written"
            sleep(0.01)
    length = path.stat().st_size
    (call,) = (tool / "calls").read_text().splitlines()
    assert "--loop-ms=1000" in call
    assert "--id=GPU-of-cuda" in call
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["unix_s"]) > 1e9
    assert rows[0]["timestamp"] == "2026/11/23 20:37:34.123"
    assert rows[0]["clocks.sm"] == "1980 MHz"
    assert rows[0]["power.draw"] == "699.50 W"
    assert rows[0]["temperature.gpu"] == "61"
    sleep(0.2)
    assert path.stat().st_size == length


def test_nothing_is_written_without_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(device_clocks, "gpu_id_option", lambda device: [])
    with log_clocks(tmp_path / "clocks.csv", "cuda"):
        pass
    assert not (tmp_path / "clocks.csv").exists()


def test_machine_data_are_queried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        calls.append(command)
        return SimpleNamespace(stdout="580.95, 1980 MHz\n")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(machine_info, "gpu_id_option", lambda device: [])
    machine_info.nvidia_smi.cache_clear()
    try:
        assert {machine_info.nvidia_smi("cuda") for _ in range(3)} == {"580.95, 1980 MHz"}
    finally:
        machine_info.nvidia_smi.cache_clear()
    assert len(calls) == 1
