"""Tests of linear interpolation between points."""

from __future__ import annotations

import pytest

from simkv.costs.interpolation import bracket, extrapolate, interpolate


@pytest.mark.parametrize(
    ("x", "y"), [(0, 10.0), (1, 10.0), (2, 15.0), (3, 20.0), (5, 20.0), (7, 20.0), (4, 20.0)]
)
def test_interpolates_between_points_and_is_constant_below(x: float, y: float) -> None:
    assert interpolate([1, 3, 5], [10.0, 20.0, 20.0], x) == y


def test_extrapolates_the_last_segment() -> None:
    assert interpolate([1, 2], [1.0, 3.0], 4) == 7.0
    assert bracket([1, 2], 4) == (0, 1, 3.0)


def test_single_point_is_constant() -> None:
    assert interpolate([5], [2.0], 0) == interpolate([5], [2.0], 50) == 2.0


def test_extrapolates_with_the_mean_slope_of_the_last_doubling() -> None:
    xs, ys = [1, 512, 1024, 2032, 2048], [1.0, 2.0, 4.0, 8.0, 8.0]
    assert extrapolate(xs, ys, 4096) == 16.0
    assert extrapolate(xs, ys, 2040) == 8.0
    assert extrapolate([1, 3], [1.0, 2.0], 7) == 4.0
    assert extrapolate([4, 5], [1.0, 2.0], 3) == 0.0
    assert extrapolate([4], [1.0], 9) == 1.0
