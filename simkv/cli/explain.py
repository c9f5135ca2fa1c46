"""``simkv explain``: explain a run or one request."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import AsJson, Source, Trust, check_variant, print_json
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.metrics.run_result import RunResult
    from simkv.scenario.scenario import Scenario


def explain(
    run: Annotated[
        Path,
        typer.Argument(
            help="Results directory of a run, scenario file, or name of a packaged scenario."
        ),
    ],
    request: Annotated[
        int | None, typer.Argument(min=0, help="Request id (default: explain the whole run).")
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Variant to explain (default: a summary of all variants)."
        ),
    ] = None,
    _source: Source = None,
    _trusted: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Explain what a run, or one request, waited for.

    Shows the causes of waiting and the requests that blocked others. Runs are deterministic: for a
    results directory, its scenario.yaml is run again.
    """
    from simkv.metrics.scenario_runner import run_scenario
    from simkv.report.report_runs import find_runs
    from simkv.report.run_explanation import explain_request, explain_run, explain_run_briefly

    planned = find_runs([run])
    check_variant(variant, planned)
    names = list(planned) if variant is None else [variant]
    if request is not None:
        for name in names:
            size = planned[name].scenario.workload.size
            if request >= size:
                raise InputError(
                    f"request {request}: there is no such request; expected an id from 0 to "
                    f"{size - 1}"
                )
    if as_json:
        from simkv.report.json_answers import build_explain_answer

        results = {
            name: run_scenario(planned[name].scenario, planned[name].folder) for name in names
        }
        print_json(build_explain_answer(results, request))
        return
    command = f"simkv explain {quote(str(run))}"
    lines: list[str | None] = (
        [f"Simulated again from {run / 'scenario.yaml'}."] if run.is_dir() else []
    )
    for name in names:
        result = run_scenario(planned[name].scenario, planned[name].folder)
        if lines:
            lines.append("")
        option = "" if name == "run" else f" --variant {name}"
        if request is not None:
            lines += explain_request(name, result, request)
            lines += _report_link(run, result, request)
        elif len(names) == 1:
            lines += explain_run(name, result, partial("{} {}".format, command + option))
        else:
            lines += explain_run_briefly(name, result)
    if len(names) > 1 and request is None:
        lines += ["", f"Explain one variant: {command} --variant {names[0]}"]
    lines += dict.fromkeys(_describe_source(planned[name].scenario) for name in names)
    print("\n".join(line for line in lines if line is not None))


def _describe_source(scenario: Scenario) -> str | None:
    """Return a line about the source whose scheduler decided, or None if simkv's port decided."""
    if not getattr(scenario.engine, "source", None):
        return None
    from simkv.scenario.native_engine import describe_source

    return f"Decided by: {describe_source(scenario.engine)}"


def _report_link(run: Path, result: RunResult, request: int) -> list[str]:
    """Return lines with the address of the request's longest interval in the report."""
    from simkv.report.report_runs import find_report_path

    longest = max(result.diagnosis.ledger[request], key=lambda one: one.seconds, default=None)
    at = 0.0 if longest is None else longest.start
    page = f"{find_report_path([run])}#t={at:.6g}&request={request}"
    return [f"Inspect its longest interval: simkv report {quote(str(run))}", f"  then open {page}"]
