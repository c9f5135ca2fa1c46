"""Compare the winner with the engine's scheduler on held-out trials."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt
from statistics import mean, stdev
from typing import Any

from simkv.study.evolve.fitness import FigureGoal
from simkv.study.evolve.tournament import SHIPPED, Candidate, Tournament
from simkv.study.evolve.trial_split import EvaluationCondition
from simkv.study.job_runner import JobRunner
from simkv.workload.workload_section import build_clients

#: Confidence level of the interval of the mean gain.
CONFIDENCE = 0.95
#: Request classes by prompt length.
PROMPT_LENGTH_CLASSES = ("short", "middle", "long")
#: Minimum relative change of a request's time that counts as a difference.
MIN_TIME_CHANGE = 0.05


@dataclass(frozen=True)
class Improvement:
    """Mean improvement of one goal over trials, as a fraction of the value with the engine's
    scheduler.

    ``low`` and ``high`` are the 95 % confidence interval of the mean by Student's t, or None for a
    single trial. ``shipped`` and ``evolved`` are the mean values with the engine's scheduler and
    with the winner.
    """

    goal: FigureGoal
    mean: float
    low: float | None
    high: float | None
    shipped: float | None
    evolved: float | None

    @property
    def surely_better(self) -> bool:
        """Whether the whole confidence interval is an improvement."""
        return self.mean > 0 if self.low is None else self.low > 0

    @property
    def surely_worse(self) -> bool:
        """Whether the whole confidence interval is a deterioration."""
        return self.mean < 0 if self.high is None else self.high < 0


@dataclass(frozen=True)
class WinnerEvaluation:
    """Result of evaluating the winner under one condition, such as a request rate.

    ``unserved`` contains the numbers of unserved requests with the engine's scheduler and with the
    winner. ``why`` is the reason if the winner could not be run.
    """

    condition: EvaluationCondition
    gains: tuple[Improvement, ...]
    unserved: tuple[float, float] = (0.0, 0.0)
    why: str = ""

    @property
    def holds(self) -> bool:
        """Whether the winner is better than the engine's scheduler.

        At least one goal must improve, or more requests must be served. No goal may get worse, and
        the number of served requests must not decrease.
        """
        before, after = self.unserved
        better = after < before or any(gain.surely_better for gain in self.gains)
        worse = after > before or any(gain.surely_worse for gain in self.gains)
        return not self.why and better and not worse


@dataclass(frozen=True)
class RequestClassCost:
    """Effect of the winner on the ``count`` requests of one class.

    ``before_s`` and ``after_s`` are the mean E2E latencies (s) of requests that both schedulers
    serve. ``slower`` and ``faster`` are the numbers of requests that take more or less time.
    ``lost`` and ``saved`` are the numbers of requests that only the engine's scheduler or only the
    winner serves.
    """

    kind: str
    count: int
    before_s: float | None
    after_s: float | None
    slower: int
    faster: int
    lost: int
    saved: int


def evaluate_winner(
    winner: Candidate,
    stands: Sequence[EvaluationCondition],
    goals: Sequence[FigureGoal],
    limits: Mapping[str, float],
    runner: JobRunner,
) -> tuple[list[WinnerEvaluation], list[RequestClassCost]]:
    """Return the evaluations of the winner on held-out trials, and its effect on classes of
    requests.
    """
    found: list[WinnerEvaluation] = []
    costs: list[RequestClassCost] = []
    for stand in stands:
        tournament = Tournament(stand.trials, goals, limits, runner, endings=True)
        tournament.start()
        (standing,) = tournament.add([winner], thorough=True)
        if standing.why:
            found.append(WinnerEvaluation(stand, (), why=standing.why))
            continue
        shipped = tournament.standings[SHIPPED.key].values
        losses = zip(*standing.losses, strict=True)
        gains = tuple(
            _gain(goal, of_goal, shipped, standing.values)
            for goal, of_goal in zip(goals, losses, strict=True)
        )
        unserved = tuple(
            fsum(v["unserved"] or 0 for v in some) for some in (shipped, standing.values)
        )
        found.append(WinnerEvaluation(stand, gains, (unserved[0], unserved[1])))
        costs = costs or _costs(tournament, winner)
    return found, costs


def _gain(
    goal: FigureGoal,
    losses: Sequence[float],
    shipped: Sequence[Mapping[str, float | None]],
    won: Sequence[Mapping[str, float | None]],
) -> Improvement:
    name = goal.figure
    gains = [-loss for loss in losses]
    low, high = compute_mean_interval(gains)
    return Improvement(goal, mean(gains), low, high, _mean(shipped, name), _mean(won, name))


def compute_mean_interval(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the 95 % confidence interval of the mean by Student's t, or None and None for one
    value.
    """
    if len(values) < 2:
        return None, None
    from scipy.special import stdtrit

    wide = float(stdtrit(len(values) - 1, 0.5 + CONFIDENCE / 2))
    off = wide * stdev(values) / sqrt(len(values))
    return mean(values) - off, mean(values) + off


def _mean(values: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    """Return the mean of a metric over trials, or None if a trial does not have it."""
    known = [value for one in values if (value := one[name]) is not None]
    return mean(known) if known and len(known) == len(values) else None


def _costs(tournament: Tournament, winner: Candidate) -> list[RequestClassCost]:
    """Return the effect on the requests of all trials, by class of prompt length."""
    rows: list[tuple[int, Any, Any]] = []
    shipped, won = tournament.summaries([SHIPPED, winner], tournament.trials)
    for trial, before, after in zip(tournament.trials, shipped, won, strict=True):
        assert isinstance(before, dict)
        assert isinstance(after, dict)
        sent = build_clients(trial.scenario.workload, trial.scenario.timeout).requests
        lengths = {request.id: request.prompt_tokens for request in sent}
        ours = {i: seconds for i, _, seconds in after["endings"]}
        rows += [(lengths[i], seconds, ours.get(i)) for i, _, seconds in before["endings"]]
    ordered = sorted(length for length, _, _ in rows)
    if ordered[0] == ordered[-1]:
        return [_cost("all", [row[1:] for row in rows])]
    cuts = [
        ordered[len(ordered) * part // len(PROMPT_LENGTH_CLASSES)]
        for part in range(1, len(PROMPT_LENGTH_CLASSES))
    ]
    kinds: dict[str, list[tuple[Any, Any]]] = {}
    for length, seconds, ours_s in rows:
        kinds.setdefault(PROMPT_LENGTH_CLASSES[sum(length >= cut for cut in cuts)], []).append(
            (seconds, ours_s)
        )
    named = dict(zip(PROMPT_LENGTH_CLASSES, ("below", "from", "from"), strict=True))
    ends = (cuts[0], cuts[0], cuts[-1])
    return [
        _cost(f"{kind} prompts ({named[kind]} {end:,} tokens)", kinds[kind])
        for kind, end in zip(PROMPT_LENGTH_CLASSES, ends, strict=True)
        if kind in kinds
    ]


def _cost(kind: str, pairs: Sequence[tuple[float | None, float | None]]) -> RequestClassCost:
    both = [(a, b) for a, b in pairs if a is not None and b is not None]
    return RequestClassCost(
        kind,
        len(pairs),
        mean(a for a, _ in both) if both else None,
        mean(b for _, b in both) if both else None,
        slower=sum(b > a * (1 + MIN_TIME_CHANGE) for a, b in both),
        faster=sum(b < a * (1 - MIN_TIME_CHANGE) for a, b in both),
        lost=sum(a is not None and b is None for a, b in pairs),
        saved=sum(a is None and b is not None for a, b in pairs),
    )
