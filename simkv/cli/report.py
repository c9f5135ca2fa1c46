"""``simkv report``: write the HTML report of runs, or the gallery of packaged incidents."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simkv.cli.command_support import Perfetto, Source, Trust, progress
from simkv.core.atomic_files import check_file, make_folder
from simkv.core.errors import InputError


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN…",
            help="Results directories, scenario files, or names of packaged scenarios.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the page to this file (default: RUN/report.html or runs/<scenario>.html).",
        ),
    ] = None,
    perfetto: Perfetto = None,
    whatif: Annotated[
        bool | None,
        typer.Option(
            help="Simulate single changes and list those that help (default: only if the "
            "workload is small and no variant fixes the problem)."
        ),
    ] = None,
    gallery: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Instead, write reports of all packaged incidents and an index page to this "
            "directory.",
        ),
    ] = None,
    _source: Source = None,
    _trusted: Trust = False,
) -> None:
    """Write an HTML report of runs with causes and fixes.

    The report shows which requests waited, which requests blocked them, and which change prevents
    the wait. For a results directory, simkv simulates its scenario again; the same scenario always
    gives the same run.
    """
    if gallery:
        _report_gallery(gallery, runs or [], whatif is not False)
        return
    if not runs:
        raise InputError(
            "report: no runs given; expected results directories, scenario files or names"
        )
    from simkv.metrics.run_result import records_by_replica, split_by_replica
    from simkv.report.html_page import write_html
    from simkv.report.narrative import find_better_variant, select_variant
    from simkv.report.perfetto_trace import write_perfetto
    from simkv.report.report_runs import (
        MAX_QUICK_REQUESTS,
        find_report_path,
        find_runs,
        remedies,
        run_all,
    )

    planned = find_runs(runs)
    page = out or find_report_path(runs)
    if out:
        check_file("--out", out)
    if perfetto:
        check_file("--perfetto", perfetto)
    size = sum(variant.scenario.workload.size for variant in planned.values())
    with progress("requests", size) as advance:
        results = run_all(planned, advance)
    name = select_variant(results)
    lead = planned[name]
    changes: list[str] = []
    if whatif is None:
        whatif = (
            lead.scenario.workload.size <= MAX_QUICK_REQUESTS
            and find_better_variant(results, name) is None
        )
    if whatif:
        with progress("runs") as advance:
            changes = remedies(lead, advance)
    make_folder(page.parent)
    write_html(page, split_by_replica(results), changes)
    print(f"Written to {page}")
    if perfetto:
        write_perfetto(
            perfetto, records_by_replica(results), next(iter(results.values())).scenario.name
        )
        print(f"Written to {perfetto}; open it with ui.perfetto.dev")


def _report_gallery(folder: Path, names: list[Path], whatif: bool) -> None:
    from simkv.report.report_gallery import check_gallery, write_gallery
    from simkv.scenario.packaged_scenarios import find_incidents

    check_gallery(folder)
    chosen = find_incidents(str(name) for name in names)
    written = write_gallery(folder, chosen, print, whatif=whatif)
    size = sum(path.stat().st_size for path in written)
    print(f"Written {len(written)} files, {size / 1e6:.1f} MB; start with {folder}/index.html")
