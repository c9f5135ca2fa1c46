"""Commands: parse, call, print."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv import __version__
from simkv.errors import InputError

if TYPE_CHECKING:
    from simkv.conform import Result as TraceResult

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="A flight simulator for LLM-serving schedulers: who was served when, who starved, why.",
)


def main() -> None:
    """Entry point: bad input ends in one message and exit code 2, an interrupt in 130."""
    try:
        app()
    except InputError as error:
        print(f"simkv: {error}".replace("\n", "\nsimkv: "), file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("simkv: interrupted; nothing was written", file=sys.stderr)
        sys.exit(130)
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


@app.command()
def run(
    scenario: Annotated[Path, typer.Argument(help="A scenario file (YAML).")],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field; may be repeated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results; default runs/<scenario>/.")
    ] = None,
    steps: Annotated[bool, typer.Option(help="Also write steps.csv, one row per step.")] = False,
    plots: Annotated[bool, typer.Option(help="Draw the pictures.")] = True,
) -> None:
    """Run a scenario's variants side by side; print the figures and write tables and pictures."""
    from simkv.report.files import check_folder
    from simkv.scenario import load

    variants = load(scenario, set_ or [])
    name = next(iter(variants.values())).name
    folder = out or Path("runs") / name
    check_folder(folder)

    from rich.console import Console

    from simkv.report.console import print_results, say
    from simkv.report.files import write_run
    from simkv.report.published import compare
    from simkv.run import run_scenario

    results = {}
    with _progress(sum(loaded.workload.size for loaded in variants.values())) as advance:
        for variant, loaded in variants.items():
            results[variant] = run_scenario(loaded, scenario.parent, advance)
    comparisons = compare(results)

    def draw(target: Path) -> None:
        if plots:
            from simkv.report.plots import write_plots

            records = {variant: result.record for variant, result in results.items()}
            write_plots(records, name, target)

    write_run(folder, results, comparisons, draw, steps=steps)
    console = Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    print_results(console, results, comparisons)
    say(console, f"\nWritten to {folder}: {', '.join(sorted(p.name for p in folder.iterdir()))}")


@contextmanager
def _progress(total: int) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing in a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)


@app.command()
def conform(
    files: Annotated[list[Path], typer.Argument(help="Recorded decision traces (.jsonl[.gz]).")],
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only differences.")] = False,
) -> None:
    """Replay recorded decisions of real engines; exit 1 at a difference, 2 on bad input."""
    from rich.console import Console
    from rich.progress import track

    from simkv.conform import check
    from simkv.conform.trace import TraceError

    console = Console(stderr=True)
    different = bad = 0
    for path in track(files, console=console, transient=True, disable=not console.is_terminal):
        try:
            result = check(path)
        except TraceError as error:
            print(f"simkv: {error}", file=sys.stderr)
            bad += 1
            continue
        different += result.difference is not None
        if result.difference or not quiet:
            print(_trace_report(result))
    equal = len(files) - different - bad
    print(f"{equal} of {len(files)} traces equal")
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
    from simkv.schedulers import ENGINES, variants

    for engine in ENGINES:
        for name, variant in variants(engine).items():
            print(f"{engine:<12}{name:<24}{variant.source}\n{'':<36}{variant.summary}")


if __name__ == "__main__":
    main()
