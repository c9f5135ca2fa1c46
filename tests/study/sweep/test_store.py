"""Tests that finished jobs are retained, regardless of the state of the last line."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.study.job_runner import ResultFile

FIRST, SECOND = {"steps": 3, "e2e_ms": {"mean": 0.1 + 0.2}}, {"steps": 4, "verdict": "served"}


def filled(path: Path) -> bytes:
    with ResultFile(path) as store:
        store.add("a", FIRST)
        store.add("b", SECOND)
        assert store.done["a"] == FIRST
    return path.read_bytes()


def test_reads_written_results(tmp_path: Path) -> None:
    path = tmp_path / "new" / "points.jsonl"
    assert ResultFile(path).done == {}
    filled(path)
    assert ResultFile(path).done == {"a": FIRST, "b": SECOND}


@given(data=st.data())
def test_ignores_torn_line(data: st.DataObject, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("store") / "points.jsonl"
    whole = filled(path)
    cut = data.draw(st.integers(0, len(whole)))
    path.write_bytes(whole[:cut])
    # A line that lacks only its newline is complete.
    kept = whole[: cut + 1].count(b"\n") if whole[cut : cut + 1] == b"\n" else 0
    kept = max(kept, whole[:cut].count(b"\n"))
    expected = dict(list({"a": FIRST, "b": SECOND}.items())[:kept])
    assert ResultFile(path).done == expected
    with ResultFile(path) as store:
        store.add("c", SECOND)
    assert ResultFile(path).done == {**expected, "c": SECOND}


@pytest.mark.parametrize(
    "junk", [b"\0\0\0\n", b"\xff\xfe\n", b"[1]\n", b'{"digest": 1}\n', b"null\n", b"\n"]
)
def test_ignores_invalid_lines(tmp_path: Path, junk: bytes) -> None:
    path = tmp_path / "points.jsonl"
    path.write_bytes(junk + filled(tmp_path / "other") + junk)
    assert ResultFile(path).done == {"a": FIRST, "b": SECOND}


def test_rejects_unusable_store(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        ResultFile(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot be written"):
        ResultFile(tmp_path / "file" / "points.jsonl").add("a", FIRST)
