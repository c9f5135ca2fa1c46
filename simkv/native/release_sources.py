"""Locate the Python files of a release in a folder, wheel, environment or package index."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from zipfile import BadZipFile, ZipFile

from simkv.core.errors import InputError

#: Version that selects the latest release on the package index.
NEWEST = "newest"


class Sources(NamedTuple):
    """A ``folder`` that contains the package, and the ``version`` of the package."""

    folder: Path
    version: str


@contextmanager
def open_sources(package: str, version: str, given: Path | None = None) -> Iterator[Sources]:
    """Provide a version of ``package`` (None: the installed one, or a download with pip).

    Raises InputError if there are no sources.
    """
    with TemporaryDirectory() as room:
        if given is not None and given.is_dir():
            folder = given
        elif given is not None:
            folder = unpack_wheel(given, package, Path(room))
            version = version_of_wheel(given) if version == NEWEST else version
        elif (installed := installed_package(package)) and installed.version == version:
            folder = installed.folder
        else:
            wheel = _downloaded(package, version, Path(room))
            folder, version = unpack_wheel(wheel, package, Path(room)), version_of_wheel(wheel)
        if not (folder / package).is_dir():
            raise InputError(
                f"{folder}: no directory {package}/; expected the sources of the package"
            )
        yield Sources(folder, version)


def installed_package(package: str) -> Sources | None:
    """Return the installed package, or None if it is not installed."""
    try:
        version = metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
    spec = find_spec(package)
    return Sources(Path(spec.origin).parent.parent, version) if spec and spec.origin else None


def _downloaded(package: str, version: str, room: Path) -> Path:
    """Download the wheel with pip and return its path."""
    wanted = package if version == NEWEST else f"{package}=={version}"
    pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "download"]
    only = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(room)]
    got = subprocess.run([*pip, *only, wanted], capture_output=True, text=True, check=False)
    wheels = list(room.glob("*.whl"))
    if got.returncode or not wheels:
        why = (got.stderr.strip() or "no wheel found").splitlines()[-1]
        raise InputError(
            f"{wanted}: download by pip failed: {why}; use --source with a wheel or directory"
        )
    return wheels[0]


def version_of_wheel(wheel: Path) -> str:
    """Return the version in a wheel's file name."""
    return wheel.name.split("-")[1].split("+")[0]


def unpack_wheel(wheel: Path, package: str, room: Path) -> Path:
    """Extract the package's Python files from a wheel and return their folder."""
    folder = room / "sources"
    try:
        with ZipFile(wheel) as archive:
            names = [n for n in archive.namelist() if n.startswith(f"{package}/")]
            archive.extractall(folder, [n for n in names if n.endswith(".py")])
    except (OSError, BadZipFile) as error:
        raise InputError(f"{wheel}: neither a directory nor a readable wheel: {error}") from error
    return folder
