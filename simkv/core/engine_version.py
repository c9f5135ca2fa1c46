"""Parse and compare the versions in the names of releases and variants."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from packaging.version import InvalidVersion, Version

#: Number of releases reported between two versions that differ in a component before the counted
#: one.
MANY = 10


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
    """Return the version at the start of a name, or None if there is none."""
    try:
        return parse_version(name)
    except ValueError:
        return None


@lru_cache(maxsize=4096)
def is_since(name: str, release: str) -> bool:
    """Return whether the version in ``name`` is ``release`` or later."""
    # Pre-releases and development versions count as the release that they precede, because they
    # mostly contain its changes.
    found = parse_version(name)
    return Version(found.base_version) >= parse_version(release)


def plain_release(name: str) -> str | None:
    """Return the release in a name such as ``v0.11.0`` or ``0.11.0.post1``.

    Returns None for other names.
    """
    # The result is None for variants and pre-releases, because they contain only some changes of
    # their release.
    try:
        version = Version(name)
    except InvalidVersion:
        return None
    if version.is_prerelease or version.epoch:
        return None
    return ".".join(map(str, version.release))


def release_of_variant(name: str) -> str:
    """Return the release in the name of a variant, such as 0.33.0 for ``0.33.0-skip-blocked``."""
    return plain_release(name) or name.partition("-")[0]


def count_releases(older: str, newer: str, part: int) -> int:
    """Return the number of releases between ``older`` and ``newer``, including ``newer``.

    ``part`` is the version component to count: 1 for minor, 2 for patch releases. If an earlier
    component differs, the result is ``MANY`` or ``-MANY``.
    """
    # The result is negative if ``newer`` is the older version, and 0 if one of the names contains
    # no version.
    first, last = find_version(older), find_version(newer)
    if first is None or last is None:
        return 0
    start, end = _numbers(first), _numbers(last)
    if start[:part] != end[:part]:
        return MANY if end > start else -MANY
    return end[part] - start[part]


def nearest_release(name: str, releases: Iterable[str]) -> str:
    """Return the entry of ``releases`` nearest to ``name``."""
    # Of two equally near releases, the older one is returned.
    wanted = parse_version(name)
    known = sorted(releases, key=parse_version)
    older = [release for release in known if parse_version(release) <= wanted]
    newer = [release for release in known if parse_version(release) > wanted]
    if not (older and newer):
        return older[-1] if older else newer[0]
    return min(older[-1], newer[0], key=lambda release: _distance(parse_version(release), wanted))


def _numbers(version: Version) -> tuple[int, int, int]:
    return version.major, version.minor, version.micro


def _distance(one: Version, other: Version) -> tuple[int, ...]:
    return tuple(abs(a - b) for a, b in zip(_numbers(one), _numbers(other), strict=True))
