"""Find the single change that helps most, and the requests that it helps and hurts.

Example:

    answer = run_whatif(scenario, Evaluator(folder))
    print(answer.best.sentence)

Every scheduling rule, setting and variant is changed separately. The changes are ranked by the
number of requests that finish, then by the number of requests that get slower, then by latency.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import exp, isnan, log
from statistics import fmean
from typing import Literal

from simkv.core.errors import InputError
from simkv.core.figure_registry import METRICS
from simkv.core.outcome import FAILURES, SERVED, Outcome, count_served
from simkv.scenario.scenario import Scenario
from simkv.study.simulation_job import SimulationJob
from simkv.study.whatif.candidate_changes import (
    Change,
    generate_changes,
    has_no_effect,
    length_cause,
)
from simkv.study.whatif.trial_evaluation import Evaluator, RequestEnding, RunFigures

Judgement = Literal["fixes", "helps", "changes little", "changes nothing", "hurts"]
#: Minimum relative change of a latency that counts as a difference.
MIN_LATENCY_CHANGE = 0.05
#: Minimum relative change of the longest stall and of the number of preemptions that counts as a
#: difference.
MIN_STALL_CHANGE = 0.2
#: Order of the kinds of changes by simplicity; among changes with similar results, the simpler one
#: ranks first.
KIND_PREFERENCE = ("rule", "knob", "variant", "memory")
TIE_RATIO = 1.25
#: Maximum number of slower requests per faster request for a change that ranks among the first.
MAX_SLOWER_SHARE = 0.1
#: Latencies of the run that count in the rank of a change.
RANKED_LATENCIES = (
    "ttft_all_ms.median",
    "ttft_all_ms.p99",
    "tpot_ms.mean",
    "e2e_all_ms.mean",
    "e2e_all_ms.p99",
)
JUDGEMENT_ORDER: tuple[Judgement, ...] = (
    "fixes",
    "helps",
    "changes little",
    "changes nothing",
    "hurts",
)


@dataclass(frozen=True)
class Effect:
    """Effect of a change on the run.

    ``newly_finished`` contains the ids of requests that finish only with the change, and
    ``newly_failed`` the ids of requests that finish only without the change. ``faster`` and
    ``slower`` contain the ids of requests whose latency changes by at least 5 %. ``e2e_ratio`` is
    the mean E2E latency with the change divided by the mean without it. ``latency_ratio`` is the
    geometric mean of the ratios of several latencies.
    """

    change: Change
    figures: RunFigures
    judgement: Judgement
    sentence: str
    newly_finished: tuple[int, ...]
    newly_failed: tuple[int, ...]
    faster: tuple[int, ...]
    slower: tuple[int, ...]
    e2e_ratio: float
    latency_ratio: float

    @property
    def is_mixed(self) -> bool:
        """Whether many requests get worse, compared with the number of requests that get better."""
        worse = len(self.slower) + len(self.newly_failed)
        return worse > MAX_SLOWER_SHARE * (len(self.faster) + len(self.newly_finished))


@dataclass(frozen=True)
class WhatIfResult:
    """The changes that were tried, the best first. ``by`` is the metric to rank by, or None.

    ``refused`` contains the changes that the engine rejects, with the reason. ``skipped`` contains
    stricter limits that were not tried, because each of the last two limits tried served fewer
    requests than the one before. ``cause`` describes the limit that the longest prompt exceeds, or
    is None. ``unfinished`` is the number of changes without a result because the user interrupted
    the runs. ``best`` is the first effect that fixes the problem or helps, or None.
    """

    base: RunFigures
    by: str | None
    effects: tuple[Effect, ...]
    refused: tuple[tuple[Change, str], ...]
    skipped: tuple[Change, ...]
    runs: int
    cause: str | None = None
    unfinished: int = 0

    @property
    def best(self) -> Effect | None:
        helpful = (e for e in self.effects if e.judgement in ("fixes", "helps"))
        return next(helpful, None)

    def with_judgement(self, *judgements: Judgement) -> list[Effect]:
        """Return the effects with one of the given judgements, in order."""
        return [effect for effect in self.effects if effect.judgement in judgements]


def run_whatif(
    scenario: Scenario,
    evaluator: Evaluator,
    by: str | None = None,
    tell: Callable[[str], None] = lambda _: None,
    also: Iterable[tuple[Change, SimulationJob]] = (),
    wanted: Callable[[Change], bool] = lambda _: True,
) -> WhatIfResult:
    """Try every change separately, and rank the changes.

    The changes are those for which ``wanted`` returns true, and those in ``also``. Changes are
    ranked by the metric ``by`` of ``summary.json``. The default is the number of finished requests,
    then latency. If the user interrupts the runs, the changes that have a result are ranked.
    """
    base = evaluator.evaluate(evaluator.job(scenario))
    tried: list[tuple[Change, SimulationJob]] = []
    refused: list[tuple[Change, str]] = []
    for change, job in generate_changes(scenario, evaluator.folder, wanted):
        if isinstance(job, InputError):
            refused.append((change, str(job)))
        else:
            tried.append((change, job))
    tried += [(change, job) for change, job in also if change not in dict(tried)]
    tell("changes")
    idle = {change: base for change, _ in tried if has_no_effect(scenario, change)}
    evaluator.plan_jobs(job for change, job in tried if change not in idle)
    run = [one for one in tried if one[0] not in idle]
    try:
        ran = _by_turns(run, base, evaluator)
        unfinished = 0
    except KeyboardInterrupt:
        ran = {change: done for change, job in run if (done := evaluator.find(job))}
        unfinished = len(run) - len(ran)
    found = {change: (idle | ran)[change] for change, _ in tried if change in idle or change in ran}
    effects = [evaluate_change(change, base, figures, by) for change, figures in found.items()]
    skipped = () if unfinished else tuple(change for change, _ in tried if change not in found)
    return WhatIfResult(
        base,
        by,
        tuple(_ranked(effects, by)),
        tuple(refused),
        skipped,
        evaluator.runs,
        length_cause(scenario),
        unfinished,
    )


def _by_turns(
    tried: list[tuple[Change, SimulationJob]], base: RunFigures, evaluator: Evaluator
) -> dict[Change, RunFigures]:
    """Run the changes in ``tried``, and return the result of each.

    The values of a limit are tried one by one, the least strict first, until the number of served
    requests decreases twice in a row.
    """
    found: dict[Change, RunFigures] = {}
    limits: dict[str, list[tuple[Change, SimulationJob]]] = {}
    turn: list[tuple[Change, SimulationJob]] = []
    for change, job in tried:
        (limits.setdefault(change.field, []) if change.limits else turn).append((change, job))
    while turn or any(limits.values()):
        # the strictest value is first in each row
        turn += [row.pop() for row in limits.values() if row]
        jobs = [job for _, job in turn]
        found.update(zip((c for c, _ in turn), evaluator.evaluate_all(jobs), strict=True))
        for field, row in limits.items():
            served = [
                base,
                *(figures for change, figures in found.items() if change.field == field),
            ]
            if row and _ever_fewer(served[-3:]):
                evaluator.skip_jobs(job for _, job in row)
                row.clear()
        turn = []
    return found


def _ever_fewer(figures: list[RunFigures]) -> bool:
    """Return whether each of three runs served fewer requests than the previous run."""
    served = [count_served(run) for run in figures]
    return len(served) == 3 and served[0] > served[1] > served[2]


def evaluate_change(
    change: Change, base: RunFigures, figures: RunFigures, by: str | None = None
) -> Effect:
    """Return the effect of a change, given the results before (``base``) and after
    (``figures``).
    """
    before = {ending.id: ending for ending in base.endings}
    after = {ending.id: ending for ending in figures.endings}
    both = [(before[i], after[i]) for i in sorted(before.keys() & after.keys())]
    ratios = [(a.id, b.e2e_s / a.e2e_s) for a, b in both if a.e2e_s and b.e2e_s]
    faster = tuple(i for i, r in ratios if r <= 1 - MIN_LATENCY_CHANGE)
    slower = tuple(i for i, r in ratios if r >= 1 + MIN_LATENCY_CHANGE)
    ratio = _mean_ratio(both)
    return Effect(
        change=change,
        figures=figures,
        judgement=_judge(base, figures, ratio, by),
        sentence=f"{change}: {_told(base, figures, faster, slower, by)}",
        newly_finished=tuple(
            b.id for a, b in both if a.outcome not in SERVED and b.e2e_s is not None
        ),
        newly_failed=tuple(
            b.id for a, b in both if a.e2e_s is not None and b.outcome not in SERVED
        ),
        faster=faster,
        slower=slower,
        e2e_ratio=ratio,
        latency_ratio=_latency_ratio(base, figures, [r for _, r in ratios]),
    )


def _latency_ratio(base: RunFigures, figures: RunFigures, e2e_ratios: list[float]) -> float:
    """Return the geometric mean of the ratios of latencies with and without the change.

    The E2E latencies of all requests together count as one latency. Returns 1 without latencies.
    """
    pairs = [(base[name], figures[name]) for name in RANKED_LATENCIES]
    logs = [log(after / before) for before, after in pairs if before > 0 and after > 0]
    if e2e_ratios:
        logs.append(fmean(log(ratio) for ratio in e2e_ratios))
    return exp(fmean(logs)) if logs else 1.0


def _mean_ratio(both: list[tuple[RequestEnding, RequestEnding]]) -> float:
    """Return the mean E2E latency with the change, divided by the mean without it.

    Only requests that finish in both runs are included. The result is 1 without such requests.
    """
    pairs = [(a.e2e_s, b.e2e_s) for a, b in both if a.e2e_s is not None and b.e2e_s is not None]
    before, after = sum(a for a, _ in pairs), sum(b for _, b in pairs)
    return after / before if before else 1.0


def _judge(base: RunFigures, figures: RunFigures, ratio: float, by: str | None) -> Judgement:
    if figures == base:
        return "changes nothing"
    moved = _fail_otherwise(base, figures)
    if by is not None:
        found = _compare(figures[by], base[by], more_is_better=METRICS[by].more_is_better)
        return "changes little" if moved and found == "helps" and by in FAILURES else found
    if base.verdict != "served" and figures.verdict == "served":
        return "fixes"
    if (after := count_served(figures)) != (before := count_served(base)):
        return "helps" if after > before else "hurts"
    if moved:  # other requests may be faster only because these requests were rejected
        return "changes little"
    by_latency = _compare(ratio, 1.0)
    if by_latency != "changes little" or count_served(base) < base["requests"]:
        # if requests fail, fewer preemptions may only mean that they ended earlier
        return by_latency
    by_stall = _compare(figures["longest_stall_s"], base["longest_stall_s"], share=MIN_STALL_CHANGE)
    if by_stall != "changes little":
        return by_stall
    return _compare(figures["preemptions"], base["preemptions"], share=MIN_STALL_CHANGE)


def _fail_otherwise(base: RunFigures, figures: RunFigures) -> bool:
    """Return whether a kind of failure becomes more frequent although no more requests are
    served.
    """
    if count_served(figures) > count_served(base):
        return False
    return any(figures[name] > base[name] for name in FAILURES)


def _compare(
    after: float, before: float, *, share: float = MIN_LATENCY_CHANGE, more_is_better: bool = False
) -> Judgement:
    if isnan(after) or isnan(before):  # no request has this latency, which is worse than any value
        return _compare(isnan(after), isnan(before))
    if abs(after - before) < share * abs(before) or after == before:
        return "changes little"
    return "helps" if (after > before) == more_is_better else "hurts"


def _ranked(effects: list[Effect], by: str | None) -> list[Effect]:
    """Return the effects, the best first.

    The order is by the metric ``by``, or by finished requests, judgement, slower requests and
    latency.
    """
    if by is not None:
        sign = -1 if METRICS[by].more_is_better else 1
        return sorted(effects, key=lambda e: (*_last(sign * e.figures[by]), _plainness(e)))
    groups: dict[tuple[float, int, bool, bool], list[Effect]] = {}
    for effect in effects:
        served, memory = count_served(effect.figures), effect.change.kind == "memory"
        group = (-served, JUDGEMENT_ORDER.index(effect.judgement), memory, effect.is_mixed)
        groups.setdefault(group, []).append(effect)
    return [effect for group in sorted(groups) for effect in _by_latency(groups[group])]


def _last(value: float) -> tuple[bool, float]:
    """Return a sort key that puts missing values last."""
    return isnan(value), 0.0 if isnan(value) else value


def _by_latency(effects: list[Effect]) -> list[Effect]:
    """Return the effects with nearly the shortest latency, then all others by latency.

    The first group is ordered by the simplicity of the change, the longest stall and the number of
    preemptions.
    """
    shortest = min(effect.latency_ratio for effect in effects)

    def rank(effect: Effect) -> tuple[object, ...]:
        latency = effect.latency_ratio
        stall = effect.figures["longest_stall_s"]
        preemptions = effect.figures["preemptions"]
        if latency <= TIE_RATIO * shortest:
            return (
                0,
                _plainness(effect)[0],
                round(log(max(stall, 1e-9), 1.0 + MIN_STALL_CHANGE)),
                preemptions,
                round(latency, 3),
                str(effect.change),
            )
        return (1, latency, *_plainness(effect))

    return sorted(effects, key=rank)


def _plainness(effect: Effect) -> tuple[int, str]:
    return KIND_PREFERENCE.index(effect.change.kind), str(effect.change)


def _told(
    base: RunFigures,
    figures: RunFigures,
    faster: tuple[int, ...],
    slower: tuple[int, ...],
    by: str | None,
) -> str:
    """Return a text about the effect on the run, such as ``24 starved -> 0``, or about
    latencies.
    """
    if figures == base:
        return "changes nothing"
    parts = [f"{by} {_shown(base[by])} -> {_shown(figures[by])}"] if by is not None else []
    for name in FAILURES:
        if base[name] != figures[name]:
            word = name.word
            if name is Outcome.STALLED:
                word += f" ({base.verdict if base[name] else figures.verdict})"
            parts.append(f"{base[name]:.0f} {word} -> {figures[name]:.0f}")
    if not parts and base.verdict != figures.verdict:
        parts.append(f"{base.verdict} -> {figures.verdict}")
    if count_served(base) == count_served(figures):
        parts += _latencies(base, figures, by)
    if not parts and (faster or slower):
        parts = [
            f"{_whom(whom)} {how}" for whom, how in ((faster, "faster"), (slower, "slower")) if whom
        ]
    return ", ".join(parts) or "no metric changes significantly"


def _shown(value: float) -> str:
    return "none" if isnan(value) else f"{value:.6g}"


def _latencies(base: RunFigures, figures: RunFigures, told: str | None) -> list[str]:
    def said(name: str, value: float) -> str:
        if isnan(value):
            return "none"
        metric = METRICS[name]
        return f"{metric.to_seconds(value):.4g}{' s' if metric.per_second else ''}"

    return [
        f"{METRICS[name].label} {said(name, base[name])} -> {said(name, figures[name])}"
        for name in ("e2e_ms.median", "longest_stall_s", "preemptions")
        if name != told and _compare(figures[name], base[name]) != "changes little"
    ]


def _whom(ids: tuple[int, ...]) -> str:
    return f"request {ids[0]}" if len(ids) == 1 else f"{len(ids)} requests"
