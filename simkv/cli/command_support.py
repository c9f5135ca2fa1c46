"""Shared options of commands, their console and progress bars, and stored jobs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import wrap
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

import typer

from simkv.core.atomic_files import check_folder
from simkv.core.errors import InputError, spelling_hint

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from simkv.report.json_answers import Answer
    from simkv.scenario.yaml_document import YamlDocument
    from simkv.study.job_runner import JobRunner

#: Minimum time between two lines of progress if standard error is no terminal.
PROGRESS_LINE_S = 10.0

Junit = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write the result of each expectation to this file as JUnit XML."
    ),
]

AsJson = Annotated[
    bool,
    typer.Option("--json", help="Print the answer as JSON; `simkv schema COMMAND` describes it."),
]

Perfetto = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev to this file."),
]


def _trust(yes: bool) -> bool:
    if yes or "simkv.scenario.custom.code_source" in sys.modules:
        from simkv.scenario.custom.code_source import set_trust

        set_trust(yes)
    return yes


Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        callback=_trust,
        help="Allow simkv to run the scheduler files and engine sources of the scenario.",
    ),
]


def _source(path: str | None) -> str | None:
    if path is not None or "simkv.scenario.native_engine" in sys.modules:
        from simkv.scenario.native_engine import set_source

        set_source(path)
    return path


Source = Annotated[
    str | None,
    typer.Option(
        "--source",
        metavar="PATH",
        callback=_source,
        help="Run the engine's own scheduler code from this checkout or wheel. If PATH is "
        "'installed', use the installed package. Requires --trust.",
    ),
]

ScenarioArgument = Annotated[
    Path, typer.Argument(help="Scenario file (YAML), or the name of a packaged scenario.")
]
OptionalScenario = Annotated[
    Path | None,
    typer.Argument(
        help="Scenario file (YAML), or the name of a packaged scenario. If omitted, describe "
        "the server (--gpu, --model or --from-command) and its load with options."
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override a field of the scenario; may be repeated."
    ),
]
VariantOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Variant of the scenario (default: the first)."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]

INTERRUPTED = 130


def check_variant(name: str | None, variants: Collection[str]) -> None:
    """Raise InputError if the scenario has no variant with the given name."""
    if name is not None and name not in variants:
        raise InputError(
            f"--variant {name}: the scenario has no such "
            f"variant{spelling_hint(name, variants)}; expected one of {', '.join(variants)}"
        )


class Interrupted(SystemExit):
    """Interrupt of a command that stores finished work in the file ``store``, if that is given.

    ``kept`` is the message about the stored work. The default message depends on whether the file
    exists.
    """

    def __init__(self, store: Path | None, kept: str | None = None) -> None:
        super().__init__(INTERRUPTED)
        stored = f"finished runs are stored in {store}; repeat the command to resume"
        self.kept = kept or (stored if store and store.is_file() else "nothing was written")


def console(*, stderr: bool = False) -> Console:
    """Return the console of a command.

    Its width is the value of the environment variable COLUMNS. If COLUMNS is not set, the console
    is as wide as the terminal, or 160 columns wide in a pipe.
    """
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if terminal or os.environ.get("COLUMNS", "").isdigit() else 160
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


class Verbatim(str):
    """A line that ``show`` never wraps, such as a command to copy."""


def show(*parts: RenderableType, on: Console | None = None) -> None:
    """Print lines without markup or number colors, and tables.

    On a terminal, or if COLUMNS is set, long lines are wrapped, and their continuation lines are
    indented.
    """
    from rich.text import Text

    out = on or console()
    wraps = out.is_terminal or os.environ.get("COLUMNS", "").isdigit()
    for part in parts:
        if not isinstance(part, str):
            out.print(part)
        elif wraps and not isinstance(part, Verbatim):
            out.print(Text(wrap_lines(part, out.width)), soft_wrap=True)
        else:
            out.print(Text(part), soft_wrap=True)


def show_lines(*lines: str) -> None:
    """Print lines like ``show``, without the time to import rich."""
    wraps = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    width = shutil.get_terminal_size().columns
    for line in lines:
        print(wrap_lines(line, width) if wraps else line)


def wrap_lines(text: str, width: int) -> str:
    """Wrap each line of a text at spaces; indent continuation lines by two more columns."""
    lines = []
    for line in text.split("\n"):
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        lines += wrap(
            line,
            width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [line]
    return "\n".join(lines)


def print_json(answer: Answer) -> None:
    """Print the answer of ``--json``."""
    print(answer.model_dump_json(indent=1))


def print_error(what: object) -> None:
    """Print to standard error, each line prefixed with the program's name."""
    print(f"simkv: {what}".replace("\n", "\nsimkv: "), file=sys.stderr)


def warn_overruled(scenario: Path | YamlDocument, assignments: Sequence[str]) -> None:
    """Print a note on standard error for each ``--set`` that has no effect on some variant."""
    if assignments:
        from simkv.scenario.variant_precedence import override_notes
        from simkv.scenario.yaml_document import read_document

        document = read_document(scenario) if isinstance(scenario, Path) else scenario.copy()
        for note in override_notes(document, assignments):
            print_error(f"note: {note}")


class AdvanceBar(Protocol):
    """Advance a progress bar by one, or to ``done`` of ``total``; ``now`` is a new label."""

    def __call__(
        self, done: int | None = None, total: int | None = None, now: str | None = None
    ) -> None: ...


class _ProgressLines:
    """Progress lines on standard error: at most one line every ``PROGRESS_LINE_S`` seconds."""

    def __init__(self, what: str, total: int | None) -> None:
        self._what, self._done, self._total = what, 0, total
        self._begin = self._last = monotonic()

    def __call__(
        self, done: int | None = None, total: int | None = None, now: str | None = None
    ) -> None:
        self._done = self._done + 1 if done is None else done
        self._what, self._total = now or self._what, total or self._total
        time = monotonic()
        if time - self._last >= PROGRESS_LINE_S:
            self._last = time
            share = f" of {self._total}" if self._total else ""
            print_error(f"{self._what}: {self._done}{share} after {time - self._begin:.0f} s")


@contextmanager
def progress(
    what: str, total: int | None = None, *, file: Path | None = None
) -> Iterator[AdvanceBar]:
    """Yield a progress bar on a terminal. In a pipe, print a line every 10 s instead.

    With ``file``, the bar shows how many of the file's bytes have been read.
    """
    if file and file.is_file():
        total = file.stat().st_size
    if not sys.stderr.isatty():
        yield _ProgressLines(what, total)
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    class TimeLeft(TimeRemainingColumn):
        """Remaining time with a label; nothing if the total is unknown."""

        def render(self, task: Task) -> Text:
            known = task.total is not None
            return Text.assemble(super().render(task), " left") if known else Text()

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn() if file else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("elapsed"),
        TimeLeft(),
        console=console(stderr=True),
        transient=True,
        speed_estimate_period=3600,
    ) as bar:
        task = bar.add_task(what, total=total)

        def advance(
            done: int | None = None, total: int | None = None, now: str | None = None
        ) -> None:
            by = 1 if done is None else None
            bar.update(task, completed=done, total=total, advance=by, description=now)

        yield advance


Jobs = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of processes (default: one per core).")
]
ExecutorOption = Annotated[
    Literal["local", "ray"],
    typer.Option(help="Where to run simulations: on this machine or on a Ray cluster."),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="ADDRESS",
        help="Address of the Ray cluster (default: RAY_ADDRESS, or a cluster started here).",
    ),
]
#: File that identifies a directory with stored runs.
STORE = "points.jsonl"


def check_store(folder: Path, kind: str) -> None:
    """Raise InputError if the directory contains files but no results of this kind."""
    check_folder("--out", folder, kind, lambda there: (there / STORE).is_file())


@contextmanager
def open_job_runner(
    folder: Path,
    jobs: int | None,
    executor: Literal["local", "ray"],
    address: str | None,
    what: str = "runs",
    total: int | None = None,
) -> Iterator[tuple[JobRunner, AdvanceBar]]:
    """Yield a job runner that stores results in the directory, and a progress bar.

    If runs fail or the user interrupts the command, the process exits.
    """
    from simkv.study.job_runner import open_pooled_runner
    from simkv.study.simulation_job import RunsFailed

    store = folder / STORE
    try:
        with (
            open_pooled_runner(store, jobs, executor, address) as bench,
            progress(what, total) as advance,
        ):
            yield bench, advance
    except KeyboardInterrupt:
        raise Interrupted(store) from None
    except RunsFailed as error:
        print_error(error)
        print_error(f"finished runs are stored in {store}")
        raise typer.Exit(1) from None
