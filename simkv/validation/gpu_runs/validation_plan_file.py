"""Store a validation plan on disk, so that predictions are recorded before any run.

``plan/plan.json`` has the predictions and the hashes of the profiles. ``plan/<trial>.yaml`` has the
scenarios, and ``plan/profile*.json`` has the profiles. ``plan/training*.csv`` has the measured
steps to which the other cost models are fitted.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from simkv.core.atomic_files import atomic_folder
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, load_profile
from simkv.costs.step_load import StepLoad
from simkv.scenario.scenario_loader import load
from simkv.scenario.scenario_writer import to_yaml
from simkv.validation.gpu_runs.baseline_models import TrainingStep, read_training
from simkv.validation.gpu_runs.load_sizing import Trial
from simkv.validation.gpu_runs.validation_suite import OVERLAPPED, SYNCHRONOUS


@dataclass(frozen=True)
class Plan:
    """Validation plan: the trials in the order in which they run, and the profiles by name.

    The plan also contains the measured steps to which the simple cost models (``baseline_models``)
    are fitted.
    """

    trials: list[Trial]
    profiles: dict[str, CostProfile]
    training: dict[str, list[TrainingStep]] = field(default_factory=dict)


def read_profiles(path: Path) -> tuple[dict[str, CostProfile], Path]:
    """Return the profiles at ``path`` by name, and their directory.

    The profile for overlapped host time is first. ``path`` is a profile, or an output directory of
    `simkv gpu calibrate`. Raises InputError if there is no profile.
    """
    if not path.is_dir():
        profile = load_profile(path.name, path.parent)
        return {OVERLAPPED if profile.floor else SYNCHRONOUS: profile}, path.parent
    names = [name for name in (OVERLAPPED, SYNCHRONOUS) if (path / f"{name}.json").is_file()]
    if not names:
        raise InputError(
            f"--profile {path}: contains no {SYNCHRONOUS}.json; expected a directory written by "
            "`simkv gpu calibrate`"
        )
    return {name: load_profile(f"{name}.json", path) for name in names}, path


def read_campaign_training(
    profiles: Mapping[str, CostProfile], folder: Path
) -> dict[str, list[TrainingStep]]:
    """Return the measured steps of the calibration in ``folder``, by profile; empty if there are
    none.
    """
    return {name: read_training(folder, profile) for name, profile in profiles.items()}


def write_plan(folder: Path, plan: Plan) -> None:
    """Write a plan to ``folder/plan``, completely or not at all. The directory must not exist."""
    if (folder / "plan").exists():
        raise InputError(f"{folder / 'plan'}: exists already; use it, or choose another directory")
    with atomic_folder(folder / "plan") as new:
        for trial in plan.trials:
            text = to_yaml({"run": trial.scenario})
            (new / f"{trial.name}.yaml").write_text(text, encoding="utf-8", newline="\n")
        about = {
            "profiles": {name: profile_hash(profile) for name, profile in plan.profiles.items()},
            "trials": [
                {
                    "name": trial.name,
                    "stresses": trial.stresses,
                    "profile": trial.profile,
                    "beside": trial.beside,
                    "predicted": trial.predicted,
                }
                for trial in plan.trials
            ],
        }
        (new / "plan.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        for name, profile in plan.profiles.items():
            (new / f"{name}.json").write_text(_text(profile), encoding="utf-8")
        for name, steps in plan.training.items():
            _write_training(new / f"training-{name}.csv", steps)


def read_plan(folder: Path, profiles: Mapping[str, CostProfile] | None = None) -> Plan | None:
    """Return the plan in ``folder/plan``, or None if there is none.

    Raises InputError if the plan is damaged, or if its profiles differ from ``profiles``.
    """
    path = folder / "plan" / "plan.json"
    if not path.is_file():
        return None
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        for name, profile in (profiles or {}).items():
            if about["profiles"].get(name) != profile_hash(profile):
                raise InputError(
                    f"{path}: this plan was made with another profile than {profile.name}; use "
                    f"the profiles in {path.parent}, or another directory"
                )
        trials = [
            Trial(
                one["name"],
                one["stresses"],
                load(path.parent / f"{one['name']}.yaml")["run"],
                one["predicted"],
                one["beside"],
                one["profile"],
            )
            for one in about["trials"]
        ]
        stored = {name: load_profile(f"{name}.json", path.parent) for name in about["profiles"]}
        training = {
            name: list(_read_training(path.parent / f"training-{name}.csv")) for name in stored
        }
        return Plan(trials, stored, training)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a plan of `simkv gpu validate`: {error}") from error


def _write_training(path: Path, steps: Sequence[TrainingStep]) -> None:
    if not steps:
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow((*StepLoad._fields[:9], "seconds"))
        writer.writerows((*step.load[:9], f"{step.seconds:.9g}") for step in steps)


def _read_training(path: Path) -> Iterator[TrainingStep]:
    if not path.is_file():
        return
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            counts = {name: int(row[name]) for name in StepLoad._fields if name in row}
            yield TrainingStep(StepLoad(**counts), float(row["seconds"]))


def _text(profile: CostProfile) -> str:
    # A measured profile has neither of these. Empty lists are left out, so that plans of earlier
    # versions keep their hash.
    empty = {name for name in ("sources", "unmeasured_kernels") if not getattr(profile.fit, name)}
    return profile.model_dump_json(indent=1, exclude_none=True, exclude={"fit": empty}) + "\n"


def profile_hash(profile: CostProfile) -> str:
    """Return the hash that identifies the profile of a plan."""
    return hashlib.sha256(_text(profile).encode()).hexdigest()[:16]
