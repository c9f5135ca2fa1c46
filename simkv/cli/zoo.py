"""``simkv zoo``: the packaged incidents, replayed."""

from __future__ import annotations

from typing import Annotated

import typer

from simkv.cli.common import Junit
from simkv.core.files import check_file


def zoo(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of incidents (default: all).")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the incidents without running them.")
    ] = False,
    junit: Junit = None,
) -> None:
    """Replay the packaged public incidents.

    Exit 1 if a result differs from what the incident's report describes.
    """
    from simkv.proof.zoo import replay
    from simkv.scenario.packaged import incidents

    if junit:
        check_file("--junit", junit)
    chosen = incidents(names or [])
    results = {}
    for incident in chosen:
        about = f"{incident.name:<30} {incident.engine:<10} {incident.what}  {incident.report}"
        if list_:
            print(about)
            continue
        checks = results[incident.name] = replay(incident)
        missed = [check for check in checks if not check.ok]
        print(f"{'missed' if missed else 'ok':<7}{about}")
        for check in missed:
            print(f"       {check.variant}: {check}")
    if list_:
        return
    if junit:
        from simkv.report.junit import write_junit

        write_junit(junit, results)
    bad = sum(not check.ok for checks in results.values() for check in checks)
    total = sum(len(checks) for checks in results.values())
    print(f"{total - bad} of {total} expectations of {len(results)} incidents hold")
    if bad:
        raise typer.Exit(1)
