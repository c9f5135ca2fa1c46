"""Tests that input files that are devices, pipes, directories or huge are rejected quickly in one
line.
"""

from __future__ import annotations

import gzip
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from simkv.conformance.decision_trace import TraceError
from simkv.conformance.decision_trace import read_trace as read_decisions
from simkv.core import input_files
from simkv.core.errors import InputError
from simkv.costs.cost_profile import load_profile
from simkv.costs.hardware.cache_size_log import read_cache_size
from simkv.costs.hardware.hf_config import parse_architecture
from simkv.costs.sources.measurement_files import read_settings, read_table
from simkv.incident.source_reader import read_source as read_evidence
from simkv.scenario.custom.code_source import load_from_file, override_trust
from simkv.scenario.yaml_document import read_document
from simkv.study.plan.plan_cost import read_prices
from simkv.validation.serving_points.measured_rows import read_rows
from simkv.workload.formats.format_detection import detect_format
from simkv.workload.trace_source import TraceSource


def scheduler(path: Path) -> object:
    with override_trust(True):
        return load_from_file(path, "mine")


def lines(path: Path) -> object:
    with TraceSource(path).text() as stream:
        return sum(1 for _ in stream)


READERS: list[Callable[[Path], object]] = [
    read_document,
    lambda path: load_profile(str(path)),
    parse_architecture,
    read_cache_size,
    lambda path: read_table(path, {}),
    read_settings,
    read_evidence,
    read_decisions,
    read_rows,
    read_prices,
    scheduler,
    detect_format,
    lines,
]


@pytest.mark.parametrize("reader", READERS)
def test_rejects_paths_that_are_not_files(
    reader: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "MAX_LINE_BYTES", 1 << 22)
    pipe, huge, loop = tmp_path / "pipe.json", tmp_path / "huge.json", tmp_path / "loop.json"
    os.mkfifo(pipe)
    with huge.open("wb") as file:
        file.truncate(1 << 40)
    loop.symlink_to(loop)
    folder, missing = tmp_path / "folder.json", tmp_path / "missing.json"
    folder.mkdir()
    for path in (Path("/dev/zero"), pipe, huge, loop, missing, folder, Path("/dev/null")):
        with pytest.raises((InputError, TraceError)) as raised:
            print(path, reader(path))
        assert path.name in str(raised.value)
        assert "\n" not in str(raised.value)
    # Hypothesis and debuggers read the files of modules; reading a pipe would never end.
    assert not any(getattr(one, "__file__", None) == str(pipe) for one in [*sys.modules.values()])


def test_rejects_gzip_file_with_one_huge_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_files, "MAX_LINE_BYTES", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(1 << 22)))
    with pytest.raises(InputError, match=r"bomb.gz: a line is longer than 1 MiB"):
        lines(tmp_path / "bomb.gz")


def test_reads_pipe_with_writer() -> None:
    end, start = os.pipe()
    os.write(start, b"name: piped\n")
    os.close(start)
    assert read_document(Path(f"/dev/fd/{end}")).tree == {"name": "piped"}
    os.close(end)
