"""Tests of packing recordings into one file per release."""

from __future__ import annotations

import gzip
from pathlib import Path

from dev.pack_recordings import pack
from simkv.conformance.decision_trace import read_traces
from tests.conformance.recordings import FILES, committed


def test_later_recordings_replace_earlier_ones_of_the_same_case(tmp_path: Path) -> None:
    one, two = committed("fastdeploy", "ratio")[:2]
    one.write(tmp_path / "one.jsonl")
    two.write(tmp_path / "two.jsonl", lambda lines: lines[0].update(case=one.case, source="new"))
    out = tmp_path / "out.jsonl.gz"
    assert pack(out, [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]) == 1
    assert [trace.header["source"] for trace in read_traces(out)] == ["new"]
    two.write(tmp_path / "two.jsonl")
    assert pack(out, [out, tmp_path / "two.jsonl"]) == 2


def test_committed_files_are_as_packed(tmp_path: Path) -> None:
    file = min(FILES, key=lambda path: path.stat().st_size)
    pack(tmp_path / "again.jsonl.gz", [file])
    # The text is compared, because the bytes depend on the version of zlib.
    packed = gzip.decompress((tmp_path / "again.jsonl.gz").read_bytes())
    assert packed == gzip.decompress(file.read_bytes())
