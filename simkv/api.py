"""Python API: run, compare, sweep, plan and evolve scenarios, with results as pandas data frames.

import simkv

outcome = simkv.run("scenario.yaml", engine__num_gpu_blocks=512)
outcome.figures.loc["e2e_ms.p99"]       # by variant
outcome.requests                        # one row per request
table = simkv.sweep("scenario.yaml", {"engine.num_gpu_blocks": [256, 512, 1024]})
plan = simkv.plan("scenario.yaml", smallest="fleet.replicas=1..20", objectives=["starved<=0"])
plan.answer                             # by variant
found = simkv.evolve("scenario.yaml", objectives=["ttft_ms.mean"], budget=200)
found.winner, found.holds               # settings; whether all final tests confirm them
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
from simkv.study.plan.plan_summary import describe_basis, describe_plan
from simkv.study.plan.plan_tables import cliff_table, evaluations, to_json
from simkv.study.sweep.sweep import build_sweep, run_sweep
from simkv.study.sweep.sweep_table import build_sweep_table, flatten_figures, list_knobs
from simkv.study.sweep_axes import format_assignment, make_axis, parse_sample

#: Path of a scenario file, name of a packaged scenario, mapping of fields, or loaded scenario.
ScenarioSource = str | Path | Mapping[str, Any] | Scenario


@dataclass(frozen=True)
class RunOutcome:
    """Results of a run: ``results`` by variant, and data frames built from them.

    ``str()`` returns one line per variant; notebooks show a table.
    """

    results: dict[str, RunResult]

    def __repr__(self) -> str:
        name = next(iter(self.results.values())).scenario.name
        lines = [f"{variant}: {result.short_summary}" for variant, result in self.results.items()]
        return "\n".join([f"Outcome of {name}", *(f"  {line}" for line in lines)])

    def _repr_html_(self) -> str:
        """HTML table of the main metrics, one column per variant."""
        found = self.figures
        rows = [row for row in NOTEBOOK_FIGURES if row in found.index]
        return str(found.loc[rows].to_html(float_format="{:.6g}".format, na_rep=""))

    @cached_property
    def figures(self) -> pd.DataFrame:
        """Metrics of summary.json: one row per metric (``e2e_ms.p99``), one column per variant."""
        columns = {name: flatten_figures(result.summary) for name, result in self.results.items()}
        return pd.DataFrame(columns, dtype=object).rename_axis(index="figure", columns="variant")

    @cached_property
    def requests(self) -> pd.DataFrame:
        """Requests, one row per request and variant, as in ``requests.csv``."""
        rows = [result.request_rows(name) for name, result in self.results.items()]
        return pd.DataFrame([row for some in rows for row in some])

    @cached_property
    def steps(self) -> pd.DataFrame:
        """Steps, one row per step and variant, as in ``steps.csv``."""
        rows = [result.step_rows(name) for name, result in self.results.items()]
        return pd.DataFrame([row for some in rows for row in some])

    @cached_property
    def ledger(self) -> pd.DataFrame:
        """Wait ledger, one row per interval of a request and variant, as in ``ledger.csv``."""
        rows = [ledger_rows(name, result.diagnosis) for name, result in self.results.items()]
        return pd.DataFrame([row for some in rows for row in some])

    @cached_property
    def preemptions(self) -> pd.DataFrame:
        """Preemptions, one row per preemption and variant, as in ``preemptions.csv``."""
        rows = [preemption_rows(name, result.diagnosis) for name, result in self.results.items()]
        return pd.DataFrame([row for some in rows for row in some])


#: Metrics shown in notebooks.
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

    ``overrides`` are field paths as in ``--set``, with two underscores for a dot
    (``engine__block_size=16``) or as ``**{"engine.block_size": 16}``. Relative file names in a
    mapping or loaded scenario refer to the current directory. With ``trust=True``, simkv executes
    the code of custom schedulers in files that the scenario names. Raises InputError for invalid
    input.
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
    """Run one or more scenarios and return the metrics of all variants side by side.

    The data frame has one row per metric and one column per variant. With several scenarios the
    columns have two levels: scenario name and variant. ``overrides`` apply to all scenarios; see
    ``run``.
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
    """Run a scenario at every point of a grid, or at sampled points; return one row per run.

    ``over`` maps each field path to its values, or to a string in the syntax of ``--over``
    (``"256..1024:256"``). ``sample`` is ``random:N`` or ``lhs:N``, sampled with ``seed``. Each
    point runs ``repeats`` times, each time with another workload seed. Results are stored in the
    file ``store``, if given, and reused. ``jobs`` is the number of processes (default: one per
    core); a script that uses more than one process needs the usual ``if __name__ == "__main__":``.
    ``advance`` is called with the number of finished runs and the total number of runs. ``trust``
    has the same meaning as in ``run``. Raises InputError for invalid input, before any run starts,
    and RunsFailed if runs failed.
    """
    axes = [make_axis(path, values) for path, values in over.items()]
    given = _assignments(overrides)
    drawn = None if sample is None else parse_sample(sample)
    with override_trust(trust):
        whole = build_sweep(find_scenario(Path(scenario)), axes, given, drawn, seed, repeats)
    _warn(whole.notes)
    with open_pooled_runner(
        None if store is None else Path(store), jobs, executor, address
    ) as runner:
        return build_sweep_table(whole, run_sweep(whole, runner, advance))


def plot(table: pd.DataFrame, figure: str, knob: str, folder: str | Path = ".") -> Path:
    """Plot a metric against a setting from the table of a sweep; return the path of the PNG.

    Raises InputError if the table has no such metric or setting.
    """
    from simkv.report.sweep_plots import check_figures, parse_plot, write_plot

    knobs = list_knobs(table)
    wanted = parse_plot(f"{figure}:{knob}", knobs)
    check_figures(table, [figure], "plot")
    return write_plot(table, knobs, wanted, _folder(folder))


def pareto(table: pd.DataFrame, goals: str, folder: str | Path | None = None) -> pd.DataFrame:
    """Return the points of a sweep's table on the Pareto front of the goals.

    ``goals`` is a string such as ``"output_throughput:max,ttft_ms.p99:min"``. With ``folder``, the
    front is also plotted to a PNG there. Raises InputError if the table has no such metric.
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
    """Issue each note as a warning at the caller of the public function."""
    for note in notes:
        warnings.warn(note.strip(), stacklevel=3)


def _folder(folder: str | Path) -> Path:
    from simkv.core.atomic_files import make_folder

    make_folder(Path(folder))
    return Path(folder)


@dataclass(frozen=True)
class Plans:
    """Results of a plan: one ``CapacityPlan`` per variant, and data frames built from them."""

    plans: dict[str, CapacityPlan]

    @property
    def answer(self) -> dict[str, float | int | None]:
        """Value of the setting by variant; None if no candidate meets the objectives."""
        return {name: plan.value(plan.answer) for name, plan in self.plans.items()}

    @property
    def summary(self) -> dict[str, dict[str, Any]]:
        """Contents of ``plan.json`` by variant: answer, confidence, binding objectives, cost."""
        return {name: to_json(plan) for name, plan in self.plans.items()}

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """Rows of ``evaluations.csv``: one row per simulation of the search."""
        return pd.concat([evaluations(plan) for plan in self.plans.values()], ignore_index=True)

    @cached_property
    def cliff(self) -> pd.DataFrame:
        """Runs around the cliff, one row per run at another request rate, as in ``cliff.csv``."""
        return pd.concat([cliff_table(plan) for plan in self.plans.values()], ignore_index=True)

    def __str__(self) -> str:
        plans = self.plans.values()
        lines = [line for plan in plans for line in describe_plan(plan)]
        return "\n".join([*lines, *describe_basis(plans)])

    def __repr__(self) -> str:
        knobs = {name: plan.prepared.case.knob for name, plan in self.plans.items()}
        found = (f"{name}: {knobs[name]} = {value}" for name, value in self.answer.items())
        return f"Plans({', '.join(found)})"

    def _repr_html_(self) -> str:
        """HTML text of the answer, its confidence, binding objectives and cost."""
        return f"<pre>{escape(str(self))}</pre>"

    def write(self, folder: str | Path) -> list[Path]:
        """Write the files of ``simkv plan`` (``plan.json``, tables, plots) to a directory.

        Returns their paths.
        """
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
    """Find the ``smallest`` or ``largest`` value of a setting that meets the ``objectives``.

    ``smallest`` and ``largest`` are strings in the syntax of ``--smallest``, objectives are strings
    such as ``"ttft_ms.p99<=500"``, and ``goodput`` maps latencies to limits in ms (``{"ttft": 500,
    "tpot": 50}``). Missing arguments are taken from the scenario's ``plan`` section. All other
    arguments have the same meaning as the options of ``simkv plan`` and the arguments of ``sweep``.
    Raises InputError for invalid input, before any run starts, and RunsFailed if runs failed.
    """
    for name in asked.keys() - PlanRequest.model_fields.keys():
        raise TypeError(f"plan() got an unexpected keyword argument {name!r}")
    with (
        override_trust(trust),
        open_pooled_runner(
            None if store is None else Path(store), jobs, executor, address
        ) as runner,
    ):
        prepared = prepare(find_scenario(Path(scenario)), parse_plan_request(asked))
        return Plans({one.label or "run": make_plan(one, runner, advance) for one in prepared})


def _with_fields(function: Callable[..., Plans]) -> inspect.Signature:
    """Return the signature of ``plan`` with the fields of PlanRequest as keyword arguments."""
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
    """Search for a better scheduler for ``objectives`` (``["ttft_ms.p99"]``), as ``simkv evolve``
    does.

    The keyword arguments not listed in the signature are ``over``, ``propose``, ``random``,
    ``variant``, ``train``, ``final``, ``test``, ``seed`` and ``profile_error``; they have the same
    meaning as on the command line. ``folder`` stores runs, studies and proposals; a repeated call
    with the same arguments resumes from them. All other arguments have the same meaning as in
    ``sweep``. Raises InputError if the search is not possible, and RunsFailed if the baseline
    cannot be run.
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
    with override_trust(trust), open_pooled_runner(store, jobs, executor, address) as runner:
        return EvolutionResult(look_for_better(wanted, runner, there, advance))


def _assignments(fields: Mapping[str, Any] | None) -> tuple[str, ...]:
    return tuple(format_assignment(path, value) for path, value in (fields or {}).items())


def _document(scenario: ScenarioSource) -> YamlDocument:
    if isinstance(scenario, str | Path):
        return read_document(find_scenario(Path(scenario)))
    if isinstance(scenario, Scenario):
        return YamlDocument(Path("scenario"), _fields(scenario))
    return YamlDocument(Path("scenario"), dict(scenario))


def _fields(scenario: Scenario) -> dict[str, Any]:
    """Return a loaded scenario as the contents of a file, without the settings chosen by launchers.

    The launchers choose these settings again after the overrides are applied, because overrides may
    change the hardware.
    """
    fields = scenario.model_dump(exclude_unset=True, exclude={"expect", "published"})
    for place, settings in scenario.origins.sections.items():
        section: Any = fields
        for key in place:
            section = section[key]
        for name in settings.default:
            section.pop(name, None)
    return fields
