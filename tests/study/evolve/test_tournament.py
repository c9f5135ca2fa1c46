"""Tests of tournaments: heats, and the final on separate trials."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from simkv.study.evolve import tournament as contests
from simkv.study.evolve import winner_evaluation
from simkv.study.evolve.evolution import count_final_candidates, run_final
from simkv.study.evolve.fitness import FigureGoal
from simkv.study.evolve.policy_search import make_policy_candidate
from simkv.study.evolve.tournament import (
    HEAT_SURVIVORS,
    SHIPPED,
    Candidate,
    Tournament,
)
from simkv.study.evolve.trial_split import EvaluationCondition, TrialScenario, TrialSplit
from simkv.study.evolve.winner_evaluation import evaluate_winner

GOAL = FigureGoal("ttft_ms.mean", more_is_better=False)
NO_BENCH = cast(Any, None)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Replace runs by metrics defined by the trial; return the list of evaluated candidates."""
    asked: list[tuple[str, int]] = []

    def one(value: float | None) -> dict[str, Any]:
        served = 0 if value is None else 10
        said = {"ttft_ms.mean": 0.0 if value is None else value, "unserved": 10 - served}
        return {"requests": 10, "finished": served, "said": said}

    def summaries(
        _: Tournament, candidates: Sequence[Candidate], trials: Sequence[TrialScenario]
    ) -> Any:
        names = [str(dict(one.change).get("engine.rule", "shipped")) for one in candidates]
        asked.extend((name, len(trials)) for name in names)
        return [[one(cast(Any, trial.scenario)[name]) for trial in trials] for name in names]

    monkeypatch.setattr(Tournament, "summaries", summaries)
    monkeypatch.setattr(winner_evaluation, "_costs", lambda *_: [])
    monkeypatch.setattr(contests, "compute_objective_figures", lambda summary: summary["said"])
    return asked


def trials(*says: dict[str, float | None]) -> tuple[TrialScenario, ...]:
    return tuple(TrialScenario(f"{i}", cast(Any, one), Path()) for i, one in enumerate(says))


def tournament(on: Sequence[TrialScenario], firsts: int = 1) -> Tournament:
    found = Tournament(on, (GOAL,), {}, NO_BENCH, scenarios=firsts)
    found.start()
    return found


def test_candidate_without_gain_is_dropped(ran: list[tuple[str, int]]) -> None:
    worse, better = "admit = 0", "admit = 1"
    each = {"shipped": 10.0, worse: 11.0, better: 8.0}
    found = tournament(trials(each, each, {**each, better: 5.0}), firsts=2)
    bad, good = found.add([make_policy_candidate(worse), make_policy_candidate(better)])
    assert ran[1:] == [(worse, 1), (better, 1), (better, 2), (better, 3)]
    assert good.loss == pytest.approx(((-0.2 - 0.2 - 0.5) / 3,))
    assert bad.loss == pytest.approx(
        (0.1 / 3,)
    )  # other trials count as equal to the shipped scheduler


def test_only_best_candidates_advance(ran: list[tuple[str, int]]) -> None:
    rules = [f"chunk = {i}" for i in range(HEAT_SURVIVORS + 5)]
    each: dict[str, float | None] = {"shipped": 100.0}
    each |= {rule: 50.0 + i for i, rule in enumerate(rules)}
    found = tournament(trials(each, each))
    found.add([make_policy_candidate(rule) for rule in rules])
    assert [rule for rule, count in ran[1:] if count == 2] == rules[:HEAT_SURVIVORS]


def test_trial_without_finished_requests_uses_other_trials(
    ran: list[tuple[str, int]],
) -> None:
    rule, none = "admit = 1", "admit = 0"
    on = trials({"shipped": None, rule: 30.0, none: None}, {"shipped": 20.0, rule: 10.0, none: 5.0})
    one, other = tournament(on).add(
        [make_policy_candidate(rule), make_policy_candidate(none)], thorough=True
    )
    assert one.losses == ((0.5,), (-0.5,))
    assert one.left_out == (-1.0, 0.0)
    assert other.losses[0] == (10.0,)  # a candidate that serves no request gains nothing
    assert ran


def test_final_corrects_luck_and_prunes_winner(
    ran: list[tuple[str, int]],
) -> None:
    lucky, steady, short = "chunk = 1", "chunk = 2\nadmit = 1", "chunk = 2"
    search = {"shipped": 10.0, lucky: 1.0, steady: 5.0}
    final = {"shipped": 10.0, lucky: 9.0, steady: 5.0, short: 5.0, "admit = 1": 10.0}
    ground = TrialSplit(trials(search), trials(final), (), "other seeds")
    found = tournament(ground.train)
    found.add([make_policy_candidate(lucky), make_policy_candidate(steady)])
    assert found.front()[0].candidate == make_policy_candidate(lucky)
    winner, everybody = run_final(found, ground, count_final_candidates(100, ground))
    assert winner.candidate == make_policy_candidate(short)
    assert winner.loss == (-0.5,)
    assert {one.candidate.key for one in everybody} >= {
        make_policy_candidate(x).key for x in (lucky, steady)
    }
    assert len(everybody) <= count_final_candidates(100, ground) == 10


def test_shipped_scheduler_can_win_final(ran: list[tuple[str, int]]) -> None:
    lucky, other = "chunk = 1", "chunk = 2"
    search = {"shipped": 10.0, lucky: 1.0, other: 2.0}
    ground = TrialSplit(trials(search), trials({**search, lucky: 11.0, other: 12.0}), (), "others")
    found = tournament(ground.train)
    found.add([make_policy_candidate(lucky), make_policy_candidate(other)])
    assert run_final(found, ground, 2)[0].candidate == SHIPPED
    assert ran


def test_small_budget_has_no_final() -> None:
    ground = TrialSplit((), trials({}), (), "other seeds")
    assert [count_final_candidates(budget, ground) for budget in (5, 19, 20, 200)] == [0, 0, 2, 20]
    assert count_final_candidates(200, TrialSplit((), (), (), None)) == 0


def test_gain_is_bounded_without_served_requests(ran: list[tuple[str, int]]) -> None:
    rule = "admit = 1"
    on = trials({"shipped": None, rule: 30.0}, {"shipped": 20.0, rule: 10.0})
    (ruling,), _ = evaluate_winner(
        make_policy_candidate(rule),
        [EvaluationCondition("as configured", on)],
        (GOAL,),
        {},
        NO_BENCH,
    )
    (gain,) = ruling.gains
    assert gain.mean == pytest.approx(0.0)  # 0.5 more in that trial, 0.5 less in this trial
    assert (gain.shipped, gain.evolved) == (
        None,
        20.0,
    )  # there is no mean if the metric of the shipped scheduler is missing in a trial
    assert ruling.unserved == (10.0, 0.0)
    assert ruling.holds  # a candidate that serves more requests is better
    assert ran
