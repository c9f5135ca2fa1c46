"""``simkv run``: run the variants of a scenario and compare them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import (
    AsJson,
    Junit,
    OptionalScenario,
    Overrides,
    Perfetto,
    Source,
    Trust,
    Verbatim,
    check_variant,
    print_json,
    progress,
    show,
    warn_overruled,
)
from simkv.cli.scenario_flags import add_scenario_flags, find_document, options_of, print_notes
from simkv.core.atomic_files import check_file
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from simkv.metrics.run_result import RunResult
    from simkv.scenario.scenario import Scenario
    from simkv.scenario.scenario_builder import BuiltScenario


def run(
    scenario: OptionalScenario = None,
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Run only this variant (default: all)."),
    ] = None,
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
        typer.Option(
            help="Write ledger.csv (waiting and running time of each request, by cause) and "
            "preemptions.csv."
        ),
    ] = False,
    plots: Annotated[
        bool | None,
        typer.Option(help="Render plots (default: plots that render within one second in total)."),
    ] = None,
    leap: Annotated[
        bool,
        typer.Option(
            help="Simulate consecutive equal decode steps as one event. This is faster and gives "
            "the same results."
        ),
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
            help="Also write files as a real server or benchmark would. KINDS is a "
            "comma-separated list of vllm-log, vllm-log-requests, vllm-log-iterations, "
            "sglang-log, otel, prometheus and bench.",
        ),
    ] = None,
    _source: Source = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Also run the engine's own scheduler code from this checkout or wheel, compare "
            "its decisions with simkv's reimplementation, and print the first difference. Exit 1 "
            "if there is a difference.",
        ),
    ] = None,
    pdb_at_step: Annotated[
        int | None,
        typer.Option(
            "--pdb-at-step",
            min=0,
            metavar="N",
            help="With --source: start the Python debugger (pdb) in the engine's own scheduler at "
            "this step.",
        ),
    ] = None,
    _trusted: Trust = False,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Always exit 0, even if requests failed.")
    ] = False,
    seeds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of random seeds to run. With 2 or more, also report confidence "
            "intervals, and whether the load reached a steady state.",
        ),
    ] = 1,
    prices: Annotated[
        str | None,
        typer.Option(
            metavar="FILE[#NAME]",
            help="File with prices per GPU hour. With prices, the output shows the cost of tokens.",
        ),
    ] = None,
    gpu_price: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GPU=PRICE", help="Price per GPU hour, such as H100=2.5; may be repeated."
        ),
    ] = None,
    as_json: AsJson = False,
    **described: Any,
) -> None:
    """Run a scenario and compare its variants.

    Give a scenario file, or describe the server and its load with options such as --gpu, --model
    and --request-rate. The command prints the results and writes tables and plots. Exit 0 if every
    request finished or was still unfinished at the scenario's horizon. Exit 3 if a request starved,
    timed out, stalled, was lost or was rejected in any variant. If the scenario has expectations,
    exit 0 if all of them hold and 1 otherwise. Exit 2 for bad input.
    """
    from simkv.report.run_files import check_run_folder
    from simkv.scenario.scenario_loader import (
        list_variant_names,
        resolve_variants,
        select_variant,
    )

    _use_source(against, pdb_at_step)
    cost_of = _cost_reader(prices, gpu_price or [])
    document, built = find_document(scenario, options_of(described))
    where = document.path.parent
    if variant is not None:
        check_variant(variant, list_variant_names(document))
        select_variant(document, variant)
    variants = resolve_variants(document.copy(), set_ or [])
    print_notes(built)
    warn_overruled(document, set_ or [])
    _compare_with_port(against, variants, where)
    name = next(iter(variants.values())).name
    folder = out or Path("runs") / name
    check_run_folder(folder)
    _check_files(junit, perfetto)
    kinds = _kinds(emit, variants)
    from simkv.metrics.expectation_checks import check_expectations, exit_code
    from simkv.metrics.scenario_runner import run_scenario
    from simkv.report.console_details import render_full_results
    from simkv.report.console_summary import render_brief
    from simkv.report.published_figures import compare_published
    from simkv.report.run_files import write_run

    results = {}
    with progress("requests", sum(loaded.workload.size for loaded in variants.values())) as advance:
        for label, loaded in variants.items():
            results[label] = run_scenario(loaded, where, advance, leaping=leap)
    comparisons = compare_published(results)

    left_out: list[str] = []

    def draw(target: Path) -> None:
        if plots is not False:
            from simkv.report.run_plots import write_run_plots

            left_out.extend(write_run_plots(results, name, target, everything=bool(plots)))

    checks = check_expectations(results)
    render = render_full_results if full else render_brief
    parts: list[RenderableType] = []
    try:
        with progress("tables and plots"):
            parts += [] if as_json else render(results, comparisons, checks)
            written = write_run(folder, results, comparisons, draw, steps=steps, ledger=ledger)
    except (InputError, OSError):  # on a full disk, print the results before the error
        show(*parts)
        raise
    show(*parts)
    more = [*_write_perfetto(perfetto, results, name), *_emit(folder, results, kinds)]
    if junit:
        from simkv.report.junit_xml import write_junit

        write_junit(junit, {name: checks})
    if as_json:
        from simkv.report.console_summary import summarize_results
        from simkv.report.json_answers import build_run_answer

        lines = summarize_results(results)
        print_json(build_run_answer(results, lines, checks, str(folder), written))
    else:
        if seeds > 1:
            _show_seeds(results, where, seeds)
        show(*cost_of(results), *_launch_command(built, variants), *_describe_sources(variants))
        rest = f" (--plots adds {', '.join(left_out)})" if left_out else ""
        show(f"\nWritten to {folder}: {', '.join(written)}{rest}", *more)
    if not exit_zero:
        raise typer.Exit(exit_code(results.values(), checks))


def _check_files(junit: Path | None, perfetto: Path | None) -> None:
    """Raise InputError if a file cannot be written."""
    for option, file in (("--junit", junit), ("--perfetto", perfetto)):
        if file:
            check_file(option, file)


def _launch_command(built: BuiltScenario | None, variants: Mapping[str, Scenario]) -> list[str]:
    """Return a line with the launch command, if the scenario was built from options."""
    if built is None:
        return []
    from simkv.scenario.launch_command import build_launch_command

    command = build_launch_command(next(iter(variants.values())), built.line, built.ranks)
    return [Verbatim(f"Launch command: {command}")] if command else []


def _select(variants: dict[str, Scenario], name: str | None) -> dict[str, Scenario]:
    """Return the variant with this name, or all variants if ``name`` is None."""
    check_variant(name, variants)
    return variants if name is None else {name: variants[name]}


def _use_source(against: str | None, pdb_at_step: int | None) -> None:
    """Set the engine code of ``--against`` and the step of ``--pdb-at-step`` for this process."""
    if against is not None:
        from simkv.scenario.native_engine import set_source

        set_source(against)
    if pdb_at_step is not None:
        from simkv.native.native_scheduler import debug_at

        debug_at(pdb_at_step)


def _compare_with_port(against: str | None, variants: Mapping[str, Scenario], folder: Path) -> None:
    """With ``--against``, compare the decisions of simkv and of the engine's code, and exit."""
    if against is None:
        return
    from simkv.conformance.port_comparison import DifferentDecision, compare_with_port

    differs = False
    for name, scenario in variants.items():
        try:
            found = compare_with_port(scenario, folder)
        except DifferentDecision as difference:
            differs = True
            first, *rest = difference.describe()
            show(f"{name}: {first}", *rest)
        else:
            show(f"{name}: identical over {found.steps} steps")
    show(*_describe_sources(variants))
    raise typer.Exit(int(differs))


def _describe_sources(variants: Mapping[str, Scenario]) -> list[str]:
    """Return one line for each engine code that made decisions."""
    from simkv.scenario.native_engine import describe_source

    lines = [describe_source(scenario.engine) for scenario in variants.values()]
    return [f"Decided by: {line}" for line in dict.fromkeys(lines) if line]


def _cost_reader(
    prices: str | None, gpu_price: Sequence[str]
) -> Callable[[Mapping[str, RunResult]], list[str]]:
    """Check the prices. Return a function that returns one line per run with its cost."""
    from simkv.study.plan.capacity_plan import count_gpus
    from simkv.study.plan.plan_cost import compute_cost, find_price, find_prices

    table = find_prices(prices, gpu_price)
    if table is None:
        return lambda _: []

    def describe(results: Mapping[str, RunResult]) -> list[str]:
        lines = []
        for name, result in results.items():
            gpu, gpus = table.label or result.profile.gpu, count_gpus(result.scenario, None)
            cost = compute_cost(
                gpu,
                find_price(gpu, table.table, table.source),
                gpus,
                result.summary["makespan_s"],
                result.summary["total_input_tokens"],
                result.summary["total_output_tokens"],
            )
            lines.append(f"Cost{f' of {name}' if len(results) > 1 else ''}: {cost.describe()}")
        return lines

    return describe


def _show_seeds(results: Mapping[str, RunResult], where: Path, seeds: int) -> None:
    """Run the scenario with further seeds and print intervals and the steady-state check."""
    from simkv.metrics.steady_state import check_steady_state
    from simkv.study.seed_runs import describe_seeds, run_seeds
    from simkv.study.worker_pool import cores

    for name, result in results.items():
        with progress("seeds", seeds - 1) as advance:
            summaries = run_seeds(result.scenario, where, seeds, cores(), advance)
        show(*describe_seeds(name, result, [result.summary, *summaries]))
        show(f"Steady state: {check_steady_state(result.record).text}")


def _kinds(text: str | None, variants: Mapping[str, Scenario]) -> tuple[str, ...]:
    """Parse the kinds of files that ``--emit`` requests, and check that the engines write them."""
    if text is None:
        return ()
    from simkv.incident.emit.emitted_files import check_kinds, parse_kinds

    kinds = parse_kinds(text)
    check_kinds(variants, kinds)
    return kinds


def _write_perfetto(file: Path | None, results: dict[str, RunResult], name: str) -> list[str]:
    """Write the trace that ``--perfetto`` requests; return a line with its name."""
    if file is None:
        return []
    from simkv.metrics.run_result import records_by_replica
    from simkv.report.perfetto_trace import write_perfetto

    write_perfetto(file, records_by_replica(results), name)
    return [f"Written to {file}; open it with ui.perfetto.dev"]


def _emit(folder: Path, results: dict[str, RunResult], kinds: tuple[str, ...]) -> list[str]:
    """Write files of these kinds for all results; return a line with the names of the files."""
    if not kinds:
        return []
    from simkv.incident.emit.emitted_files import emit

    files = emit(folder / "emitted", results, kinds)
    return [f"Server files written to: {', '.join(map(str, files))}"]


add_scenario_flags(run)
