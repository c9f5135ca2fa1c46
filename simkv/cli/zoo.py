"""``simkv zoo``: replay the packaged incidents."""

from __future__ import annotations

from typing import Annotated

import typer

from simkv.cli.command_support import AsJson, Junit, print_json
from simkv.core.atomic_files import check_file


def zoo(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of incidents (default: all).")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the incidents without running them.")
    ] = False,
    junit: Junit = None,
    as_json: AsJson = False,
) -> None:
    """Replay the packaged public incidents.

    Exit 1 if a result differs from the public report of the incident.
    """
    from simkv.scenario.packaged_scenarios import find_incidents
    from simkv.validation.zoo import replay_incident

    if junit:
        check_file("--junit", junit)
    chosen = find_incidents(names or [])
    results = {}
    for incident in chosen:
        about = f"{incident.name:<30} {incident.engine:<10} {incident.what}  {incident.report}"
        if list_:
            print(about)
            continue
        checks = results[incident.name] = replay_incident(incident)
        missed = [check for check in checks if not check.ok]
        if as_json:
            continue
        print(f"{'missed' if missed else 'ok':<7}{about}")
        for check in missed:
            print(f"       {check.variant}: {check}")
    if list_:
        return
    if junit:
        from simkv.report.junit_xml import write_junit

        write_junit(junit, results)
    bad = sum(not check.ok for checks in results.values() for check in checks)
    total = sum(len(checks) for checks in results.values())
    if as_json:
        from simkv.report.json_answers import build_zoo_answer

        print_json(build_zoo_answer(results))
    else:
        print(f"{total - bad} of {total} expectations of {len(results)} incidents hold")
    if bad:
        raise typer.Exit(1)
