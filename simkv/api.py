"""simkv from Python: run, compare, sweep, plan and evolve scenarios, with tables as pandas frames.

import simkv

outcome = simkv.run("scenario.yaml", engine__num_gpu_blocks=512)
outcome.figures.loc["e2e_ms.p99"]       # by variant
outcome.requests                        # a row per request
table = simkv.sweep("scenario.yaml", {"engine.num_gpu_blocks": [256, 512, 1024]})
plan = simkv.plan("scenario.yaml", smallest="fleet.replicas=1..20", objectives=["starved<=0"])
plan.answer                             # by variant
found = simkv.evolve("scenario.yaml", objectives=["ttft_ms.mean"], budget=200)
found.winner, found.holds               # fields and their values; whether it is surely better
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from simkv.core.outcome import Outcome
from simkv.explain.diagnosis import ledger_rows, preemption_rows
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.packaged_scenarios import find_scenario
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.variant_precedence import override_notes
from simkv.scenario.yaml_document import YamlDocument, read_document
from simkv.study.evolve.evolution import EvolutionRequest
from simkv.study.evolve.evolution import run_evolution as look_for_better
from simkv.study.evolve.evolution_result import EvolutionResult
from simkv.study.job_runner import open_pooled_runner
from simkv.study.plan.capacity_plan import CapacityPlan, make_plan
from simkv.study.plan.plan_preparation import prepare
from simkv.study.plan.plan_request import PlanRequest, parse_plan_request
from simkv.study.plan.plan_summary import describe_plan
from simkv.study.plan.plan_tables import cliff_table, evaluations, to_json
from simkv.study.sweep.random_sampling import parse_sample
from simkv.study.sweep.sweep import build_sweep, run_sweep
from simkv.study.sweep.sweep_table import build_sweep_table, flatten_figures, list_knobs
from simkv.study.sweep_axes import format_assignment, make_axis

#: A scenario file, the name of a packaged one, the contents of a file, or a loaded scenario.
ScenarioSource = str | Path | Mapping[str, Any] | Scenario


@dataclass(frozen=True)
class RunOutcome:
    """What came of a run: ``results`` by variant, and tables of them.

    Its text is a line per variant, in notebooks a table.
    """

    results: dict[str, RunResult]

    def __repr__(self) -> str:
        name = next(iter(self.results.values())).scenario.name
        lines = [f"{variant}: {result.short_summary}" for variant, result in self.results.items()]
        return "\n".join([f"Outcome of {name}", *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        """The figures that compare variants, a column each."""
        found = self.figures
        rows = [row for row in NOTEBOOK_FIGURES if row in found.index]
        return str(found.loc[rows].to_html(float_format="{:.6g}".format, na_rep=""))

    @cached_property
    def figures(self) -> pd.DataFrame:
        """The figures of summary.json, a row each (``e2e_ms.p99``), a column per variant."""
        columns = {name: flatten_figures(result.summary) for name, result in self.results.items()}
        return pd.DataFrame(columns, dtype=object).rename_axis(index="figure", columns="variant")

    @cached_property
    def requests(self) -> pd.DataFrame:
        """A row per request and variant, as in requests.csv."""
        rows = [result.request_rows(name) for name, result in self.results.items()]
        return pd.DataFrame([row for some in rows for row in some])

    @cached_property
    def steps(self) -> pd.DataFrame:
        """A row per step and variant, as in steps.csv."""
        rows = [result.step_rows(name) for name, result in self.results.items()]
        return pd.DataFrame([row for some in rows for row in some])

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """A row per interval of a request's life and variant, as in ledger.csv."""
        rows = [ledger_rows(name, result.diagnosis) for name, result in self.results.items()]
        return pd.DataFrame([row for some in rows for row in some])

    @cached_property
    def preemptions(self) -> pd.DataFrame:
        """A row per preemption and variant, as in preemptions.csv."""
        rows = [preemption_rows(name, result.diagnosis) for name, result in self.results.items()]
        return pd.DataFrame([row for some in rows for row in some])


#: The figures that a notebook shows of an outcome.
NOTEBOOK_FIGURES = (
    "verdict",
    "requests",
    *(str(outcome) for outcome in Outcome),
    "makespan_s",
    "output_throughput",
    "ttft_ms.mean",
    "ttft_ms.p99",
    "tpot_ms.mean",
    "e2e_ms.mean",
    "e2e_ms.p99",
    "preemptions",
    "recomputed_tokens",
)


def run(scenario: ScenarioSource, *, trust: bool = False, **overrides: Any) -> RunOutcome:
    """Run all variants of a scenario in this process.

    ``overrides`` are fields by their paths as in ``--set``, with two underscores for a dot
    (``engine__block_size=16``) or with ``**{"engine.block_size": 16}``. Files that a mapping or a
    loaded scenario names are looked for in the current folder. With ``trust`` the code of
    schedulers that it names as files is run. Raises InputError for what cannot be used.
    """
    document = _document(scenario)
    assignments = [
        format_assignment(path.replace("__", "."), value) for path, value in overrides.items()
    ]
    _warn(override_notes(document, assignments, ""))
    with override_trust(trust):
        variants = resolve_variants(document, assignments)
    folder = document.path.parent
    return RunOutcome({name: run_scenario(found, folder) for name, found in variants.items()})


def compare(*scenarios: ScenarioSource, trust: bool = False, **overrides: Any) -> pd.DataFrame:
    """The figures of all variants of one or more scenarios, side by side.

    A row per figure, a column per variant; with several scenarios the columns have two levels, the
    scenario's name and the variant. ``overrides`` apply to all of them; see ``run``.
    """
    outcomes = [run(scenario, trust=trust, **overrides) for scenario in scenarios]
    if len(outcomes) == 1:
        return outcomes[0].figures
    names: list[str] = []
    for outcome in outcomes:
        name = next(iter(outcome.results.values())).scenario.name
        again = names.count(name)
        names.append(f"{name} ({again + 1})" if again else name)
    return pd.concat(
        [outcome.figures for outcome in outcomes], axis="columns", keys=names, names=["scenario"]
    )


def sweep(
    scenario: str | Path,
    over: Mapping[str, float | str | Iterable[Any]],
    *,
    overrides: Mapping[str, Any] | None = None,
    sample: str | None = None,
    seed: int = 0,
    repeats: int = 1,
    store: str | Path | None = None,
    jobs: int | None = None,
    executor: Literal["local", "ray"] = "local",
    address: str | None = None,
    advance: Callable[[int, int], None] | None = None,
    trust: bool = False,
) -> pd.DataFrame:
    """Run a scenario at every point of a grid, or at sampled ones; a row per run.

    ``over`` gives each path its values, or a text as for ``--over`` (``"256..1024:256"``);
    ``sample`` is ``random:N`` or ``lhs:N``, drawn from ``seed``. With ``repeats`` each point runs
    with so many seeds. What is done is kept in the file ``store``, if given, and not done again.
    ``jobs`` processes work at a time, by default one per core: a script then needs the usual
    ``if __name__ == "__main__":``. ``advance`` is told how many of how many runs are done;
    ``trust`` as for ``run``. Raises InputError for what cannot be used, before anything is run, and
    RunsFailed if runs failed.
    """
    axes = [make_axis(path, values) for path, values in over.items()]
    given = _assignments(overrides)
    drawn = None if sample is None else parse_sample(sample)
    with override_trust(trust):
        whole = build_sweep(find_scenario(Path(scenario)), axes, given, drawn, seed, repeats)
    _warn(whole.notes)
    with open_pooled_runner(
        None if store is None else Path(store), jobs, executor, address
    ) as bench:
        return build_sweep_table(whole, run_sweep(whole, bench, advance))


def plot(table: pd.DataFrame, figure: str, knob: str, folder: str | Path = ".") -> Path:
    """Draw a figure against a knob from the table of a sweep, into a PNG; returns its path.

    Raises InputError if there is no such figure or knob.
    """
    from simkv.report.sweep_plots import check_figures, parse_plot, write_plot

    knobs = list_knobs(table)
    wanted = parse_plot(f"{figure}:{knob}", knobs)
    check_figures(table, [figure], "plot")
    return write_plot(table, knobs, wanted, _folder(folder))


def pareto(table: pd.DataFrame, goals: str, folder: str | Path | None = None) -> pd.DataFrame:
    """The points of a sweep's table that nothing beats in all goals.

    ``goals`` as in ``"output_throughput:max,ttft_ms.p99:min"``. With a ``folder`` they are drawn
    there too. Raises InputError if there is no such figure.
    """
    from simkv.report.sweep_plots import (
        check_figures,
        find_front,
        parse_pareto,
        write_pareto,
    )

    wanted = parse_pareto(goals)
    check_figures(table, [goal.figure for goal in wanted.goals], "pareto")
    if folder is None:
        return find_front(table, list_knobs(table), wanted)[1]
    return write_pareto(table, list_knobs(table), wanted, _folder(folder))[1]


def _warn(notes: Iterable[str]) -> None:
    """Warn whoever called a function of this module."""
    for note in notes:
        warnings.warn(note.strip(), stacklevel=3)


def _folder(folder: str | Path) -> Path:
    from simkv.core.atomic_files import make_folder

    make_folder(Path(folder))
    return Path(folder)


@dataclass(frozen=True)
class Plans:
    """What came of a plan: a ``CapacityPlan`` per variant, and tables of them."""

    plans: dict[str, CapacityPlan]

    @property
    def answer(self) -> dict[str, float | int | None]:
        """The value of the knob by variant; None where no candidate meets the objectives."""
        return {name: plan.value(plan.answer) for name, plan in self.plans.items()}

    @property
    def summary(self) -> dict[str, dict[str, Any]]:
        """As in plan.json, by variant: how sure the answer is, what binds it, what it costs."""
        return {name: to_json(plan) for name, plan in self.plans.items()}

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """A row per run of the search, as in evaluations.csv."""
        return pd.concat([evaluations(plan) for plan in self.plans.values()], ignore_index=True)

    @cached_property
    def cliff(self) -> pd.DataFrame:
        """A row per run at another rate, as in cliff.csv."""
        return pd.concat([cliff_table(plan) for plan in self.plans.values()], ignore_index=True)

    def __str__(self) -> str:
        return "\n".join(line for plan in self.plans.values() for line in describe_plan(plan))

    def __repr__(self) -> str:
        knobs = {name: plan.prepared.case.knob for name, plan in self.plans.items()}
        found = (f"{name}: {knobs[name]} = {value}" for name, value in self.answer.items())
        return f"Plans({', '.join(found)})"

    def _repr_html_(self) -> str:
        """The answer, how sure it is, what binds it, what it costs."""
        return f"<pre>{escape(str(self))}</pre>"

    def write(self, folder: str | Path) -> list[Path]:
        """Write what ``simkv plan`` writes into a folder: plan.json, tables and pictures."""
        from simkv.report.plan_files import write_plans

        return write_plans(list(self.plans.values()), Path(folder))


def plan(
    scenario: str | Path,
    *,
    store: str | Path | None = None,
    jobs: int | None = None,
    executor: Literal["local", "ray"] = "local",
    address: str | None = None,
    advance: Callable[[int, int], None] | None = None,
    trust: bool = False,
    **asked: Any,
) -> Plans:
    """The ``smallest`` or ``largest`` value of a knob with which the ``objectives`` hold.

    The knob is a text as for ``--smallest``, objectives are texts as ``"ttft_ms.p99<=500"``,
    ``goodput`` limits in ms (``{"ttft": 500, "tpot": 50}``); what is not given is taken from the
    scenario's ``plan`` section. The rest is as on the command line, and as for ``sweep``. Raises
    InputError for what cannot be used, before anything is run, and RunsFailed if runs
    failed.
    """
    for name in asked.keys() - PlanRequest.model_fields.keys():
        raise TypeError(f"plan() got an unexpected keyword argument {name!r}")
    with (
        override_trust(trust),
        open_pooled_runner(
            None if store is None else Path(store), jobs, executor, address
        ) as bench,
    ):
        prepared = prepare(find_scenario(Path(scenario)), parse_plan_request(asked))
        return Plans({one.label or "run": make_plan(one, bench, advance) for one in prepared})


def _with_fields(function: Callable[..., Plans]) -> inspect.Signature:
    """The signature of ``plan`` with the fields of PlanRequest as its keywords."""
    own = inspect.signature(function, eval_str=True)
    first, *rest, _ = own.parameters.values()
    fields = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.get_default(call_default_factory=True),
            annotation=field.annotation,
        )
        for name, field in PlanRequest.model_fields.items()
    ]
    return own.replace(parameters=[first, *fields, *rest])


plan.__signature__ = _with_fields(plan)  # type: ignore[attr-defined]


def evolve(
    *scenarios: str | Path,
    objectives: Iterable[str],
    budget: int = 200,
    overrides: Mapping[str, Any] | None = None,
    goodput: Mapping[str, float] | None = None,
    folder: str | Path | None = None,
    jobs: int | None = None,
    executor: Literal["local", "ray"] = "local",
    address: str | None = None,
    advance: Callable[[int, int], None] | None = None,
    trust: bool = False,
    **asked: Any,
) -> EvolutionResult:
    """Look for a better scheduler for ``objectives`` (``["ttft_ms.p99"]``), as ``simkv evolve``.

    The rest of ``asked`` is ``over``, ``propose``, ``random``, ``variant``, ``train``, ``final``,
    ``test``, ``seed`` and ``profile_error`` as on the command line; ``folder`` keeps runs, studies
    and proposals, and the same call goes on from there. All else is as for ``sweep``. Raises
    InputError for what cannot be searched, RunsFailed if what is shipped cannot be run.
    """
    wanted = EvolutionRequest(
        tuple(find_scenario(Path(scenario)) for scenario in scenarios),
        tuple(objectives),
        budget,
        overrides=_assignments(overrides),
        goodput=tuple(f"{name}:{ms:g}" for name, ms in (goodput or {}).items()),
        **asked | {"over": tuple(asked.get("over", ()))},
    )
    there = None if folder is None else _folder(folder)
    store = there and there / "points.jsonl"
    with override_trust(trust), open_pooled_runner(store, jobs, executor, address) as bench:
        return EvolutionResult(look_for_better(wanted, bench, there, advance))


def _assignments(fields: Mapping[str, Any] | None) -> tuple[str, ...]:
    return tuple(format_assignment(path, value) for path, value in (fields or {}).items())


def _document(scenario: ScenarioSource) -> YamlDocument:
    if isinstance(scenario, str | Path):
        return read_document(find_scenario(Path(scenario)))
    if isinstance(scenario, Scenario):
        return YamlDocument(Path("scenario"), _fields(scenario))
    return YamlDocument(Path("scenario"), dict(scenario))


def _fields(scenario: Scenario) -> dict[str, Any]:
    """A loaded scenario as the contents of a file, without what the launchers of engines chose:
    they choose again, by what overrides make of the hardware."""
    fields = scenario.model_dump(exclude_unset=True, exclude={"expect", "published"})
    for place, settings in scenario.origins.sections.items():
        section: Any = fields
        for key in place:
            section = section[key]
        for name in settings.default:
            section.pop(name, None)
    return fields
