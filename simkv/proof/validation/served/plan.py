"""A plan on disk, so that what is predicted is written down before anything is served.

``plan/plan.json`` has the predictions and the profile's hash, ``plan/<case>.yaml`` the scenarios,
``plan/profile.json`` the profile.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from simkv.core.errors import InputError
from simkv.core.files import replacing
from simkv.costs.profile import Profile
from simkv.proof.validation.served.sizing import Trial
from simkv.scenario.load import load
from simkv.scenario.saving import to_yaml


def write_plan(folder: Path, cases: Sequence[Trial], profile: Profile) -> None:
    """Write ``cases`` to ``folder/plan``, complete or not at all; there must be none yet."""
    if (folder / "plan").exists():
        raise InputError(f"{folder / 'plan'}: there is a plan already")
    with replacing(folder / "plan") as new:
        for case in cases:
            text = to_yaml({"run": case.scenario})
            (new / f"{case.name}.yaml").write_text(text, encoding="utf-8", newline="\n")
        about = {
            "profile": profile.name,
            "profile_hash": hash_of(profile),
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


def read_plan(folder: Path, profile: Profile) -> list[Trial] | None:
    """The cases of ``folder/plan``, None if there is no plan.

    Raises InputError for a plan that was made with another profile, or is damaged.
    """
    path = folder / "plan" / "plan.json"
    if not path.is_file():
        return None
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if about["profile_hash"] != hash_of(profile):
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


def _text(profile: Profile) -> str:
    return profile.model_dump_json(indent=1, exclude_none=True) + "\n"


def hash_of(profile: Profile) -> str:
    """By what a plan knows its profile again."""
    return hashlib.sha256(_text(profile).encode()).hexdigest()[:16]
