"""Tests of error messages for invalid input."""

from __future__ import annotations

import pytest

from simkv.core.errors import InputError, simplify_pydantic_message, spelling_hint


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


@pytest.mark.parametrize(
    ("message", "plain"),
    [
        ("Input should be greater than or equal to 0.000000001", "should be greater than 0"),
        ("Input should be greater than or equal to 1e-09", "should be greater than 0"),
        (
            "Input should be greater than or equal to 0.001",
            "should be greater than or equal to 0.001",
        ),
    ],
)
def test_tiny_minimum_is_written_as_zero(message: str, plain: str) -> None:
    assert simplify_pydantic_message(message) == plain
