"""``simkv zoo``: replay the packaged incidents, or run them on an engine's own code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import (
    AsJson,
    Jobs,
    Junit,
    Trust,
    print_json,
    progress,
    show,
)
from simkv.core.atomic_files import check_file
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from simkv.metrics.expectation_checks import ExpectationCheck
    from simkv.scenario.packaged_scenarios import PackagedIncident
    from simkv.validation.source_comparison import SourceComparison


def zoo(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of incidents (default: all).")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the incidents without running them.")
    ] = False,
    source: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Run the incidents of an engine with the engine's own scheduler code from this "
            "checkout, wheel or folder, and compare the results with the newest release. "
            "Requires --trust.",
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="RELEASE",
            help="Compare --source with this release: a version number, or 'source' for the "
            "release that the code in --source comes from (default: the newest release).",
        ),
    ] = None,
    tolerance: Annotated[
        float,
        typer.Option(
            min=0, help="With --source: show only metrics that change by at least this fraction."
        ),
    ] = 0.01,
    junit: Junit = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
    _trusted: Trust = False,
) -> None:
    """Replay the packaged public incidents.

    Exit 1 if a result differs from the public report of its incident. With --source, the command
    prints a table that shows which verdicts and metrics become better or worse. With --source, exit
    1 if requests starve or fail in an incident in which the newest release serves all requests.
    """
    from simkv.scenario.packaged_scenarios import find_incidents

    if junit:
        check_file("--junit", junit)
    chosen = find_incidents(names or [])
    if list_:
        for incident in chosen:
            print(_about(incident))
        return
    from simkv.report.json_answers import build_zoo_answer

    rows: list[SourceComparison] = []
    if source is None:
        results = _replay(chosen, quiet=as_json)
    else:
        rows = _compare(chosen, source, baseline, tolerance, jobs, named=bool(names), quiet=as_json)
        results = {}
        for row in rows:
            results.setdefault(row.incident, []).append(row.as_check())
    if junit:
        from simkv.report.junit_xml import write_junit

        write_junit(junit, results)
    if as_json:
        print_json(build_zoo_answer(results, [row.as_json() for row in rows]))
    if any(not check.ok for checks in results.values() for check in checks):
        raise typer.Exit(1)


def _about(incident: PackagedIncident) -> str:
    return f"{incident.name:<30} {incident.engine:<10} {incident.what}  {incident.report}"


def _replay(
    chosen: Sequence[PackagedIncident], *, quiet: bool
) -> dict[str, list[ExpectationCheck]]:
    """Replay the incidents; return the checked expectations by incident.

    Unless ``quiet``, print each incident with its missed expectations.
    """
    from simkv.validation.zoo import replay_incident

    results = {}
    for incident in chosen:
        checks = results[incident.name] = replay_incident(incident)
        if quiet:
            continue
        missed = [check for check in checks if not check.ok]
        print(f"{'missed' if missed else 'ok':<7}{_about(incident)}")
        for check in missed:
            print(f"       {check.variant}: {check}")
    if not quiet:
        held = [check.ok for checks in results.values() for check in checks]
        print(f"{sum(held)} of {len(held)} expectations of {len(results)} incidents hold")
    return results


def _compare(
    chosen: Sequence[PackagedIncident],
    path: Path,
    baseline: str | None,
    tolerance: float,
    jobs: int | None,
    *,
    named: bool,
    quiet: bool,
) -> list[SourceComparison]:
    """Compare a release with the engine code at ``path``; print the result unless ``quiet``.

    ``named`` is true if the user named the incidents; incidents of other engines are then an error.
    """
    from simkv.scenario.custom.code_source import is_trusted
    from simkv.validation.source_comparison import (
        compare_incidents,
        find_release,
        find_source_engine,
        load_from,
        render_comparisons,
    )

    if not is_trusted():
        raise InputError(
            f"--source {path}: this would run the code in this path; review the code, then pass "
            "--trust"
        )
    source = str(path) if str(path) == "installed" else str(path.resolve())
    engine = find_source_engine(source)
    fitting = [incident for incident in chosen if incident.engine == engine]
    if not fitting or (named and len(fitting) < len(chosen)):
        other = next(incident for incident in chosen if incident.engine != engine)
        raise InputError(
            f"{other.name}: this is an incident of {other.engine}, but {path} contains {engine}"
        )
    release = find_release(engine, source) if baseline == "source" else baseline
    with progress("runs") as advance:
        rows = compare_incidents(fitting, load_from(source), tolerance, jobs, advance, release)
    if all(row.after is None for row in rows):
        raise InputError(f"{path}: no incident can be run: {rows[0].refused}")
    if not quiet:
        show(*render_comparisons(rows, release))
    return rows
