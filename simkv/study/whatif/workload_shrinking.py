"""Shrink a workload while it still shows a verdict: delta debugging of a scenario.

First, requests are removed in ever smaller chunks until none can be removed (A. Zeller and R.
Hildebrandt, IEEE TSE 28, 2002). Then the rest is simplified: a smaller engine, shorter prompts and
outputs, rounder arrivals. Both steps repeat until nothing changes.

The simpler scenario must not show the verdict for a different reason. Therefore the verdict must
still affect one of the same requests, and must not appear for a request in isolation. Engine
settings other than sizes are not changed. A size is reduced only if the verdict disappears with a
large size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import tee
from typing import Any

from simkv.core.errors import InputError
from simkv.scenario.run_fields import RUN_FIELDS, find_differences
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.study.field_changes import with_knobs
from simkv.study.simulation_job import SimulationJob
from simkv.study.whatif.outcome_predicate import RunCondition, VerdictCondition
from simkv.study.whatif.trial_evaluation import Evaluator, RunFigures, TooManyRuns
from simkv.study.whatif.workload_rows import (
    NOTHING_SHARED,
    WorkloadDraft,
    change_row,
    halve_fields,
    list_requests,
    round_arrivals,
    set_fields,
)
from simkv.workload.listed_requests import ListedRequest

#: Factors on a size for the test with a large size; the first factor that the engine allows is
#: used.
KNOB_FACTORS = (256, 16, 4, 2)
#: Maximum number of rows for steps that treat each row separately.
ONE_BY_ONE = 100


@dataclass(frozen=True)
class ShrunkScenario:
    """A shrunk scenario, and the ``original``.

    ``scenario`` has fewer and simpler requests, and ``numbers`` contains their original ids.
    ``count_before_simplifying`` is the number of requests before the engine and the lengths were
    changed. ``knobs`` contains the changed settings (name, before, after). ``served_in_isolation``
    is true if no single request shows the verdict in isolation. ``minimal`` is true if every
    request is necessary for the verdict.
    """

    original: Scenario
    scenario: Scenario
    numbers: tuple[int, ...]
    before: RunFigures
    after: RunFigures
    count_before_simplifying: int
    knobs: tuple[tuple[str, Any, Any], ...]
    served_in_isolation: bool
    minimal: bool
    runs: int


def shrink(
    scenario: Scenario,
    wanted: RunCondition,
    evaluator: Evaluator,
    *,
    knobs: bool = True,
    tell: Callable[[str], None] = lambda _: None,
) -> ShrunkScenario:
    """Return the smallest scenario found that still shows the verdict ``wanted``.

    With ``knobs``, sizes of the engine are also reduced. ``tell`` receives progress lines. Raises
    InputError if the scenario does not show ``wanted``.
    """
    rows = list_requests(scenario, evaluator.folder)
    draft = WorkloadDraft(scenario, tuple(rows), tuple(rows.values()))
    before = evaluator.evaluate(evaluator.job(draft.listed_scenario))
    if not wanted.is_met(before):
        raise InputError(
            f"{scenario.name} does not meet the condition {wanted.text!r}; its result is "
            f"{wanted.describe(before)}"
        )
    # from now on, require the verdict that was actually found
    if isinstance(wanted, VerdictCondition):
        wanted = replace(wanted, words=(before.verdict,))
    search = _Search(draft, wanted, evaluator, tell, _victims(wanted, draft, before))
    minimal = True
    try:
        search.remove_requests()
        search.minimal_count = len(search.draft.rows)
        search.guarded = search.served_in_isolation(search.draft)
        search.simplify(knobs)
        search.restore_sizes(scenario)
    except TooManyRuns:
        minimal = False
    small = search.draft
    return ShrunkScenario(
        original=scenario,
        scenario=small.listed_scenario,
        numbers=small.numbers,
        before=before,
        after=search.figures,
        count_before_simplifying=search.minimal_count or len(small.rows),
        knobs=_knob_changes(scenario, small.scenario),
        served_in_isolation=search.guarded,
        minimal=minimal,
        runs=evaluator.runs,
    )


def _victims(wanted: RunCondition, draft: WorkloadDraft, figures: RunFigures) -> frozenset[int]:
    """Return the original numbers of the requests that the verdict affects."""
    if not isinstance(wanted, VerdictCondition):
        return frozenset()
    endings = zip(draft.numbers, figures.endings, strict=True)
    return frozenset(number for number, ending in endings if ending.outcome == wanted.outcome)


def _knob_changes(before: Scenario, after: Scenario) -> tuple[tuple[str, Any, Any], ...]:
    """Return the changed engine settings and the changed other fields of the scenario."""
    found = find_differences(before, after, [name for name in RUN_FIELDS if name != "workload"])
    return tuple((one.field.removeprefix("engine."), one.before, one.after) for one in found)


@dataclass
class _Search:
    """The smallest scenario found so far (the draft), and the steps that reduce it."""

    draft: WorkloadDraft
    wanted: RunCondition
    evaluator: Evaluator
    report: Callable[[str], None]
    victims: frozenset[int]
    guarded: bool = False
    minimal_count: int = 0

    @property
    def figures(self) -> RunFigures:
        return self.tried(self.draft)

    def tried(self, draft: WorkloadDraft) -> RunFigures:
        return self.evaluator.evaluate(self.job(draft))

    def job(self, draft: WorkloadDraft) -> SimulationJob:
        return self.evaluator.job(draft.listed_scenario)

    def served_in_isolation(self, draft: WorkloadDraft) -> bool:
        """Return whether each request is served in isolation and does not show ``wanted``."""
        lone = {
            repr(row): row
            for row in (change_row(row, arrival=0.0, **NOTHING_SHARED) for row in draft.rows)
        }
        jobs = (self.job(WorkloadDraft(draft.scenario, (0,), (row,))) for row in lone.values())
        return all(
            found.verdict == "served" and not self.wanted.is_met(found)
            for found in self.evaluator.stream(jobs)
        )

    def remove_requests(self) -> None:
        """Remove requests until the verdict would disappear with any further removal.

        The verdict must still affect one of the same requests. If no such removal is left, removals
        that shift the verdict to other requests are tried.
        """
        size = len(self.draft.rows)
        while True:
            size = max(size // 2, 1)
            if self._sweep(size) or size > 1:
                continue
            index = self._first_that_shows(self._one_less(), same_victims=False)
            if index is None:
                return
            self.draft = self.draft.without(index, index + 1)
            self.victims = _victims(self.wanted, self.draft, self.figures)

    def _sweep(self, size: int) -> bool:
        """Try to remove every chunk of ``size`` requests, the last first. Return whether any was
        removed.
        """
        before = len(self.draft.rows)
        end = before
        while end > 0:
            draft, left = self.draft, len(self.draft.rows)
            self.report(f"{left} requests, removing {size} at a time")
            chunks = [(max(e - size, 0), e) for e in range(end, 0, -size)]
            chunks = [(start, e) for start, e in chunks if e - start < left]
            found = self._first_that_shows(draft.without(*chunk) for chunk in chunks)
            if found is None:
                break
            self.draft = draft.without(*chunks[found])
            end = chunks[found][0]
        return len(self.draft.rows) < before

    def _one_less(self) -> list[WorkloadDraft]:
        count = len(self.draft.rows)
        return [self.draft.without(i, i + 1) for i in range(count)] if count > 1 else []

    def _first_that_shows(
        self, drafts: Iterable[WorkloadDraft], *, same_victims: bool = True
    ) -> int | None:
        """Return the index of the first draft that shows ``wanted``, or None.

        With ``same_victims``, the verdict must still affect one of the same requests.
        """
        here, ahead = tee(drafts)
        runs = self.evaluator.stream(map(self.job, ahead))
        for index, (draft, figures) in enumerate(zip(here, runs, strict=True)):
            if self.wanted.is_met(figures) and (
                not same_victims or self._same_victims(draft, figures)
            ):
                return index
        return None

    def _same_victims(self, draft: WorkloadDraft, figures: RunFigures) -> bool:
        return not self.victims or bool(self.victims & _victims(self.wanted, draft, figures))

    def simplify(self, knobs: bool) -> None:
        """Simplify the engine and the requests in rounds until nothing changes."""
        while True:
            before = self.draft
            if knobs:
                self._unless_others(self._engine_steps)
                self.remove_requests()
            self._unless_others(self._row_steps)
            self.remove_requests()
            if self.draft == before:
                return

    def _unless_others(self, steps: Callable[[], Iterable[Callable[[], object]]]) -> None:
        """Apply all steps of simplification that do not allow the verdict to shift to other
        requests.

        The verdict can shift if it affects only other requests after the removal of one request.
        The check needs one run per request. Therefore all steps are checked together first, and one
        by one only if the check fails.
        """
        before = self.draft
        for step in steps():
            step()
        if not self._others_instead(before):
            return
        self.draft = before
        for step in steps():
            before = self.draft
            step()
            if self._others_instead(before):
                self.draft = before

    def _others_instead(self, before: WorkloadDraft) -> bool:
        """Return whether the verdict shifts to other requests when any one request is removed.

        The result is False without a check for an unchanged draft, or for more than ``ONE_BY_ONE``
        requests.
        """
        if self.draft == before or not self.victims or len(self.draft.rows) > ONE_BY_ONE:
            return False
        for draft in self._one_less():
            figures = self.tried(draft)
            if self.wanted.is_met(figures) and not self._same_victims(draft, figures):
                return True
        return False

    def restore_sizes(self, original: Scenario) -> None:
        """Restore the original sizes of the engine if the remaining requests still show the
        verdict.
        """
        sizes = find_engine_spec(original.engine).sizes
        former = [partial(self._try_size, name, getattr(original.engine, name)) for name in sizes]
        self._unless_others(lambda: former)
        self.remove_requests()

    def _try(self, draft: WorkloadDraft) -> bool:
        """Adopt ``draft`` if it shows the verdict ``wanted``. Return whether it was adopted.

        The requests must also be served in isolation, if this is required.
        """
        if draft == self.draft:
            return False
        self.report(f"{len(self.draft.rows)} requests, simplifying")
        figures = self.tried(draft)
        if not self.wanted.is_met(figures) or not self._same_victims(draft, figures):
            return False
        if self.guarded and not self.served_in_isolation(draft):
            return False
        self.draft = draft
        return True

    def _try_all(self, change: Callable[[ListedRequest], ListedRequest]) -> bool:
        return self._try(self.draft.with_rows(change))

    def _try_each(self, change: Callable[[ListedRequest], ListedRequest]) -> None:
        for index in range(len(self.draft.rows)):
            self._try(self.draft.with_rows(change, [index]))

    def _least(self, high: int, make: Callable[[int], WorkloadDraft | None], low: int = 1) -> None:
        """Find by bisection the smallest value from ``low`` to ``high`` whose draft can be
        adopted.
        """
        value = low
        while low < high:
            draft = make(value)
            if draft is not None and self._try(draft):
                high = value
            else:
                low = value + 1
            value = (low + high) // 2

    def _with_knobs(self, **values: Any) -> WorkloadDraft | None:
        try:
            return replace(self.draft, scenario=with_knobs(self.draft.scenario, **values))
        except InputError:
            return None

    def _with_size(self, knob: str, value: int) -> WorkloadDraft | None:
        """Return the draft with another size of the engine. A smaller cache may reduce the length
        limit.
        """
        draft = self._with_knobs(**{knob: value})
        engine = self.draft.scenario.engine
        spec = find_engine_spec(engine)
        if draft is None and knob == spec.memory and spec.longest:
            length = min((value - 1) * spec.block_size(engine), getattr(engine, spec.longest))
            draft = self._with_knobs(**{knob: value, spec.longest: length})
        return draft

    def _with_length(self, name: str, indexes: Collection[int], value: int) -> WorkloadDraft:
        return self.draft.with_rows(lambda row: change_row(row, **{name: value}), indexes)

    def _engine_steps(self) -> Iterator[Callable[[], object]]:
        """Yield the steps that simplify the engine."""
        for name, plain in (("engine_ready", 0.0), ("horizon", None), ("pipeline", None)):
            scenario = self.draft.scenario.model_copy(update={name: plain})
            yield partial(self._try, replace(self.draft, scenario=scenario))
        spec = find_engine_spec(self.draft.scenario.engine)
        for name in spec.sizes:
            size = getattr(self.draft.scenario.engine, name)
            if not self._needs_it_small(name, size):
                continue
            if name == spec.memory:
                yield partial(self._halve_with_memory, name)
                size = getattr(self.draft.scenario.engine, name)
            yield partial(self._least, size, partial(self._with_size, name))

    def _try_size(self, knob: str, value: int) -> bool:
        draft = self._with_size(knob, value)
        return draft is not None and self._try(draft)

    def _needs_it_small(self, knob: str, size: int) -> bool:
        """Return whether the verdict disappears with a large size; False without a large size."""
        larger = (self._with_size(knob, size * factor) for factor in KNOB_FACTORS)
        draft = next((draft for draft in larger if draft is not None), None)
        return draft is not None and self._first_that_shows([draft]) is None

    def _halve_with_memory(self, memory: str) -> None:
        """Halve lengths and the KV cache together as long as the verdict remains."""
        both = ("prompt_tokens", "output_tokens")
        for names in (both, both[:1], both[1:]):
            while True:
                size = getattr(self.draft.scenario.engine, memory)
                smaller = self._with_size(memory, -(-size // 2))
                if smaller is None or not self._try(smaller.with_rows(halve_fields(names))):
                    break

    def _row_steps(self) -> Iterator[Callable[[], object]]:
        """Yield the steps that simplify the requests, first all together, then one by one."""
        one_by_one = len(self.draft.rows) <= ONE_BY_ONE
        for name in ("prompt_tokens", "output_tokens"):
            groups: dict[int, list[int]] = {}
            for index, row in enumerate(self.draft.rows):
                groups.setdefault(getattr(row, name), []).append(index)
            for length, indexes in sorted(groups.items(), reverse=True):
                yield partial(self._least, length, partial(self._with_length, name, indexes))
            if one_by_one:
                yield partial(self._shorter_each, name)
        first = min(row.arrival for row in self.draft.rows)
        yield partial(self._try_all, lambda row: change_row(row, arrival=row.arrival - first))
        plainer = [round_arrivals(digits) for digits in (None, 0, 1, 2, 3)]
        for values in (
            NOTHING_SHARED,
            {"has_images": False},
            {"ignore_eos": False},
            {"priority": 0},
            {"lora": None},
            {"acceptance": None, "acceptance_seed": None},
            {"routing_key": None},
            {"client": None},
            {"logprobs_from": None},
            {"max_tokens": None},
        ):
            plainer.append(set_fields(values))
        for change in plainer:
            yield partial(self._try_all, change)
            if one_by_one:
                yield partial(self._try_each, change)

    def _shorter_each(self, name: str) -> None:
        for index, row in enumerate(self.draft.rows):
            self._shorter_alone(name, index, getattr(row, name))

    def _shorter_alone(self, name: str, index: int, length: int) -> None:
        """Shorten the field ``name`` of one request as far as possible, by at least a quarter."""
        make = partial(self._with_length, name, [index])
        quarter_less = length * 3 // 4
        if not self._try(make(1)) and 1 < quarter_less < length and self._try(make(quarter_less)):
            self._least(quarter_less, make, low=2)
