"""``simkv trace``: inspect, convert and sample request traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import Overwrite, print_error, progress, show
from simkv.cli.usage_errors import Commands
from simkv.core.atomic_files import check_new_file
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.workload.trace_selection import Selection
    from simkv.workload.trace_source import Tally

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Inspect, convert and sample request traces.",
)

TraceArgument = Annotated[
    Path, typer.Argument(help="Trace file (CSV, JSON, Parquet), tar archive or directory.")
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format", metavar="NAME", help="Trace format (`simkv trace formats` lists them)."
    ),
]
Start = Annotated[
    float,
    typer.Option(metavar="SECONDS", help="Time in seconds to skip at the start of the trace."),
]
Duration = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Duration in seconds of the part to read (default: all)."),
]
RateScale = Annotated[
    float, typer.Option(metavar="FACTOR", help="Multiply the request rate by this factor.")
]
Limit = Annotated[
    int | None, typer.Option(metavar="N", help="Read only the first N requests (default: all).")
]
SampleOption = Annotated[
    str | None,
    typer.Option(help="Read a random sample: a fraction (0.1) or a number of requests (1000)."),
]
SeedOption = Annotated[
    int,
    typer.Option(
        help="Random seed for the sample and for traces that are generated from a distribution "
        "(ServeGen)."
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Skip and count invalid rows instead of failing.")
]


@app.command()
def inspect(
    file: TraceArgument,
    format: FormatOption = "auto",
    start: Start = 0.0,
    duration: Duration = None,
    rate_scale: RateScale = 1.0,
    limit: Limit = None,
    sample: SampleOption = None,
    seed: SeedOption = 0,
    skip_bad: SkipBad = False,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block.")] = 16,
    kv_bytes_per_token: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="BYTES",
            help="KV cache bytes per token; the KV demand is then shown in GiB.",
        ),
    ] = None,
    prefill_rate: Annotated[
        float,
        typer.Option(
            metavar="TOKENS/S",
            help="Assumed prefill rate in tokens per second, to estimate the peak KV demand.",
        ),
    ] = 10_000.0,
    tpot: Annotated[
        float,
        typer.Option(
            metavar="MS", help="Assumed time per output token, to estimate the peak KV demand."
        ),
    ] = 30.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Plot the results to this file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics as JSON.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Show rates, lengths, shared prefixes and KV demand."""
    from simkv.workload import trace_statistics as survey
    from simkv.workload.trace_reader import TraceReader

    if not (prefill_rate > 0 and tpot > 0):
        raise InputError("--prefill-rate and --tpot must be greater than 0")
    if plot:
        check_new_file("--plot", plot, file, overwrite)
    wanted = _selection(start, duration, rate_scale, limit, sample, seed, skip_bad)
    with progress(file.name, file=file) as advance:
        reader = TraceReader(file, wanted, format, advance)
        service = survey.ServiceTime(prefill_rate, tpot / 1000)
        found = survey.inspect_trace(reader, service, block_size)
    figures = found.figures()
    if kv_bytes_per_token and figures["peak_blocks"]:
        figures["peak_gib"] = figures["peak_blocks"] * block_size * kv_bytes_per_token / 2**30
    if as_json:
        told = {"file": str(file), "format": reader.format.name, **figures}
        print(json.dumps({**told, "notes": reader.tally.lines()}, indent=1))
    else:
        from simkv.report.trace_table import figures_table

        show(figures_table(str(file), reader.format.what, figures))
        _tell(reader.tally)
    if plot:
        from simkv.report.trace_plot import draw_trace

        draw_trace(found, file.name, plot)


@app.command()
def convert(
    file: TraceArgument,
    out: Annotated[Path, typer.Argument(help="File to write: .csv, .csv.gz or .parquet.")],
    format: FormatOption = "auto",
    start: Start = 0.0,
    duration: Duration = None,
    rate_scale: RateScale = 1.0,
    limit: Limit = None,
    sample: SampleOption = None,
    seed: SeedOption = 0,
    skip_bad: SkipBad = False,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="OURS=THEIRS,…",
            help="Column names of your own log (CSV or JSON lines), such as "
            "arrival=ts,prompt_tokens=in_tok,output_tokens=out_tok.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a trace, or a part of it, to simkv's format."""
    from simkv.workload.formats.mapped_columns import parse_columns
    from simkv.workload.trace_conversion import convert_trace as write
    from simkv.workload.trace_reader import TraceReader

    if not out.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise InputError(f"{out}: the name must end in .csv, .csv.gz or .parquet")
    check_new_file("OUT", out, file, overwrite)
    named = None if columns is None else parse_columns(columns)
    if named and format != "auto":
        raise InputError(f"--format {format}: cannot be combined with --columns")
    wanted = _selection(start, duration, rate_scale, limit, sample, seed, skip_bad)
    with progress(file.name, file=file) as advance:
        reader = TraceReader(file, wanted, format, advance, named)
        count = write(reader, out)
    _tell(reader.tally)
    print(f"{count:,} requests written to {out}")


@app.command("sample")
def take_sample(
    file: TraceArgument,
    format: FormatOption = "auto",
    start: Start = 0.0,
    duration: Duration = None,
    rate_scale: RateScale = 1.0,
    limit: Limit = None,
    sample: Annotated[
        str, typer.Option(help="Sample size: a number of requests (10) or a fraction (0.001).")
    ] = "10",
    seed: SeedOption = 0,
    skip_bad: SkipBad = False,
) -> None:
    """Print a random sample of requests as CSV.

    The columns follow simkv's trace format.
    """
    from simkv.workload.trace_conversion import write_csv_rows
    from simkv.workload.trace_reader import TraceReader

    wanted = _selection(start, duration, rate_scale, limit, sample, seed, skip_bad)
    with progress(file.name, file=file) as advance:
        reader = TraceReader(file, wanted, format, advance)
        rows = list(reader)
    write_csv_rows(rows, reader, sys.stdout)
    _tell(reader.tally)


@app.command()
def formats() -> None:
    """List the supported trace formats."""
    from simkv.workload.formats.format_detection import TRACE_FORMATS

    for format in TRACE_FORMATS:
        print(f"{format.name:<22}{format.what}")


def _selection(
    start: float,
    duration: float | None,
    rate_scale: float,
    limit: int | None,
    sample: str | None,
    seed: int,
    skip_bad: bool,
) -> Selection:
    from simkv.workload.trace_selection import Selection

    part = None if sample is None else _part(sample)
    return Selection(start, duration, rate_scale, limit, part, seed, skip_bad)


def _part(text: str) -> int | float:
    """Parse a sample size: an integer is a number of requests, any other number is a fraction."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"--sample {text}: expected a fraction such as 0.1 or a number of requests such as 1000"
        ) from None


def _tell(tally: Tally) -> None:
    for line in tally.lines():
        print_error(f"note: {line}")
