"""A plan as tables and as plain data."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import pandas as pd

from simkv.scenario.objectives import DERIVED
from simkv.search.jobs import Summary
from simkv.search.plan.board import Board
from simkv.search.plan.case import Condition
from simkv.search.plan.cliff import AtRate
from simkv.search.plan.plan import Plan, Standing
from simkv.search.plan.uncertain import coverage_of_range, most_violated
from simkv.search.sweep.table import figures_of, typed


def evaluations(plan: Plan) -> pd.DataFrame:
    """A row per run that the search made, in order of the knob.

    ``variant``, the knob, ``repeat``, ``side`` of the profile's error and whether one replica was
    ``failing``; ``holds`` and ``misses`` (the objectives that do not); the figures of summary.json
    and those that are worked out from them; ``held_back`` tells runs of the other scenario.
    """
    rows = _evaluated(plan.board, held_back=False)
    if plan.held_back:
        rows += _evaluated(plan.held_back[2], held_back=True)
    return typed([_labelled(plan, row) for row in rows])


def _labelled(plan: Plan, row: dict[str, Any]) -> dict[str, Any]:
    """A row that says for which combination of ``--over`` it is, where there are several."""
    return {"over": plan.prepared.point, **row} if plan.prepared.point else row


def _evaluated(board: Board, held_back: bool) -> list[dict[str, Any]]:
    case = board.case

    def order(key: tuple[int, Condition]) -> tuple[Any, ...]:
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


def cliff_table(plan: Plan) -> pd.DataFrame:
    """A row per run at another rate: ``rate`` (requests per second), the rest as above."""
    return typed([_labelled(plan, _at_rate(plan, point)) for point in plan.points])


def _at_rate(plan: Plan, point: AtRate) -> dict[str, Any]:
    return {
        "variant": plan.board.case.variant,
        "factor": point.factor,
        "rate": point.rate,
        **_condition(point.condition),
        "holds": all(one.holds(point.values) for one in plan.board.case.objectives),
        **_figures(point.summary, point.values),
    }


def _condition(condition: Condition) -> dict[str, Any]:
    return {
        "repeat": condition.repeat,
        "side": condition.side or "",
        "failing": condition.failing,
    }


def _figures(summary: Summary, values: dict[str, float | None] | Any) -> dict[str, Any]:
    plain = {
        name: value for name, value in summary.items() if name not in ("fidelity", "notes", "peak")
    }
    derived = {name: values[name] for name in DERIVED if name in values}
    return {**figures_of(plain), **derived}


def to_json(plan: Plan) -> dict[str, Any]:
    """The answer and all that is said of it; numbers that are not there are null."""
    prepared, case = plan.prepared, plan.prepared.case
    by_seed = plan.by_seed
    found: dict[str, Any] = {
        "variant": case.variant,
        **({"over": prepared.point} if prepared.point else {}),
        "largest" if prepared.asked.largest else "smallest": case.knob,
        "candidates": [case.candidates[0], case.candidates[-1], len(case.candidates)],
        "answer": plan.value(plan.answer),
        "objectives": [_held(held) for held in plan.objectives],
        "binding": [str(held.objective) for held in plan.binding],
        "survives_one_failing": bool(prepared.asked.survive),
        "tried": len({candidate for candidate, _ in plan.board.summaries}),
        "runs": len(plan.board.summaries),
        "not_monotone": {
            "meets": [plan.value(i) for i in plan.islands],
            "does_not": [plan.value(i) for i in plan.failing],
        },
        "seeds": {
            "repeats": prepared.repeats,
            "answers": [plan.value(answer) for answer in plan.answers],
            "range": [plan.value(by_seed.low), plan.value(by_seed.high)],
            "covers_median": coverage_of_range(prepared.repeats),
            "violated_at_most": most_violated(prepared.repeats),
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


def _held(held: Standing) -> dict[str, Any]:
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
