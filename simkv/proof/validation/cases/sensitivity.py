"""What the result would be if what was not recorded, or cannot be known, were otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from simkv.costs.profile import Profile, Term
from simkv.costs.sources.host import without_host
from simkv.costs.sources.llmservingsim import slower_collectives
from simkv.proof.validation.cases.case import Case
from simkv.proof.validation.cases.score import Score, score
from simkv.proof.validation.cases.simulate import engine_of, replay
from simkv.schedulers.vllm.versions import rules_of

#: Host time per step (s) that kernel tables do not have.
HOST_S = (2e-4, 5e-4)
#: Hosts of one GPU differ by as much in what their GPUs exchange.
SLOWER = 2.0


@dataclass(frozen=True)
class Otherwise:
    """One thing changed, and how the case then scores."""

    change: str
    score: Score


def otherwise(case: Case, profile: Profile) -> list[Otherwise]:
    """The case simulated again with one thing changed at a time."""
    found = []
    for change, fields, costs in _changes(case, profile):
        config, notes = engine_of(case, **fields)
        found.append(Otherwise(change, score(case, replay(case, costs, config, notes), costs.name)))
    return found


def _changes(case: Case, profile: Profile) -> list[tuple[str, dict[str, Any], Profile]]:
    setup = case.facts.engine
    base, _ = engine_of(case)
    changes: list[tuple[str, dict[str, Any], Profile]] = []
    if setup.num_gpu_blocks is None:
        for share in (0.9, 1.1):
            blocks = int(base.num_gpu_blocks * share)
            changes.append((f"num_gpu_blocks x {share:g}", {"num_gpu_blocks": blocks}, profile))
    if setup.async_scheduling is None and "async_scheduling" not in rules_of(base.variant).fixed:
        other = not rules_of(base.variant).async_scheduling
        changes.append((f"async_scheduling {other}", {"async_scheduling": other}, profile))
    for seconds in HOST_S:
        term = Term(name="host", feature="steps", seconds=seconds)
        costs = profile.model_copy(update={"terms": [*profile.terms, term]})
        changes.append((f"{1e3 * seconds:g} ms of host time per step", {}, costs))
    kernels = without_host(profile)
    if kernels is not profile:
        changes.append(("kernels only, no host time", {}, kernels))
    if slower := slower_collectives(profile, SLOWER):
        changes.append((f"collectives x {SLOWER:g}", {}, slower))
    if profile.attention is not None and profile.attention.skew is not None:
        even = profile.attention.model_copy(update={"skew": None})
        costs = profile.model_copy(update={"attention": even})
        changes.append(("no correction for unequal decodes", {}, costs))
    if profile.graph_sizes:
        changes.append(
            ("no padding to CUDA graphs", {}, profile.model_copy(update={"graph_sizes": []}))
        )
    if profile.front_s:
        changes.append(
            ("no time before the engine core", {}, profile.model_copy(update={"front_s": 0.0}))
        )
    return changes
