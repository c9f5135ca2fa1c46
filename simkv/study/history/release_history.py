"""Releases of an engine in order, and a directory with their Python files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from packaging.version import Version

from simkv.core.engine_version import find_version, parse_version, plain_release
from simkv.core.errors import InputError
from simkv.native.release_sources import open_sources
from simkv.schedulers.engine_registry import list_variants


def parse_releases(text: str, engine: str, package: str, folder: Path) -> list[str]:
    """Return the releases of ``LOW..HIGH``, or of a comma-separated list.

    A range contains the releases that simkv supports and the releases in ``folder``. Raises
    InputError if there are fewer than two releases.
    """
    if ".." not in text:
        found = [plain_release(name.strip()) or name.strip() for name in text.split(",")]
    else:
        ends = text.split("..")
        if len(ends) != 2:
            raise InputError(f"--releases {text}: expected a range such as 0.19..0.33")
        low, high = (_parse(end, text) for end in ends)
        known = [name for name in list_variants(engine) if plain_release(name) == name]
        known += [path.name.removeprefix(f"{package}-") for path in folder.glob(f"{package}-*")]
        known += [end for end in map(plain_release, ends) if end and end.count(".") >= 2]
        found = _between(known, *sorted([low, high]))
        if low > high:
            found.reverse()
    if len(found) < 2:
        raise InputError(f"--releases {text}: expected at least two releases of {engine}")
    return found


def _parse(end: str, text: str) -> Version:
    version = find_version(end)
    if version is None:
        raise InputError(f"--releases {text}: {end!r} is not a release; expected 0.19..0.33")
    return version


def _between(names: Iterable[str], low: Version, high: Version) -> list[str]:
    """Return the releases in a range. An upper end of 0.33 includes 0.33.1."""
    found = {name: parse_version(name) for name in names if find_version(name)}
    return sorted(
        (
            name
            for name, version in found.items()
            if low <= version
            and (version <= high or version.release[: len(high.release)] == high.release)
        ),
        key=found.__getitem__,
    )


def fetch_release(package: str, version: str, folder: Path) -> Path:
    """Return the directory ``folder/PACKAGE-VERSION`` with the Python files of a release.

    A missing wheel is downloaded with pip. Raises InputError if the download fails.
    """
    target = folder / f"{package}-{version}"
    if (target / package).is_dir():
        return target
    with open_sources(package, version) as sources:
        folder.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=folder) as room:
            shutil.copytree(
                sources.folder / package, Path(room) / "new" / package, ignore=_not_python
            )
            (Path(room) / "new").rename(target)
    return target


def _not_python(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if not (name.endswith(".py") or (Path(folder) / name).is_dir())]
