"""Reader of custom logs (CSV or JSON lines); the user maps simkv's column names to the
names in the log, as ``ours=theirs``.

simkv trace convert log.csv out.csv --columns arrival=ts,prompt_tokens=in,output_tokens=out

If the columns ``session`` and ``turn`` are mapped, the rows are turns of sessions, and each prompt
repeats the prompt and the answer of the previous turn (see ``growing_turns``). ``ttft`` is the
measured TTFT in seconds. It is checked, and a note summarizes it for a comparison with the TTFT of
a simulated run.

Columns that are not mapped are read if they have simkv's names. ``arrival`` may be seconds on any
clock, or wall-clock times such as ``2026-05-01T12:00:00.25Z``; wall-clock times are converted to
seconds after the first row.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice

import numpy as np

from simkv.core.errors import InputError, spelling_hint
from simkv.workload.column_values import (
    ColumnArray,
    Parser,
    parse_times,
    parse_whole_numbers,
)
from simkv.workload.csv_columns import open_csv
from simkv.workload.formats.azure import parse_timestamps
from simkv.workload.formats.growing_turns import GrowingTurns
from simkv.workload.formats.simkv_csv import COLUMN_PARSERS, LENGTH_PARSERS, rows_from_table
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import RequestRows
from simkv.workload.trace_source import TraceSource, select_served

#: Number of JSON records at the beginning of the file in which a mapped key must occur.
CHECKED_LINES = 100
#: In these columns, 0 is allowed: requests without an answer are counted as failed instead of
#: rejected.
_COUNTED: dict[str, Parser] = dict.fromkeys(LENGTH_PARSERS, parse_whole_numbers)
#: Columns that can be mapped, but are not columns of simkv's own traces.
_NOT_OURS: dict[str, Parser] = {"turn": parse_whole_numbers, "ttft": parse_times}
_KNOWN = (*COLUMN_PARSERS, *_NOT_OURS)


def parse_columns(text: str) -> dict[str, str]:
    """Parse ``ours=theirs,…``. Raises InputError if a name is unknown or duplicated."""
    found: dict[str, str] = {}
    for pair in text.split(","):
        ours, equals, theirs = (part.strip() for part in pair.partition("="))
        if not equals or not theirs:
            raise InputError(f"--columns {text}: expected OURS=THEIRS, as in arrival=ts")
        if ours not in _KNOWN:
            raise InputError(
                f"--columns {text}: unknown column {ours!r}{spelling_hint(ours, _KNOWN)}; expected "
                f"{', '.join(_KNOWN)}"
            )
        if ours in found or theirs in found.values():
            raise InputError(f"--columns {text}: {pair.strip()}: column given twice")
        found[ours] = theirs
    if "turn" in found and "session" not in found:
        raise InputError(f"--columns {text}: the column turn requires the column session")
    return found


def make_mapped_format(columns: Mapping[str, str], head: FileHead) -> TraceFormat:
    """Return the format of a file with mapped columns.

    Raises InputError if the file is neither CSV nor JSON lines.
    """
    if head.kind not in ("csv", "json", "text"):
        raise InputError(f"{head.path}: --columns requires CSV or JSON lines; found {head.kind}")
    rows = partial(_rows, columns=columns, is_json=head.kind == "json")
    return TraceFormat("columns", "a log with the columns of --columns", lambda _: False, rows)


def _rows(source: TraceSource, columns: Mapping[str, str], is_json: bool) -> Iterator[RequestRows]:
    with source.text() as lines:
        texts = (
            _json_as_csv(source, lines, columns) if is_json else _renamed(source, lines, columns)
        )
        parsers: dict[str, Parser] = {
            **COLUMN_PARSERS,
            **_COUNTED,
            "arrival": partial(_arrival, source),
        }
        grown = GrowingTurns(source) if "turn" in columns else None
        parsers |= {name: parse for name, parse in _NOT_OURS.items() if name in columns}
        ttfts: list[ColumnArray] = []
        needed = {name: parsers[name] for name in (*LENGTH_PARSERS, *columns)}
        for table in open_csv(source, texts, needed, parsers):
            turns = table.columns.pop("turn", None)
            if (measured := table.columns.pop("ttft", None)) is not None:
                ttfts.append(measured)
            rows = select_served(source, rows_from_table(source, table), table.lines)
            yield grown.extend(rows, table, turns) if grown and turns is not None else rows
    if ttfts and (note := _describe(np.concatenate(ttfts))):
        source.tally.notes.append(note)


def _describe(ttfts: ColumnArray) -> str:
    """Return a note about measured TTFTs in seconds, or an empty text."""
    if not len(ttfts):
        return ""
    mean, p50, p95, p99 = np.mean(ttfts), *np.percentile(ttfts, (50, 95, 99))
    return (
        f"measured TTFT of {len(ttfts):,} rows: mean {mean:.3g} s, P50 {p50:.3g} s, "
        f"P95 {p95:.3g} s, P99 {p99:.3g} s"
    )


def _arrival(source: TraceSource, texts: Sequence[str]) -> ColumnArray:
    """Return arrivals in seconds. Wall-clock times are counted from the first row."""
    try:
        return parse_times(texts)
    except ValueError:
        if not texts or not texts[0].strip()[4:5] == "-":
            raise
        return source.since_first(parse_timestamps(texts)) / 1e9


def _renamed(
    source: TraceSource, lines: Iterator[str], columns: Mapping[str, str]
) -> Iterator[str]:
    """Yield the lines of a CSV file, with simkv's column names in the header."""
    theirs = {name.casefold(): ours for ours, name in columns.items()}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            yield line
            continue
        header = [name.strip() for name in next(csv.reader([line]))]
        known = {name.casefold() for name in header}
        for ours, name in columns.items():
            if name.casefold() not in known:
                raise source.error(
                    f"--columns {ours}={name}: missing "
                    f"column{spelling_hint(name, header)}; "
                    f"found {', '.join(header)}",
                    number,
                )
        yield ",".join(_our_name(name, theirs, columns) for name in header) + "\n"
        yield from lines


def _our_name(name: str, theirs: Mapping[str, str], columns: Mapping[str, str]) -> str:
    """Return simkv's name of a column."""
    # If an unmapped column has a name to which another column is mapped, it gets a suffix.
    ours = theirs.get(name.casefold())
    if ours is not None:
        return ours
    name = name.replace(",", " ").replace('"', " ")
    return f"{name} (theirs)" if name.casefold() in columns else name


def _json_as_csv(
    source: TraceSource, lines: Iterator[str], columns: Mapping[str, str]
) -> Iterator[str]:
    """Convert each JSON line to one CSV line."""
    # Line numbers therefore stay correct.
    head = list(islice(lines, CHECKED_LINES))
    lines = chain(head, lines)
    _check_keys(source, head, columns)
    names = {**{name: name for name in COLUMN_PARSERS}, **columns}
    used: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            raise source.error("should be a JSON object", number)
        if not used:
            used = [ours for ours, name in names.items() if name in record or ours in columns]
            yield ",".join(used) + "\n"
        yield ",".join(_as_text(record.get(names[ours])) for ours in used) + "\n"


def _check_keys(source: TraceSource, head: Sequence[str], columns: Mapping[str, str]) -> None:
    """Raise InputError for a mapped key that does not occur in the first records."""
    keys: dict[str, None] = {}
    for line in head:
        try:
            record = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError):
            return  # an invalid record is reported later, with its line number
        if isinstance(record, dict):
            keys |= dict.fromkeys(record)
    for ours, name in columns.items():
        if keys and name not in keys:
            raise source.error(
                f"--columns {ours}={name}: no such key{spelling_hint(name, keys)}; found "
                f"{', '.join(keys)}"
            )


def _as_text(value: object) -> str:
    text = "" if value is None else value if isinstance(value, str) else json.dumps(value)
    return '"' + text.replace('"', '""').replace("\n", " ") + '"'
