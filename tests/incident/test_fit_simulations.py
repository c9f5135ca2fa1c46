"""Number of simulations that fit the members of an ensemble to the lines of a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.incident import diagnose_stages, ensemble_fit, incident_calibration
from simkv.incident import incident_folder as files
from simkv.incident.ensemble_fit import fit_members
from simkv.incident.incident_calibration import NEAR_ROUNDS, SAMPLED_ROUNDS
from simkv.incident.server_setup import UserSettings
from simkv.scenario.scenario_loader import load

LOG = Path(__file__).parent / "logs" / "vllm-seat-limit.log"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("lines")
    diagnose_stages.read_stage([LOG], made)
    diagnose_stages.rebuild_stage(made, UserSettings())
    return made


def fitted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, members: int, near: bool = True
) -> tuple[list[float], int]:
    """Return the errors of the members' fits, and the number of simulations."""
    errors: list[float] = []
    runs = 0
    fit, simulate = incident_calibration._Fitter.fitted, incident_calibration.simulate_with_profile
    calibrate = ensemble_fit.calibrate_incident

    def counted(*given: Any) -> Any:
        nonlocal runs
        runs += 1
        return simulate(*given)

    def measured(*given: Any) -> Any:
        found = fit(*given)
        errors.append(found.missed)
        return found

    def from_the_start(*given: Any, **named: Any) -> Any:
        return calibrate(*given, **named | ({} if near else {"near": None}))

    with monkeypatch.context() as patch:
        for module in (ensemble_fit, incident_calibration):
            patch.setattr(module, "simulate_with_profile", counted)
        patch.setattr(incident_calibration._Fitter, "fitted", measured)
        patch.setattr(ensemble_fit, "calibrate_incident", from_the_start)
        patch.setattr(ensemble_fit, "MEMBERS", members)
        _, setup = diagnose_stages.rebuild_stage(folder, UserSettings())
        (scenario,) = load(folder / files.SCENARIO, []).values()
        fit_members(files.read_evidence(folder), setup, scenario)
    return errors, runs


def test_later_members_start_near_their_result(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors, runs = fitted(folder, monkeypatch, members=4)
    assert runs <= SAMPLED_ROUNDS + 3 * NEAR_ROUNDS
    slow, more = fitted(folder, monkeypatch, members=4, near=False)
    assert more > runs
    assert errors == pytest.approx(slow, rel=0.03)
