"""``simkv explain``: explain a run or one request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import AsJson, Source, Trust, check_variant, print_json, show_lines
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
        int | None,
        typer.Argument(min=0, help="Id of a request to explain (default: explain the whole run)."),
    ] = None,
    session: Annotated[
        int | None,
        typer.Option(
            min=0, metavar="NUMBER", help="Session to explain, by order of arrival from 0."
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Variant to explain (default: summarize all variants)."),
    ] = None,
    _source: Source = None,
    _trusted: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Explain what a run, a session or one request waited for.

    The output shows the causes of waiting and the requests that blocked others. For a results
    directory, simkv runs its scenario.yaml again; the same scenario always gives the same run.
    """
    from simkv.metrics.scenario_runner import run_scenario
    from simkv.report.report_runs import find_runs

    planned = find_runs([run])
    check_variant(variant, planned)
    names = list(planned) if variant is None else [variant]
    _check_request({name: planned[name].scenario for name in names}, request, session)
    command = f"simkv explain {quote(str(run))}"
    lines: list[str | None] = (
        [f"Simulated again from {run / 'scenario.yaml'}."] if run.is_dir() else []
    )
    results: dict[str, RunResult] = {}
    for name in names:
        result = run_scenario(planned[name].scenario, planned[name].folder)
        _check_session(result, session)
        if as_json:
            results[name] = result
            continue
        if lines:
            lines.append("")
        option = "" if name == "run" else f" --variant {name}"
        if request is not None or session is not None:
            lines += _explain_part(name, result, request, session)
            lines += _next_steps(run, result, request, command + option)
        else:
            lines += _explain_whole(name, result, len(names) == 1, command + option)
    if as_json:
        from simkv.report.json_answers import build_explain_answer

        print_json(build_explain_answer(results, request, session))
        return
    if len(names) > 1 and request is None and session is None:
        lines += ["", f"Explain one variant: {command} --variant {names[0]}"]
    lines += dict.fromkeys(_describe_source(planned[name].scenario) for name in names)
    show_lines(*(line for line in lines if line is not None))


def _explain_whole(name: str, result: RunResult, alone: bool, command: str) -> Iterator[str]:
    """Return the lines about a run: the full explanation if it is the only run, a short one
    otherwise.
    """
    from simkv.report.run_explanation import explain_run, explain_run_briefly

    if alone:
        return explain_run(name, result, partial("{} {}".format, command))
    return explain_run_briefly(name, result)


def _explain_part(
    name: str, result: RunResult, request: int | None, session: int | None
) -> Iterator[str]:
    """Return the lines about one request or session of a run."""
    from simkv.report.run_explanation import explain_request
    from simkv.report.session_explanation import explain_session

    if request is not None:
        return explain_request(name, result, request)
    assert session is not None
    return explain_session(name, result, session)


def _next_steps(run: Path, result: RunResult, request: int | None, command: str) -> list[str]:
    """Return lines that suggest the next command after the explanation of a request or session."""
    if request is None:
        return ["", f"Explain one request: {command} REQUEST"]
    return _report_link(run, result, request)


def _check_request(
    scenarios: Mapping[str, Scenario], request: int | None, session: int | None
) -> None:
    """Raise InputError if the request does not exist, or if a session is given as well."""
    if request is None:
        return
    if session is not None:
        raise InputError(
            f"explain: --session {session} cannot be combined with a request id, got {request}"
        )
    for scenario in scenarios.values():
        size = scenario.workload.size
        if request >= size:
            raise InputError(
                f"request {request}: there is no such request; expected an id from 0 to {size - 1}"
            )


def _check_session(result: RunResult, session: int | None) -> None:
    """Raise InputError if the run has no session with this number."""
    from simkv.metrics.session_turns import list_sessions

    if session is None:
        return
    if not result.run.clients.after:
        raise InputError(
            f"--session {session}: this workload has no sessions, because no request waits for an "
            "answer; explain a request by its id"
        )
    size = len(list_sessions(result.record, result.run.clients))
    if session >= size:
        raise InputError(
            f"--session {session}: there is no such session; expected a number from 0 to {size - 1}"
        )


def _describe_source(scenario: Scenario) -> str | None:
    """Return a line about the engine code that decided; None for simkv's own scheduler."""
    if not getattr(scenario.engine, "source", None):
        return None
    from simkv.scenario.native_engine import describe_source

    return f"Decided by: {describe_source(scenario.engine)}"


def _report_link(run: Path, result: RunResult, request: int) -> list[str]:
    """Return lines with the address that opens the report at the request's longest interval."""
    from simkv.report.report_runs import find_report_path

    longest = max(result.diagnosis.ledger[request], key=lambda one: one.seconds, default=None)
    at = 0.0 if longest is None else longest.start
    page = f"{find_report_path([run])}#t={at:.6g}&request={request}"
    return [f"Inspect its longest interval: simkv report {quote(str(run))}", f"  then open {page}"]
