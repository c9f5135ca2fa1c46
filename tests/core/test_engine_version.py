"""Tests of versions in names of releases and variants."""

from __future__ import annotations

import pytest

from simkv.core.engine_version import (
    MANY,
    count_releases,
    find_version,
    is_since,
    nearest_release,
    parse_version,
    plain_release,
    release_of_variant,
)


def test_names_of_releases_are_in_release_order() -> None:
    names = ["0.6.0", "0.9.0.1", "0.11", "0.33.0-skip-blocked", "0.33.0.post1", "0.34.0rc1"]
    names += ["v0.34.0", "1.0.0"]
    shuffled = [*names[4:], *names[:4]]
    assert sorted(shuffled, key=parse_version) == names


@pytest.mark.parametrize("name", ["", "bucketed", "5f480b7a6", "0.27.", "newest"])
def test_rejects_names_without_a_version(name: str) -> None:
    assert find_version(name) is None
    with pytest.raises(ValueError, match="is not a version; expected a release such as"):
        parse_version(name)


@pytest.mark.parametrize(
    ("name", "release"),
    [
        ("v0.11.0", "0.11.0"),
        ("0.11", "0.11"),
        ("0.33.0.post1", "0.33.0"),
        ("0.11.0+cu128", "0.11.0"),
        ("0.34.0rc1", None),
        ("0.11.1.dev3+g12ab", None),
        ("0.33.0-skip-blocked", None),
        ("1!0.33.0", None),
    ],
)
def test_plain_releases(name: str, release: str | None) -> None:
    assert plain_release(name) == release


def test_variants_have_the_release_in_their_name() -> None:
    assert release_of_variant("0.33.0-skip-blocked") == "0.33.0"
    assert release_of_variant("v0.11.0") == "0.11.0"
    assert release_of_variant("5f480b7a6") == "5f480b7a6"


def test_since_compares_numbers_not_texts() -> None:
    assert is_since("0.11.0", "0.9")
    assert is_since("1.0.0", "0.33")
    assert is_since("v0.33.0.post1", "0.33")
    assert is_since("0.34.0rc1", "0.34")
    assert not is_since("0.6.0", "0.33")
    assert not is_since("0.5.9", "0.5.15")


def test_counts_releases_between_versions() -> None:
    assert count_releases("0.27.0", "0.33.0", part=1) == 6
    assert count_releases("0.27.1", "0.27.0", part=1) == 0
    assert count_releases("0.5.15", "0.5.23", part=2) == 8
    # The number of releases between two minor or two major versions is unknown.
    assert count_releases("0.5.23", "0.6.0", part=2) == MANY
    assert count_releases("1.0.0", "0.33.0", part=1) == -MANY
    assert count_releases("", "0.33.0", part=1) == 0


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("0.5.18", "0.5.20"),
        ("0.5.14", "0.5.15"),
        ("0.6.0", "0.5.23"),
        ("0.4.6.post2", "0.5.15"),
        ("1.0.0", "0.5.23"),
    ],
)
def test_nearest_releases(name: str, nearest: str) -> None:
    assert nearest_release(name, ["0.5.23", "0.5.22", "0.5.20", "0.5.15"]) == nearest


def test_prefers_the_older_of_two_equally_near_releases() -> None:
    assert nearest_release("0.5.21", ["0.5.22", "0.5.20"]) == "0.5.20"
