"""Convert a plan to tables and plain data."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pandas as pd

from simkv.scenario.objectives import DERIVED
from simkv.study.plan.candidate_results import CandidateResults
from simkv.study.plan.capacity_plan import CapacityPlan, ObjectiveStatus
from simkv.study.plan.plan_candidates import PlanCondition
from simkv.study.plan.plan_confidence import bound_violated_share, coverage_of_range
from simkv.study.plan.rate_cliff import RateResult
from simkv.study.simulation_job import Summary
from simkv.study.sweep.sweep_table import flatten_figures, make_typed_frame


def evaluations(plan: CapacityPlan) -> pd.DataFrame:
    """Return one row per run of the search, in order of the planned setting.

    ``repeat`` is the index of the seed. ``side`` is ``faster`` or ``slower`` for runs with the
    profile's error. ``failing`` is true if one replica failed. ``holds`` is true if all objectives
    were met, and ``misses`` lists the violated objectives. ``held_back`` is true for runs of the
    held-out scenario. The other columns are metrics.
    """
    rows = _evaluated(plan.results, held_back=False)
    if plan.held_back:
        rows += _evaluated(plan.held_back[2], held_back=True)
    return make_typed_frame([_labelled(plan, row) for row in rows])


def _labelled(plan: CapacityPlan, row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the values of the settings in ``each``, if the request has several
    plans.
    """
    return {"over": plan.prepared.point, **row} if plan.prepared.point else row


def _evaluated(board: CandidateResults, held_back: bool) -> list[dict[str, Any]]:
    case = board.case

    def order(key: tuple[int, PlanCondition]) -> tuple[Any, ...]:
        candidate, condition = key
        return candidate, condition.side or "", condition.failing, condition.repeat

    return [
        {
            "variant": case.variant,
            case.knob: case.candidates[key[0]],
            **_condition(key[1]),
            "held_back": held_back,
            "holds": bool(board.holds(*key)),
            "misses": "\n".join(
                str(one) for one in case.objectives if not one.holds(board.values[key])
            ),
            **_figures(board.summaries[key], board.values[key]),
        }
        for key in sorted(board.summaries, key=order)
    ]


def cliff_table(plan: CapacityPlan) -> pd.DataFrame:
    """Return one row per run at another request rate, with the columns of ``evaluations``.

    ``rate`` is in requests per second.
    """
    return make_typed_frame([_labelled(plan, _at_rate(plan, point)) for point in plan.points])


def _at_rate(plan: CapacityPlan, point: RateResult) -> dict[str, Any]:
    return {
        "variant": plan.results.case.variant,
        "factor": point.factor,
        "rate": point.rate,
        **_condition(point.condition),
        "holds": all(one.holds(point.values) for one in plan.results.case.objectives),
        **_figures(point.summary, point.values),
    }


def _condition(condition: PlanCondition) -> dict[str, Any]:
    return {
        "repeat": condition.repeat,
        "side": condition.side or "",
        "failing": condition.failing,
    }


def _figures(summary: Summary, values: dict[str, float | None] | Any) -> dict[str, Any]:
    plain = {
        name: value
        for name, value in summary.items()
        if name not in ("fidelity", "notes", "peak", "saturated")
    }
    derived = {name: values[name] for name in DERIVED if name in values}
    return {**flatten_figures(plain), **derived}


def to_json(plan: CapacityPlan) -> dict[str, Any]:
    """Return the answer and its details as JSON data."""
    prepared, case = plan.prepared, plan.prepared.case
    by_seed = plan.by_seed
    found: dict[str, Any] = {
        "variant": case.variant,
        **({"over": prepared.point} if prepared.point else {}),
        "largest" if prepared.request.largest else "smallest": case.knob,
        "candidates": [case.candidates[0], case.candidates[-1], len(case.candidates)],
        "answer": plan.value(plan.answer),
        "objectives": [_held(held) for held in plan.objectives],
        "binding": [str(held.objective) for held in plan.binding],
        "survives_one_failing": bool(prepared.request.survive),
        "tried": len({candidate for candidate, _ in plan.results.summaries}),
        "runs": len(plan.results.summaries),
        "not_monotone": {
            "meets": [plan.value(i) for i in plan.isolated_answers],
            "does_not": [plan.value(i) for i in plan.failing],
        },
        "seeds": {
            "repeats": prepared.repeats,
            "answers": [plan.value(answer) for answer in plan.answers],
            "range": [plan.value(by_seed.low), plan.value(by_seed.high)],
            "covers_median": coverage_of_range(prepared.repeats),
            "violated_at_most": bound_violated_share(prepared.repeats),
        },
        "profile_error": {
            "note": prepared.error.note,
            "factors": prepared.error.factors,
            "range": plan.by_error
            and [plan.value(plan.by_error.low), plan.value(plan.by_error.high)],
        },
        "cost": plan.cost and asdict(plan.cost),
    }
    if plan.held_back:
        holds, there, board = plan.held_back
        candidates = board.case.candidates
        found["held_back"] = {
            "overrides": list(board.case.overrides[len(case.overrides) :]),
            "answer_holds": holds,
            "answer_there": None if there is None else candidates[there],
        }
    return found


def _held(held: ObjectiveStatus) -> dict[str, Any]:
    def finite(value: float | None) -> float | None:
        return value if value is not None and math.isfinite(value) else None

    return {
        "objective": str(held.objective),
        "assumed": held.objective.assumed,
        "value": finite(held.value),
        "slack": finite(held.slack),
        "value_before": finite(held.value_before),
        "slack_before": finite(held.slack_before),
        "binds": held.binds,
        "binds_by_failure": held.by_failure,
    }
