"""``simkv diff``: compare the results of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simkv.cli.command_support import AsJson, print_json, progress, show


def diff(
    before: Annotated[Path, typer.Argument(help="Results directory of the first run.")],
    after: Annotated[Path, typer.Argument(help="Results directory of the second run.")],
    as_json: AsJson = False,
) -> None:
    """Compare the results of two runs.

    The output shows the settings and the metrics that differ, the requests whose outcomes differ,
    and the first decision that differs. simkv simulates both scenarios again to compare their
    steps. Exit 0 if the results are equal, 1 if they differ, 2 for bad input.
    """
    from simkv.report.run_diff import compare_runs, describe_diff

    with progress("runs", 2) as advance:
        found = compare_runs(before, after, lambda: advance())
    if as_json:
        from simkv.report.json_answers import build_diff_answer

        print_json(build_diff_answer(found))
    else:
        show(*describe_diff(found))
    if not found.same:
        raise typer.Exit(1)
