"""Run scenarios by the hundred: a cache, and several processes where that pays.

figures = Evaluator(folder).evaluate(Case(scenario))
print(figures.verdict, figures["preemptions"])
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, is_dataclass
from functools import cached_property
from hashlib import sha256
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ValidationError

from simkv.core.errors import InputError, nearest
from simkv.core.figures import FIGURES, figure
from simkv.measure.metrics import e2e
from simkv.measure.simulate import run_scenario
from simkv.scenario.scenario import Scenario
from simkv.schedulers.registry import spec_of

#: Fields of a scenario that tell about it and have no part in the run.
ABOUT = ("name", "report", "summary", "provenance", "published", "expect")


class Ending(NamedTuple):
    """How one request ended: its outcome, and seconds from arrival to its last token if served."""

    id: int
    outcome: str
    e2e_s: float | None


@dataclass(frozen=True)
class Figures:
    """What came of one run: the verdict, why, the numbers of ``summary.json``, all endings by id.

    ``figures["e2e_ms.median"]`` is one number; the names are those of ``core.figures.FIGURES``.
    """

    verdict: str
    detail: str
    values: Mapping[str, float]
    endings: tuple[Ending, ...]

    def __getitem__(self, name: str) -> float:
        return self.values[name]

    @property
    def shown(self) -> str:
        """The verdict and whom it concerns, as in ``starved (24 of 40: requests 16, …)``."""
        return self.verdict if self.verdict == "served" else f"{self.verdict} ({self.detail})"


@dataclass(frozen=True)
class Case:
    """A scenario to run; ``rules`` are those to go by instead of the variant's (see EngineSpec)."""

    scenario: Scenario
    rules: Any = None

    @cached_property
    def key(self) -> str:
        """Equal if and only if the runs are the same."""
        fields = {**run_fields(self.scenario), "rules": self.rules and asdict(self.rules)}
        return sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def run_fields(scenario: Scenario) -> dict[str, Any]:
    """The fields of a scenario that decide its run, as plain data without defaults in models."""
    fields = {}
    for name in Scenario.model_fields:
        value = getattr(scenario, name)
        if isinstance(value, BaseModel):
            value = value.model_dump(mode="json", exclude_defaults=True)
        elif is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        if name not in ABOUT:
            fields[name] = value
    return fields


def with_knobs(scenario: Scenario, **knobs: Any) -> Scenario:
    """The scenario with some fields of its engine changed. Raises InputError if it refuses them."""
    return _with(scenario, "engine", {**asdict(scenario.engine), **knobs}, Path())


class NoSuchField(InputError):
    """A path names a field that a scenario does not have."""


def with_field(scenario: Scenario, path: str, value: Any, folder: Path) -> Scenario:
    """The scenario with the field at ``path``, as in ``workload.burst.num_prompts``, changed.

    Traces are looked for beside ``folder``.
    Raises NoSuchField if there is none, and InputError if the scenario refuses the value.
    """
    head, *rest = path.split(".")
    known = [name for name in Scenario.model_fields if name not in ABOUT]
    if head not in known:
        raise NoSuchField(f"there is no field {head!r}{nearest(head, known)}; {_one_of(known)}")
    if not rest:
        return _with(scenario, head, value, folder)
    present = getattr(scenario, head)
    known_here, fields = _plain(present), _plain(present, only_set=True)
    node = fields
    for depth, key in enumerate(rest):
        here = ".".join([head, *rest[:depth]])
        names = _names(known_here)
        if key not in names:
            what = _one_of(names) if names else "it has no fields"
            raise NoSuchField(f"{here} has no field {key!r}{nearest(key, names)}; {what}")
        place = int(key) if isinstance(node, list) else key
        known_here = known_here[place]
        if depth == len(rest) - 1:
            node[place] = value
        elif isinstance(node, dict):
            node = node.setdefault(place, {})
        else:
            node = node[place]
    return _with(scenario, head, fields, folder)


def _names(node: Any) -> list[str]:
    if isinstance(node, list):
        return [str(index) for index in range(len(node))]
    return list(node) if isinstance(node, dict) else []


def _one_of(names: list[str]) -> str:
    shown = ", ".join(names[:30])
    return f"expected one of {shown}" + (", …" if len(names) > 30 else "")


def _plain(value: Any, *, only_set: bool = False) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=only_set)
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _with(scenario: Scenario, name: str, value: Any, folder: Path) -> Scenario:
    """The scenario with one of its own fields changed, checked as a file is."""
    fields = {other: getattr(scenario, other) for other in Scenario.model_fields}
    if name != "engine":
        fields["engine"] = asdict(scenario.engine)
    try:
        return Scenario.model_validate({**fields, name: value}, context={"folder": folder})
    except ValidationError as error:
        message = error.errors(include_url=False)[0]["msg"]
        raise InputError(message.removeprefix("Value error, ")) from error


def evaluate(case: Case, folder: Path) -> Figures:
    """Run a case once. Raises InputError if its profile (beside ``folder``) cannot be used."""
    engine = case.scenario.engine
    scheduler = None
    if case.rules is not None:
        scheduler = spec_of(engine).build(engine, case.rules)
    result = run_scenario(case.scenario, folder, scheduler=scheduler)
    values = {name: figure(result.summary, name) for name in FIGURES}
    lives = sorted(result.record.lives.items())
    endings = tuple(Ending(i, str(life.outcome), e2e(life)) for i, life in lives)
    return Figures(result.summary["verdict"], result.summary["verdict_detail"], values, endings)


class TooManyRuns(InputError):
    """The limit on runs is reached."""


class Evaluator:
    """Evaluates cases, each once. Its answers do not depend on ``workers``, only the time does.

    Profiles given as files are looked for beside ``folder``. Other processes are started when the
    work at hand would take longer than ``POOL_PAYS`` seconds. ``runs`` counts the cases that were
    asked for; at the first one beyond ``most_runs`` it raises TooManyRuns. ``tick`` is called after
    every run.

    Use it as a context manager, so that its processes end with it.
    """

    POOL_PAYS = 3.0
    #: Seconds that a run takes at least which is worth sending to another process.
    POOL_LEAST = 0.02
    #: Endings that are kept in mind, of all runs together (about 100 bytes each).
    MOST_KEPT = 5_000_000

    def __init__(
        self,
        folder: Path,
        workers: int = 1,
        most_runs: int | None = None,
        tick: Callable[[], None] = lambda: None,
    ) -> None:
        self.folder, self._workers, self._most, self._tick = folder, workers, most_runs, tick
        self._asked: set[str] = set()
        self._known: dict[str, Figures] = {}
        self._kept = 0
        self._seconds = 0.0
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self._pool is None:
            return
        if kind is not None:  # as Python 3.14's terminate_workers does; waiting could take long
            for process in list(self._pool._processes.values()):
                process.terminate()
        self._pool.shutdown(cancel_futures=True)

    @property
    def runs(self) -> int:
        """How many different cases were asked for."""
        return len(self._asked)

    def evaluate(self, case: Case) -> Figures:
        """The figures of one case."""
        if case.key not in self._asked and self.runs == self._most:
            raise TooManyRuns(f"{self._most} runs are not enough for this")
        self._asked.add(case.key)
        if case.key not in self._known:
            self._keep(case, *_timed(_bare(case), self.folder))
        return self._known[case.key]

    def evaluate_all(self, cases: Iterable[Case]) -> list[Figures]:
        """The figures of all cases, in order."""
        cases = list(cases)
        new = {case.key: case for case in cases if case.key not in self._known}
        if len(new) > 1:
            self.evaluate(new.pop(next(iter(new))))  # which tells how long the others will take
            if self._pays(len(new)):
                self._evaluate_beside(list(new.values()))
        return [self.evaluate(case) for case in cases]

    def stream(self, cases: Iterable[Case]) -> Iterator[Figures]:
        """The figures of one case after the other, for as long as the caller takes them.

        Other processes look ahead, which changes nothing but the time.
        """
        left = iter(cases)
        while group := list(islice(left, self._workers)):
            new = [case for case in group if case.key not in self._known]
            if self._pays(len(new), likely_more=True):
                self._evaluate_beside(new)
            for case in group:
                yield self.evaluate(case)

    def _pays(self, cases: int, *, likely_more: bool = False) -> bool:
        """Whether other processes would be faster, by how long the last run took."""
        if self._workers < 2 or cases < 2 or self._seconds < self.POOL_LEAST:
            return False
        expected = cases * (10 if likely_more else 1)
        return self._pool is not None or expected * self._seconds > self.POOL_PAYS

    def _keep(self, case: Case, figures: Figures, seconds: float) -> None:
        self._known[case.key], self._seconds = figures, seconds
        self._kept += len(figures.endings)
        while self._kept > self.MOST_KEPT and len(self._known) > 1:
            oldest = next(iter(self._known))
            self._kept -= len(self._known.pop(oldest).endings)
        self._tick()

    def _evaluate_beside(self, cases: list[Case]) -> None:
        """Evaluate cases in other processes and keep what they find."""
        if self._pool is None:
            context = get_context("spawn")  # no surprises with threads, the same everywhere
            self._pool = ProcessPoolExecutor(self._workers, context, initializer=_leave_interrupts)
        futures = [self._pool.submit(_timed, _bare(case), self.folder) for case in cases]
        for case, future in zip(cases, futures, strict=True):
            self._keep(case, *future.result())


def _timed(case: Case, folder: Path) -> tuple[Figures, float]:
    start = perf_counter()
    return evaluate(case, folder), perf_counter() - start


def _bare(case: Case) -> Case:
    """The case without what is said about it, which a process need not be sent."""
    defaults = {name: Scenario.model_fields[name].default for name in ABOUT[1:]}
    return Case(case.scenario.model_copy(update=defaults), case.rules)


def _leave_interrupts() -> None:
    """Ctrl-C goes to the process that has started this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
