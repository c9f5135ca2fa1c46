"""Helpers shared by commands: options, console and progress bar."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

Junit = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Write the results of expectations to this file as JUnit XML."
    ),
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
        help="Allow execution of custom scheduler files that the scenario names.",
    ),
]

INTERRUPTED = 130


class Interrupted(SystemExit):
    """Interrupt of a command that stores finished work in a file; ``kept`` is the message."""

    def __init__(self, store: Path) -> None:
        super().__init__(INTERRUPTED)
        self.kept = f"finished runs are stored in {store}; repeat the command to resume"


def console(*, stderr: bool = False) -> Console:
    """Return the console of a command: as wide as the terminal, or 160 columns in a pipe."""
    from rich.console import Console

    terminal = (sys.stderr if stderr else sys.stdout).isatty()
    width = None if terminal else 160
    return Console(stderr=stderr, width=width, highlight=False, markup=False, emoji=False)


def show(*parts: RenderableType, on: Console | None = None) -> None:
    """Print lines verbatim (no markup, wrapping or number colors), and tables."""
    from rich.text import Text

    out = on or console()
    for part in parts:
        if isinstance(part, str):
            out.print(Text(part), soft_wrap=True)
        else:
            out.print(part)


def print_error(what: object) -> None:
    """Print to standard error, each line prefixed with the program's name."""
    print(f"simkv: {what}".replace("\n", "\nsimkv: "), file=sys.stderr)


def warn_overruled(scenario: Path, assignments: Sequence[str]) -> None:
    """Print a note on standard error for each ``--set`` that has no effect on some variant."""
    if assignments:
        from simkv.scenario.variant_precedence import override_notes
        from simkv.scenario.yaml_document import read_document

        for note in override_notes(read_document(scenario), assignments):
            print_error(f"note: {note}")


class AdvanceBar(Protocol):
    """Advances a progress bar by one, or to ``done`` of ``total``; ``now`` replaces its label."""

    def __call__(
        self, done: int | None = None, total: int | None = None, now: str | None = None
    ) -> None: ...


@contextmanager
def progress(
    what: str, total: int | None = None, *, file: Path | None = None
) -> Iterator[AdvanceBar]:
    """Yield a progress bar on a terminal; in a pipe nothing is shown.

    With ``file`` the bar shows the bytes that have been read.
    """
    where = console(stderr=True)
    if file and file.is_file():
        total = file.stat().st_size
    if not where.is_terminal:
        yield lambda *_, **__: None
        return
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn() if file else MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=where,
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
