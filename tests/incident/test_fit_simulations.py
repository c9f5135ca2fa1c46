"""Number of simulations that fit the members of an ensemble to the lines of a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.incident import diagnose_stages, ensemble_fit, incident_calibration
from simkv.incident import incident_folder as files
from simkv.incident.ensemble_fit import fit_members
from simkv.incident.incident_calibration import SAMPLED_ROUNDS
from simkv.incident.server_setup import UserSettings
from simkv.scenario.scenario_loader import load

LOG = Path(__file__).parent / "logs" / "vllm-seat-limit.log"
MEMBERS = 2


def test_fit_repeats_no_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    diagnose_stages.read_stage([LOG], tmp_path)
    _, setup = diagnose_stages.rebuild_stage(tmp_path, UserSettings())
    (scenario,) = load(tmp_path / files.SCENARIO, []).values()
    runs = 0
    simulate = incident_calibration.simulate_with_profile

    def counted(*given: Any) -> Any:
        nonlocal runs
        runs += 1
        return simulate(*given)

    for module in (ensemble_fit, incident_calibration):
        monkeypatch.setattr(module, "simulate_with_profile", counted)
    monkeypatch.setattr(ensemble_fit, "MEMBERS", MEMBERS)
    fit_members(files.read_evidence(tmp_path), setup, scenario)
    assert MEMBERS <= runs <= MEMBERS * SAMPLED_ROUNDS
