"""Versions in the names of releases and variants, in release order."""

from __future__ import annotations

from functools import lru_cache

from packaging.version import InvalidVersion, Version


@lru_cache(maxsize=1024)
def parse_version(name: str) -> Version:
    """Return the version in a name such as ``0.33.0``, ``v0.11`` or ``0.33.0-skip-blocked``.

    Raises ValueError if the name does not start with a version.
    """
    for text in (name, name.partition("-")[0]):
        try:
            return Version(text)
        except InvalidVersion:
            pass
    raise ValueError(f"{name!r} is not a version; expected a release such as 0.33.0 or v0.11.0")


def find_version(name: str) -> Version | None:
    """Return the version in a name, or None if the name does not start with a version."""
    try:
        return parse_version(name)
    except ValueError:
        return None


def is_since(name: str, release: str) -> bool:
    """Return whether a version is ``release`` or a later one.

    Pre-releases and development versions count as their release, since they mostly contain its
    changes.
    """
    found = parse_version(name)
    return Version(found.base_version) >= parse_version(release)


def plain_release(name: str) -> str | None:
    """Return the release in a name without ``v``, post release and local version, or None.

    ``v0.11.0``, ``0.11.0.post1`` and ``0.11.0+cu128`` are 0.11.0. The result is None for names of
    variants and for pre-releases, which have only some changes of their release.
    """
    try:
        version = Version(name)
    except InvalidVersion:
        return None
    if version.is_prerelease or version.epoch:
        return None
    return ".".join(map(str, version.release))
