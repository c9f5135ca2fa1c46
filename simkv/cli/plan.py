"""``simkv plan``: find the smallest deployment that meets the objectives."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import (
    Address,
    AdvanceBar,
    AsJson,
    ExecutorOption,
    Jobs,
    Source,
    Trust,
    Verbatim,
    check_store,
    open_job_runner,
    print_error,
    print_json,
    progress,
    show,
    warn_overruled,
)
from simkv.cli.scenario_flags import find_document, list_parameters, options_of, print_notes
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.scenario.launch_line import LaunchLine
    from simkv.scenario.scenario_builder import BuiltScenario
    from simkv.scenario.yaml_document import YamlDocument
    from simkv.study.job_runner import JobRunner, ProgressCallback
    from simkv.study.plan.capacity_plan import CapacityPlan
    from simkv.study.plan.deployment_search import DeploymentSearch

#: Word such as ``ttft:500`` in ``--goodput ttft:500 tpot:50``, which may follow the option.
_GOOD = re.compile(r"[a-z0-9]+:\S*")


def plan(
    scenario: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SCENARIO]",
            help="Scenario file (YAML), or the name of a packaged scenario. If omitted, "
            "describe the server (--gpu, --model or --from-command) and its load with "
            "options.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write results to this directory (default: runs/<scenario>-plan/). Existing "
            "results are reused.",
        ),
    ] = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Search replicas, tensor parallel size, tokens per step and prefill/decode splits "
            "together; print the Pareto front of tok/s per GPU and TPOT.",
        ),
    ] = False,
    kv_bandwidth: Annotated[
        float | None,
        typer.Option(
            metavar="GB/S",
            min=0.001,
            help="With --tune: bandwidth per GPU, in GB/s, between prefill and decode replicas "
            "(default: 50, as of a 400 Gb/s network).",
        ),
    ] = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
    executor: ExecutorOption = "local",
    address: Address = None,
    _source: Source = None,
    _trusted: Trust = False,
    **asked: Any,
) -> None:
    """Find the smallest deployment that meets the objectives.

    Describe the deployment with a scenario file or with options. If options have several values,
    such as --gpu H100,H200 --tp 1,2,4, the command makes one plan for each combination in which the
    weights fit into GPU memory. A plan is a search for the smallest fleet or cache, or for the
    highest request rate; its result includes the cost. The scenario's 'plan' section sets the
    options that the command line omits. With --tune, replicas, tensor parallel size, tokens per
    step and prefill/decode splits are searched together. Exit 1 if no candidate meets the
    objectives. An interrupted plan continues when the same command is run again.
    """
    from simkv.study.plan.capacity_plan import make_plan
    from simkv.study.plan.plan_preparation import prepare
    from simkv.study.plan.plan_request import PlanRequest, parse_plan_request

    if kv_bandwidth is not None and not tune:
        raise InputError("--kv-bandwidth: requires --tune")
    file, limits = _words(scenario or [], asked["goodput"] or [])
    tp_given = asked.get("tp") is not None
    document, built = _document(file, asked)
    line = built.line if built else None
    if tune:
        _tune_replicas(document, asked)
    fields = {name: asked[name] for name in PlanRequest.model_fields}
    request = parse_plan_request({**fields, "goodput": limits})
    if tune:
        from simkv.study.plan.deployment_layouts import KV_BANDWIDTH, prepare_layouts
        from simkv.study.plan.deployment_search import search_deployments

        bases, tokens = prepare_layouts(document, request, tp_given, print_error)
        print_notes(built)
        warn_overruled(document, bases[0].prepared.request.overrides)
        folder = out or Path("runs") / f"{bases[0].prepared.name}-plan"
        check_store(folder, "plan")
        with open_job_runner(folder, jobs, executor, address) as (runner, advance):
            ticked = count_runs(runner, advance, "runs")
            search = search_deployments(
                *(bases, tokens, runner, print_error, kv_bandwidth or KV_BANDWIDTH, ticked)
            )
        _show_search(search, line, folder, as_json)
        return
    prepared = prepare(document, request, print_error)
    print_notes(built)
    warn_overruled(document, prepared[0].request.overrides)
    folder = out or Path("runs") / f"{prepared[0].name}-plan"
    check_store(folder, "plan")
    with open_job_runner(folder, jobs, executor, address) as (runner, advance):
        plans = []
        for number, asking in enumerate(prepared, start=1):
            name = f"plan {number} of {len(prepared)}, runs" if len(prepared) > 1 else "runs"
            plans.append(make_plan(asking, runner, count_runs(runner, advance, name)))

    from simkv.report.plan_files import write_plans
    from simkv.study.plan.plan_summary import compare_plans, describe_basis, describe_plan

    with progress("writing tables and plots"):
        written = write_plans(plans, folder)
    if as_json:
        from simkv.report.json_answers import PlanAnswer
        from simkv.study.plan.plan_tables import to_json

        found = [to_json(one) for one in plans]
        commands = [line.strip() for line in _commands(plans, line)[1::2]]
        print_json(PlanAnswer(plans=found, launch_commands=commands, folder=str(folder)))
    else:
        show(*compare_plans(plans))
        for one in plans:
            show(*describe_plan(one))
        show(*describe_basis(plans))
        show(*_copyable(_commands(plans, line)))
        show(f"Written to {folder}: {', '.join(path.name for path in written)}")
    if any(one.answer is None for one in plans):
        raise typer.Exit(1)


def count_runs(runner: JobRunner, advance: AdvanceBar, name: str) -> ProgressCallback:
    """Return a callback that shows the number of all finished runs, without a total.

    The search determines the next runs from the results, so the total is unknown.
    """
    return lambda _, __: advance(len(runner.done), now=name)


def _tune_replicas(document: YamlDocument, asked: dict[str, Any]) -> None:
    """Set the search to the number of replicas, unless the options or the file state what to
    search.
    """
    section = document.tree.get("plan") or {}
    if not str(section.get("smallest")).startswith("fleet.replicas="):
        _search_replicas(document, asked)


def _show_search(
    search: DeploymentSearch, line: LaunchLine | None, folder: Path, as_json: bool
) -> None:
    """Write and print the result of ``--tune``; exit 1 if no deployment meets the objectives."""
    from simkv.report.deployment_files import make_front_table, write_search
    from simkv.scenario.launch_command import describe_launch
    from simkv.study.plan import deployment_tables

    written = write_search(search, folder)
    best = deployment_tables.find_best(search)
    lines = []
    for one in dict.fromkeys([*(one for _, one in best), *search.front]):
        scenario = one.layout.prepared.case.scenario(one.candidate)
        lines += describe_launch(scenario, line, deployment_tables.describe_layout(one))
    if as_json:
        from simkv.report.json_answers import PlanAnswer

        rows = deployment_tables.deployment_rows(search)
        words = {what: deployment_tables.describe_deployment(one) for what, one in best}
        commands = [text.strip() for text in lines if text.startswith("  ")]
        print_json(
            PlanAnswer(
                plans=[],
                deployments=rows,
                best=words,
                launch_commands=commands,
                folder=str(folder),
            )
        )
    else:
        show(*deployment_tables.describe_search(search))
        if search.front:
            show(
                "Pareto front of tok/s per GPU (of this load, not the capacity) and mean TPOT:",
                make_front_table(search),
            )
        show(*deployment_tables.describe_best(search), *_copyable(lines))
        show(f"Written to {folder}: {', '.join(path.name for path in written)}")
    if not search.front:
        raise typer.Exit(1)


#: Options with several values: one plan per combination.
_AXES = {"gpu": "hardware.gpu", "tp": "hardware.tp"}
_OWN = inspect.signature(plan, eval_str=True)


def select_options(*, all_of_them: bool) -> None:
    """Set the options of the command ``plan``, optionally with one option per field of PlanRequest.

    The import of PlanRequest takes longer than the rest of the start, so other commands omit it.
    """
    first, *own = (one for one in _OWN.parameters.values() if one.kind is not one.VAR_KEYWORD)
    fields = _fields() if all_of_them else []
    known = {one.name for one in (first, *own, *fields)}
    more = list_parameters(tuple(_AXES)) if all_of_them else []
    rest = [one.replace(kind=one.POSITIONAL_OR_KEYWORD) for one in more if one.name not in known]
    plan.__signature__ = _OWN.replace(parameters=[first, *fields, *rest, *own])  # type: ignore[attr-defined]


def _fields() -> list[inspect.Parameter]:
    from simkv.scenario.plan_section import PlanSection
    from simkv.study.plan.plan_request import (
        PlanRequest,
        find_bounds,
        find_option,
        find_option_flag,
    )

    found = []
    for name, field in PlanRequest.model_fields.items():
        plain = next(
            (one for one in (bool, int, float, str) if field.annotation in (one, one | None)), None
        )
        kind: Any = plain or list[str]
        # None marks options that were not given, so that the scenario file's value applies.
        asks_file = plain is None or name in PlanSection.model_fields
        least, most = find_bounds(name)
        option = typer.Option(
            *([] if kind is bool else [find_option(name)]),
            metavar=find_option_flag(name).metavar,
            help=field.description,
            min=least,
            max=most,
        )
        found.append(
            inspect.Parameter(
                name,
                inspect.Parameter.POSITIONAL_OR_KEYWORD,
                default=None if asks_file else field.default,
                annotation=Annotated[kind | None if asks_file else kind, option],
            )
        )
    return found


select_options(all_of_them=False)


#: Deployments that a plan without a scenario file tries.
_REPLICAS = "fleet.replicas=1..64"


def _document(file: str | None, asked: dict[str, Any]) -> tuple[YamlDocument, BuiltScenario | None]:
    """Return the scenario, and the options that it was built from, if any.

    Without a file, several values of ``--gpu`` or ``--tp`` are added to ``asked["each"]``, which
    makes one plan for each combination.
    """
    from simkv.costs.hardware.model_gpu_catalog import find_gpu
    from simkv.scenario.scenario_builder import make_name

    if file is not None and asked.get("gpu") and asked.get("prices"):
        raise InputError(
            f"--gpu {asked['gpu']}: not supported with a scenario file; to select an entry of "
            f"the price table, use --prices {asked['prices']}#{asked['gpu']}"
        )
    several = {name: _listed(asked.get(name)) for name in _AXES}
    if several["tp"] and not all(text.isdecimal() and int(text) for text in several["tp"]):
        raise InputError(f"--tp {asked['tp']}: expected sizes such as 1,2,4")
    for name in several["gpu"]:
        try:
            find_gpu(name)
        except InputError as error:
            raise InputError(f"--gpu {name}: {error}") from error
    first: dict[str, Any] = {name: values[0] for name, values in several.items() if values}
    first |= {"tp": int(first["tp"])} if "tp" in first else {}
    options = options_of({**asked, "gpu": None, "tp": None, **first})
    document, built = find_document(None if file is None else Path(file), options)
    if built is None:
        if file is None:
            _search_replicas(document, asked)
        return document, None
    axes = [
        f"{path}={','.join(several[name])}"
        for name, path in _AXES.items()
        if len(several[name]) > 1
    ]
    asked["each"] = [*axes, *(asked["each"] or [])]
    if len(axes) and asked["cliff"] is None:
        asked["cliff"] = False
    if len(several["gpu"]) > 1:
        document.tree["name"] = make_name(str(document.tree["hardware"]["model"]), *several["gpu"])
    _search_replicas(document, asked)
    return document, built


def _search_replicas(document: YamlDocument, asked: dict[str, Any]) -> None:
    """Set the search to the number of replicas if ``asked`` has neither ``smallest`` nor
    ``largest``.
    """
    if not asked["smallest"] and not asked["largest"]:
        asked["smallest"] = _REPLICAS
        document.tree.setdefault("fleet", {}).setdefault("replicas", 1)


def _listed(text: str | None) -> list[str]:
    return [part.strip() for part in (text or "").split(",") if part.strip()]


def _commands(plans: Sequence[CapacityPlan], line: LaunchLine | None) -> list[str]:
    """Return the launch command of each plan's answer, cheapest or smallest first."""
    from simkv.scenario.launch_command import describe_launch

    lines = []
    for plan in plans:
        if plan.answer is not None:
            scenario = plan.prepared.case.scenario(plan.answer)
            lines += describe_launch(scenario, line, plan.prepared.label)
    return lines


def _copyable(lines: Sequence[str]) -> list[str]:
    """Mark indented lines, which are launch commands, as Verbatim, so that ``show`` never wraps
    them.
    """
    return [Verbatim(text) if text.startswith("  ") else text for text in lines]


def _words(words: list[str], goodput: list[str]) -> tuple[str | None, tuple[str, ...]]:
    """Split words such as ``ttft:500 tpot:50 chat.yaml`` into the scenario and the limits."""
    limits = [word for text in goodput for word in text.split()]
    files = [word for word in words if not (goodput and _GOOD.fullmatch(word))]
    limits += [word for word in words if word not in files]
    if len(files) > 1:
        raise InputError(f"expected one scenario; found {' '.join(files)}")
    return files[0] if files else None, tuple(limits)
