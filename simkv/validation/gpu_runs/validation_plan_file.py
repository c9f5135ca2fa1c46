"""Store a plan on disk, so that predictions are recorded before any run.

``plan/plan.json`` has the predictions and the profile's hash, ``plan/<case>.yaml`` the scenarios,
``plan/profile.json`` the profile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from simkv.core.atomic_files import atomic_folder
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile
from simkv.scenario.scenario_loader import load
from simkv.scenario.scenario_writer import to_yaml
from simkv.validation.gpu_runs.load_sizing import Trial


def write_plan(folder: Path, cases: Sequence[Trial], profile: CostProfile) -> None:
    """Write ``cases`` to ``folder/plan``, atomically; the plan must not exist yet."""
    if (folder / "plan").exists():
        raise InputError(f"{folder / 'plan'}: there is a plan already")
    with atomic_folder(folder / "plan") as new:
        for case in cases:
            text = to_yaml({"run": case.scenario})
            (new / f"{case.name}.yaml").write_text(text, encoding="utf-8", newline="\n")
        about = {
            "profile": profile.name,
            "profile_hash": profile_hash(profile),
            "cases": [
                {
                    "name": case.name,
                    "stresses": case.stresses,
                    "beside": case.beside,
                    "predicted": case.predicted,
                }
                for case in cases
            ],
        }
        (new / "plan.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        (new / "profile.json").write_text(_text(profile), encoding="utf-8")


def read_plan(folder: Path, profile: CostProfile) -> list[Trial] | None:
    """Return the cases of ``folder/plan``, or None if there is no plan.

    Raises InputError for a plan of another profile or a damaged plan.
    """
    path = folder / "plan" / "plan.json"
    if not path.is_file():
        return None
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about["profile_hash"] != profile_hash(profile):
            raise InputError(
                f"{path}: was made with another profile, named {about['profile']}; "
                f"use that one ({path.parent / 'profile.json'}) or another folder"
            )
        return [
            Trial(
                one["name"],
                one["stresses"],
                load(path.parent / f"{one['name']}.yaml")["run"],
                one["predicted"],
                one["beside"],
            )
            for one in about["cases"]
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: not a plan of `simkv gpu validate`: {error}") from error


def _text(profile: CostProfile) -> str:
    return profile.model_dump_json(indent=1, exclude_none=True) + "\n"


def profile_hash(profile: CostProfile) -> str:
    """Return the hash that identifies the profile of a plan."""
    return hashlib.sha256(_text(profile).encode()).hexdigest()[:16]
