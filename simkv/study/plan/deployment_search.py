"""Search tensor parallelism, tokens per step, replicas and prefill/decode splits together.

The search has four steps, of which the first three use only the first seed:

1. For each GPU and tensor parallel size, find the least number of replicas by bisection.
2. Repeat this with other numbers of tokens per step, starting at the number found.
3. Split the least number of GPUs into prefill and decode replicas of the same size, with one more
   replica if that is not enough.
4. Run the deployments on the Pareto front of tok/s per GPU and TPOT with all seeds. Deployments
   that miss an objective are removed from the front.

More replicas are assumed to give better results, so candidates next to an answer are not checked.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from simkv.core.errors import InputError
from simkv.core.figure_registry import figure
from simkv.study.job_runner import JobRunner, ProgressCallback
from simkv.study.plan.candidate_results import PlanQuestion, answer_questions, run_candidates
from simkv.study.plan.candidate_search import find_edge
from simkv.study.plan.capacity_plan import count_gpus
from simkv.study.plan.deployment_layouts import (
    KV_BANDWIDTH,
    Layout,
    LeftOut,
    split_layout,
    with_step_tokens,
)
from simkv.study.plan.plan_candidates import PlanCondition
from simkv.study.plan.plan_cost import PlanCost, compute_cost
from simkv.study.simulation_job import Summary

#: Number of prefill counts of a split that are tried first; neighbours of the best count follow.
SPLITS = 4
#: Relative difference below which two deployments count as equal on the front.
NEGLIGIBLE = 0.01


@dataclass(frozen=True)
class PlannedDeployment:
    """A layout with a number of replicas, given by the index ``candidate``.

    ``tok_s_per_gpu`` is the output throughput per GPU. ``tpot_ms`` is the mean TPOT, and
    ``ttft_ms`` is the P99 TTFT. They are averaged over seeds. A value is None without a sample.
    ``meets`` is None if more seeds must be simulated.
    """

    layout: Layout
    candidate: int
    gpus: int
    tok_s_per_gpu: float
    tpot_ms: float | None
    ttft_ms: float | None
    meets: bool | None
    cost: PlanCost | None

    @property
    def replicas(self) -> int:
        """Number of replicas, or of decode replicas if prefill is separate."""
        return int(self.layout.prepared.case.candidates[self.candidate])

    @property
    def name(self) -> str:
        """Numbers of replicas and their tensor parallel size as text."""
        return self.layout.describe(self.replicas)

    def covers(self, other: PlannedDeployment, tolerance: float) -> bool:
        """Return whether the deployment is as good as ``other`` in tok/s per GPU and in TPOT.

        ``tolerance`` is the fraction by which a metric may be worse.
        """
        assert self.tpot_ms is not None
        assert other.tpot_ms is not None
        return (
            self.tok_s_per_gpu >= (1 - tolerance) * other.tok_s_per_gpu
            and self.tpot_ms <= (1 + tolerance) * other.tpot_ms
        )


@dataclass(frozen=True)
class DeploymentSearch:
    """Result of the search: all layouts, and the deployments on the Pareto front, in order of
    increasing TPOT.
    """

    layouts: tuple[Layout, ...]
    front: tuple[PlannedDeployment, ...]

    @property
    def deployments(self) -> list[PlannedDeployment]:
        """Deployments that were simulated."""
        return list_deployments(self.layouts)

    @property
    def runs(self) -> int:
        """Number of simulations."""
        return sum(len(layout.results.summaries) for layout in self.layouts)


def search_deployments(
    bases: Sequence[Layout],
    step_tokens: Sequence[int],
    runner: JobRunner,
    left_out: LeftOut,
    bandwidth: float = KV_BANDWIDTH,
    advance: ProgressCallback | None = None,
) -> DeploymentSearch:
    """Search all deployments of the layouts ``bases``. Stored runs are not repeated.

    ``left_out`` receives impossible layouts. ``bandwidth`` between prefill and decode replicas is
    in GB/s per GPU. Raises RunsFailed if a run fails.
    """

    def settle(layouts: Iterable[tuple[Layout, int]]) -> None:
        """Find the least number of replicas with the first seed, from a hint for each layout.

        The hint is the index of a candidate; -1 is the last candidate, and -2 the second last.
        """
        questions = [
            PlanQuestion(
                one.results,
                one.prepared.seed_conditions(0),
                max(hint if hint >= 0 else len(one.prepared.case.candidates) + hint, 0),
            )
            for one, hint in layouts
        ]
        answer_questions(questions, runner, 0, advance=advance)

    settle((base, 0) for base in bases)
    families = [[base, *_vary_step_tokens(base, step_tokens, left_out)] for base in bases]
    settle((one, _least(family[0], -1)) for family in families for one in family[1:])
    layouts = [layout for family in families for layout in family]
    best = [min(family, key=_rank) for family in families]
    splits = [_split(one, bandwidth, left_out) for one in best]
    settle((one, -2) for family in splits for one in family)
    closer = [
        _split_closer(one, family, bandwidth) for one, family in zip(best, splits, strict=True)
    ]
    settle((one, -2) for family in closer for one in family)
    layouts += [one for pair in zip(splits, closer, strict=True) for both in pair for one in both]
    front = _confirm_front(layouts, runner, advance)
    return DeploymentSearch(tuple(layouts), tuple(front))


def _vary_step_tokens(
    base: Layout, step_tokens: Sequence[int], left_out: LeftOut
) -> Iterator[Layout]:
    for tokens in step_tokens:
        if tokens == base.step_tokens:
            continue
        try:
            yield with_step_tokens(base, tokens)
        except InputError as error:
            left_out(f"{base.prepared.label} {tokens} tokens per step: skipped: {error}".strip())


def _split(base: Layout, bandwidth: float, left_out: LeftOut) -> list[Layout]:
    """Return layouts with evenly spaced numbers of separate prefill replicas, or an empty list.

    The list is empty if separate prefill replicas are impossible.
    """
    total = _total(base)
    step = max(-(-(total - 1) // SPLITS), 1)
    try:
        if base.prepared.request.survive:
            raise InputError("--survive cannot be combined with a split")
        return [split_layout(base, p, total - p + 1, bandwidth) for p in range(1, total, step)]
    except InputError as error:
        left_out(f"{base.prepared.label} prefill/decode split: skipped: {error}".strip())
        return []


def _split_closer(base: Layout, tried: Sequence[Layout], bandwidth: float) -> list[Layout]:
    """Return layouts with one prefill replica more or less than the best one, if not tried yet."""
    if not tried:
        return []
    best, total = min(tried, key=_rank).prefill, _total(base)
    known = {one.prefill for one in tried}
    return [
        split_layout(base, p, total - p + 1, bandwidth)
        for p in (best - 1, best + 1)
        if 0 < p <= total and p not in known
    ]


def _least(layout: Layout, default: int | None = None) -> Any:
    """Return the index of the smallest number of replicas that meets the objectives.

    Only the first seed is considered.
    """
    known = PlanQuestion(layout.results, layout.prepared.seed_conditions(0)).known
    found = find_edge(known, 0)
    return default if found is None else found


def _total(base: Layout) -> int:
    """Return the smallest sufficient number of replicas (at least 2), or else the largest
    number.
    """
    return max(int(base.prepared.case.candidates[_least(base, -1)]), 2)


def _rank(layout: Layout) -> tuple[float, float, float]:
    """Return a sort key: layouts with the fewest GPUs come first, then layouts with a low TPOT.

    Layouts that never meet the objectives come last, the nearest first.
    """
    found = _least(layout)
    if found is None:
        last = len(layout.prepared.case.candidates) - 1
        condition = layout.prepared.seed_conditions(0)[-1]
        values = layout.results.values.get((last, condition), {})
        return math.inf, -min(one.slack(values) for one in layout.prepared.case.objectives), 0.0
    made = _deployment(layout, found)
    return made.gpus, math.inf if made.tpot_ms is None else made.tpot_ms, layout.prefill


def list_deployments(layouts: Sequence[Layout]) -> list[PlannedDeployment]:
    """Return all deployments that were simulated, by layout and number of replicas."""
    return [
        _deployment(layout, candidate)
        for layout in layouts
        for candidate in sorted({candidate for candidate, _ in layout.results.summaries})
    ]


def _deployment(layout: Layout, candidate: int) -> PlannedDeployment:
    prepared, results = layout.prepared, layout.results
    wanted = [PlanCondition(repeat=repeat) for repeat in range(prepared.repeats)]
    runs = [results.summaries[candidate, c] for c in wanted if (candidate, c) in results.summaries]
    gpus = count_gpus(prepared.case.scenario(candidate), prepared.request.gpus_per_replica)
    cost = None
    if prepared.price is not None:
        sums = (sum(run[name] for run in runs) for name in _SPENT)
        cost = compute_cost(prepared.gpu, prepared.price, gpus, *sums)
    throughput = _mean(runs, "output_throughput") or 0.0
    return PlannedDeployment(
        layout,
        candidate,
        gpus,
        throughput / gpus,
        _mean(runs, "tpot_ms.mean"),
        _mean(runs, "ttft_ms.p99"),
        results.verdict(candidate, prepared.nominal),
        cost,
    )


#: Metrics that determine the cost per token.
_SPENT = ("makespan_s", "total_input_tokens", "total_output_tokens")


def _mean(runs: Sequence[Summary], name: str) -> float | None:
    """Return the mean of a metric over the runs, or None if a run has no sample of it."""
    values = [figure(run, name) for run in runs]
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _confirm_front(
    layouts: Sequence[Layout], runner: JobRunner, advance: ProgressCallback | None
) -> list[PlannedDeployment]:
    """Run the deployments on the Pareto front and the cheapest one with all seeds, and return the
    front.

    If a deployment misses an objective with another seed, its number of replicas is searched again
    with all seeds.
    """
    while True:
        known = list_deployments(layouts)
        front = find_front(known)
        shown = [*front, *filter(None, [find_cheapest(known)])]
        unsure = list(dict.fromkeys(one.layout for one in shown if one.meets is None))
        if not unsure:
            return front
        wanted = [
            (one.layout.results, one.candidate, condition)
            for one in shown
            for condition in one.layout.results.missing(one.candidate, one.layout.prepared.nominal)
        ]
        run_candidates(wanted, runner, advance)
        again = [
            PlanQuestion(one.results, one.prepared.nominal, _least(one))
            for one in unsure
            if _has_new_miss(one)
        ]
        answer_questions(again, runner, 0, advance=advance)


def _has_new_miss(layout: Layout) -> bool:
    """Return whether the number of replicas misses an objective with a seed other than the
    first.
    """
    return layout.results.verdict(_least(layout), layout.prepared.nominal) is False


def find_cheapest(deployments: Iterable[PlannedDeployment]) -> PlannedDeployment | None:
    """Return the deployment with the lowest cost per hour that meets the objectives, or None.

    Of deployments with equal cost, the one with the lowest TPOT is returned.
    """
    meeting = [one for one in deployments if one.meets is not False and one.tpot_ms is not None]
    if not meeting or not all(one.cost for one in meeting):
        return None
    return min(meeting, key=lambda one: (one.cost.per_hour if one.cost else 0.0, one.tpot_ms or 0))


def find_front(deployments: Iterable[PlannedDeployment]) -> list[PlannedDeployment]:
    """Return the deployments on the Pareto front that meet the objectives, by increasing TPOT.

    Only the first of several almost equal deployments is returned.
    """
    meeting = [one for one in deployments if one.meets is not False and one.tpot_ms is not None]
    front: list[PlannedDeployment] = []
    for one in meeting:
        better = (o for o in meeting if o.covers(one, 0.0) and not one.covers(o, 0.0))
        if not any(better) and not any(o.covers(one, NEGLIGIBLE) for o in front):
            front.append(one)
    return sorted(front, key=lambda one: one.tpot_ms or 0.0)
