"""``simkv trace``: look into traces, convert them, take samples."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.common import complain, progress, show
from simkv.cli.words import Commands
from simkv.core.errors import InputError
from simkv.core.files import check_new_file

if TYPE_CHECKING:
    from simkv.workload.selection import Selection
    from simkv.workload.source import Tally

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    help="Look into request traces, convert them to simkv's own form, take samples.",
)

File = Annotated[Path, typer.Argument(help="A trace: CSV, JSON, Parquet, a folder or a tar.")]
FormatName = Annotated[
    str, typer.Option("--format", help="The trace's format; default: known from the file.")
]
Start = Annotated[float, typer.Option(help="Seconds of the trace to skip.")]
Duration = Annotated[float | None, typer.Option(help="Seconds of the trace to take.")]
RateScale = Annotated[float, typer.Option(help="How many times as fast requests shall arrive.")]
Limit = Annotated[int | None, typer.Option(help="Take the first so many requests.")]
Sample = Annotated[
    str | None,
    typer.Option(help="Take a random part: a fraction (0.1) or a number of requests (1000)."),
]
Seed = Annotated[int, typer.Option(help="Of the sample, and of a trace that is drawn (ServeGen).")]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Leave out and count bad rows.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace a file that is there.")]


@app.command()
def inspect(
    file: File,
    format: FormatName = "auto",
    start: Start = 0.0,
    duration: Duration = None,
    rate_scale: RateScale = 1.0,
    limit: Limit = None,
    sample: Sample = None,
    seed: Seed = 0,
    skip_bad: SkipBad = False,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens in a KV block.")] = 16,
    kv_bytes_per_token: Annotated[
        int | None, typer.Option(min=1, help="KV bytes of a token, to tell demand in GiB.")
    ] = None,
    prefill_rate: Annotated[
        float, typer.Option(help="Assumed prefill speed (tokens/s), for KV in flight.")
    ] = 10_000.0,
    tpot: Annotated[
        float, typer.Option(help="Assumed time per output token (ms), for KV in flight.")
    ] = 30.0,
    picture: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Also draw what was found.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    overwrite: Overwrite = False,
) -> None:
    """Rates, burstiness, lengths, shared prefixes and peak KV demand of a trace."""
    from simkv.workload import inspect as survey
    from simkv.workload.trace import Reader

    if not (prefill_rate > 0 and tpot > 0):
        raise InputError("--prefill-rate and --tpot should be above 0")
    if picture:
        check_new_file("--picture", picture, file, overwrite)
    wanted = _selection(start, duration, rate_scale, limit, sample, seed, skip_bad)
    with progress(file.name, file=file) as advance:
        reader = Reader(file, wanted, format, advance)
        service = survey.Service(prefill_rate, tpot / 1000)
        found = survey.inspect(reader, service, block_size)
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
    if picture:
        from simkv.report.trace_picture import draw

        draw(found, file.name, picture)


@app.command()
def convert(
    file: File,
    out: Annotated[Path, typer.Argument(help="The new file: .csv, .csv.gz or .parquet.")],
    format: FormatName = "auto",
    start: Start = 0.0,
    duration: Duration = None,
    rate_scale: RateScale = 1.0,
    limit: Limit = None,
    sample: Sample = None,
    seed: Seed = 0,
    skip_bad: SkipBad = False,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="OURS=THEIRS,…",
            help="For a log of one's own (CSV, JSON lines): what its columns are called, as in "
            "arrival=ts,prompt_tokens=in_tok,output_tokens=out_tok.",
        ),
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Convert a trace, or a part of it, to simkv's own form."""
    from simkv.workload.convert import convert as write
    from simkv.workload.trace import Reader
    from simkv.workload.traces.mapped import parse_columns

    if not out.name.endswith((".csv", ".csv.gz", ".parquet")):
        raise InputError(f"{out}: the name should end in .csv, .csv.gz or .parquet")
    check_new_file("OUT", out, file, overwrite)
    named = None if columns is None else parse_columns(columns)
    if named and format != "auto":
        raise InputError(f"--format {format}: expected either it or --columns")
    wanted = _selection(start, duration, rate_scale, limit, sample, seed, skip_bad)
    with progress(file.name, file=file) as advance:
        reader = Reader(file, wanted, format, advance, named)
        count = write(reader, out)
    _tell(reader.tally)
    print(f"{count:,} requests written to {out}")


@app.command("sample")
def take_sample(
    file: File,
    format: FormatName = "auto",
    start: Start = 0.0,
    duration: Duration = None,
    rate_scale: RateScale = 1.0,
    limit: Limit = None,
    sample: Annotated[
        str, typer.Option(help="How many: a number of requests (10) or a fraction (0.001).")
    ] = "10",
    seed: Seed = 0,
    skip_bad: SkipBad = False,
) -> None:
    """Print some requests of a trace, drawn at random, as CSV in simkv's own form."""
    from simkv.workload.convert import print_rows
    from simkv.workload.trace import Reader

    wanted = _selection(start, duration, rate_scale, limit, sample, seed, skip_bad)
    with progress(file.name, file=file) as advance:
        reader = Reader(file, wanted, format, advance)
        rows = list(reader)
    print_rows(rows, reader, sys.stdout)
    _tell(reader.tally)


@app.command()
def formats() -> None:
    """List the formats that are known."""
    from simkv.workload.traces.find import FORMATS

    for format in FORMATS:
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
    from simkv.workload.selection import Selection

    part = None if sample is None else _part(sample)
    return Selection(start, duration, rate_scale, limit, part, seed, skip_bad)


def _part(text: str) -> int | float:
    """A sample's size: a number of requests if it is a whole number, else a fraction."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise InputError(
            f"--sample {text}: should be a fraction like 0.1 or a number of requests like 1000"
        ) from None


def _tell(tally: Tally) -> None:
    for line in tally.lines():
        complain(f"note: {line}")
