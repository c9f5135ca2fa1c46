"""Notes on problems of a run, shown with its metrics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from simkv.core.engine_version import parse_version
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Scheduler, blocks_for
from simkv.costs.cost_profile import Feature
from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.costs.profile_uncertainty import unknown_share
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.schedulers.engine_registry import ENGINES, find_engine_spec
from simkv.sim.fleet.replica_lifetime import ReplicaLifetime
from simkv.sim.simulation import ReplicaSpec


def replica_notes(
    lifetimes: Sequence[ReplicaLifetime], specs: Sequence[ReplicaSpec], requests: Sequence[Request]
) -> list[str]:
    """Return notes about problems on replicas.

    A note names its replicas unless it applies to all of them.
    """
    notes: dict[str, list[int]] = {}
    for lifetime in lifetimes:
        engine = lifetime.engine
        config = specs[lifetime.replica].engine
        found = _never_fit(requests, engine.scheduler, config)
        found += engine.run_notes()
        if assumed := find_engine_spec(config).naming.assumed(config.variant):
            found.insert(0, assumed)
        for note in found:
            notes.setdefault(note, []).append(lifetime.replica)
    return [
        note if len(set(where)) == len(specs) else f"replica {', '.join(map(str, where))}: {note}"
        for note, where in notes.items()
    ]


def _never_fit(requests: Sequence[Request], scheduler: Scheduler, engine: Any) -> list[str]:
    """Return a note on requests whose KV exceeds the whole cache, or an empty list."""
    block_size = getattr(engine, "block_size", None)
    if block_size is None:
        return []
    too_large = [
        (blocks_for(r.prompt_tokens + r.output_tokens - 1, block_size), r.id)
        for r in requests
        if blocks_for(r.prompt_tokens + r.output_tokens - 1, block_size) > scheduler.num_blocks
    ]
    if not too_large:
        return []
    need, worst = max(too_large)
    return [
        f"{len(too_large)} requests do not fit into the KV cache: request {worst} needs {need} "
        f"blocks of {block_size} tokens, the cache has {scheduler.num_blocks}"
    ]


def profile_range_notes(executors: Sequence[SimulatedExecutor]) -> list[str]:
    """Return notes on the time spent in steps outside the data range of each cost profile."""
    names = dict.fromkeys(executor.profile.name for executor in executors)
    return [
        note
        for name in names
        for note in _outside([e for e in executors if e.profile.name == name])
    ]


def outside_range_share(executors: Sequence[SimulatedExecutor]) -> float:
    """Return the fraction of busy time (0 to 1) in steps outside the range of their cost
    profile.
    """
    busy = sum(executor.busy for executor in executors)
    return sum(executor.outside_s for executor in executors) / busy if busy else 0.0


def unknown_error_share(executors: Sequence[SimulatedExecutor]) -> float:
    """Return the fraction of busy time (0 to 1) in steps whose error is unknown.

    With several cost profiles, this is the largest fraction. The error is unknown if a feature of
    the step is outside the measured range and the profile has no error for its extrapolation.
    """
    profiles = {executor.profile.name: executor.profile for executor in executors}
    shares = (
        unknown_share(profile, *_spent([e for e in executors if e.profile.name == name]))
        for name, profile in profiles.items()
    )
    return max(shares, default=0.0)


def _spent(executors: Sequence[SimulatedExecutor]) -> tuple[dict[Feature, float], float]:
    """Return the seconds in steps outside the range of a profile, by feature, and in all steps."""
    outside: Counter[Feature] = Counter()
    for executor in executors:
        outside.update(executor.outside)
    return dict(outside), sum(executor.busy for executor in executors)


def _outside(executors: Sequence[SimulatedExecutor]) -> list[str]:
    """Return a note for each feature of steps outside the range of the executors' common
    profile.
    """
    notes = []
    profile, busy = executors[0].profile, sum(executor.busy for executor in executors)
    for feature in sorted({feature for executor in executors for feature in executor.outside}):
        there = [executor for executor in executors if feature in executor.outside]
        seconds = sum(executor.outside[feature] for executor in there)
        least = min(executor.extremes[feature][0] for executor in there)
        most = max(executor.extremes[feature][1] for executor in there)
        low, high = profile.range[feature]
        notes.append(
            f"{100.0 * seconds / busy:.1f} % of the busy time was outside the measured range of "
            f"profile {profile.name}: {feature} was {least:g} to {most:g}, but was measured "
            f"from {low:g} to {high:g}"
        )
    return notes


_RELEASE = re.compile(r"\d+\.\d+(?:\.\d+)*")


def engine_mismatch_notes(replicas: Iterable[ReplicaSpec]) -> list[str]:
    """Return a note for each profile that was made for another engine or engine release."""
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
