"""Results of candidates (values of the planned setting), and the runs that are still needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simkv.scenario.objectives import compute_objective_figures
from simkv.study.job_runner import JobRunner, ProgressCallback
from simkv.study.plan.candidate_search import next_probes
from simkv.study.plan.plan_candidates import PlanCandidates, PlanCondition
from simkv.study.simulation_job import RunsFailed, Summary

FigureValues = dict[str, float | None]


class CandidateResults:
    """Results of the runs of candidates, by candidate and condition (seed, failure, step-time
    error).
    """

    def __init__(self, case: PlanCandidates) -> None:
        self.case = case
        self.summaries: dict[tuple[int, PlanCondition], Summary] = {}
        self.values: dict[tuple[int, PlanCondition], FigureValues] = {}

    def holds(self, candidate: int, condition: PlanCondition) -> bool | None:
        """Return whether the candidate meets all objectives in a run, or None without the run."""
        values = self.values.get((candidate, condition))
        if values is None:
            return None
        return all(objective.holds(values) for objective in self.case.objectives)

    def verdict(self, candidate: int, conditions: Sequence[PlanCondition]) -> bool | None:
        """Return whether the candidate meets all objectives in all runs, or None if runs are
        missing.

        The result is False as soon as any run fails an objective.
        """
        found = [self.holds(candidate, condition) for condition in conditions]
        return False if False in found else None if None in found else True

    def missing(self, candidate: int, conditions: Sequence[PlanCondition]) -> list[PlanCondition]:
        """Return the conditions (seed, failure, step-time error) of the next runs of the candidate.

        A run with a replica failure requires an earlier run without a failure.
        """
        if self.verdict(candidate, conditions) is not None:
            return []
        wanted = dict.fromkeys(
            condition
            if not condition.failing or (candidate, condition.without_failure) in self.values
            else condition.without_failure
            for condition in conditions
        )
        return [one for one in wanted if (candidate, one) not in self.values]

    def add(self, candidate: int, condition: PlanCondition, summary: Summary) -> None:
        """Store the result of a run."""
        self.summaries[candidate, condition] = summary
        self.values[candidate, condition] = compute_objective_figures(summary)


@dataclass(frozen=True)
class PlanQuestion:
    """A question to answer by runs: the first candidate that meets the objectives.

    The candidate must meet the objectives under all ``conditions``, such as seeds. The search
    starts at candidate ``hint``, if given.
    """

    results: CandidateResults
    conditions: tuple[PlanCondition, ...]
    hint: int | None = None

    @property
    def known(self) -> dict[int, bool]:
        """Candidates with sufficient results, and whether they meet the objectives."""
        verdicts = {
            candidate: self.results.verdict(candidate, self.conditions)
            for candidate in range(len(self.results.case.candidates))
        }
        return {i: verdict for i, verdict in verdicts.items() if verdict is not None}

    def wanted(self, neighbours: int, exhaustive: bool) -> list[tuple[int, PlanCondition]]:
        """Return the candidates to run next, each with a condition, such as a seed.

        The list is empty if the question is answered.
        """
        known, count = self.known, len(self.results.case.candidates)
        if exhaustive:
            probes = tuple(i for i in range(count) if i not in known)
        else:
            probes = next_probes(known, count, neighbours, hint=self.hint)
        return [
            (probe, condition)
            for probe in probes
            for condition in self.results.missing(probe, self.conditions)
        ]


def answer_questions(
    questions: Sequence[PlanQuestion],
    runner: JobRunner,
    neighbours: int,
    exhaustive: bool = False,
    advance: ProgressCallback | None = None,
) -> None:
    """Run candidates until all questions are answered.

    ``advance`` is called with the number of finished runs and the total. Raises RunsFailed if a run
    fails.
    """
    while True:
        rounds = [(q.results, *one) for q in questions for one in q.wanted(neighbours, exhaustive)]
        wanted = list(dict.fromkeys(rounds))
        if not wanted:
            return
        run_candidates(wanted, runner, advance)


def run_candidates(
    wanted: Sequence[tuple[CandidateResults, int, PlanCondition]],
    runner: JobRunner,
    advance: ProgressCallback | None = None,
) -> None:
    """Run candidates under the given conditions, such as seeds, and store the results.

    Raises RunsFailed if a run fails.
    """
    jobs = {}
    for board, candidate, condition in wanted:
        calm = board.summaries.get((candidate, condition.without_failure))
        jobs[board, candidate, condition] = board.case.job(candidate, condition, calm)
    failed = runner.run(jobs.values(), advance)
    if failed:
        (board, candidate, _), job = next(one for one in jobs.items() if one[1].digest in failed)
        value = board.case.candidates[candidate]
        raise RunsFailed(
            f"{len(failed)} of {len(jobs)} runs failed, first with {board.case.knob}={value}: "
            f"{failed[job.digest]}"
        )
    for (board, candidate, condition), job in jobs.items():
        board.add(candidate, condition, runner.done[job.digest])
