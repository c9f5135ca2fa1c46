"""Tests of constraints to the lower bounds of dependencies."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from dev.oldest_dependencies import oldest

ROOT = Path(__file__).parents[2]


def test_constraints_have_the_lower_bounds() -> None:
    assert oldest(["numpy>=1.26", "simpy>=4.1,<4.2"]) == ["numpy==1.26", "simpy==4.1"]
    with pytest.raises(ValueError, match="rich: has no lower bound"):
        oldest(["rich"])


def test_every_dependency_has_a_lower_bound() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert len(oldest(project["dependencies"])) == len(project["dependencies"])
