"""Tests of reading and packing recordings, and of messages about invalid files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simkv.conformance.decision_trace import (
    TraceError,
    ending_kind,
    pack_traces,
    read_trace,
    read_traces,
    split_recordings,
)

HEADER: dict[str, Any] = {
    "format": 1,
    "engine": "mistralrs",
    "variant": "seed",
    "config": {},
    "requests": [],
}


def text(*lines: Any) -> bytes:
    return "\n".join(json.dumps(line) for line in lines).encode()


def read(folder: Path, content: bytes) -> Any:
    path = folder / "trace.jsonl"
    path.write_bytes(content)
    return read_trace(path)


@pytest.mark.parametrize("packed", [False, True])
def test_reads_header_and_steps(tmp_path: Path, packed: bool) -> None:
    content = text(HEADER, {"step": 0}, {"tick": 1})
    trace = read(tmp_path, gzip.compress(content) if packed else content)
    assert trace.header == HEADER
    assert trace.steps == [{"step": 0}, {"tick": 1}]
    assert trace.truncated is None


def test_separates_the_closing_line(tmp_path: Path) -> None:
    closing = {"truncated": True, "why": "engine panic"}
    trace = read(tmp_path, text(HEADER, {"step": 0}, closing))
    assert trace.steps == [{"step": 0}]
    assert trace.truncated == closing


def test_ignores_empty_lines(tmp_path: Path) -> None:
    assert read(tmp_path, text(HEADER) + b"\n\n" + text({"step": 0}) + b"\n").steps


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "trace.jsonl: the file is empty; expected a header line"),
        (b"\n \n", "trace.jsonl: the file is empty; expected a header line"),
        (b"{", "trace.jsonl:1: not JSON"),
        (text(HEADER) + b"\n{", "trace.jsonl:2: not JSON"),
        (b"[" * 100_000, "trace.jsonl:1: not JSON"),
        (b"9" * 5000, "trace.jsonl:1: not JSON"),
        (b"[1]", "trace.jsonl:1: expected a JSON object, found '[1]'"),
        (text({**HEADER, "format": 2}), "trace.jsonl:1: format: must be 1, got 2"),
        (text({"engine": "x"}), "trace.jsonl:1: format: must be 1, got None"),
        (text({**HEADER, "engine": 5}), "trace.jsonl:1: header: engine: expected a string"),
        (text({**HEADER, "config": []}), "trace.jsonl:1: header: config: expected an object"),
        (
            text({**HEADER, "requests": {}}),
            "trace.jsonl:1: header: requests: expected an array",
        ),
        (
            text(HEADER, {"x": 1}),
            "trace.jsonl:2: unknown kind of line; expected a step, a tick or a closing line",
        ),
        (b"\xff\xfe\x00", "trace.jsonl: not UTF-8 text"),
        (b"\x1f\x8bnonsense", "trace.jsonl: damaged gzip data"),
        (gzip.compress(text(HEADER))[:-9], "trace.jsonl: damaged gzip data"),
    ],
    ids=range(16),
)
def test_rejects_invalid_files_with_line_and_field(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(TraceError) as raised:
        read(tmp_path, content)
    assert str(raised.value).startswith(f"{tmp_path}/{message}")
    assert "\n" not in str(raised.value)


def test_rejects_missing_files_and_directories(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: no such file"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(TraceError, match="cannot be read: is a directory"):
        read_trace(tmp_path)


def test_reads_several_recordings_from_one_file(tmp_path: Path) -> None:
    path = tmp_path / "packed.jsonl"
    closing = {"truncated": True, "why": "stall"}
    named = {**HEADER, "case": "rand-1"}
    path.write_bytes(text(named, {"step": 0, "note": '"format"'}, closing, HEADER, {"step": 0}))
    first, second = read_traces(path)
    assert (first.header, len(first.steps), first.truncated) == (named, 1, closing)
    assert (second.header, len(second.steps), second.truncated) == (HEADER, 1, None)
    assert (first.name, first.where) == (f"{path}: rand-1", f"{path}:1: rand-1")
    assert (second.name, second.where) == (f"{path}: recording 2", f"{path}:4: recording 2")
    with pytest.raises(
        TraceError, match=r"packed.jsonl: contains 2 recordings; expected a file with one"
    ):
        read_trace(path)


def test_an_error_names_its_recording_and_others_are_read(tmp_path: Path) -> None:
    path = tmp_path / "packed.jsonl"
    path.write_bytes(text({**HEADER, "case": "a"}, {"x": 1}, {**HEADER, "case": "b"}, {"step": 0}))
    bad, good = split_recordings(path)
    with pytest.raises(TraceError, match=r"packed.jsonl:2: a: unknown kind of line"):
        bad.parse()
    assert good.parse().steps == [{"step": 0}]


def test_reads_directories_with_subdirectories(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "one.jsonl").write_bytes(text(HEADER))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text(HEADER, HEADER)))
    (tmp_path / "notes.txt").write_text("no recording")
    assert len(list(read_traces(tmp_path))) == 3
    (tmp_path / "empty").mkdir()
    with pytest.raises(TraceError, match="empty: no recordings"):
        list(read_traces(tmp_path / "empty"))


def test_packing_is_lossless_and_reproducible(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl.gz"
    closing = {"truncated": True, "why": "stall"}
    path.write_bytes(gzip.compress(text(HEADER, {"step": 0}, closing, HEADER, {"step": 0})))
    packed = pack_traces(read_traces(path))
    path.write_bytes(packed)
    first, second = read_traces(path)
    assert (first.truncated, second.truncated) == (closing, None)
    assert pack_traces([first, second]) == packed
    assert packed[4:8] == bytes(4)  # no time stamp


@pytest.mark.parametrize(
    ("why", "kind"),
    [
        ("engine panic on this batch", "panic"),
        ("livelock inside one schedule call", "livelock"),
        ("the same sequence twice in a batch", "self-deadlock"),
        ("requests left every queue: [1]", "lost"),
        ("the scheduler raised", "raised"),
        ("no progress", "stall"),
        ("something new", "something new"),
    ],
)
def test_classifies_endings(why: str, kind: str) -> None:
    assert ending_kind({"truncated": True, "why": why}) == kind
