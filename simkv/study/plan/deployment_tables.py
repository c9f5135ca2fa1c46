"""Present a search for deployments as plain data and text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from simkv.metrics.fidelity import warn_mixed_bases
from simkv.study.plan.deployment_search import (
    DeploymentSearch,
    PlannedDeployment,
    find_cheapest,
)
from simkv.study.plan.plan_summary import describe_objectives


def deployment_rows(search: DeploymentSearch) -> list[dict[str, Any]]:
    """Return a row per simulated deployment. Missing numbers are None.

    ``meets`` is true if the deployment meets the objectives, and None if more seeds must be
    simulated.
    """
    on_front = [(one.layout, one.candidate) for one in search.front]
    return [
        {**_row(one), "on_front": (one.layout, one.candidate) in on_front}
        for one in search.deployments
    ]


def _row(one: PlannedDeployment) -> dict[str, Any]:
    layout, cost = one.layout, one.cost
    return {
        "case": layout.place,
        "deployment": one.name,
        "tp": layout.tp,
        "replicas": one.replicas + layout.prefill,
        "prefill": layout.prefill,
        "decode": one.replicas if layout.prefill else 0,
        "step_tokens": layout.step_tokens,
        "gpus": one.gpus,
        "tok_s_per_gpu": one.tok_s_per_gpu,
        "tpot_ms_mean": one.tpot_ms,
        "ttft_ms_p99": one.ttft_ms,
        "meets": one.meets,
        "step_times": layout.prepared.error.mark,
        "cost": cost and asdict(cost),
    }


def find_best(search: DeploymentSearch) -> list[tuple[str, PlannedDeployment]]:
    """Return the best deployments, each with the property in which it is best.

    The cheapest deployment need not be on the front of tok/s per GPU and TPOT, because GPUs have
    different prices.
    """
    front = search.front
    if not front:
        return []
    best = [
        ("most tok/s per GPU", max(front, key=lambda one: one.tok_s_per_gpu)),
        ("lowest mean TPOT", front[0]),
        ("lowest P99 TTFT", min(front, key=lambda one: one.ttft_ms or 0.0)),
    ]
    if cheapest := find_cheapest(search.deployments):
        best.insert(0, ("lowest cost per hour", cheapest))
    return best


def describe_search(search: DeploymentSearch) -> list[str]:
    """Return lines above the table: the objectives and the number of deployments and runs."""
    prepared = search.layouts[0].prepared
    known = search.deployments
    missed = sum(one.meets is False for one in known)
    return [
        f"{prepared.name}: deployments that meet {describe_objectives(prepared.case.objectives)}",
        f"Simulated {len(known)} deployments in {search.runs} runs; {missed} miss an objective.",
    ]


def describe_best(search: DeploymentSearch) -> list[str]:
    """Return lines below the table: the best deployments, and the limits of their comparison."""
    if not search.front:
        return ["No deployment meets the objectives."]
    lines = ["Best deployments:"]
    by_deployment: dict[int, list[str]] = {}
    best = find_best(search)
    for what, one in best:
        by_deployment.setdefault(id(one), []).append(what)
    named = {id(one): one for _, one in best}
    for key, names in by_deployment.items():
        lines.append(f"  {', '.join(names)}: {describe_deployment(named[key])}")
    lines += _describe_others(search)
    lines += _compare_splits(search)
    marks = [one.layout.prepared.error.mark for one in search.front]
    if len(set(marks)) == 1:
        lines.append(f"Step times: {marks[0]} typically; a smaller difference is not significant.")
    return [*lines, *warn_mixed_bases(marks)]


def _describe_others(search: DeploymentSearch) -> list[str]:
    """Return a line for each GPU that is not on the front, with its smallest deployment."""
    shown = {one.layout.place for one in search.front}
    lines = []
    for place in dict.fromkeys(layout.place for layout in search.layouts):
        if place in shown:
            continue
        meeting = [
            one
            for one in search.deployments
            if one.layout.place == place and one.meets is not False
        ]
        least = min(meeting, key=lambda one: one.gpus, default=None)
        lines.append(
            f"  {place}: no deployment meets the objectives"
            if least is None
            else f"  fewest GPUs with {describe_deployment(least)} ({least.gpus} GPUs); not on the "
            f"front{'' if least.meets else ', simulated with the first seed only'}"
        )
    return lines


def describe_deployment(one: PlannedDeployment) -> str:
    """Return a deployment with its GPU and tokens per step as text."""
    place = f"{one.layout.place}: " if one.layout.place else ""
    return f"{place}{one.name}, {one.layout.step_tokens} tokens per step"


def describe_layout(one: PlannedDeployment) -> str:
    """Return the GPU, tensor parallel size and tokens per step of a deployment as text."""
    place = f"{one.layout.place}: " if one.layout.place else ""
    return f"{place}tp {one.layout.tp}, {one.layout.step_tokens} tokens per step"


def _compare_splits(search: DeploymentSearch) -> list[str]:
    """Return a line that compares the best deployments with and without separate prefill
    replicas.
    """
    splits, whole = (
        [one for one in search.deployments if one.meets is not False and split(one)]
        for split in (lambda one: one.layout.prefill, lambda one: not one.layout.prefill)
    )
    if not any(layout.prefill for layout in search.layouts):
        return []
    if not splits or not whole:
        return ["Prefill/decode split: none meets the objectives."] if whole else []
    ratio = _most(splits) / _most(whole)
    return [
        f"Prefill/decode split: at most {_most(splits):.4g} tok/s per GPU, {ratio:.2g} times the "
        "best without a split."
    ]


def _most(deployments: Iterable[PlannedDeployment]) -> float:
    return max(one.tok_s_per_gpu for one in deployments)
