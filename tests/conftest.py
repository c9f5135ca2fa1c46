"""Fixtures for all tests, and the Hypothesis profiles."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# Output in tests is as wide as output into a pipe, even if the environment sets a terminal width.
os.environ.pop("COLUMNS", None)

# Examples are the same in every run, so that failures are reproducible; HYPOTHESIS_PROFILE=deep
# generates new examples.
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


#: Files that take longest. They start first, so that no worker waits for them at the end.
LONGEST = ("test_wheel.py", "test_docs_walkthroughs.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of the longest files to the front."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Exclude the collected tests and imported modules, millions of objects, from garbage
    collections.
    """
    gc.freeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """Return the root of the repository."""
    return ROOT


@pytest.fixture(scope="session")
def shared() -> Path:
    """Return the project's data folder beside the checkout; skip the test if it is missing."""
    if not SHARED.is_dir():
        pytest.skip(f"the recorded data of the project are not here: no folder {SHARED.name}/")
    return SHARED
