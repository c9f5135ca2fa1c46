"""The smallest workload that still shows a verdict: delta debugging of a scenario.

First requests are taken away, in ever smaller chunks, until none can go (A. Zeller and
R. Hildebrandt, IEEE TSE 28, 2002, in sweeps). Then what is left is made plainer: a smaller engine,
shorter prompts and outputs, rounder arrivals. This may make more requests needless, so it all goes
round until nothing changes.

A plainer case must not show the verdict for another reason. So it has to befall one of the requests
that it befell before, and a request that is alone in the engine must not come to show it. Of the
engine's knobs only its sizes are made smaller, and only if the verdict is gone when they are large:
with another policy, or in a cache that was large enough before and is not now, the same verdict
would have another cause.
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
from simkv.study.whatif.workload_draft import (
    WorkloadDraft,
    halve_fields,
    round_arrivals,
    set_fields,
)
from simkv.study.whatif.workload_rows import NOTHING_SHARED, change_row, list_requests
from simkv.workload.listed_requests import ListedRequest

#: So many times as large is large; the first that the engine allows.
KNOB_FACTORS = (256, 16, 4, 2)
#: Rows are looked at one by one only if they are not more than this.
ONE_BY_ONE = 100


@dataclass(frozen=True)
class ShrunkScenario:
    """What is left of a scenario, and what was there before.

    ``scenario`` is ``original`` with a listed workload; ``numbers`` are the ids that its requests
    had. ``enough_as_it_was`` of them were enough when engine and lengths were as before; ``knobs``
    (name, before, after) were changed after that. ``sound_alone``: each request, if it came alone,
    would be served and not show it, before and after. ``minimal``: without any single request the
    verdict is gone; false if the limit on runs came first.
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
    """The smallest scenario that can be found in which ``wanted`` is still shown.

    With ``knobs`` the engine is made smaller too, where a large one would not show it. Costs,
    timeouts and the variant stay. ``tell`` gets a line of progress.
    Raises InputError if the scenario does not show it.
    """
    rows = list_requests(scenario, evaluator.folder)
    draft = WorkloadDraft(scenario, tuple(rows), tuple(rows.values()))
    before = evaluator.evaluate(evaluator.job(draft.listed_scenario))
    if not wanted.is_met(before):
        raise InputError(
            f"{scenario.name} does not show {wanted.text!r}: it is {wanted.told(before)}"
        )
    if isinstance(wanted, VerdictCondition):  # one of several words: the one that it is
        wanted = replace(wanted, words=(before.verdict,))
    search = _Search(draft, wanted, evaluator, tell, _victims(wanted, draft, before))
    minimal = True
    try:
        search.fewest_requests()
        search.enough = len(search.draft.rows)
        search.guarded = search.served_in_isolation(search.draft)
        search.plainest(knobs)
        search.knobs_as_they_were(scenario)
    except TooManyRuns:
        minimal = False
    small = search.draft
    return ShrunkScenario(
        original=scenario,
        scenario=small.listed_scenario,
        numbers=small.numbers,
        before=before,
        after=search.figures,
        count_before_simplifying=search.enough or len(small.rows),
        knobs=_knob_changes(scenario, small.scenario),
        served_in_isolation=search.guarded,
        minimal=minimal,
        runs=evaluator.runs,
    )


def _victims(wanted: RunCondition, draft: WorkloadDraft, figures: RunFigures) -> frozenset[int]:
    """The requests that a verdict is about, by the numbers that they had at first."""
    if not isinstance(wanted, VerdictCondition):
        return frozenset()
    endings = zip(draft.numbers, figures.endings, strict=True)
    return frozenset(number for number, ending in endings if ending.outcome == wanted.outcome)


def _knob_changes(before: Scenario, after: Scenario) -> tuple[tuple[str, Any, Any], ...]:
    """Knobs of the engine, and fields of the scenario beside it, that are not the same."""
    found = find_differences(before, after, [name for name in RUN_FIELDS if name != "workload"])
    return tuple((one.field.removeprefix("engine."), one.before, one.after) for one in found)


@dataclass
class _Search:
    """The best draft so far, and the ways to make it smaller."""

    draft: WorkloadDraft
    wanted: RunCondition
    evaluator: Evaluator
    tell: Callable[[str], None]
    victims: frozenset[int]
    guarded: bool = False
    enough: int = 0

    @property
    def figures(self) -> RunFigures:
        return self.tried(self.draft)

    def tried(self, draft: WorkloadDraft) -> RunFigures:
        return self.evaluator.evaluate(self.job(draft))

    def job(self, draft: WorkloadDraft) -> SimulationJob:
        return self.evaluator.job(draft.listed_scenario)

    def served_in_isolation(self, draft: WorkloadDraft) -> bool:
        """Whether each request, if it came alone, would be served and not show what is wanted."""
        lone = {
            repr(row): row
            for row in (change_row(row, arrival=0.0, **NOTHING_SHARED) for row in draft.rows)
        }
        jobs = (self.job(WorkloadDraft(draft.scenario, (0,), (row,))) for row in lone.values())
        return all(
            found.verdict == "served" and not self.wanted.is_met(found)
            for found in self.evaluator.stream(jobs)
        )

    def fewest_requests(self) -> None:
        """Take requests away until the verdict is gone without any single one of them.

        What goes first are those without which it befalls the same requests.
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
        """Try to take away every chunk of ``size`` requests, last first; whether any went."""
        before = len(self.draft.rows)
        end = before
        while end > 0:
            draft, left = self.draft, len(self.draft.rows)
            self.tell(f"{left} requests, taking away {size}")
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
        """Index of the first draft that shows what is wanted, or None.

        With ``same_victims`` it has to befall a request that it befell before.
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

    def plainest(self, knobs: bool) -> None:
        """Make everything plainer, round by round, until nothing changes."""
        while True:
            before = self.draft
            if knobs:
                self._unless_others(self._engine_steps)
                self.fewest_requests()
            self._unless_others(self._row_steps)
            self.fewest_requests()
            if self.draft == before:
                return

    def _unless_others(self, steps: Callable[[], Iterable[Callable[[], object]]]) -> None:
        """Take all steps but those after which, with one request less, it would befall others.

        That costs a run for every request, so it is asked once, after all steps, and step by step
        only where it is so.
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
        """Whether, since ``before``, with one request less it befalls others only."""
        if self.draft == before or not self.victims or len(self.draft.rows) > ONE_BY_ONE:
            return False
        for draft in self._one_less():
            figures = self.tried(draft)
            if self.wanted.is_met(figures) and not self._same_victims(draft, figures):
                return True
        return False

    def knobs_as_they_were(self, original: Scenario) -> None:
        """Give back the sizes that are not needed after all for what is left."""
        sizes = find_engine_spec(original.engine).sizes
        former = [partial(self._try_size, name, getattr(original.engine, name)) for name in sizes]
        self._unless_others(lambda: former)
        self.fewest_requests()

    def _try(self, draft: WorkloadDraft) -> bool:
        """Go on from ``draft`` if it shows what is wanted and each of its requests is servable."""
        if draft == self.draft:
            return False
        self.tell(f"{len(self.draft.rows)} requests, making them plainer")
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
        """Bisect for the smallest value whose draft will do; a small one if not monotone."""
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
        """With another size; a smaller cache takes the limit on a request's length down too."""
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
        """What makes the engine plainer."""
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
        """Whether the verdict is gone when this is large; not if it cannot be."""
        larger = (self._with_size(knob, size * factor) for factor in KNOB_FACTORS)
        draft = next((draft for draft in larger if draft is not None), None)
        return draft is not None and self._first_that_shows([draft]) is None

    def _halve_with_memory(self, memory: str) -> None:
        """Half the lengths in half the memory, as long as that will do."""
        both = ("prompt_tokens", "output_tokens")
        for names in (both, both[:1], both[1:]):
            while True:
                size = getattr(self.draft.scenario.engine, memory)
                smaller = self._with_size(memory, -(-size // 2))
                if smaller is None or not self._try(smaller.with_rows(halve_fields(names))):
                    break

    def _row_steps(self) -> Iterator[Callable[[], object]]:
        """What makes the requests plainer: all together first, then row by row."""
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
        """One row; if it cannot lose a quarter it stays as it is."""
        make = partial(self._with_length, name, [index])
        quarter_less = length * 3 // 4
        if not self._try(make(1)) and 1 < quarter_less < length and self._try(make(quarter_less)):
            self._least(quarter_less, make, low=2)
