"""The source of an engine: a checkout, an unpacked wheel, a wheel or the installed package."""

from __future__ import annotations

import atexit
import hashlib
import re
import subprocess
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from simkv.core.errors import InputError
from simkv.native.driver_protocol import NativeEngine
from simkv.native.native_engines import NATIVE_ENGINES, describe_unsupported
from simkv.native.release_sources import installed_package, unpack_wheel, version_of_wheel

#: Value of ``source`` that selects the installed package.
INSTALLED = "installed"
#: Pattern of the version in a package's ``_version.py``.
_VERSION = re.compile(r"^(?:__version__ = )?version = ['\"]([^'\"]+)['\"]", re.MULTILINE)
_TAG = re.compile(r"v?(\d+\.\d+(\.\d+)?\S*)")


class SourceError(InputError):
    """Raised for a source that does not exist or contains no code of the engine."""


class NativeSource(NamedTuple):
    """Code of an engine, ``git describe`` of its folder, and the SHA-256 of its deciding files."""

    path: str
    folder: Path
    version: str | None
    commit: str | None
    dirty: bool
    digest: str

    @property
    def state(self) -> str:
        """Version, commit and hash of the files that affect decisions, as text."""
        known = [f"version {self.version or 'unknown'}"]
        if self.commit:
            known.append(f"commit {self.commit}{' with local changes' if self.dirty else ''}")
        return f"{', '.join(known)}, sha256 of deciding files {self.digest[:16]}"


def find_source(engine: str, path: str, folder: Path) -> NativeSource:
    """Return the code at ``path``, relative to ``folder``; raises SourceError if there is none."""
    if engine not in NATIVE_ENGINES:
        raise SourceError(
            f"source: {describe_unsupported(engine)}, or remove source to run simkv's port of "
            f"{engine}"
        )
    spec = NATIVE_ENGINES[engine]
    whole = path if path == INSTALLED else str((folder / path).resolve())
    found, version = _locate(spec, whole)
    described = ("describe", "--tags", "--always", "--long", "--match", "v*")
    commit = _git(found, *described) if path != INSTALLED else None
    changes = ("status", "--porcelain", "--untracked-files=no", "--", ".")
    dirty = commit is not None and bool(_git(found, *changes))
    version = version or _version_of(found, spec.package) or (commit and _tag(commit))
    version = version or _tag(found.name.removeprefix(f"{spec.package}-"))
    return NativeSource(whole, found, version, commit, dirty, _digest(spec, found))


def locate(engine: str, path: str) -> Path:
    """Return the folder with the engine's package; ``path`` is a checkout or wheel (absolute)."""
    return _locate(NATIVE_ENGINES[engine], path)[0]


def _locate(spec: NativeEngine, path: str) -> tuple[Path, str | None]:
    """Return the folder that contains the package, and the version if the source is a wheel."""
    if path == INSTALLED:
        if found := installed_package(spec.package):
            return found
        raise SourceError(f"source: {spec.package} is not installed; expected a path")
    given = Path(path)
    if given.is_file():
        return _unpacked(given, spec.package), version_of_wheel(given)
    if not given.is_dir():
        raise SourceError(f"source: {given} does not exist; expected a checkout or wheel")
    for folder in (*(given / name for name in spec.subfolders), given.parent):
        if (folder / spec.package / "__init__.py").is_file() and (
            folder != given.parent or given.name == spec.package
        ):
            return folder.resolve(), None
    raise SourceError(
        f"source: {given} contains no {spec.package}/__init__.py; expected a checkout, an unpacked "
        f"wheel, a wheel file or {INSTALLED}"
    )


@lru_cache(maxsize=8)
def _unpacked(wheel: Path, package: str) -> Path:
    room = TemporaryDirectory(prefix="simkv-source-")
    atexit.register(room.cleanup)
    return unpack_wheel(wheel, package, Path(room.name))


def _version_of(folder: Path, package: str) -> str | None:
    """Return the version stated in the files of the package or in its directory, or None."""
    for info in sorted(folder.glob(f"{package}-*.dist-info")):
        return info.name.removesuffix(".dist-info").partition("-")[2]
    file = folder / package / "_version.py"
    found = _VERSION.search(file.read_text(errors="replace")) if file.is_file() else None
    return found.group(1) if found else None


def _git(folder: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _tag(text: str) -> str | None:
    found = _TAG.match(text)
    return found.group(1).partition("-")[0] if found else None


def _digest(spec: NativeEngine, folder: Path) -> str:
    whole = hashlib.sha256()
    for path in spec.files(folder):
        whole.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()
