"""Judge predictions by published results with launch lines: ``python -m dev.served_results FILE``.

FILE has one JSON object per result: the GPU, the launch command of the server, the command of the
load generator and the measured metrics. Step times are not fitted to these results, but the width
of the source of error ``server`` is. Each result is predicted from the launch command, as
``simkv validate --server ... --gpu ...`` does. With ``--calibrate``, each result of a server is
also predicted after a calibration with the other results of that server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.table import Table

from simkv.cli.command_support import progress, show
from simkv.core.errors import InputError
from simkv.scenario.scenario_options import ScenarioOptions
from simkv.study.worker_pool import open_executor
from simkv.validation.benchmark_check import (
    CalibrationCase,
    CheckedBenchmark,
    ComparedFigure,
    build_benchmark_scenario,
    build_other_protocols,
    check_benchmark,
    leave_one_out,
)
from simkv.validation.benchmark_results import BenchmarkResult

#: Metrics that are judged, by their names in the file.
FIGURES = {
    "ttft_mean_ms": "ttft_ms.mean",
    "tpot_mean_ms": "tpot_ms.mean",
    "output_throughput": "output_throughput",
}
#: Launch commands by engine; the backend parameters in the file are appended to them.
COMMANDS = {"vllm": "vllm serve {}", "sglang": "python3 -m sglang.launch_server --model-path {}"}
SIDES = ("input", "output")
#: Minimum number of results of one server for a calibration that leaves one out.
ENOUGH = 3


@dataclass(frozen=True)
class ServedResult:
    """A published result: the launch command of the server, its load, and the measured metrics.

    ``server`` is equal for results of the same server.
    """

    name: str
    server: tuple[str, ...]
    dataset: str
    options: ScenarioOptions
    benchmark: BenchmarkResult


def read_results(path: Path) -> list[ServedResult]:
    """Read the usable results of a file, in the order of their servers.

    Repeated, suspect and multi-turn results, and engines whose times simkv cannot predict, are left
    out.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    found = [
        _result(row)
        for row in rows
        if row["engine"] in COMMANDS
        and row["client"]["dataset"] in ("random", "sharegpt")
        and row["launch_is"] != "not printed"
        and row["usable"]
        and not row["duplicate_of"]
        and not row["suspect"]
        and "prefix-cache" not in row["id"]  # an earlier run with the same prompts is not stated
    ]
    return sorted(found, key=lambda one: (one.server, one.name))


def _result(row: Mapping[str, Any]) -> ServedResult:
    launch, client, measured = row["launch_command"], row["client"], row["results"]
    if row["launch_is"] != "command":
        launch = f"{COMMANDS[row['engine']].format(row['model'])} {launch}"
    launch = re.sub(r"\\?\n", " ", re.sub(r"^#.*\n", "", launch, flags=re.MULTILINE))
    load: dict[str, Any] = {"num_prompts": client["num_prompts"]}
    if client["request_rate"] not in (None, "inf"):
        load["request_rate"] = float(client["request_rate"])
    if client["tool"].startswith("vllm") and client["max_concurrency"]:
        load["max_concurrency"] = client["max_concurrency"]
    if client["dataset"] == "random":
        load |= {"input_len": client["input_len"], "output_len": client["output_len"]}
    else:  # the lengths of its requests are not published, only their means
        load |= {f"{side}_len": round(row["derived"][f"mean_{side}_tokens"]) for side in SIDES}
    figures = {ours: float(measured[name]) for name, ours in FIGURES.items() if measured[name]}
    if "tpot" not in row["usable"]:
        figures.pop("tpot_ms.mean", None)
    options = ScenarioOptions(
        gpu=row["gpu"], model=row["model"], version=row["engine_version"], from_command=launch
    )
    return ServedResult(
        row["id"],
        (row["gpu"], row["engine"], row["engine_version"], row["model"], launch),
        client["dataset"],
        options,
        BenchmarkResult(Path(row["id"]), client["num_prompts"], figures, load, row["model"]),
    )


def predict(one: ServedResult) -> tuple[str, CheckedBenchmark | str]:
    """Return the name of a result and its prediction, or the reason why simkv cannot predict it."""
    try:
        scenario, built = build_benchmark_scenario(one.benchmark, one.options)
        others = build_other_protocols(one.benchmark, one.options)
        return one.name, check_benchmark(one.benchmark, scenario, built.notes, others)
    except InputError as error:
        return one.name, str(error)


def calibrate(results: Sequence[ServedResult]) -> list[tuple[str, list[ComparedFigure]]]:
    """Predict each result of a server after a calibration with its other results."""
    try:
        cases = [
            CalibrationCase(one.benchmark, build_benchmark_scenario(one.benchmark, one.options)[0])
            for one in results
        ]
        found = leave_one_out(cases)
        return [(str(case.benchmark.path), figures) for case, figures in found]
    except InputError:
        return []


def judge(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Results, one JSON object a line.")],
    calibrated: Annotated[
        bool, typer.Option("--calibrate", help="Also calibrate with a server's other results.")
    ] = False,
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only results whose id contains this text.")
    ] = "",
    jobs: Annotated[
        int | None, typer.Option(help="Maximum number of processes (default: one per core).")
    ] = None,
) -> None:
    """Predict published results from their launch lines and print errors and coverage."""
    results = [one for one in read_results(path) if only in one.name]
    with progress("results", len(results)) as advance, open_executor(jobs=jobs) as run:
        checked = {}
        for name, found in run(predict, results):
            checked[name] = found
            advance()
    show(*_lines(results, [checked[one.name] for one in results]))
    if calibrated:
        servers = [list(part) for _, part in groupby(results, key=lambda one: one.server)]
        servers = [part for part in servers if len(part) >= ENOUGH]
        with progress("servers", len(servers)) as advance, open_executor(jobs=jobs) as run:
            for found in run(calibrate, servers):
                show(*_calibrated_lines(found))
                advance()


def _lines(
    results: Sequence[ServedResult], checked: Sequence[CheckedBenchmark | str]
) -> Iterator[str | Table]:
    """Yield each prediction, and the summary by engine and dataset."""
    groups: dict[str, list[CheckedBenchmark]] = {}
    for one, found in zip(results, checked, strict=True):
        if isinstance(found, str):
            yield f"{one.name}: refused: {found}"
            continue
        yield f"{one.name}: {', '.join(map(_figure, found.figures))}"
        for name in ("all", f"{one.options.version} {one.server[1]}", one.dataset):
            groups.setdefault(name, []).append(found)
    table = Table("group", "results", *FIGURES.values())
    for name, members in groups.items():
        cells = (
            _cell([f for m in members for f in m.figures if f.name == n]) for n in FIGURES.values()
        )
        table.add_row(name, str(len(members)), *cells)
    yield table


def _figure(one: ComparedFigure) -> str:
    mark = {True: "inside", False: "outside", None: "no interval"}[one.inside]
    ends = f" [{one.interval.low:.4g}, {one.interval.high}]" if one.interval else ""
    return f"{one.name} {one.predicted:.4g} for {one.measured:.4g} ({one.error:+.0%}, {mark}{ends})"


def _cell(figures: Sequence[ComparedFigure]) -> str:
    """Return the mean and median error, the fraction of measurements in their interval, and the
    median half-width.
    """
    if not figures:
        return "-"
    errors = np.array([one.error for one in figures])
    told = [one for one in figures if one.inside is not None]
    inside = sum(bool(one.inside) for one in told)
    return (
        f"{abs(errors).mean():.0%}, median {np.median(errors):+.0%}; {inside} of {len(told)} inside"
    )


def _calibrated_lines(found: Sequence[tuple[str, Sequence[ComparedFigure]]]) -> Iterator[str]:
    for name, figures in found:
        errors = ", ".join(f"{figure.name} {figure.error:+.0%}" for figure in figures)
        yield f"{name}: after a calibration with the others: {errors}"


if __name__ == "__main__":
    typer.run(judge)
