"""Tests of atomic writes of files and directories, and of one-line messages for disk errors."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path

import pytest

from simkv.core import atomic_files
from simkv.core.errors import InputError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def half_written(new: Path) -> None:
    assert new.suffix == ".txt"  # exit handlers cannot change this
    new.write_text("half of it")
    raise KeyboardInterrupt


def test_replaces_file_atomically(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    atomic_files.write_text(path, "old\n")
    with pytest.raises(KeyboardInterrupt), atomic_files.atomic_file(path) as new:
        half_written(new)
    assert path.read_bytes() == b"old\n"
    atomic_files.write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a.txt"]


def test_writes_to_device_directly() -> None:
    atomic_files.write_text(Path(os.devnull), "away with it")
    assert not Path(os.devnull).is_file()


def test_reports_full_disk_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    with (
        pytest.raises(InputError, match=r"a.txt: cannot be written: no space left on device$"),
        atomic_files.atomic_file(path),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == []
    with (
        pytest.raises(InputError, match="out: cannot be written: no space left on device"),
        atomic_files.atomic_folder(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert names(tmp_path) == []


def test_atomic_folder_keeps_foreign_files(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "out"
    for text in ("one", "two"):
        with atomic_files.atomic_folder(folder, ("*.csv",)) as new:
            (new / f"{text}.csv").write_text(text)
        (folder / "notes.md").write_text("hours of work")
    assert names(folder) == ["notes.md", "two.csv"]
    assert names(tmp_path / "deep") == ["out"]


@pytest.mark.parametrize(
    ("place", "complaint"),
    [
        ("folder", "is a folder; expected a file"),
        ("none/x", "its folder does not exist"),
        ("x" * 300 + "/x", "cannot be written: file name too long"),
    ],
)
def test_check_file_rejects_impossible_paths(tmp_path: Path, place: str, complaint: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=f"--out .*{complaint}"):
        atomic_files.check_file("--out", tmp_path / place)


def test_rejects_read_only_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> str:
        raise PermissionError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    atomic_files.check_file("--out", Path(os.devnull))
    with pytest.raises(InputError, match="its folder is not writable"):
        atomic_files.check_file("--out", tmp_path / "x")
    with pytest.raises(InputError, match=f"--out {tmp_path}/a/b: {tmp_path} is not writable"):
        atomic_files.check_folder("--out", tmp_path / "a" / "b")


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="requires /proc")
def test_rejects_paths_that_only_seem_writable(tmp_path: Path) -> None:
    """The superuser has all permissions in /proc, but no file can be created there."""
    for check in (atomic_files.check_file, atomic_files.check_folder):
        with pytest.raises(InputError, match="is not writable"):
            check("--out", Path("/proc/simkv"))
        check("--out", tmp_path / "new")
    assert names(tmp_path) == []


def test_check_new_file_rejects_existing_files(tmp_path: Path) -> None:
    source, there = tmp_path / "source", tmp_path / "there"
    source.touch()
    there.touch()
    atomic_files.check_new_file("-o", tmp_path / "new", source, False)
    atomic_files.check_new_file("-o", there, source, True)
    with pytest.raises(InputError, match="already exists; use --overwrite to replace it"):
        atomic_files.check_new_file("-o", there, source, False)
    with pytest.raises(InputError, match="is the input file"):
        atomic_files.check_new_file("-o", source, source, True)


def test_check_folder_accepts_earlier_results(tmp_path: Path) -> None:
    def ours(folder: Path) -> bool:
        return (folder / "mark").exists()

    atomic_files.check_folder("--out", tmp_path / "new", "sweep", ours)
    (tmp_path / "thesis.tex").touch()
    atomic_files.check_folder("--out", tmp_path)
    with pytest.raises(
        InputError, match="contains other files and no sweep; expected a new or empty"
    ):
        atomic_files.check_folder("--out", tmp_path, "sweep", ours)
    (tmp_path / "mark").touch()
    atomic_files.check_folder("--out", tmp_path, "sweep", ours)
