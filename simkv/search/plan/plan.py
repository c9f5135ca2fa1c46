"""A plan from beginning to end: which candidate is the answer, how sure that is, what binds it.

request = PlanRequest(smallest="fleet.replicas=1..20", objectives=["starved<=0"])
with bench_for(None) as bench:
    plan = make_plan(prepare(Path("scenario.yaml"), request)[0], bench)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simkv.scenario.costs import all_costs
from simkv.scenario.fleet import ReplicaGroup
from simkv.scenario.objectives import Objective
from simkv.scenario.scenario import Scenario
from simkv.search.bench import Advance, Bench
from simkv.search.plan.board import Board, Question, settle
from simkv.search.plan.case import Condition, Number
from simkv.search.plan.cliff import AtRate, cliff
from simkv.search.plan.prepare import Prepared
from simkv.search.plan.price import Cost, cost_of
from simkv.search.plan.search import edge, surprises
from simkv.search.plan.uncertain import Answers, spread


@dataclass(frozen=True)
class Standing:
    """How an objective stands at the answer: its worst ``value``, and the ``slack`` to its limit.

    ``slack`` is per limit; ``slack_before`` is that at the next candidate before the answer, which
    does not meet the objectives: where it is negative, the objective binds; if that is so with a
    replica failing only, ``by_failure``.
    """

    objective: Objective
    value: float | None
    slack: float
    value_before: float | None
    slack_before: float | None
    by_failure: bool = False

    @property
    def binds(self) -> bool:
        """Whether the candidate before fails this objective."""
        return self.slack_before is not None and self.slack_before < 0


@dataclass(frozen=True)
class Plan:
    """What came of it. Answers are places among the candidates; ``value`` tells what they are.

    ``answers`` are those of the single seeds, ``by_error`` those within the profile's error.
    ``islands`` meet the objectives although a later candidate does not. ``held_back`` is whether
    the answer holds on the other scenario, and the answer there.
    """

    prepared: Prepared
    board: Board
    answer: int | None
    answers: tuple[int | None, ...]
    by_error: Answers | None
    islands: tuple[int, ...]
    failing: tuple[int, ...]
    objectives: tuple[Standing, ...]
    cost: Cost | None
    points: tuple[AtRate, ...]
    held_back: tuple[bool, int | None, Board] | None

    def value(self, candidate: int | None) -> Number | None:
        """The value of the knob at a candidate's place."""
        return None if candidate is None else self.prepared.case.candidates[candidate]

    @property
    def gpus(self) -> int:
        """GPUs of the answer; 0 without one."""
        if self.answer is None:
            return 0
        scenario = self.prepared.case.scenario(self.answer)
        return gpus_of(scenario, self.prepared.asked.gpus_per_replica)

    @property
    def by_seed(self) -> Answers:
        """The least and the greatest answer of a seed."""
        return spread(self.answers)

    @property
    def binding(self) -> list[Standing]:
        """The objectives that the candidate before fails, first the one that it misses by most."""
        found = [held for held in self.objectives if held.binds]
        return sorted(found, key=lambda held: (held.slack_before or 0.0, str(held.objective)))


def make_plan(prepared: Prepared, bench: Bench, advance: Advance | None = None) -> Plan:
    """Find the answer, by running what is not done yet. Raises RunsFailed.

    ``advance`` is told of how many runs that are wanted now how many are done.
    """
    board = Board(prepared.case)

    def settled(questions: Sequence[Question]) -> None:
        settle(questions, bench, prepared.asked.neighbours, prepared.asked.exhaustive, advance)

    # the smallest: from the cheap end in growing strides, so that little that is too large is tried
    first = 0 if prepared.asked.smallest else None
    nominal = Question(board, prepared.nominal, first)
    single = [Question(board, prepared.of(repeat), first) for repeat in range(prepared.repeats)]
    settled([nominal, *single])
    known = nominal.known
    answer = edge(known, prepared.asked.neighbours)
    last = len(prepared.case.candidates) - 1
    hint = last if answer is None else answer
    sides = {side: Question(board, prepared.on(side), hint) for side in prepared.error.factors}
    elsewhere = prepared.held_back and Question(Board(prepared.held_back), prepared.nominal, hint)
    settled([*sides.values(), *([elsewhere] if elsewhere else [])])
    by_error = None
    if sides:
        cheaper, dearer = (
            edge(sides[side].known, prepared.asked.neighbours) for side in ("cheaper", "dearer")
        )
        by_error = spread([cheaper, answer, dearer])
    points: list[AtRate] = []
    if prepared.asked.cliff:
        shown = answer if answer is not None else last
        conditions = [
            Condition(side, False, repeat)
            for side in (None, *prepared.error.factors)
            for repeat in range(prepared.repeats)
        ]
        points = cliff(prepared.case, shown, conditions, bench, advance)
    held_back = None
    if elsewhere:
        there = elsewhere.known
        verdict = False if answer is None else elsewhere.board.verdict(answer, prepared.nominal)
        held_back = (bool(verdict), edge(there, prepared.asked.neighbours), elsewhere.board)
    worse = surprises(known)
    return Plan(
        prepared,
        board,
        answer,
        tuple(edge(question.known, prepared.asked.neighbours) for question in single),
        by_error,
        tuple(i for i in sorted(known) if known[i] and any(j > i for j in worse)),
        tuple(worse),
        tuple(_held(objective, board, answer, prepared) for objective in board.case.objectives),
        _cost(prepared, board, answer),
        tuple(points),
        held_back,
    )


def _held(objective: Objective, board: Board, answer: int | None, prepared: Prepared) -> Standing:
    """How an objective stands at the answer, or if there is none at the last candidate."""
    last = len(prepared.case.candidates) - 1
    here = last if answer is None else answer
    before = last if answer is None else answer - 1
    value = _worst(objective, board, here, prepared.nominal)
    slack = objective.slack({objective.figure: value})
    if before < 0:
        return Standing(objective, value, slack, None, None)
    earlier = _worst(objective, board, before, prepared.nominal)
    calm = _worst(objective, board, before, [c for c in prepared.nominal if not c.failing])
    slack_before = objective.slack({objective.figure: earlier})
    by_failure = slack_before < 0 <= objective.slack({objective.figure: calm})
    return Standing(objective, value, slack, earlier, slack_before, by_failure)


def _worst(
    objective: Objective, board: Board, candidate: int, conditions: Sequence[Condition]
) -> float | None:
    """The worst value of an objective's figure under those conditions that have been tried."""
    found: list[Mapping[str, float | None]] = [
        board.values[candidate, one] for one in conditions if (candidate, one) in board.values
    ]
    return objective.worst(values.get(objective.figure) for values in found)


def _cost(prepared: Prepared, board: Board, answer: int | None) -> Cost | None:
    """What the answer costs, by the first seed; None without an answer or a price."""
    if prepared.price is None or answer is None:
        return None
    summary = board.summaries[answer, Condition()]
    gpus = gpus_of(prepared.case.scenario(answer), prepared.asked.gpus_per_replica)
    return cost_of(
        prepared.gpu,
        prepared.price,
        gpus,
        summary["makespan_s"],
        summary["total_input_tokens"],
        summary["total_output_tokens"],
    )


def gpus_of(scenario: Scenario, per_replica: int | None) -> int:
    """GPUs of all replicas: ``per_replica``, or as many as the hardware of each says."""
    groups = scenario.fleet.groups if scenario.fleet else [ReplicaGroup()]
    return sum(
        group.count * (per_replica or costs.gpus)
        for group, (_, costs) in zip(groups, all_costs(scenario), strict=True)
    )
