"""Calibrate with two published results and predict a third one: ``python -m dev.left_out_rates``.

FILE is a table of measured points (``simkv/validation/serving_points/measured_rows.py``). For each
configuration below, the table has results at several concurrencies. The prediction of each
concurrency is printed with the packaged costs, and after a calibration as ``simkv calibrate`` does
with the results at the other concurrencies. Nothing else is fitted to these results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from simkv.cli.command_support import progress, show
from simkv.scenario.scenario_options import ScenarioOptions
from simkv.study.worker_pool import open_executor
from simkv.validation.benchmark_check import (
    CalibrationCase,
    ComparedFigure,
    build_benchmark_scenario,
    fit_calibration,
    predict_figures,
)
from simkv.validation.benchmark_results import BenchmarkResult
from simkv.validation.serving_points.measured_rows import MeasuredRow, read_rows


@dataclass(frozen=True)
class RateSweep:
    """A server that was measured at several concurrencies, with the command that started it.

    ``{}`` in ``command`` is replaced by the concurrency. ``share`` is the mean length of prompts
    and answers as a fraction of the nominal lengths; ``spread`` is the range ratio of the lengths.
    """

    name: str
    backend: str
    model: str
    gpu: str
    tp: int
    lengths: tuple[int, int]
    concurrencies: tuple[int, ...]
    version: str
    command: str
    share: float = 0.9
    spread: float = 1 / 9

    def matches(self, row: MeasuredRow) -> bool:
        """Return whether a row of the table is a result of this server."""
        return (
            (row.backend, row.model, row.system, row.tp, row.dp)
            == (self.backend, self.model, self.gpu, self.tp, 1)
            and (row.isl, row.osl) == self.lengths
            and row.concurrency in self.concurrencies
            and not row.suspect
        )


#: InferenceMAX runs these commands (github.com/SemiAnalysisAI/InferenceX, ``benchmarks``). The
#: command of the last server is not published; the engine's defaults are assumed.
SWEEPS = (
    RateSweep(
        *("Llama 3.1 70B fp8, 4 x H100, 1024/1024", "vllm", "meta-llama/Llama-3.1-70B", "h100_sxm"),
        *(4, (1024, 1024), (8, 32, 64), "0.10.2"),
        "vllm serve meta-llama/Llama-3.1-70B-FP8 -tp 4 --kv-cache-dtype fp8 --async-scheduling "
        "--no-enable-prefix-caching --max-num-batched-tokens 8192 --max-num-seqs {}",
    ),
    RateSweep(
        *("MiniMax-M2.5, 8 x H200, 8192/1024", "vllm", "MiniMaxAI/MiniMax-M2.5", "h200_sxm"),
        *(8, (8192, 1024), (4, 16, 32), "0.18.0"),
        "vllm serve MiniMaxAI/MiniMax-M2.5 -tp 8 --enable-expert-parallel "
        "--gpu-memory-utilization 0.95",
    ),
    RateSweep(
        *("Qwen3-32B, 4 x H100, SGLang, 1024/128", "sglang", "Qwen/Qwen3-32B", "h100_sxm"),
        *(4, (1024, 128), (16, 64, 128), "0.5.1"),
        "python3 -m sglang.launch_server --model-path Qwen/Qwen3-32B --tp-size 4",
        *(1.0, 0.0),
    ),
)
#: Requests per client, as InferenceMAX sends them.
ROUNDS = 10


def read_cases(sweep: RateSweep, rows: Sequence[MeasuredRow]) -> list[CalibrationCase]:
    """Return the results of a server, in the order of their concurrency."""
    found = {row.concurrency: row for row in rows if row.measured and sweep.matches(row)}
    return [_case(sweep, found[clients]) for clients in sorted(found)]


def _case(sweep: RateSweep, row: MeasuredRow) -> CalibrationCase:
    assert row.measured
    clients, tokens = row.concurrency, [round(sweep.share * length) for length in sweep.lengths]
    load = {
        "max_concurrency": clients,
        "num_prompts": ROUNDS * clients,
        "input_len": tokens[0],
        "output_len": tokens[1],
        "range_ratio": sweep.spread,
    }
    figures = {"ttft_ms.mean": row.measured.ttft, "tpot_ms.mean": row.measured.tpot}
    benchmark = BenchmarkResult(Path(f"c{clients}"), ROUNDS * clients, figures, load, sweep.model)
    options = ScenarioOptions(
        gpu=row.system, version=sweep.version, from_command=sweep.command.format(clients)
    )
    return CalibrationCase(benchmark, build_benchmark_scenario(benchmark, options)[0])


@dataclass(frozen=True)
class LeftOut:
    """A result that is predicted from the other results of a server."""

    cases: tuple[CalibrationCase, ...]
    index: int

    def others(self) -> list[CalibrationCase]:
        """Return the other results of the server, for the calibration."""
        return [case for number, case in enumerate(self.cases) if number != self.index]


Pair = tuple[list[ComparedFigure], list[ComparedFigure]]


def predict(one: LeftOut) -> tuple[LeftOut, Pair]:
    """Return the metrics of the result left out, with packaged costs and after calibration."""
    case = one.cases[one.index]
    before = predict_figures(case)
    return one, (before, predict_figures(case, fit_calibration(one.others())))


def judge(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="Measured points (CSV).")],
    only: Annotated[
        str, typer.Option(metavar="TEXT", help="Only servers whose name contains this text.")
    ] = "",
    jobs: Annotated[
        int | None, typer.Option(help="Maximum number of processes (default: one per core).")
    ] = None,
) -> None:
    """Predict each concurrency of published servers from the other concurrencies."""
    rows = read_rows(path)
    swept = {one.name: tuple(read_cases(one, rows)) for one in SWEEPS if only in one.name}
    work = [LeftOut(cases, number) for cases in swept.values() for number in range(len(cases))]
    found = []
    with progress("fits", len(work)) as advance, open_executor(jobs=jobs) as run:
        for one in run(predict, work):
            found.append(one)
            advance()
    show(_table(swept, found))


def _table(
    swept: dict[str, tuple[CalibrationCase, ...]], found: Sequence[tuple[LeftOut, Pair]]
) -> Table:
    """Return the errors by server and concurrency: packaged costs, then calibrated."""
    table = Table("server", "left out", "TTFT", "TPOT", "throughput")
    for name, cases in swept.items():
        for one, pair in sorted(found, key=lambda item: item[0].index):
            if one.cases[0].benchmark != cases[0].benchmark:
                continue
            clients = str(cases[one.index].benchmark.path)
            table.add_row(name, clients, *_cells(cases[one.index].benchmark, pair))
    return table


def _cells(benchmark: BenchmarkResult, pair: Pair) -> Iterator[str]:
    before, after = ({figure.name: figure.error for figure in part} for part in pair)
    for errors in zip(_errors(benchmark, before), _errors(benchmark, after), strict=True):
        yield " -> ".join(f"{error:+.1%}" for error in errors)


def _errors(benchmark: BenchmarkResult, found: dict[str, float]) -> tuple[float, float, float]:
    """Return the errors of TTFT and TPOT, and of the throughput of a closed loop.

    With a constant number of clients, the throughput is inversely proportional to the mean time of
    a request, which follows from TTFT and TPOT. The table does not contain it.
    """
    ttft, tpot = found["ttft_ms.mean"], found["tpot_ms.mean"]
    first = benchmark.figures["ttft_ms.mean"]
    rest = benchmark.figures["tpot_ms.mean"] * (benchmark.load["output_len"] - 1)
    return ttft, tpot, (first + rest) / (first * (1 + ttft) + rest * (1 + tpot)) - 1


if __name__ == "__main__":
    typer.run(judge)
