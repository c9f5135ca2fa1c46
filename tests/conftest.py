"""Fixtures for all tests, and how hard Hypothesis tries."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# The same examples every time, so that a red test is red for everybody;
# HYPOTHESIS_PROFILE=deep looks for new ones.
settings.register_profile(
    "default",
    max_examples=18,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("deep", settings.get_profile("default"), max_examples=500)
settings.register_profile("deep", settings.get_profile("deep"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(scope="session")
def root() -> Path:
    """The root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """The project's data folder beside the checkout; tests that need it skip where it is not."""
    if not SHARED.is_dir():
        pytest.skip(f"the recorded data of the project are not here: no folder {SHARED.name}/")
    return SHARED
