"""Tests of error messages for invalid input."""

from __future__ import annotations

import pytest

from simkv.core.errors import InputError, spelling_hint


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("block_sise", " (did you mean 'block_size'?)"),
        ("num_blocks", " (did you mean 'num_gpu_blocks'?)"),
        ("zzz", ""),
        ("", ""),
    ],
)
def test_spelling_hint_suggests_nearest_name(name: str, expected: str) -> None:
    assert spelling_hint(name, ["block_size", "num_gpu_blocks", "timeout"]) == expected


def test_spelling_hint_is_empty_without_candidates() -> None:
    assert spelling_hint("x", []) == ""


def test_input_error_is_no_builtin_error() -> None:
    assert not issubclass(InputError, ValueError)
    assert str(InputError("file:3: field: wrong")) == "file:3: field: wrong"
