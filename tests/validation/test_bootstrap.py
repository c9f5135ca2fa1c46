"""Tests that intervals of errors over resampled steps contain the true value, for any correlation
of the steps.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from scipy.signal import lfilter

from simkv.validation.bootstrap import step_error_intervals

Errors = npt.NDArray[np.float64]
NAMES = ("median", "p95", "bias")


def alike(count: int, likeness: float, random: np.random.Generator) -> Errors:
    """Return autocorrelated errors (an AR(1) process) with mean 3 % and deviation 5 %."""
    drawn = random.normal(size=count + 100) * np.sqrt(1 - likeness**2)
    found: Errors = 0.03 + 0.05 * lfilter([1.0], [1.0, -likeness], drawn)[100:]
    return found


def figures(errors: Errors) -> dict[str, float]:
    median, p95 = np.percentile(np.abs(errors), (50, 95))
    return {"median": median, "p95": p95, "bias": errors.mean()}


def held(count: int, likeness: float, runs: int = 150) -> dict[str, float]:
    """Return how often the intervals contain the true value, as a fraction of ``runs`` runs of
    ``count`` steps.
    """
    random = np.random.default_rng(0)
    truth = figures(alike(500_000, likeness, random))
    found = [step_error_intervals(alike(count, likeness, random)) for _ in range(runs)]
    return {
        name: sum(ends[name][0] <= truth[name] <= ends[name][1] for ends in found) / runs
        for name in NAMES
    }


@pytest.mark.parametrize(("count", "likeness"), [(300, 0.0), (300, 0.5), (600, 0.7)])
def test_intervals_contain_planted_errors(count: int, likeness: float) -> None:
    assert min(held(count, likeness).values()) >= 0.85


def test_few_blocks_widen_the_interval() -> None:
    """With 5 blocks of 20 steps, plain 2.5 % quantiles would contain the true value in only 87 of
    100 cases.
    """
    found = held(20, 0.0)
    assert min(found["median"], found["bias"]) >= 0.92


def test_correlated_steps_widen_the_interval() -> None:
    random = np.random.default_rng(1)
    errors = alike(400, 0.9, random)
    low, high = step_error_intervals(errors)["bias"]
    lowest, highest = step_error_intervals(random.permutation(errors))["bias"]
    assert high - low > 2 * (highest - lowest)


def shapes(count: int) -> Iterator[Errors]:
    random = np.random.default_rng(count)
    edges = np.zeros(count)
    edges[[0, 1, -2, -1]] = 1.0
    yield edges
    yield np.linspace(-0.2, 0.8, count)
    yield random.pareto(1.0, count)
    yield np.cumsum(random.normal(size=count))
    yield np.where(np.arange(count) < 0.06 * count, 1.0, 0.01)


@pytest.mark.parametrize("count", [4, 5, 16, 40, 300])
def test_interval_contains_its_estimate(count: int) -> None:
    """The first and last steps count as much as the steps between them."""
    for errors in shapes(count):
        found = figures(errors)
        for name, (low, high) in step_error_intervals(errors).items():
            assert low <= found[name] <= high, (name, errors)


def test_few_steps_have_an_interval_and_a_single_step_has_none() -> None:
    ends = step_error_intervals(np.array([0.04, -0.212, 0.01]))
    assert ends["median"] == pytest.approx((0.01, 0.212))
    assert ends["bias"] == pytest.approx((-0.212, 0.04))
    assert step_error_intervals(np.array([0.1])) == {}
