"""Input files that are devices, pipes, folders or huge: one line, soon, and little memory."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from simkv.core import inputs
from simkv.core.errors import InputError
from simkv.costs.hardware.configs import architecture_of
from simkv.costs.hardware.logs import cache_size
from simkv.costs.profile import load_profile
from simkv.costs.sources.files import read_settings, read_table
from simkv.ingest.read import read as read_evidence
from simkv.proof.conform.trace import TraceError
from simkv.proof.conform.trace import read_trace as read_decisions
from simkv.proof.validation.silicon.rows import read_rows
from simkv.scenario.document import read_document
from simkv.scenario.own.source import from_file, trusting
from simkv.search.plan.price import read_prices
from simkv.workload.source import Source
from simkv.workload.traces.find import find_format


def scheduler(path: Path) -> object:
    with trusting(True):
        return from_file(path, "mine")


def lines(path: Path) -> object:
    with Source(path).text() as stream:
        return sum(1 for _ in stream)


READERS: list[Callable[[Path], object]] = [
    read_document,
    lambda path: load_profile(str(path)),
    architecture_of,
    cache_size,
    lambda path: read_table(path, {}),
    read_settings,
    read_evidence,
    read_decisions,
    read_rows,
    read_prices,
    scheduler,
    find_format,
    lines,
]


@pytest.mark.parametrize("reader", READERS)
def test_one_line_for_what_is_no_file(
    reader: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MOST_OF_A_LINE", 1 << 22)
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


def test_a_gzip_file_that_unpacks_to_one_huge_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "MOST_OF_A_LINE", 1 << 20)
    (tmp_path / "bomb.gz").write_bytes(gzip.compress(bytes(1 << 22)))
    with pytest.raises(InputError, match=r"bomb.gz: a line is longer than 1 MiB"):
        lines(tmp_path / "bomb.gz")


def test_a_pipe_with_a_writer_is_read() -> None:
    end, start = os.pipe()
    os.write(start, b"name: piped\n")
    os.close(start)
    assert read_document(Path(f"/dev/fd/{end}")).tree == {"name": "piped"}
    os.close(end)
