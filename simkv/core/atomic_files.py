"""Atomic writes of files and directories, and checks of output paths.

check_file("--out", path)
with atomic_file(path) as new:
   new.write_bytes(content)
"""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from simkv.core.errors import InputError


@contextmanager
def translate_disk_errors(path: object, what: str) -> Iterator[None]:
    """Raise InputError in place of OSError.

    The message is, for example, ``PATH: cannot be WHAT: no space left on device``. ``what`` is
    "read" or "written".
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error) or "error").lower()
        raise InputError(f"{path}: cannot be {what}: {reason}") from error


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` if the ``with`` block succeeds.

    Pipes and devices are written to directly. Raises InputError if the file cannot be written.
    """
    # The temporary file is in the same directory, and its name ends with the name of ``path``, so
    # that its suffix is the same.
    with translate_disk_errors(path, "written"):
        if path.exists() and not path.is_file():
            yield path
            return
        new = path.with_name(f".{os.getpid()}-{path.name}")
        try:
            yield new
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write text to a file atomically as UTF-8."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write bytes to a file atomically."""
    with atomic_file(path) as new:
        new.write_bytes(content)


def make_folder(folder: Path) -> None:
    """Create a directory and its parents. Raises InputError if that fails."""
    with translate_disk_errors(folder, "written"):
        folder.mkdir(parents=True, exist_ok=True)


@contextmanager
def atomic_folder(folder: Path, own: Sequence[str] = ("*",)) -> Iterator[Path]:
    """Yield a new directory that replaces ``folder`` if the ``with`` block succeeds.

    A file in ``folder`` is copied to the new directory if it matches none of the glob patterns
    ``own``.

    Raises InputError if the directory cannot be written.
    """
    make_folder(folder.parent)
    with (
        translate_disk_errors(folder, "written"),
        tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch,
    ):
        new = Path(scratch) / "new"
        new.mkdir()
        yield new
        _keep(folder, new, own)
        _replace(folder, new, Path(scratch) / "old")


def _keep(folder: Path, new: Path, own: Sequence[str]) -> None:
    for path in folder.iterdir() if folder.exists() else ():
        target = new / path.name
        if target.exists() or any(path.match(name) for name in own):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, target, symlinks=True)
        else:
            shutil.copy2(path, target, follow_symlinks=False)


def _replace(folder: Path, new: Path, old: Path) -> None:
    """Replace ``folder`` with two renames on one file system; restore it on failure."""
    if folder.exists():
        folder.rename(old)
    try:
        new.rename(folder)
    except BaseException:
        if old.exists() and not folder.exists():
            old.rename(folder)
        raise


def check_file(option: str, file: Path) -> None:
    """Raise InputError if ``file`` cannot be written.

    ``option`` names the option in the message.
    """
    # ``file`` must not be a directory, and its parent directory must exist and be writable.
    what = ""
    with translate_disk_errors(f"{option} {file}", "written"):
        if file.is_dir():
            what = "is a folder"
        elif not file.parent.is_dir():
            what = "its folder does not exist"
        elif (file.is_file() or not file.exists()) and not _is_writable(file.parent):
            what = "its folder is not writable"
    if what:
        raise InputError(f"{option} {file}: {what}; expected a file in a folder that exists")


def check_new_file(option: str, file: Path, source: Path, overwrite: bool) -> None:
    """Raise InputError if ``file`` is the ``source``, already exists or cannot be written.

    With ``overwrite``, an existing file is accepted.
    """
    check_file(option, file)
    if file.exists() and file.resolve() == source.resolve():
        raise InputError(f"{option} {file}: this is the input file; choose another output file")
    if file.exists() and not overwrite:
        raise InputError(f"{option} {file}: already exists; use --overwrite to replace it")


def check_folder(
    option: str, folder: Path, what: str = "", is_own: Callable[[Path], bool] | None = None
) -> None:
    """Raise InputError if ``folder`` cannot be written or contains unrelated files.

    ``what`` names the output in the message, such as "report". The function ``is_own`` returns
    whether a directory contains an earlier output.
    """
    # Without ``is_own``, any content is accepted.
    with translate_disk_errors(f"{option} {folder}", "written"):
        found = _find_conflict(folder, what, is_own)
    if found:
        expected = "a new or empty folder" if is_own else "a folder"
        raise InputError(f"{option} {folder}: {found}; expected {expected}")


def _is_writable(folder: Path) -> bool:
    """Return whether a directory can be created in ``folder``.

    A full disk raises OSError.
    """
    # os.access allows everything to the superuser, even on a read-only file system.
    try:
        Path(tempfile.mkdtemp(prefix=".simkv-", dir=folder)).rmdir()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise
        return False
    return True


def _find_conflict(folder: Path, what: str, is_own: Callable[[Path], bool] | None) -> str:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    name = "" if existing is folder else f"{existing} "
    if not existing.is_dir():
        return f"{name}is a file"
    if not _is_writable(existing):
        return f"{name}is not writable"
    if is_own and existing is folder and any(folder.iterdir()) and not is_own(folder):
        return f"contains other files and no {what}"
    return ""
