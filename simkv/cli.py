"""Commands: parse, call, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv import __version__, cli_counterfactual, cli_explain, cli_sweep, cli_trace
from simkv.errors import InputError
from simkv.gpu import cli as cli_gpu

if TYPE_CHECKING:
    from simkv.conform import Result as TraceResult

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A flight simulator for LLM-serving schedulers: who was served when, who starved, why.",
)
app.command()(cli_sweep.sweep)
app.command()(cli_explain.explain)
app.add_typer(cli_trace.app, name="trace")
app.add_typer(cli_counterfactual.app)
app.add_typer(cli_gpu.app, name="gpu")
app.command()(cli_gpu.calibrate)


INTERRUPTED = 130


def main() -> None:
    """Entry point: bad input ends in one message and exit code 2, an interrupt in 130."""
    try:
        app()
    except InputError as error:
        print(f"simkv: {error}".replace("\n", "\nsimkv: "), file=sys.stderr)
        sys.exit(2)
    except SystemExit as end:  # typer turns an interrupt into this
        if end.code == INTERRUPTED:
            print("simkv: interrupted; nothing was written", file=sys.stderr)
        raise
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"simkv {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options before the command."""


Junit = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what was expected as JUnit XML.")
]

Perfetto = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")
]


@app.command()
def run(
    scenario: Annotated[
        Path, typer.Argument(help="A scenario file (YAML), or the name of a packaged one.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; default runs/<scenario>/.")
    ] = None,
    steps: Annotated[bool, typer.Option(help="Also write steps.csv, one row per step.")] = False,
    plots: Annotated[bool, typer.Option(help="Draw the pictures.")] = True,
    leap: Annotated[
        bool, typer.Option(help="Leap over dull stretches; changes nothing but the time it takes.")
    ] = True,
    junit: Junit = None,
    perfetto: Perfetto = None,
    exit_zero: Annotated[
        bool, typer.Option("--exit-zero", help="Exit 0 whoever starved; for those who only look.")
    ] = False,
) -> None:
    """Run a scenario's variants side by side; print the figures and write tables and pictures.

    Exit 0 if every request was served, or cut off by the scenario's own horizon; 3 if one starved,
    stalled, was lost or rejected in any variant. Where the scenario expects something, that
    decides instead: 0 if all of it comes true, 1 if not. 2 is bad input.
    """
    from simkv.report.files import check_folder
    from simkv.report.junit import check_target, write_junit
    from simkv.scenario import load
    from simkv.zoo import find

    scenario = find(scenario)
    variants = load(scenario, set_ or [])
    name = next(iter(variants.values())).name
    folder = out or Path("runs") / name
    check_folder(folder)
    if junit:
        check_target(junit)
    if perfetto:
        _check_file("--perfetto", perfetto)

    from rich.console import Console

    from simkv.expect import check, exit_code
    from simkv.report.checks import print_checks
    from simkv.report.console import print_results, say
    from simkv.report.files import write_run
    from simkv.report.published import compare
    from simkv.run import run_scenario

    results = {}
    with _progress(sum(loaded.workload.size for loaded in variants.values())) as advance:
        for variant, loaded in variants.items():
            results[variant] = run_scenario(loaded, scenario.parent, advance, leaping=leap)
    comparisons = compare(results)

    def draw(target: Path) -> None:
        if plots:
            from simkv.report.plots import write_plots

            records = {variant: result.record for variant, result in results.items()}
            write_plots(records, name, target)

    write_run(folder, results, comparisons, draw, steps=steps)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    print_results(console, results, comparisons)
    checks = check(results)
    if checks:
        say(console, "\nExpected")
        print_checks(console, checks)
    say(console, f"\nWritten to {folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")
    if perfetto:
        from simkv.report.perfetto import write_perfetto

        write_perfetto(perfetto, {variant: r.record for variant, r in results.items()}, name)
        say(console, f"Written {perfetto}: open it with ui.perfetto.dev")
    if junit:
        write_junit(junit, {name: checks})
    if not exit_zero:
        raise typer.Exit(exit_code(results.values(), checks))


@contextmanager
def _progress(total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing in a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)


def _check_file(option: str, file: Path) -> None:
    """Raise InputError if ``file`` cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else "its folder does not exist"
        raise InputError(f"{option} {file}: {what}; expected a file in a folder that exists")


@app.command()
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN…", help="Run folders, scenario files or names of packaged scenarios."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="The page; default RUN/report.html or runs/<scenario>.html."
        ),
    ] = None,
    perfetto: Perfetto = None,
    whatif: Annotated[
        bool | None,
        typer.Option(
            help="Try single changes and name those that would help; default for small workloads."
        ),
    ] = None,
    gallery: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write reports of the zoo and an index instead."),
    ] = None,
) -> None:
    """Explain runs on one HTML page: who starved, behind whom, and what would fix it.

    Runs are deterministic, so they are run again from their scenarios.
    """
    if gallery:
        _report_gallery(gallery, runs or [], whatif is not False)
        return
    if not runs:
        raise InputError("report: nothing to report on; expected run folders, files or names")
    from simkv.report.html import write_html
    from simkv.report.perfetto import write_perfetto
    from simkv.report.runs import QUICK, page_of, plan, remedies, run_all
    from simkv.report.story import first_to_look_at

    planned = plan(runs)
    page = out or page_of(runs)
    if out:
        _check_file("--out", out)
    if perfetto:
        _check_file("--perfetto", perfetto)
    with _progress(sum(variant.scenario.workload.size for variant in planned.values())) as advance:
        results = run_all(planned, advance)
    lead = planned[first_to_look_at(results)]
    changes: list[str] = []
    if lead.scenario.workload.size <= QUICK if whatif is None else whatif:
        with _progress(None) as advance:
            changes = remedies(lead, advance)
    page.parent.mkdir(parents=True, exist_ok=True)
    write_html(page, results, changes)
    print(f"Written {page}")
    if perfetto:
        records = {name: result.record for name, result in results.items()}
        write_perfetto(perfetto, records, next(iter(results.values())).scenario.name)
        print(f"Written {perfetto}: open it with ui.perfetto.dev")


def _report_gallery(folder: Path, names: list[Path], whatif: bool) -> None:
    from simkv.report.gallery import check_gallery, write_gallery
    from simkv.zoo import incidents

    check_gallery(folder)
    chosen = incidents(str(name) for name in names)
    written = write_gallery(folder, chosen, print, whatif=whatif)
    size = sum(path.stat().st_size for path in written)
    print(f"Written {len(written)} files, {size / 1e6:.1f} MB; start with {folder}/index.html")


@app.command()
def zoo(
    names: Annotated[list[str] | None, typer.Argument(help="Incidents; default all.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List them and run nothing.")] = False,
    junit: Junit = None,
) -> None:
    """Replay public incidents of starvation; exit 1 if one does not come out as expected."""
    from simkv.report.junit import check_target, write_junit
    from simkv.zoo import incidents, replay

    if junit:
        check_target(junit)
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
        write_junit(junit, results)
    bad = sum(not check.ok for checks in results.values() for check in checks)
    total = sum(len(checks) for checks in results.values())
    print(f"{total - bad} of {total} expectations of {len(results)} incidents hold")
    if bad:
        raise typer.Exit(1)


@app.command()
def conform(
    files: Annotated[list[Path], typer.Argument(help="Recorded decision traces (.jsonl[.gz]).")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only differences.")] = False,
    count: Annotated[
        bool, typer.Option("--count", help="Print only how many each variant reproduces, as JSON.")
    ] = False,
) -> None:
    """Replay recorded decisions of real engines; exit 1 at a difference, 2 on bad input."""
    from rich.console import Console
    from rich.progress import track

    from simkv.conform import check
    from simkv.conform.count import count as count_by_variant
    from simkv.conform.trace import TraceError

    console = Console(stderr=True)
    results = []
    bad = 0
    for path in track(files, console=console, transient=True, disable=not console.is_terminal):
        try:
            result = check(path)
        except TraceError as error:
            print(f"simkv: {error}", file=sys.stderr)
            bad += 1
            continue
        results.append(result)
        if not count and (result.difference or not quiet):
            print(_trace_report(result))
    different = sum(result.difference is not None for result in results)
    if count:
        print(json.dumps(count_by_variant(results), indent=1))
    else:
        print(f"{len(results) - different} of {len(files)} traces equal")
    if bad or different:
        raise typer.Exit(2 if bad else 1)


def _trace_report(result: TraceResult) -> str:
    """``FILE: ok …``, or the first step that differs, both sides."""
    engine = f"{result.engine} {result.variant}"
    found = result.difference
    if found is None:
        return f"{result.path}: ok ({engine}, {result.steps} steps)"
    lines = [f"{result.path}: differs at step {found.step} ({engine})"]
    for field, recorded in found.recorded.items():
        lines.append(f"  {field}")
        lines.append(f"    recorded:  {json.dumps(recorded)}")
        lines.append(f"    simulated: {json.dumps(found.simulated.get(field))}")
    return "\n".join(lines)


@app.command()
def schema() -> None:
    """Print the JSON schema of scenario files, for editors."""
    from simkv.scenario import json_schema

    print(json.dumps(json_schema(), indent=1))


@app.command()
def policies() -> None:
    """List the engines and variants whose decisions simkv makes, and where they come from."""
    from simkv.conform.count import shipped
    from simkv.schedulers import ENGINES, variants

    counts = shipped()
    for engine in ENGINES:
        for name, variant in variants(engine).items():
            found = counts[engine].get(name)
            traces = (
                f"reproduces {found['equal']} of {found['recorded']} recorded traces"
                if found
                else "never recorded"
            )
            print(f"{engine:<12}{name:<24}{traces}")
            print(f"{'':<36}{variant.source}\n{'':<36}{variant.summary}")


if __name__ == "__main__":
    main()
