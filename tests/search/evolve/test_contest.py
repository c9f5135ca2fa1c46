"""How candidates are tried: in heats, and the best once more on trials of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from simkv.search.evolve import contest as contests
from simkv.search.evolve import judge
from simkv.search.evolve.aims import Aim
from simkv.search.evolve.conditions import Angle, Ground, Tryout
from simkv.search.evolve.contest import SHIPPED, STAY, Candidate, Contest
from simkv.search.evolve.final import decided, seats_of
from simkv.search.evolve.judge import judge_winner
from simkv.search.evolve.rules import rule_of

GOAL = Aim("ttft_ms.mean", more=False)
NO_BENCH = cast(Any, None)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Nothing is run: a trial's figures are in its place. What was asked for: rule, and trials."""
    asked: list[tuple[str, int]] = []

    def one(value: float | None) -> dict[str, Any]:
        served = 0 if value is None else 10
        said = {"ttft_ms.mean": 0.0 if value is None else value, "unserved": 10 - served}
        return {"requests": 10, "finished": served, "said": said}

    def summaries(_: Contest, candidates: Sequence[Candidate], trials: Sequence[Tryout]) -> Any:
        names = [str(dict(one.change).get("engine.rule", "shipped")) for one in candidates]
        asked.extend((name, len(trials)) for name in names)
        return [[one(cast(Any, trial.scenario)[name]) for trial in trials] for name in names]

    monkeypatch.setattr(Contest, "summaries", summaries)
    monkeypatch.setattr(judge, "_costs", lambda *_: [])
    monkeypatch.setattr(contests, "figures", lambda summary: summary["said"])
    return asked


def trials(*says: dict[str, float | None]) -> tuple[Tryout, ...]:
    return tuple(Tryout(f"{i}", cast(Any, one), Path()) for i, one in enumerate(says))


def contest(on: Sequence[Tryout], firsts: int = 1) -> Contest:
    found = Contest(on, (GOAL,), {}, NO_BENCH, firsts=firsts)
    found.start()
    return found


def test_who_gains_nothing_at_first_is_run_no_more(ran: list[tuple[str, int]]) -> None:
    worse, better = "admit = 0", "admit = 1"
    each = {"shipped": 10.0, worse: 11.0, better: 8.0}
    found = contest(trials(each, each, {**each, better: 5.0}), firsts=2)
    bad, good = found.add([rule_of(worse), rule_of(better)])
    assert ran[1:] == [(worse, 1), (better, 1), (better, 2), (better, 3)]
    assert good.loss == pytest.approx(((-0.2 - 0.2 - 0.5) / 3,))
    assert bad.loss == pytest.approx((0.1 / 3,))  # elsewhere it counts as what is shipped


def test_only_the_best_so_far_are_run_on(ran: list[tuple[str, int]]) -> None:
    rules = [f"chunk = {i}" for i in range(STAY + 5)]
    each: dict[str, float | None] = {"shipped": 100.0}
    each |= {rule: 50.0 + i for i, rule in enumerate(rules)}
    found = contest(trials(each, each))
    found.add([rule_of(rule) for rule in rules])
    assert [rule for rule, count in ran[1:] if count == 2] == rules[:STAY]


def test_where_nobody_is_served_what_is_shipped_does_elsewhere_counts(
    ran: list[tuple[str, int]],
) -> None:
    rule, none = "admit = 1", "admit = 0"
    on = trials({"shipped": None, rule: 30.0, none: None}, {"shipped": 20.0, rule: 10.0, none: 5.0})
    one, other = contest(on).add([rule_of(rule), rule_of(none)], thorough=True)
    assert one.losses == ((0.5,), (-0.5,))
    assert one.left_out == (-1.0, 0.0)
    assert other.losses[0] == (10.0,)  # to serve nobody is no gain in anything
    assert ran


def test_the_final_undoes_luck_and_leaves_out_what_is_not_needed(
    ran: list[tuple[str, int]],
) -> None:
    lucky, steady, short = "chunk = 1", "chunk = 2\nadmit = 1", "chunk = 2"
    search = {"shipped": 10.0, lucky: 1.0, steady: 5.0}
    final = {"shipped": 10.0, lucky: 9.0, steady: 5.0, short: 5.0, "admit = 1": 10.0}
    ground = Ground(trials(search), trials(final), (), "other seeds")
    found = contest(ground.train)
    found.add([rule_of(lucky), rule_of(steady)])
    assert found.front()[0].candidate == rule_of(lucky)
    winner, everybody = decided(found, ground, seats_of(100, ground))
    assert winner.candidate == rule_of(short)
    assert winner.loss == (-0.5,)
    assert {one.candidate.key for one in everybody} >= {rule_of(x).key for x in (lucky, steady)}
    assert len(everybody) <= seats_of(100, ground) == 10


def test_what_is_shipped_may_win_the_final(ran: list[tuple[str, int]]) -> None:
    lucky, other = "chunk = 1", "chunk = 2"
    search = {"shipped": 10.0, lucky: 1.0, other: 2.0}
    ground = Ground(trials(search), trials({**search, lucky: 11.0, other: 12.0}), (), "others")
    found = contest(ground.train)
    found.add([rule_of(lucky), rule_of(other)])
    assert decided(found, ground, 2)[0].candidate == SHIPPED
    assert ran


def test_a_budget_too_small_for_a_final_has_none() -> None:
    ground = Ground((), trials({}), (), "other seeds")
    assert [seats_of(budget, ground) for budget in (5, 19, 20, 200)] == [0, 0, 2, 20]
    assert seats_of(200, Ground((), (), (), None)) == 0


def test_a_gain_is_no_thousandfold_where_nobody_was_served(ran: list[tuple[str, int]]) -> None:
    rule = "admit = 1"
    on = trials({"shipped": None, rule: 30.0}, {"shipped": 20.0, rule: 10.0})
    (ruling,), _ = judge_winner(rule_of(rule), [Angle("as asked", on)], (GOAL,), {}, NO_BENCH)
    (gain,) = ruling.gains
    assert gain.mean == pytest.approx(0.0)  # a half more there, a half less here
    assert (gain.shipped, gain.won) == (None, 20.0)  # shipped, a trial has no mean
    assert ruling.unserved == (10.0, 0.0)
    assert ruling.holds  # to serve more of them is better
    assert ran
