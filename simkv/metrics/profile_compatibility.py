"""Check whether a replica's cost profile was made for its engine."""

from __future__ import annotations

import re
from collections.abc import Iterable

from simkv.core.engine_version import parse_version
from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.schedulers.engine_registry import ENGINES
from simkv.sim.simulation import ReplicaSpec

_RELEASE = re.compile(r"\d+\.\d+(?:\.\d+)*")


def engine_mismatch_notes(replicas: Iterable[ReplicaSpec]) -> list[str]:
    """Return a note for each profile that was made for another engine or release.

    Profiles without a known engine name (``any``) produce no note.
    """
    return list(dict.fromkeys(note for one in replicas if (note := _note(one))))


def _note(replica: ReplicaSpec) -> str:
    made_for, setting = replica.profile.engine, find_execution_settings(replica.engine)
    squeezed = re.sub(r"[^a-z0-9]", "", made_for.casefold())
    named = [name for name in ENGINES if squeezed.startswith(name)]
    if not named:
        return ""
    release = _RELEASE.search(made_for)
    ours = _RELEASE.match(setting.release)
    same = setting.engine in named
    if same and (not release or not ours or parse_version(release[0]) == parse_version(ours[0])):
        return ""
    return (
        f"profile {replica.profile_name} was made for {made_for}; step times of "
        f"{setting.engine} {setting.release} may differ"
    )
