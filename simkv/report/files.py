"""The files that a run leaves: figures, tables and pictures, all of them or none."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from simkv.core.errors import InputError
from simkv.core.files import check_folder, replacing, write_text
from simkv.core.version import __version__
from simkv.measure.result import Result
from simkv.report.published import Comparison
from simkv.scenario.fleet import FleetSection
from simkv.scenario.scenario import Scenario
from simkv.why.diagnosis import ledger_rows, preemption_rows
from simkv.workload.workload import fields_of_others

#: By this a folder is known as one that simkv wrote and may replace.
MARK = "summary.json"
#: What simkv writes to such a folder, and so does not keep when it replaces it.
OWN = (
    MARK,
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
    "report.html",
)


def check_run_folder(folder: Path) -> None:
    """Raise InputError if ``folder`` is not one that a run may be written to."""
    check_folder("--out", folder, "earlier run", _is_run)
    if folder.resolve() == Path.cwd():
        raise InputError(
            f"--out {folder}: is the folder where simkv runs; expected a new or empty folder"
        )


def _is_run(folder: Path) -> bool:
    """Whether simkv wrote what is there."""
    try:
        summary = json.loads((folder / MARK).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(summary, dict) and {"version", "variants"} <= summary.keys()


def write_run(
    folder: Path,
    results: dict[str, Result],
    comparisons: Sequence[Comparison],
    draw: Callable[[Path], Any],
    *,
    steps: bool = False,
    ledger: bool = False,
) -> list[str]:
    """Write a run to ``folder``, in place of an earlier one, complete or not at all.

    ``draw`` writes the pictures into the folder that it is given; ``steps`` adds ``steps.csv``,
    ``ledger`` adds ``ledger.csv`` and ``preemptions.csv``. Returns the names of what it wrote.
    """
    with replacing_run(folder) as new:
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
def replacing_run(folder: Path) -> Iterator[Path]:
    """A new folder for a run, which takes the place of ``folder`` at the end, if all went well.

    What lies in ``folder`` and is not of an earlier run stays there. Raises InputError if
    ``folder`` is not one that a run may be written to.
    """
    check_run_folder(folder)
    with replacing(folder, OWN) as new:
        yield new


def _write_rows(
    file: Path,
    results: dict[str, Result],
    rows_of: Callable[[str, Result], list[dict[str, Any]]],
    columns: Sequence[str] | None = None,
) -> None:
    """A table of all variants' rows; ``columns`` where there may be none."""
    import pandas as pd

    rows = [row for name, result in results.items() for row in rows_of(name, result)]
    frame = pd.DataFrame(rows, columns=None if columns is None else list(columns))
    if "by" in frame:
        frame["by"] = frame["by"].astype("Int64")
    frame.to_csv(file, index=False, lineterminator="\n")


def _write_all(folder: Path, results: dict[str, Result], comparisons: Sequence[Comparison]) -> None:
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
    write_text(folder / MARK, json.dumps(summary, indent=1, allow_nan=False) + "\n")
    _write_rows(folder / "requests.csv", results, lambda name, r: r.request_rows(name))
    with (folder / "scenario.yaml").open("w", encoding="utf-8") as file:
        YAML().dump(resolved({name: r.scenario for name, r in results.items()}), file)
    for result in results.values():
        for name, profile in result.profiles.items():
            if name.endswith(".json"):
                text = profile.model_dump_json(indent=1, exclude_none=True)
                write_text(folder / Path(name).name, text + "\n")


def _profile(result: Result) -> dict[str, Any]:
    profile = result.profile
    return {
        "name": profile.name,
        "gpu": profile.gpu,
        "basis": profile.basis,
        "rms_s": profile.fit.rms_s,
    }


def resolved(scenarios: dict[str, Scenario]) -> dict[str, Any]:
    """A scenario file that gives this run again: overrides applied, engine defaults filled in.

    A profile that is a file is meant to lie beside it.
    """
    first = next(iter(scenarios.values()))
    common = first.model_dump(
        exclude_defaults=True,
        include={"name", "report", "summary", "provenance", "published", "expect"},
    )
    base = _run_fields(first)
    variants = {name: _run_fields(scenario, base) for name, scenario in scenarios.items()}
    return {**common, **base, "variants": variants}


def _run_fields(scenario: Scenario, base: dict[str, Any] | None = None) -> dict[str, Any]:
    """What decides the run, as a scenario or, with a ``base``, as a variant on top of it."""
    workload = scenario.workload.model_dump(exclude_defaults=True)
    if scenario.workload.trace is not None:
        workload["trace"] = str(scenario.workload.path.resolve())
    if base:
        workload = _cover(base["workload"], workload, scenario.workload.model_dump())
    pipeline, fleet = scenario.pipeline, scenario.fleet
    return {
        "workload": workload,
        "engine": asdict(scenario.engine),
        "profile": Path(scenario.profile).name,
        "timeout": scenario.timeout,
        "horizon": scenario.horizon,
        "engine_ready": scenario.engine_ready,
        "pipeline": None if pipeline is None else pipeline.model_dump(),
        "fleet": None if fleet is None else _fleet_fields(fleet),
    }


def _fleet_fields(fleet: FleetSection) -> dict[str, Any]:
    """The fleet with the names of profiles as they lie beside the scenario."""
    fields = fleet.model_dump()
    if isinstance(fields["replicas"], list):
        for group in fields["replicas"]:
            group["profile"] = group["profile"] and Path(group["profile"]).name
    return fields


def _cover(base: Any, given: Any, full: Any) -> Any:
    """``given``, and those of its defaults that ``base`` would show through in their place."""
    if not isinstance(base, dict) or not isinstance(given, dict):
        return given
    gone = fields_of_others(given)
    covered = {k: full[k] for k in base if k not in given and k in full and k not in gone}
    return {k: _cover(base.get(k), value, full[k]) for k, value in given.items()} | covered
