"""Tests of campaign and fit on devices with known costs; see tests/gpu/synthetic_devices.py."""

from __future__ import annotations

import numpy as np
import pytest

from simkv.costs.cost_profile import StepCost
from simkv.gpu.campaign import count_stalled, measure_drift
from simkv.validation.gpu_runs.validation_suite import OVERLAPPED, SYNCHRONOUS
from tests.gpu.synthetic_devices import Calibration, Device, Disturbance, calibrate, sample_nature


@pytest.fixture(scope="module")
def plain() -> Calibration:
    return calibrate(Device(sample_nature(3)))


@pytest.mark.parametrize("mode", [OVERLAPPED, SYNCHRONOUS])
def test_profile_predicts_runs_of_other_loads(plain, mode):
    """The error is at most 1.5 % at the median and 4 % at P95, for steps of sizes that were not
    fitted.
    """
    error = plain.profiles[mode].fit.held_out["all"]
    assert error.points > 500
    assert error.median < 0.015
    assert error.p95 < 0.04
    assert measure_drift(plain.samples) == pytest.approx(0.0, abs=1e-3)
    assert count_stalled(plain.samples) == 0


def test_late_begin_event_does_not_bias_the_overlapped_profile():
    """In synchronous steps, the device time includes 0.3 ms of host time before the first
    kernel.
    """
    biases = []
    for event_s in (0.0, 3e-4):
        device = Device(sample_nature(3)._replace(event_s=event_s))
        found = calibrate(device)
        biases.append(found.profiles[OVERLAPPED].fit.held_out["decode"].bias)
        assert abs(found.profile.fit.held_out["decode"].bias) < 0.01
    assert abs(biases[1]) < 0.005
    assert biases[1] == pytest.approx(biases[0], abs=0.003)


def test_throttling_in_service_is_fitted():
    """A clock that decreases under load slows all steps by a fraction; a constant cannot describe
    this.
    """
    found = calibrate(Device(sample_nature(3, "throttle")._replace(throttle=0.1)))
    assert abs(found.profiles[OVERLAPPED].fit.held_out["mixed"].bias) < 0.03
    assert found.profiles[OVERLAPPED].fit.held_out["all"].median < 0.03


def test_noise_drift_and_stalls_are_reported():
    """The device is 6 % slower at the end, with 1 % of noise and a stall in one of 200 repeats."""
    disturbance = Disturbance(np.random.default_rng(7), noise=0.01, drift=0.06, stalls=0.005)
    found = calibrate(Device(sample_nature(3), disturbance), repeats=7)
    assert measure_drift(found.samples) == pytest.approx(0.06, abs=0.01)
    assert disturbance.stalled > 10
    assert 5 < count_stalled(found.samples) <= disturbance.stalled
    # the serving overhead is fitted at the end of the campaign
    error = found.profile.fit.held_out["all"]
    assert error.median < 0.03
    assert StepCost(found.profile)
