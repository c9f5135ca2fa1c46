"""Summarize a plan as lines of text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from simkv.core.figure_registry import METRICS
from simkv.metrics.fidelity import warn_mixed_bases
from simkv.scenario.objectives import Objective
from simkv.study.plan.capacity_plan import CapacityPlan, ObjectiveStatus
from simkv.study.plan.plan_candidates import Number, PlanCondition
from simkv.study.plan.plan_confidence import AnswerRange, bound_violated_share, coverage_of_range

#: Relative difference of values that count as equal.
SAME_VALUE = 0.02


def describe_plan(plan: CapacityPlan) -> list[str]:
    """Return lines of text on the answer, its uncertainty, its objectives and its cost."""
    prepared, case = plan.prepared, plan.prepared.case
    superlative = "largest" if prepared.request.largest else "smallest"
    name = f"{prepared.name}, {prepared.label}" if prepared.label else prepared.name
    held = describe_objectives(held.objective for held in plan.objectives)
    also = ", including with one replica failing" if prepared.request.survive else ""
    lines = [f"{name}: {superlative} {case.knob} that meets {held}{also}"]
    lines.append(_answer(plan))
    more = (
        *_unbounded(plan),
        *_sureness(plan),
        *_binding(plan),
        *_cliff(plan),
        *_others(plan),
    )
    return [*lines, *(f"  {line}" for line in more)]


def describe_objectives(objectives: Iterable[Objective]) -> str:
    """Return objectives as text. Default objectives are marked."""
    return "; ".join(f"{one}{' (default)' if one.assumed else ''}" for one in objectives)


def describe_basis(plans: Iterable[CapacityPlan]) -> list[str]:
    """Return lines with the plans' notes and with the errors of their step times, without
    repetition.
    """
    found: dict[str, list[str]] = {}
    for plan in plans:
        last = len(plan.prepared.case.candidates) - 1
        tried = last if plan.answer is None else plan.answer
        summary = plan.results.summaries.get((tried, PlanCondition()))
        notes = [] if summary is None else [f"Note: {note}" for note in summary["notes"]]
        outside = 0.0 if summary is None else summary["fidelity"]["outside_range_share"]
        beyond = (
            f"; {100 * outside:.1f} % of the busy time was outside the profile's range"
            if outside
            else ""
        )
        for text in (*notes, f"Step times: {plan.prepared.error.note}{beyond}"):
            found.setdefault(text, []).append(plan.prepared.label)
    several = len({label for labels in found.values() for label in labels}) > 1
    return [
        f"{text} ({', '.join(dict.fromkeys(labels))})" if several else text
        for text, labels in found.items()
    ]


def compare_plans(plans: Sequence[CapacityPlan]) -> list[str]:
    """Return lines of text that rank plans by cost. Without prices, they rank by number of GPUs."""
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
    if plan.by_error and plan.by_error.low is None:
        within = ", not even with steps faster by the profile's error"
    elif plan.by_error:
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
    if plan.prepared.request.largest:  # its candidates are in decreasing order
        first, second = second, first
    return first if first == second else f"{first} to {second}"


def _unbounded(plan: CapacityPlan) -> list[str]:
    """Return the reason why the range due to the profile's error has no upper end, if so."""
    if plan.by_error is None or plan.by_error.high is not None or plan.prepared.request.largest:
        return []
    case = plan.prepared.case
    last = len(case.candidates) - 1
    conditions = plan.prepared.side_conditions("slower")
    runs = {i: _worst_values(plan, i, conditions) for i in range(last + 1)}
    known = [i for i, values in runs.items() if values is not None]
    if last not in known:
        return []
    missed = [
        f"{one} ({_format(one, value)})"
        for one in case.objectives
        if one.slack({one.figure: (value := (runs[last] or {}).get(one.figure))}) < 0
    ]
    saturated = any(
        plan.results.summaries[last, one].get("saturated")
        for one in conditions
        if (last, one) in plan.results.summaries
    )
    why = ", because the load saturates it: requests arrive faster than they finish"
    if not saturated:
        why = _without_gain(plan, runs, [i for i in known if i < last])
    if not missed:
        return []
    end = format_value(case.candidates[last])
    unmet = f"{end} does not meet {'; '.join(missed)}"
    return [f"the range has no upper end: with slower steps, {unmet}{why}"]


def _without_gain(
    plan: CapacityPlan, runs: Mapping[int, Mapping[str, float | None] | None], tried: list[int]
) -> str:
    """Return a sentence if the last candidate is hardly better than an earlier one."""
    case = plan.prepared.case
    last = len(case.candidates) - 1
    for one in case.objectives:
        final = (runs[last] or {}).get(one.figure)
        if final is None or one.slack({one.figure: final}) >= 0:
            continue
        for i in tried:
            value = (runs[i] or {}).get(one.figure)
            if value is not None and abs(value - final) <= SAME_VALUE * abs(final):
                start, end = (format_value(case.candidates[k]) for k in (i, last))
                return f"; it is the same from {start} to {end}, so more would not help"
    return ""


def _worst_values(
    plan: CapacityPlan, candidate: int, conditions: Sequence[PlanCondition]
) -> dict[str, float | None] | None:
    """Return the worst value of each objective's metric over a candidate's runs; None without runs.

    Only the runs under the given conditions count.
    """
    found = [
        plan.results.values[candidate, one]
        for one in conditions
        if (candidate, one) in plan.results.values
    ]
    if not found:
        return None
    return {
        one.figure: one.worst(values.get(one.figure) for values in found)
        for one in plan.prepared.case.objectives
    }


def _sureness(plan: CapacityPlan) -> list[str]:
    prepared = plan.prepared
    lines = []
    if prepared.repeats > 1:
        answers = ", ".join(
            "none" if a is None else format_value(plan.value(a)) for a in plan.answers
        )
        surely = 100 * coverage_of_range(prepared.repeats)
        lines.append(
            f"answers of {prepared.repeats} seeds: {answers} (the median answer of many seeds is "
            f"in this range with {surely:.1f} % confidence)"
        )
        if plan.answer is not None:
            share = 100 * bound_violated_share(prepared.repeats)
            lines.append(
                f"the answer meets the objectives with all {prepared.repeats} seeds; of other "
                f"seeds, at most {share:.0f} % do not meet them (95 % confidence)"
            )
    else:
        lines.append(
            "no interval over seeds: only one seed was run, or the workload has no random part"
        )
    return lines


def _binding(plan: CapacityPlan) -> list[str]:
    if plan.answer is None:
        missed = [held for held in plan.objectives if held.slack < 0]
        last = format_value(plan.prepared.case.candidates[-1])
        return [f"at {last}, the run does not meet {_value(held, held.value)}" for held in missed]
    if plan.answer == 0:
        lines = ["no objective is limiting: the first candidate meets all objectives"]
    else:
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


def _cliff(plan: CapacityPlan) -> list[str]:
    """Return a line with the highest simulated request rate at which the answer meets the
    objectives, and the next one.

    Without an answer, the line describes the last candidate.
    """
    objectives = plan.results.case.objectives
    found: dict[tuple[float, float], bool] = {}
    for point in plan.points:
        if point.condition.side is None:
            holds = all(one.holds(point.values) for one in objectives)
            at = (point.factor, point.rate)
            found[at] = holds and found.get(at, True)
    if not found:
        return []
    failing = [at for at, holds in sorted(found.items()) if not holds]
    meeting = [at for at in sorted(found) if not failing or at < failing[0]]

    def said(at: tuple[float, float]) -> str:
        return f"{at[1]:.4g} requests/s ({at[0]:g} x the rate)"

    last = plan.prepared.case.candidates[-1] if plan.answer is None else plan.value(plan.answer)
    parts = []
    if meeting:
        parts.append(f"meets the objectives up to {said(meeting[-1])}")
        parts += [f"does not meet them at {said(failing[0])}"] if failing else []
    else:
        parts.append(f"does not meet the objectives at {said(failing[0])} or more")
    return [f"at other request rates: {format_value(last)} {', '.join(parts)}"]


def _value(held: ObjectiveStatus, value: float | None) -> str:
    return f"{held.objective} ({_format(held.objective, value)})"


def _format(objective: Objective, value: float | None) -> str:
    """Format the value of an objective's metric with its unit."""
    if value is None:
        return "no sample"
    metric = METRICS.get(objective.figure)
    return metric.format(value) if metric else f"value {value:.4g}"


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
