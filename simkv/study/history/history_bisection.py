"""Bisect a history of commits or releases for the change of a scenario's result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from simkv.core.errors import InputError
from simkv.study.history.change_search import (
    HistoryChange,
    HistorySearch,
    SkippedRevision,
    find_changes,
)
from simkv.study.history.criterion import Criterion, choose_criterion
from simkv.study.history.git_history import Commit, list_commits, merge_base
from simkv.study.history.revision_run import DIED, RevisionResult

Revision = TypeVar("Revision")
#: Function that runs the scenario on a revision.
RunRevision = Callable[[Revision], RevisionResult | SkippedRevision]


@dataclass(frozen=True)
class Bisection(Generic[Revision]):
    """Result of a bisection.

    ``revisions`` are in order of history. ``good`` and ``bad`` are the results of the first and the
    last revision. ``criterion`` is the property in which they differ, or None.
    """

    revisions: Sequence[Revision]
    good: RevisionResult
    bad: RevisionResult
    criterion: Criterion | None
    search: HistorySearch[RevisionResult]

    @property
    def changes(self) -> tuple[HistoryChange[RevisionResult], ...]:
        return self.search.changes


def bisect_revisions(
    revisions: Sequence[Revision],
    run: RunRevision[Revision],
    when: str | None,
    tolerance: float,
    samples: int = 2,
) -> Bisection[Revision]:
    """Find where the result changes between the first revision (GOOD) and the last (BAD).

    ``when`` and ``tolerance`` are arguments of ``choose_criterion``, and ``samples`` is an argument
    of ``find_changes``. Raises InputError if the first or the last revision cannot be run.
    """
    ends = _Ends(revisions[0], revisions[-1], run, when, tolerance)
    return ends.search(revisions, run, samples)


def bisect_commits(
    repository: Path,
    good: Commit,
    bad: Commit,
    run: RunRevision[Commit],
    when: str | None,
    tolerance: float,
    samples: int = 2,
) -> Bisection[Commit]:
    """Find the commit between ``good`` and ``bad`` that changes the result.

    Either commit may be older. If they are on different branches, only the branch on which the
    result changes is searched. It starts at the common ancestor.
    """
    ends = _Ends(good, bad, run, when, tolerance)
    base = merge_base(repository, good, bad)
    new = bad
    if ends.criterion is None or base == bad:
        new = good if base == bad else bad
    elif base != good:
        found = run(base)
        if isinstance(found, SkippedRevision):
            raise InputError(
                f"{good.short} and {bad.short} are on different branches, and their common "
                f"ancestor {base.short} cannot be run: {found.reason}"
            )
        state = ends.criterion.state
        new = bad if state(found) == state(ends.good) else good
    return ends.search(list_commits(repository, base, new), run, samples)


class _Ends(Generic[Revision]):
    """Results of both ends of a range, and the criterion in which they differ."""

    def __init__(
        self,
        good: Revision,
        bad: Revision,
        run: RunRevision[Revision],
        when: str | None,
        tolerance: float,
    ) -> None:
        self.good, self.bad = _result("GOOD", run(good)), _result("BAD", run(bad))
        self.criterion = choose_criterion(self.good, self.bad, when, tolerance)

    def search(
        self, revisions: Sequence[Revision], run: RunRevision[Revision], samples: int
    ) -> Bisection[Revision]:
        state = self.criterion.state if self.criterion else lambda _: "same"
        dead = {self.good.figures.verdict, self.bad.figures.verdict}

        def at(index: int) -> RevisionResult | SkippedRevision:
            found = run(revisions[index])
            if isinstance(found, SkippedRevision) or found.figures.verdict != DIED or DIED in dead:
                return found
            # the range contains another change than the one between its ends
            return SkippedRevision(f"the engine died: {found.figures.detail}")

        found = find_changes(len(revisions), at, state, samples)
        return Bisection(revisions, self.good, self.bad, self.criterion, found)


def _result(name: str, found: RevisionResult | SkippedRevision) -> RevisionResult:
    if isinstance(found, SkippedRevision):
        raise InputError(f"{name} cannot be run: {found.reason}")
    return found
