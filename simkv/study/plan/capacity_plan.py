"""Make a capacity plan: find the answer, its uncertainty, and the objectives that determine it.

Example:

    request = PlanRequest(smallest="fleet.replicas=1..20", objectives=["starved<=0"])
    with open_pooled_runner(None) as runner:
        plan = make_plan(prepare(Path("scenario.yaml"), request)[0], runner)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simkv.scenario.fleet_section import ReplicaGroup
from simkv.scenario.objectives import Objective
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_costs import list_replica_costs
from simkv.study.job_runner import JobRunner, ProgressCallback
from simkv.study.plan.candidate_results import CandidateResults, PlanQuestion, answer_questions
from simkv.study.plan.candidate_search import find_edge, find_nonmonotone_candidates
from simkv.study.plan.plan_candidates import Number, PlanCondition
from simkv.study.plan.plan_confidence import AnswerRange, find_answer_range
from simkv.study.plan.plan_cost import PlanCost, compute_cost
from simkv.study.plan.plan_preparation import PreparedPlan
from simkv.study.plan.rate_cliff import RateResult, cliff


@dataclass(frozen=True)
class ObjectiveStatus:
    """An objective, evaluated for the answer of a plan.

    ``value`` is the worst value of the metric. ``slack`` is the distance from the limit, as a
    fraction of the limit. ``value_before`` and ``slack_before`` are the same numbers for the
    candidate before the answer. ``by_failure`` is true if this candidate fails the objective only
    in runs with a replica failure.
    """

    objective: Objective
    value: float | None
    slack: float
    value_before: float | None
    slack_before: float | None
    by_failure: bool = False

    @property
    def binds(self) -> bool:
        """Whether the candidate before the answer fails this objective."""
        return self.slack_before is not None and self.slack_before < 0


@dataclass(frozen=True)
class CapacityPlan:
    """Result of a plan. Answers are indices of candidates.

    ``answer`` is the first candidate that meets all objectives, and ``answers`` contains the
    answers for the individual seeds. ``by_error`` is the range of the answers for faster, unchanged
    and slower steps. ``failing`` contains candidates that fail although an earlier candidate meets
    the objectives. ``isolated_answers`` contains candidates that meet the objectives although a
    later candidate is in ``failing``. ``held_back`` contains the results for the held-out scenario.
    """

    prepared: PreparedPlan
    results: CandidateResults
    answer: int | None
    answers: tuple[int | None, ...]
    by_error: AnswerRange | None
    isolated_answers: tuple[int, ...]
    failing: tuple[int, ...]
    objectives: tuple[ObjectiveStatus, ...]
    cost: PlanCost | None
    points: tuple[RateResult, ...]
    held_back: tuple[bool, int | None, CandidateResults] | None

    def value(self, candidate: int | None) -> Number | None:
        """Return the value of the planned setting for the candidate with this index."""
        return None if candidate is None else self.prepared.case.candidates[candidate]

    @property
    def gpus(self) -> int:
        """Number of GPUs of the answer, or 0 without an answer."""
        if self.answer is None:
            return 0
        scenario = self.prepared.case.scenario(self.answer)
        return count_gpus(scenario, self.prepared.request.gpus_per_replica)

    @property
    def by_seed(self) -> AnswerRange:
        """Range of the answers for the individual seeds."""
        return find_answer_range(self.answers)

    @property
    def binding(self) -> list[ObjectiveStatus]:
        """Objectives that the candidate before the answer fails, the most violated first."""
        found = [held for held in self.objectives if held.binds]
        return sorted(found, key=lambda held: (held.slack_before or 0.0, str(held.objective)))


def make_plan(
    prepared: PreparedPlan, runner: JobRunner, advance: ProgressCallback | None = None
) -> CapacityPlan:
    """Make a plan. Stored runs are not repeated.

    ``advance`` is called with the number of finished runs and the total. Raises RunsFailed if a run
    fails.
    """
    board = CandidateResults(prepared.case)

    def settled(questions: Sequence[PlanQuestion]) -> None:
        answer_questions(
            questions, runner, prepared.request.neighbours, prepared.request.exhaustive, advance
        )

    # For --smallest, start with the cheapest candidate and continue upwards in growing strides.
    first = 0 if prepared.request.smallest else None
    nominal = PlanQuestion(board, prepared.nominal, first)
    single = [
        PlanQuestion(board, prepared.seed_conditions(repeat), first)
        for repeat in range(prepared.repeats)
    ]
    settled([nominal, *single])
    known = nominal.known
    answer = find_edge(known, prepared.request.neighbours)
    last = len(prepared.case.candidates) - 1
    hint = last if answer is None else answer
    sides = {
        side: PlanQuestion(board, prepared.side_conditions(side), hint)
        for side in prepared.error.factors
    }
    elsewhere = prepared.held_back and PlanQuestion(
        CandidateResults(prepared.held_back), prepared.nominal, hint
    )
    settled([*sides.values(), *([elsewhere] if elsewhere else [])])
    by_error = None
    if sides:
        faster, slower = (
            find_edge(sides[side].known, prepared.request.neighbours)
            for side in ("faster", "slower")
        )
        by_error = find_answer_range([faster, answer, slower])
    points: list[RateResult] = []
    if prepared.request.cliff is not False:
        shown = answer if answer is not None else last
        conditions = [
            PlanCondition(side, False, repeat)
            for side in (None, *prepared.error.factors)
            for repeat in range(prepared.repeats)
        ]
        points = cliff(prepared.case, shown, conditions, runner, advance)
    held_back = None
    if elsewhere:
        there = elsewhere.known
        verdict = False if answer is None else elsewhere.results.verdict(answer, prepared.nominal)
        held_back = (
            bool(verdict),
            find_edge(there, prepared.request.neighbours),
            elsewhere.results,
        )
    worse = find_nonmonotone_candidates(known)
    return CapacityPlan(
        prepared,
        board,
        answer,
        tuple(find_edge(question.known, prepared.request.neighbours) for question in single),
        by_error,
        tuple(i for i in sorted(known) if known[i] and any(j > i for j in worse)),
        tuple(worse),
        tuple(_held(objective, board, answer, prepared) for objective in board.case.objectives),
        _cost(prepared, board, answer),
        tuple(points),
        held_back,
    )


def _held(
    objective: Objective, board: CandidateResults, answer: int | None, prepared: PreparedPlan
) -> ObjectiveStatus:
    """Return the status of an objective for the answer, or for the last candidate without an
    answer.
    """
    last = len(prepared.case.candidates) - 1
    here = last if answer is None else answer
    before = last if answer is None else answer - 1
    value = _worst(objective, board, here, prepared.nominal)
    slack = objective.slack({objective.figure: value})
    if before < 0:
        return ObjectiveStatus(objective, value, slack, None, None)
    earlier = _worst(objective, board, before, prepared.nominal)
    calm = _worst(objective, board, before, [c for c in prepared.nominal if not c.failing])
    slack_before = objective.slack({objective.figure: earlier})
    by_failure = slack_before < 0 <= objective.slack({objective.figure: calm})
    return ObjectiveStatus(objective, value, slack, earlier, slack_before, by_failure)


def _worst(
    objective: Objective,
    board: CandidateResults,
    candidate: int,
    conditions: Sequence[PlanCondition],
) -> float | None:
    """Return the worst value of an objective's metric over the runs of a candidate."""
    found: list[Mapping[str, float | None]] = [
        board.values[candidate, one] for one in conditions if (candidate, one) in board.values
    ]
    return objective.worst(values.get(objective.figure) for values in found)


def _cost(prepared: PreparedPlan, board: CandidateResults, answer: int | None) -> PlanCost | None:
    """Return the cost of the answer with the first seed, or None without an answer or a price."""
    if prepared.price is None or answer is None:
        return None
    summary = board.summaries[answer, PlanCondition()]
    gpus = count_gpus(prepared.case.scenario(answer), prepared.request.gpus_per_replica)
    return compute_cost(
        prepared.gpu,
        prepared.price,
        gpus,
        summary["makespan_s"],
        summary["total_input_tokens"],
        summary["total_output_tokens"],
    )


def count_gpus(scenario: Scenario, per_replica: int | None) -> int:
    """Return the number of GPUs of all replicas.

    ``per_replica`` is the number of GPUs of one replica. The default is taken from the replica's
    hardware section.
    """
    groups = scenario.fleet.groups if scenario.fleet else [ReplicaGroup()]
    return sum(
        group.count * (per_replica or costs.gpus)
        for group, (_, costs) in zip(groups, list_replica_costs(scenario), strict=True)
    )
