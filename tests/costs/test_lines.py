"""Straight lines between points."""

from __future__ import annotations

import pytest

from simkv.costs.lines import at, bracket


@pytest.mark.parametrize(
    ("x", "y"), [(0, 10.0), (1, 10.0), (2, 15.0), (3, 20.0), (5, 20.0), (7, 20.0), (4, 20.0)]
)
def test_lines_join_the_points_flat_below_and_going_on_above(x: float, y: float) -> None:
    assert at([1, 3, 5], [10.0, 20.0, 20.0], x) == y


def test_above_the_last_point_the_last_line_goes_on() -> None:
    assert at([1, 2], [1.0, 3.0], 4) == 7.0
    assert bracket([1, 2], 4) == (0, 1, 3.0)


def test_a_single_point_is_flat() -> None:
    assert at([5], [2.0], 0) == at([5], [2.0], 50) == 2.0
