"""Campaign and fit find what a device costs, and say rightly how wrong they are.

Some of those that `python -m tests.gpu.synthetic_devices 50` draws.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.gpu.synthetic_devices import (
    Device,
    Weather,
    calibrated,
    drawn,
    judged_freely,
)


@pytest.mark.parametrize("seed", [1, 3])
def test_a_planted_device_is_found(seed):
    """Steps of runs of other load and other sizes: within 1 % at the median, 3 % at P95."""
    device = Device(drawn(seed))
    found = calibrated(device)
    error = found.profile.fit.held_out["all"]
    assert error.points > 500
    assert error.median < 0.01
    assert error.p95 < 0.03
    assert (found.drift, found.stalled) == (pytest.approx(0.0, abs=1e-3), 0)
    inside = judged_freely(device, found.profile)
    assert sum(inside.values()) >= 0.9 * len(inside)


def test_noise_drift_and_stalls_are_told_and_not_fitted_in():
    """6 % slower in the end, 1 % of noise, and every two hundredth repeat stalls."""
    weather = Weather(np.random.default_rng(7), noise=0.01, drift=0.06, stalls=0.005)
    found = calibrated(Device(drawn(3), weather), repeats=7)
    assert found.drift == pytest.approx(0.06, abs=0.01)
    assert weather.stalled > 10
    assert 5 < found.stalled <= weather.stalled
    error = found.profile.fit.held_out["all"]  # service is as slow as the end of the campaign
    assert error.median < 0.02
    assert abs(error.bias) < 0.02
