"""Results directory of a run: metrics, tables and plots, written completely or not at all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simkv.core.atomic_files import (
    atomic_folder,
    check_folder,
    translate_disk_errors,
    write_text,
)
from simkv.core.csv_writer import write_rows
from simkv.core.errors import InputError
from simkv.core.version import __version__
from simkv.explain.diagnosis import ledger_rows, preemption_rows
from simkv.metrics.run_result import RunResult
from simkv.report.published_figures import PublishedComparison
from simkv.scenario.run_fields import find_custom_sources
from simkv.scenario.scenario_writer import to_yaml

#: File that identifies a directory as the result of a run of simkv, which may be replaced.
MARKER_FILE = "summary.json"
#: Files that simkv writes to a results directory and replaces in it.
RUN_FILES = (
    MARKER_FILE,
    "requests.csv",
    "steps.csv",
    "ledger.csv",
    "preemptions.csv",
    "passes.csv",
    "decisions-*.jsonl.gz",
    "scenario.yaml",
    "lanes.png",
    "latency.png",
    "pressure.png",
    "fleet.png",
    "report.html",
)


def check_run_folder(folder: Path) -> None:
    """Raise InputError if ``folder`` must not be replaced by a run.

    The current directory and directories with other files are not replaced.
    """
    check_folder("--out", folder, "earlier run", _is_run)
    if folder.resolve() == Path.cwd():
        raise InputError(
            f"--out {folder}: is the current directory; expected a new or empty directory"
        )
    if folder.exists():  # an earlier run is replaced by a rename in its parent directory
        check_folder("--out", folder.absolute().parent)


def _is_run(folder: Path) -> bool:
    """Return whether the directory contains the files of a run."""
    try:
        summary = json.loads((folder / MARKER_FILE).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and {"version", "variants"} <= summary.keys()


def write_run(
    folder: Path,
    results: dict[str, RunResult],
    comparisons: Sequence[PublishedComparison],
    draw: Callable[[Path], Any],
    *,
    steps: bool = False,
    ledger: bool = False,
) -> list[str]:
    """Write a run to ``folder``, replacing an earlier run, and return the names of the files.

    ``draw`` writes the plots to the directory that it is called with. ``steps`` adds ``steps.csv``.
    ``ledger`` adds ``ledger.csv`` and ``preemptions.csv``.
    """
    with atomic_run_folder(folder) as new:
        _write_all(new, results, comparisons)
        if steps:
            _write_rows(new / "steps.csv", results, lambda name, r: r.step_rows(name))
        if ledger:
            _write_rows(new / "ledger.csv", results, lambda n, r: ledger_rows(n, r.diagnosis))
            _write_rows(
                new / "preemptions.csv",
                results,
                lambda n, r: preemption_rows(n, r.diagnosis),
                ("variant", "at_s", "victim", "by", "why", "tokens"),
            )
        draw(new)
        return sorted(path.name for path in new.iterdir())


@contextmanager
def atomic_run_folder(folder: Path) -> Iterator[Path]:
    """Yield a new directory that replaces the run in ``folder`` at the end, unless an error occurs.

    Other files in ``folder`` are retained. Raises InputError if a run must not be written to
    ``folder``.
    """
    check_run_folder(folder)
    with atomic_folder(folder, RUN_FILES) as new:
        yield new


def _write_rows(
    file: Path,
    results: dict[str, RunResult],
    rows_of: Callable[[str, RunResult], list[dict[str, Any]]],
    columns: Sequence[str] | None = None,
) -> None:
    """Write a table with the rows of all variants. An empty table has the header ``columns``."""
    rows = [row for name, result in results.items() for row in rows_of(name, result)]
    write_rows(file, rows, columns)


def _write_all(
    folder: Path, results: dict[str, RunResult], comparisons: Sequence[PublishedComparison]
) -> None:
    scenario = next(iter(results.values())).scenario
    summary = {
        "scenario": scenario.name,
        "version": __version__,
        "report": scenario.report,
        "provenance": scenario.provenance.model_dump(),
        "variants": {
            name: {
                **result.summary,
                "verdicts": [verdict.to_json() for verdict in result.diagnosis.verdicts],
                "diagnosis": result.diagnosis.figures(),
                "profile": _profile(result),
            }
            for name, result in results.items()
        },
        "published": [
            {
                "variant": row.variant,
                "figure": row.figure,
                "published": row.published,
                "bound": row.bound,
                "simulated": row.simulated,
                "error": row.error,
            }
            for row in comparisons
        ],
    }
    write_text(folder / MARKER_FILE, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    _write_rows(folder / "requests.csv", results, lambda name, r: r.request_rows(name))
    write_text(folder / "scenario.yaml", to_yaml({n: r.scenario for n, r in results.items()}))
    for result in results.values():
        for name, profile in result.profiles.items():
            if name.endswith(".json"):
                text = profile.model_dump_json(indent=1, exclude_none=True)
                write_text(folder / Path(name).name, text + "\n")
    _write_sources(folder, results.values())


def _write_sources(folder: Path, results: Iterable[RunResult]) -> None:
    """Write copies of the custom scheduler files to the results directory."""
    kept: dict[str, bytes] = {}
    for result in results:
        for source in find_custom_sources(result.scenario).values():
            name = Path(source.path).name
            if kept.setdefault(name, source.code) != source.code:
                raise InputError(
                    f"{source.path}: two variants use different scheduler files named {name}; "
                    "rename one of them"
                )
    for name, code in kept.items():
        with translate_disk_errors(folder / name, "written"):
            (folder / name).write_bytes(code)


def _profile(result: RunResult) -> dict[str, Any]:
    profile = result.profile
    return {
        "name": profile.name,
        "gpu": profile.gpu,
        "basis": profile.basis,
        "rms_s": profile.fit.rms_s,
    }
