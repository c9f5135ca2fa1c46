"""Read a source of any kind. Its format is detected from the content, not from the name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import pandas as pd

from simkv.core.errors import InputError
from simkv.incident import (
    prometheus_reader,
    sglang_log_reader,
    trtllm_log_reader,
    vllm_log_reader,
)
from simkv.incident.evidence import Evidence
from simkv.incident.log_lines import read_beginning
from simkv.workload.formats.format_detection import HEAD_BYTES, detect_format, read_head
from simkv.workload.formats.measured_latencies import read_measured_latencies
from simkv.workload.formats.trace_format import FileHead
from simkv.workload.trace_selection import Selection
from simkv.workload.trace_source import TraceSource


class LogReader(Protocol):
    """A module that reads the logs of the engine ``ENGINE``, called ``TITLE`` in messages.

    ``LOGS_ITERATIONS`` is true if the log reports single iterations with their durations.
    ``OWN_LINE`` matches lines that no other program writes. ``OLDEST`` is the oldest release that
    can be simulated, or None. ``REQUEST_FLAGS`` are the server flags that log or export single
    requests. ``SLOT_SETTING`` is the setting that limits running requests.
    """

    ENGINE: str
    TITLE: str
    LOGS_ITERATIONS: bool
    OLDEST: str | None
    REQUEST_FLAGS: str | None
    SLOT_SETTING: str
    OWN_LINE: re.Pattern[str]

    def known(self, text: str) -> bool:
        """Return whether a text contains lines of the engine."""

    def read(self, source: TraceSource) -> Evidence:
        """Return the evidence in a log."""

    def computed_only(self, version: str) -> bool:
        """Return whether the prompt token counts in the log lines of a version exclude cached
        tokens.
        """


#: Log readers; each detects its format in a text and reads the log in a file.
LOGS: tuple[LogReader, ...] = (vllm_log_reader, sglang_log_reader, trtllm_log_reader)


def log_reader(engine: str | None) -> LogReader | None:
    """Return the reader of an engine's logs, or None if there is none."""
    return next((reader for reader in LOGS if engine == reader.ENGINE), None)


def logs_iterations(engine: str | None) -> bool:
    """Return whether an engine logs single iterations with their durations."""
    reader = log_reader(engine)
    return reader is not None and reader.LOGS_ITERATIONS


def read_sources(
    paths: Sequence[Path], advance: Callable[[int], None] | None = None
) -> list[Evidence]:
    """Read several sources. Metrics files are read together, as scrapes of one server."""
    metrics = [path for path in paths if path.is_file() and _is_metrics(path)]
    found = [
        read_source(path, advance) for path in paths if path not in metrics or len(metrics) < 2
    ]
    if len(metrics) > 1:
        sources = [TraceSource(path, Selection(skip_bad=True), advance) for path in metrics]
        found.append(prometheus_reader.read_metrics(*sources))
    return found


def _is_metrics(path: Path) -> bool:
    if read_head(path).kind in ("tar", "parquet", "binary"):
        return False
    text = read_beginning(TraceSource(path, Selection(skip_bad=True)), HEAD_BYTES)
    own = any(reader.OWN_LINE.search(text) for reader in LOGS)
    return not own and prometheus_reader.is_metrics(text)


def read_source(path: Path, advance: Callable[[int], None] | None = None) -> Evidence:
    """Return the evidence in a log, an export or a client's results.

    ``advance`` receives the number of bytes read. Raises InputError if the file cannot be read or
    its format is unknown.
    """
    source = TraceSource(path, Selection(skip_bad=True), advance)
    head = read_head(path)
    beginning = (
        "" if head.kind in ("folder", "tar", "parquet") else read_beginning(source, HEAD_BYTES)
    )
    if all(words.search(beginning) for words in _BOTH):
        raise InputError(
            f"{path}: has statistics lines of both {LOGS[0].TITLE} and {LOGS[1].TITLE}; "
            "expected the log of one server. Split the log into one file per server"
        )
    own = next((reader for reader in LOGS if reader.OWN_LINE.search(beginning)), None)
    if own is not None:
        return own.read(source)
    if prometheus_reader.is_metrics(beginning):
        return prometheus_reader.read_metrics(source)
    if head.kind in _TEXT:
        for reader in LOGS:
            if reader.known(beginning):
                return reader.read(source)
    try:
        form, found = detect_format(path)
    except InputError as error:
        if head.kind in (*_TEXT, "json", "binary"):
            known = head.kind == "json" or head.is_empty or _is_table(head, beginning)
            hint = "" if head.is_empty else ". `simkv diagnose` has an option --columns, too"
            return _anywhere(path, advance, InputError(f"{error}{hint}") if known else None)
        raise
    source = TraceSource(found, Selection(skip_bad=True), advance)
    table = read_measured_latencies(found, source)
    return _of_requests(path, form.name, table, source)


#: Lines that only vLLM writes, and lines that only SGLang writes.
_BOTH = (re.compile(r"Avg prompt throughput: "), re.compile(r"(Prefill|Decode) batch[,.] #"))
#: Kinds of files that may be logs.
_TEXT = ("text", "csv", "yaml")


#: Name of a column in a CSV header.
_COLUMN = re.compile(r"[A-Za-z_][\w .()/%-]*")


def _is_table(head: FileHead, beginning: str) -> bool:
    """Return whether a file is a CSV file: a header with names, and rows with the same number of
    columns.
    """
    rows = [line for line in beginning.splitlines()[:10] if line.strip()]
    return (
        head.kind == "csv"
        and all(_COLUMN.fullmatch(name) for name in head.columns)
        and all(row.count(",") == len(head.columns) - 1 for row in rows if '"' not in row)
    )


def _titles(between: str) -> str:
    *first, last = (reader.TITLE for reader in LOGS)
    return ", ".join(first) + between + last


def _anywhere(
    path: Path, advance: Callable[[int], None] | None, unknown: InputError | None
) -> Evidence:
    """Read a log that begins with lines of another program.

    If the file has no line of an engine, raises ``unknown`` or an InputError that lists the
    supported inputs.
    """
    for reader in LOGS:
        source = TraceSource(path, Selection(skip_bad=True), advance)
        found = reader.read(source)
        if found.settings or found.series is not None or found.arrivals is not None:
            return found
    if unknown is not None:
        raise unknown
    raise InputError(
        f"{path}: unknown kind of file: it contains no log lines of {_titles(' or ')}, no "
        "spans, no metrics and no requests of a client; `simkv diagnose --help` lists the "
        "supported inputs"
    )


def _of_requests(path: Path, name: str, table: pd.DataFrame, source: TraceSource) -> Evidence:
    """Return the evidence in a table of requests with latencies."""
    wall = "start_s" in table
    requests = table.assign(t_s=table["start_s"] if wall else table["arrival_s"])
    notes = [f"{path.name}: {line}" for line in source.tally.lines()]
    lacks = []
    if requests["queue_ms"].isna().all():
        lacks.append(f"queue time of requests (not in {path.name}, {name})")
    if not requests["output_tokens"].gt(0).any():
        raise InputError(f"{path}: none of the {len(requests)} requests received an answer")
    return Evidence(
        path.name,
        wall=wall,
        requests=requests.sort_values("t_s", kind="stable", ignore_index=True),
        notes=tuple(notes),
        lacks=tuple(lacks),
    )
