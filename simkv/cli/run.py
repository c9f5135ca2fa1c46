"""``simkv run``: run the variants of a scenario and compare them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import (
    Junit,
    Overrides,
    Perfetto,
    ScenarioArgument,
    Trust,
    progress,
    show,
    warn_overruled,
)
from simkv.core.atomic_files import check_file
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.metrics.run_result import RunResult


def run(
    scenario: ScenarioArgument,
    set_: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Write results to this directory (default: runs/<scenario>/)."
        ),
    ] = None,
    steps: Annotated[bool, typer.Option(help="Write steps.csv, with one row per step.")] = False,
    ledger: Annotated[
        bool,
        typer.Option(help="Write ledger.csv (time of each request by cause) and preemptions.csv."),
    ] = False,
    plots: Annotated[
        bool | None,
        typer.Option(help="Render plots (default: plots that render within one second in total)."),
    ] = None,
    leap: Annotated[
        bool, typer.Option(help="Combine repeated decode steps: faster, same results.")
    ] = True,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Print the full report: all metrics per variant, sources and expectations.",
        ),
    ] = False,
    junit: Junit = None,
    perfetto: Perfetto = None,
    emit: Annotated[
        str | None,
        typer.Option(
            metavar="KINDS",
            help="Also write the files of a real server, comma-separated: vllm-log, "
            "vllm-log-requests, vllm-log-iterations, sglang-log, otel, prometheus, bench.",
        ),
    ] = None,
    _trusted: Trust = False,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Always exit 0, even if requests failed.")
    ] = False,
) -> None:
    """Run a scenario and compare its variants.

    Print the results and write tables and plots. Exit 0 if every request finished or was cut off by
    the scenario's horizon; 3 if a request starved, timed out, stalled, was lost or was rejected in
    any variant. If the scenario has expectations, they decide instead: 0 if all hold, 1 if not.
    Exit 2 for bad input.
    """
    from simkv.report.run_files import check_run_folder
    from simkv.scenario.packaged_scenarios import find_scenario
    from simkv.scenario.scenario_loader import load

    scenario = find_scenario(scenario)
    variants = load(scenario, set_ or [])
    name = next(iter(variants.values())).name
    folder = out or Path("runs") / name
    check_run_folder(folder)
    if junit:
        check_file("--junit", junit)
    if perfetto:
        check_file("--perfetto", perfetto)
    kinds = _kinds(emit)
    warn_overruled(scenario, set_ or [])

    from simkv.metrics.expectation_checks import check_expectations, exit_code
    from simkv.metrics.run_result import records_by_replica
    from simkv.metrics.scenario_runner import run_scenario
    from simkv.report.console_details import render_full_results
    from simkv.report.console_summary import render_brief
    from simkv.report.published_figures import compare_published
    from simkv.report.run_files import write_run

    results = {}
    with progress("requests", sum(loaded.workload.size for loaded in variants.values())) as advance:
        for variant, loaded in variants.items():
            results[variant] = run_scenario(loaded, scenario.parent, advance, leaping=leap)
    comparisons = compare_published(results)

    left_out: list[str] = []

    def draw(target: Path) -> None:
        if plots is not False:
            from simkv.report.run_plots import write_run_plots

            left_out.extend(write_run_plots(results, name, target, everything=bool(plots)))

    checks = check_expectations(results)
    parts = list((render_full_results if full else render_brief)(results, comparisons, checks))
    try:
        written = write_run(folder, results, comparisons, draw, steps=steps, ledger=ledger)
    except (InputError, OSError):  # on a full disk, print the results before the error
        show(*parts)
        raise
    show(*parts)
    rest = f" (--plots adds {', '.join(left_out)})" if left_out else ""
    show(f"\nWritten to {folder}: {', '.join(written)}{rest}")
    if perfetto:
        from simkv.report.perfetto_trace import write_perfetto

        write_perfetto(perfetto, records_by_replica(results), name)
        show(f"Written to {perfetto}; open it with ui.perfetto.dev")
    _emit(folder, results, kinds)
    if junit:
        from simkv.report.junit_xml import write_junit

        write_junit(junit, {name: checks})
    if not exit_zero:
        raise typer.Exit(exit_code(results.values(), checks))


def _kinds(text: str | None) -> tuple[str, ...]:
    """Parse the kinds of files that ``--emit`` requests."""
    if text is None:
        return ()
    from simkv.incident.emit.emitted_files import parse_kinds

    return parse_kinds(text)


def _emit(folder: Path, results: dict[str, RunResult], kinds: tuple[str, ...]) -> None:
    """Write files of these kinds and print their names."""
    if kinds:
        from simkv.incident.emit.emitted_files import emit

        files = emit(folder / "emitted", results, kinds)
        show(f"Server files written to: {', '.join(map(str, files))}")
