"""Options of commands that run many jobs: executor, and the directory that stores results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from simkv.cli.command_support import (
    AdvanceBar,
    Interrupted,
    print_error,
    progress,
)
from simkv.core.atomic_files import check_folder

if TYPE_CHECKING:
    from simkv.study.job_runner import JobRunner

Jobs = Annotated[
    int | None, typer.Option(min=1, help="Maximum number of processes (default: one per core).")
]
ExecutorOption = Annotated[
    Literal["local", "ray"], typer.Option(help="Run on this machine or on a Ray cluster.")
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
    """Raise InputError if the directory contains anything but ``kind`` of results."""
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

    Exits if runs fail or on an interrupt.
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
