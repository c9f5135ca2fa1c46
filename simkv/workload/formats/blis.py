"""Reader of BLIS trace v2 and v3: a YAML header and a CSV of requests, in two files or in one.

Times are in us. A request is sent at ``send_time_us``, or at ``arrival_time_us`` if
``send_time_us`` is 0. Prompts in a ``prefix_group`` begin with ``prefix_length`` shared tokens,
which ``input_tokens`` does not include. For a prompt without a group, ``server_input_tokens``, if
present, is the number of prompt tokens. If the header has ``session_context_growth: accumulate``,
``input_tokens`` counts only the tokens that a round adds to the prompt and output of the previous
round (github.com/inference-sim/inference-sim, sim/workload/tracev2.go, replay.go,
fixed_accumulate.go). Rows whose ``status`` is not ``ok`` are left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from simkv.workload.column_values import (
    describe_found,
    make_column_parser,
    parse_times,
    parse_whole_numbers,
)
from simkv.workload.csv_columns import CsvTable, open_csv
from simkv.workload.formats.burstgpt import session_numbers
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import (
    NAMED_STREAM,
    OUTPUT_STREAM,
    PROMPT_STREAM,
    PromptPieces,
    RequestRows,
)
from simkv.workload.trace_source import TraceSource, select_served

Piece = tuple[int, int, int, int]

MAX_HEADER_LINES = 1000


def _reset(text: str) -> int:
    return parse_whole_numbers([text])[0] if text.strip() else -1


_TEXT = make_column_parser(str)
_NEEDED = {
    "input_tokens": parse_whole_numbers,
    "output_tokens": parse_whole_numbers,
    "arrival_time_us": parse_times,
}
_ALSO = {
    "send_time_us": parse_times,
    "server_input_tokens": parse_whole_numbers,
    "prefix_group": _TEXT,
    "prefix_length": parse_whole_numbers,
    "session_id": _TEXT,
    "status": _TEXT,
    "deadline_us": parse_times,
    "input_tokens_reset": make_column_parser(_reset, np.int64),
}


def data_file(header: Path) -> Path | None:
    """Return the CSV file of a YAML header, or None."""
    stems = [header.stem, header.stem.replace("header", "data"), header.stem + "_data"]
    names = [f"{stem}.csv{end}" for stem in stems for end in ("", ".gz")]
    return next((found for name in names if (found := header.with_name(name)).is_file()), None)


def _header_file(data: Path) -> Path | None:
    stem = data.name.removesuffix(".gz").removesuffix(".csv")
    stems = [stem, stem.replace("data", "header")]
    names = [f"{name}.{end}" for name in stems for end in ("yaml", "yml")]
    return next((found for name in names if (found := data.with_name(name)).is_file()), None)


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    beside = _header_file(source.path)
    with source.text() as lines:
        header, rest = _split(lines)
        line = 1 + header.count("\n")
        if beside:
            header = beside.read_text(errors="replace")
        growing = _accumulates(source, header, beside)
        tables = open_csv(source, rest, _NEEDED, _ALSO, quoted=True, line=line)
        yield from _Rounds(source, growing).rows(tables)


def _split(lines: Iterator[str]) -> tuple[str, Iterator[str]]:
    """Return the YAML text before the CSV header, and the lines from the CSV header on."""
    before: list[str] = []
    for text in lines:
        if "arrival_time_us," in text or len(before) > MAX_HEADER_LINES:
            return "".join(before), chain([text], lines)
        before.append(text)
    return "".join(before), iter(())


def _accumulates(source: TraceSource, text: str, path: Path | None) -> bool:
    """Return whether each prompt of a session includes the earlier rounds of the session."""
    # The header of the trace declares this. imported here because it is slow to import and few
    # inputs have a header
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        header = YAML(typ="safe", pure=True).load(text.replace("\n---", "\n")) or {}
    except (YAMLError, RecursionError, ValueError) as error:
        raise source.error(f"header {path or ''}: not valid YAML") from error
    if not isinstance(header, dict) or not header:
        source.tally.notes.append("no YAML header: input_tokens are assumed to be whole prompts")
        return False
    unit = header.get("time_unit", "microseconds")
    if unit != "microseconds":
        raise source.error(f"header: time_unit should be microseconds; {describe_found(unit)}")
    growth = header.get("session_context_growth") or ""
    if growth not in ("", "accumulate"):
        raise source.error(
            "header: session_context_growth should be accumulate or empty; "
            f"{describe_found(growth)}"
        )
    return growth == "accumulate"


class _Rounds:
    """Convert rows to requests and track the context of each session."""

    def __init__(self, source: TraceSource, growing: bool) -> None:
        self.source = source
        self.growing = growing
        self._said: dict[str, tuple[int, list[Piece]]] = {}

    def rows(self, tables: Iterable[CsvTable]) -> Iterator[RequestRows]:
        for table in tables:
            count = len(table.lines)
            zeros = np.zeros(count, np.int64)
            arrival, sent = table["arrival_time_us"], table.columns.get("send_time_us", zeros)
            deadline = table.columns.get("deadline_us", zeros)
            prompts, pieces = self._prompts(table)
            sessions = table.columns.get("session_id")
            status = table.columns.get("status")
            rows = RequestRows(
                arrival=np.where(sent > 0, sent, arrival) / 1e6,
                prompt_tokens=np.array(prompts, np.int64),
                output_tokens=table["output_tokens"],
                timeout=np.where(deadline > arrival, (deadline - arrival) / 1e6, np.nan)
                if (deadline > arrival).any()
                else None,
                session=None if sessions is None else session_numbers(self.source, sessions),
                number=table.numbers,
                pieces=PromptPieces.of(pieces) if any(pieces) else None,
            )
            fine = np.ones(count, np.bool_)
            if status is not None:
                fine = np.array([text.strip() in ("", "ok") for text in status], np.bool_)
                self.source.failed("with a status other than ok", ~fine, table.lines)
            lines = [line for line, good in zip(table.lines, fine, strict=True) if good]
            yield select_served(self.source, rows.where(fine), lines)

    def _prompts(self, table: CsvTable) -> tuple[list[int], list[list[Piece]]]:
        """Return the number of prompt tokens and the prompt pieces of every row."""
        count = len(table.lines)
        nothing = [""] * count
        prompts, pieces = [], []
        for group, length, new, measured, session, reset, output, number in zip(
            table.columns.get("prefix_group", nothing),
            table.columns.get("prefix_length", [0] * count),
            table["input_tokens"].tolist(),
            table.columns.get("server_input_tokens", [0] * count),
            table.columns.get("session_id", nothing),
            table.columns.get("input_tokens_reset", [-1] * count),
            table["output_tokens"].tolist(),
            table.numbers.tolist(),
            strict=True,
        ):
            if measured > 0 and not group:
                new = int(measured)
            before, begin = 0, list[Piece]()
            if self.growing and session in self._said:
                before, begin = self._said[session]
                if reset >= 0:
                    before, begin, new = 0, [], int(reset)
            elif group and length:
                before = int(length)
                begin = [(NAMED_STREAM, self.source.streams.number(f"g{group}"), 0, before)]
            prompts.append(before + new)
            pieces.append(begin)
            if self.growing and session:
                said = [*begin, *([(PROMPT_STREAM, number, 0, new)] if new else [])]
                said += [(OUTPUT_STREAM, number, 0, output)] if output else []
                self._said[session] = (before + new + output, said)
        return prompts, pieces


def _known(head: FileHead) -> bool:
    return head.has("arrival_time_us", "input_tokens", "output_tokens") or head.has("trace_version")


BLIS = TraceFormat("blis", "BLIS trace v2 and v3 (YAML header and CSV)", _known, _rows)
