"""``simkv plan``: find the smallest deployment that meets the objectives."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from simkv.cli.command_support import (
    Address,
    ExecutorOption,
    Jobs,
    Trust,
    check_store,
    open_job_runner,
    print_error,
    show,
    warn_overruled,
)
from simkv.core.errors import InputError

#: Word such as ``ttft:500`` in ``--goodput ttft:500 tpot:50``, which may follow the option.
_GOOD = re.compile(r"[a-z0-9]+:\S*")


def plan(
    scenario: Annotated[
        list[str],
        typer.Argument(
            metavar="SCENARIO", help="Scenario file (YAML), or the name of a packaged scenario."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write results to this directory (default: runs/<scenario>-plan/). Existing "
            "results are reused.",
        ),
    ] = None,
    jobs: Jobs = None,
    executor: ExecutorOption = "local",
    address: Address = None,
    _trusted: Trust = False,
    **asked: Any,
) -> None:
    """Find the smallest deployment that meets the objectives.

    Searches for the smallest fleet or cache, or the highest rate, and reports its cost. Options
    that are not given are taken from the scenario's 'plan' section. Exit 1 if no candidate meets
    the objectives. An interrupted plan continues when the same command is run again.
    """
    from simkv.scenario.packaged_scenarios import find_scenario
    from simkv.study.plan.capacity_plan import make_plan
    from simkv.study.plan.plan_preparation import prepare
    from simkv.study.plan.plan_request import parse_plan_request

    file, limits = _words(scenario, asked["goodput"] or [])
    prepared = prepare(
        find_scenario(Path(file)), parse_plan_request({**asked, "goodput": limits}), print_error
    )
    warn_overruled(find_scenario(Path(file)), prepared[0].request.overrides)
    folder = out or Path("runs") / f"{prepared[0].name}-plan"
    check_store(folder, "plan")
    with open_job_runner(folder, jobs, executor, address) as (runner, advance):
        plans = [make_plan(one, runner, advance) for one in prepared]

    from simkv.report.plan_files import write_plans
    from simkv.study.plan.plan_summary import compare_plans, describe_plan

    written = write_plans(plans, folder)
    for one in plans:
        show(*describe_plan(one))
    show(*compare_plans(plans))
    show(f"Written to {folder}: {', '.join(path.name for path in written)}")
    if any(one.answer is None for one in plans):
        raise typer.Exit(1)


_OWN = inspect.signature(plan, eval_str=True)


def select_options(*, all_of_them: bool) -> None:
    """Set the options of ``plan``: its own, or also the fields of PlanRequest.

    The fields must be imported, which takes longer than the rest of the start of a command.
    """
    first, *own = (one for one in _OWN.parameters.values() if one.kind is not one.VAR_KEYWORD)
    fields = _fields() if all_of_them else []
    plan.__signature__ = _OWN.replace(parameters=[first, *fields, *own])  # type: ignore[attr-defined]


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


def _words(words: list[str], goodput: list[str]) -> tuple[str, tuple[str, ...]]:
    """Return the scenario and the limits among words such as ``ttft:500 tpot:50 chat.yaml``."""
    limits = [word for text in goodput for word in text.split()]
    files = [word for word in words if not (goodput and _GOOD.fullmatch(word))]
    limits += [word for word in words if word not in files]
    if len(files) != 1:
        raise InputError(f"expected one scenario; found {' '.join(files) or 'none'}")
    return files[0], tuple(limits)
