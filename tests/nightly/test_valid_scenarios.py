"""Tests of a sample of the scenarios of ``make nightly-scenarios``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nightly.run_scenarios import MIN_REACHED, describe
from tests.nightly.scenario_checks import check_seed, prepare_folder
from tests.nightly.scenario_generator import generate_scenario, list_options

#: Seeds whose scenarios failed when they were first generated.
FOUND = [3, 124, 253, 297, 1024]


@pytest.mark.parametrize("first", range(0, 120, 30))
def test_laws_hold_in_valid_scenarios(first: int, tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    for seed in range(first, first + 30):
        assert check_seed(seed, tmp_path).problem is None


@pytest.mark.parametrize("seed", FOUND)
def test_laws_hold_for_seeds_that_failed(seed: int, tmp_path: Path) -> None:
    assert check_seed(seed, prepare_folder(tmp_path)).problem is None


def test_targeted_options_are_reached(tmp_path: Path) -> None:
    prepare_folder(tmp_path)
    missed = {
        found.target
        for found in (generate_scenario(seed, tmp_path) for seed in range(len(list_options())))
        if found.target not in found.options
    }
    assert len(missed) <= 6, missed


def test_rarely_reached_options_fail_a_full_run() -> None:
    line = {"engine": "vllm", "options": ["VllmConfig.policy"], "verdict": "served", "cpu_s": 0.1}
    text, fine = describe([{**line, "seed": seed, "problem": None} for seed in range(MIN_REACHED)])
    assert not fine
    assert any(row.startswith("  VllmConfig.watermark 0") for row in text)
    assert not any(row.startswith("  VllmConfig.policy ") for row in text)
