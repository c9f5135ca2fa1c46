"""Change settings that were not recorded or cannot be known, and compare the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simkv.costs.cost_profile import CostProfile, CostTerm
from simkv.costs.sources.launch_overhead import without_host
from simkv.costs.sources.llmservingsim_profile import scale_collectives
from simkv.schedulers.vllm.versions import find_rules
from simkv.validation.recorded_runs.recorded_run import RecordedRun
from simkv.validation.recorded_runs.run_scores import Score, score
from simkv.validation.recorded_runs.run_simulation import engine_of, simulate_run

#: Assumed host time per step (s), which kernel tables do not contain.
HOST_TIMES_S = (2e-4, 5e-4)
#: Assumed ratio of the communication times of two hosts with the same GPU.
COLLECTIVES_SLOWDOWN = 2.0


@dataclass(frozen=True)
class SensitivityScore:
    """The score of a simulation with one changed setting. ``change`` describes the change."""

    change: str
    score: Score


def score_sensitivity(case: RecordedRun, profile: CostProfile) -> list[SensitivityScore]:
    """Simulate a recorded run again, each time with one changed setting, and return the scores."""
    found = []
    for change, fields, costs in _changes(case, profile):
        config, notes = engine_of(case, **fields)
        found.append(
            SensitivityScore(
                change, score(case, simulate_run(case, costs, config, notes), costs.name)
            )
        )
    return found


def _changes(
    case: RecordedRun, profile: CostProfile
) -> list[tuple[str, dict[str, Any], CostProfile]]:
    setup = case.facts.engine
    base, _ = engine_of(case)
    changes: list[tuple[str, dict[str, Any], CostProfile]] = []
    if setup.num_gpu_blocks is None:
        for share in (0.9, 1.1):
            blocks = int(base.num_gpu_blocks * share)
            changes.append((f"num_gpu_blocks x {share:g}", {"num_gpu_blocks": blocks}, profile))
    if setup.async_scheduling is None and "async_scheduling" not in find_rules(base.variant).fixed:
        other = not find_rules(base.variant).async_scheduling
        changes.append((f"async_scheduling {other}", {"async_scheduling": other}, profile))
    for seconds in HOST_TIMES_S:
        term = CostTerm(name="host", feature="steps", seconds=seconds)
        costs = profile.model_copy(update={"terms": [*profile.terms, term]})
        changes.append((f"{1e3 * seconds:g} ms of host time per step", {}, costs))
    kernels = without_host(profile)
    if kernels is not profile:
        changes.append(("kernels only, no host time", {}, kernels))
    if slower := scale_collectives(profile, COLLECTIVES_SLOWDOWN):
        changes.append((f"collectives x {COLLECTIVES_SLOWDOWN:g}", {}, slower))
    if profile.attention is not None and profile.attention.skew is not None:
        even = profile.attention.model_copy(update={"skew": None})
        costs = profile.model_copy(update={"attention": even})
        changes.append(("no correction for decodes of unequal length", {}, costs))
    if profile.graph_sizes:
        changes.append(
            ("no padding to CUDA graph sizes", {}, profile.model_copy(update={"graph_sizes": []}))
        )
    if profile.front_s:
        changes.append(
            ("no time before the engine core", {}, profile.model_copy(update={"front_s": 0.0}))
        )
    return changes
