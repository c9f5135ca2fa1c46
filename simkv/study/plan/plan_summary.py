"""Summarize a plan as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simkv.metrics.fidelity import warn_mixed_bases
from simkv.scenario.objectives import Objective
from simkv.study.plan.capacity_plan import CapacityPlan, ObjectiveStatus
from simkv.study.plan.plan_candidates import Number, PlanCondition
from simkv.study.plan.plan_confidence import AnswerRange, bound_violated_share, coverage_of_range


def describe_plan(plan: CapacityPlan) -> list[str]:
    """Return lines of text on the answer, its uncertainty, its objectives and its cost."""
    prepared, case = plan.prepared, plan.prepared.case
    superlative = "largest" if prepared.request.largest else "smallest"
    name = f"{prepared.name}, {prepared.label}" if prepared.label else prepared.name
    held = describe_objectives(held.objective for held in plan.objectives)
    also = ", including with one replica failing" if prepared.request.survive else ""
    lines = [f"{name}: {superlative} {case.knob} that meets {held}{also}"]
    lines.append(_answer(plan))
    more = (*_sureness(plan), *_binding(plan), *_others(plan), *_fidelity(plan))
    return [*lines, *(f"  {line}" for line in more)]


def describe_objectives(objectives: Iterable[Objective]) -> str:
    """Return objectives as text. Default objectives are marked."""
    return "; ".join(f"{one}{' (default)' if one.assumed else ''}" for one in objectives)


def _fidelity(plan: CapacityPlan) -> list[str]:
    """Return the notes and the accuracy that ``simkv run`` would report for the answer."""
    last = len(plan.prepared.case.candidates) - 1
    tried = last if plan.answer is None else plan.answer
    summary = plan.results.summaries.get((tried, PlanCondition()))
    if summary is None:
        return []
    return [*summary["notes"], f"Fidelity: {summary['fidelity']['note']}"]


def compare_plans(plans: Sequence[CapacityPlan]) -> list[str]:
    """Return lines of text that rank plans by cost, or by number of GPUs without prices."""
    met = [plan for plan in plans if plan.answer is not None]
    if len(plans) < 2 or not plans[0].prepared.point or not met:
        return []
    by_price = all(plan.cost for plan in met)

    def least(plan: CapacityPlan) -> float:
        return plan.cost.per_hour if plan.cost and by_price else plan.gpus

    ranked = sorted(met, key=lambda plan: (least(plan), plan.prepared.label))
    lines = ["Cheapest first:" if by_price else "Sorted by number of GPUs (no prices specified):"]
    for plan in ranked:
        cost = ""
        if plan.cost:
            each = plan.cost.per_million_output_tokens
            tokens = "" if each is None else f", {each:.4g} per million output tokens"
            cost = f", {plan.cost.per_hour:.2f} per hour{tokens}"
        answer = f"{plan.prepared.case.knob} = {format_value(plan.value(plan.answer))}"
        mark = plan.prepared.error.mark
        gpus = f"{plan.gpus} GPU{'s' * (plan.gpus != 1)}"
        lines.append(f"  {plan.prepared.label}: {answer}, {gpus}{cost} ({mark})")
    lines += warn_mixed_bases([plan.prepared.error.mark for plan in ranked])
    none = len(plans) - len(met)
    return [*lines, f"  {none} more plans cannot meet the objectives"] if none else lines


def _answer(plan: CapacityPlan) -> str:
    knob, candidates = plan.prepared.case.knob, plan.prepared.case.candidates
    within = ""
    if plan.by_error:
        within = f" ({_range(plan, plan.by_error)} within the profile's error)"
    if plan.answer is None:
        low, high = min(candidates), max(candidates)
        span = f"{format_value(low)} to {format_value(high)}"
        return f"No {knob} from {span} meets the objectives{within}"
    return f"Answer: {knob} = {format_value(plan.value(plan.answer))}{within}"


def _range(plan: CapacityPlan, interval: AnswerRange) -> str:
    low, high = plan.value(interval.low), plan.value(interval.high)
    last = format_value(plan.prepared.case.candidates[-1])
    beyond = f"{'below' if plan.prepared.request.largest else 'beyond'} {last}"
    first = beyond if low is None else format_value(low)
    second = beyond if high is None else format_value(high)
    return first if first == second else f"{first} to {second}"


def _sureness(plan: CapacityPlan) -> list[str]:
    prepared = plan.prepared
    lines = []
    if prepared.repeats > 1:
        answers = ", ".join(
            "none" if a is None else format_value(plan.value(a)) for a in plan.answers
        )
        surely = 100 * coverage_of_range(prepared.repeats)
        lines.append(
            f"answers of {prepared.repeats} seeds: {answers}; with {surely:.1f} % confidence, "
            "the median over all possible seeds is in this range (sign test)"
        )
        if plan.answer is not None:
            share = 100 * bound_violated_share(prepared.repeats)
            lines.append(
                f"the answer meets the objectives with all {prepared.repeats} seeds; with 95 % "
                f"confidence, it fails for at most {share:.0f} % of all possible seeds"
            )
    else:
        lines.append(
            "no interval over seeds: only one seed was run, or the workload has no random part"
        )
    lines.append(f"step costs: {prepared.error.note}")
    return lines


def _binding(plan: CapacityPlan) -> list[str]:
    if plan.answer is None:
        missed = [held for held in plan.objectives if held.slack < 0]
        last = format_value(plan.prepared.case.candidates[-1])
        return [f"at {last}, the run does not meet {_value(held, held.value)}" for held in missed]
    if plan.answer == 0:
        return ["no objective is limiting: the first candidate meets all objectives"]
    before = format_value(plan.value(plan.answer - 1))
    lines = [
        f"limiting objective: {_value(held, held.value_before)} at "
        f"{before}{', with one replica failing' if held.by_failure else ''}"
        for held in plan.binding
    ]
    for held in plan.objectives:
        room = f", {100 * held.slack:.1f} % slack" if held.objective.limit else ""
        lines.append(f"at the answer: {_value(held, held.value)}{room}")
    return lines


def _value(held: ObjectiveStatus, value: float | None) -> str:
    found = "no sample" if value is None else f"{value:.4g}"
    return f"{held.objective} (value {found})"


def _others(plan: CapacityPlan) -> list[str]:
    lines = []
    if plan.isolated_answers:
        meets = ", ".join(format_value(plan.value(i)) for i in plan.isolated_answers)
        fails = ", ".join(format_value(plan.value(i)) for i in plan.failing)
        lines.append(f"not monotone: {meets} meets the objectives, but {fails} does not")
    if plan.held_back:
        holds, there, board = plan.held_back
        changed = " ".join(board.case.overrides[len(plan.results.case.overrides) :])
        needs = "none" if there is None else format_value(board.case.candidates[there])
        verdict = "holds" if holds else "does NOT hold"
        lines.append(
            f"held-out scenario ({changed}): the answer {verdict}; the answer for the held-out "
            f"scenario alone is {needs}"
        )
    if plan.cost:
        lines.append(plan.cost.describe())
    return lines


def format_value(value: Number | None) -> str:
    """Format a value of the planned setting."""
    return "none" if value is None else f"{value:.12g}"
