"""What several commands share: options, a progress bar, checks of where to write."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from simkv.core.errors import InputError

Junit = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write what was expected as JUnit XML.")
]

Perfetto = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev.")
]


INTERRUPTED = 130


class Interrupted(SystemExit):
    """An interrupt after which what is done is ``kept`` in a file."""

    def __init__(self, store: Path) -> None:
        super().__init__(INTERRUPTED)
        self.kept = f"what is done is kept in {store}, and the same command goes on from there"


@contextmanager
def requests_bar(total: int | None) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, nothing in a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("requests", total=total)
        yield lambda: bar.advance(task)


@contextmanager
def steps_bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """A bar over ``total`` pieces of work on a terminal, nothing in a pipe."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def check_file(option: str, file: Path) -> None:
    """Raise InputError if ``file`` cannot be written."""
    if file.is_dir() or not file.parent.is_dir():
        what = "is a folder" if file.is_dir() else "its folder does not exist"
        raise InputError(f"{option} {file}: {what}; expected a file in a folder that exists")


def check_folder(option: str, folder: Path | None) -> None:
    """Raise InputError if ``folder``, or one that it would be in, is a file."""
    for place in (folder, *folder.parents) if folder else ():
        if place.exists() and not place.is_dir():
            raise InputError(f"{option} {place}: is a file; expected a folder")


def check_own_folder(folder: Path, store: str, what: str) -> None:
    """Raise InputError if ``folder`` holds anything but a former ``what``, known by a ``store``."""
    if folder.exists() and not folder.is_dir():
        raise InputError(f"--out {folder}: is a file; expected a folder for the {what}")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / store).is_file():
        raise InputError(
            f"--out {folder}: holds other files and no {what}; expected a new or empty folder"
        )


@contextmanager
def runs_bar() -> Iterator[Callable[[int, int], None]]:
    """On a terminal a bar with the time that is left; nothing in a pipe."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns,
        console=console,
        transient=True,
        speed_estimate_period=3600,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("runs", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
