"""BLIS trace v2 and v3: a YAML header and a CSV of requests, in two files or in one.

Times are in us. A request is sent at ``send_time_us``, or at ``arrival_time_us`` where that is 0.
Requests of a ``prefix_group`` begin with its ``prefix_length`` tokens, which ``input_tokens`` do
not count; otherwise ``server_input_tokens``, where given, are the true count. If the header says
``session_context_growth: accumulate``, ``input_tokens`` are what a round adds to the prompt and
output of the round before it (github.com/inference-sim/inference-sim, sim/workload/tracev2.go,
replay.go, fixed_accumulate.go). Rows whose ``status`` is not ``ok`` are left out and counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from simkv.workload.cells import found, one_by_one, seconds, whole
from simkv.workload.rows import NAME, OUTPUT, OWN, Pieces, Rows
from simkv.workload.source import Source, served
from simkv.workload.tables import Table, open_csv
from simkv.workload.traces.base import Format, Head
from simkv.workload.traces.burstgpt import session_numbers

Piece = tuple[int, int, int, int]

MOST_HEADER_LINES = 1000


def _reset(text: str) -> int:
    return whole([text])[0] if text.strip() else -1


_TEXT = one_by_one(str)
_NEEDED = {"input_tokens": whole, "output_tokens": whole, "arrival_time_us": seconds}
_ALSO = {
    "send_time_us": seconds,
    "server_input_tokens": whole,
    "prefix_group": _TEXT,
    "prefix_length": whole,
    "session_id": _TEXT,
    "status": _TEXT,
    "deadline_us": seconds,
    "input_tokens_reset": one_by_one(_reset, np.int64),
}


def data_file(header: Path) -> Path | None:
    """The CSV that belongs to a YAML header, if there is one."""
    stems = [header.stem, header.stem.replace("header", "data"), header.stem + "_data"]
    names = [f"{stem}.csv{end}" for stem in stems for end in ("", ".gz")]
    return next((found for name in names if (found := header.with_name(name)).is_file()), None)


def _header_file(data: Path) -> Path | None:
    stem = data.name.removesuffix(".gz").removesuffix(".csv")
    stems = [stem, stem.replace("data", "header")]
    names = [f"{name}.{end}" for name in stems for end in ("yaml", "yml")]
    return next((found for name in names if (found := data.with_name(name)).is_file()), None)


def _rows(source: Source) -> Iterator[Rows]:
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
    """The YAML before the CSV's own header, and the lines from that on."""
    before: list[str] = []
    for text in lines:
        if "arrival_time_us," in text or len(before) > MOST_HEADER_LINES:
            return "".join(before), chain([text], lines)
        before.append(text)
    return "".join(before), iter(())


def _accumulates(source: Source, text: str, path: Path | None) -> bool:
    """Whether rounds of a session add to each other, by the YAML header."""
    try:
        header = YAML(typ="safe", pure=True).load(text.replace("\n---", "\n")) or {}
    except (YAMLError, RecursionError, ValueError) as error:
        raise source.error(f"its header {path or ''} is not valid YAML") from error
    if not isinstance(header, dict) or not header:
        source.tally.notes.append("no YAML header: input_tokens are taken as whole prompts")
        return False
    unit = header.get("time_unit", "microseconds")
    if unit != "microseconds":
        raise source.error(f"time_unit in its header should be microseconds; {found(unit)}")
    growth = header.get("session_context_growth") or ""
    if growth not in ("", "accumulate"):
        raise source.error(
            f"session_context_growth in its header should be accumulate or empty; {found(growth)}"
        )
    return growth == "accumulate"


class _Rounds:
    """Makes requests of rows, and remembers what a session has said so far."""

    def __init__(self, source: Source, growing: bool) -> None:
        self.source = source
        self.growing = growing
        self._said: dict[str, tuple[int, list[Piece]]] = {}

    def rows(self, tables: Iterable[Table]) -> Iterator[Rows]:
        for table in tables:
            count = len(table.lines)
            zeros = np.zeros(count, np.int64)
            arrival, sent = table["arrival_time_us"], table.columns.get("send_time_us", zeros)
            deadline = table.columns.get("deadline_us", zeros)
            prompts, pieces = self._prompts(table)
            sessions = table.columns.get("session_id")
            status = table.columns.get("status")
            rows = Rows(
                arrival=np.where(sent > 0, sent, arrival) / 1e6,
                prompt_tokens=np.array(prompts, np.int64),
                output_tokens=table["output_tokens"],
                timeout=np.where(deadline > arrival, (deadline - arrival) / 1e6, np.nan)
                if (deadline > arrival).any()
                else None,
                session=None if sessions is None else session_numbers(self.source, sessions),
                number=table.numbers,
                pieces=Pieces.of(pieces) if any(pieces) else None,
            )
            fine = np.ones(count, np.bool_)
            if status is not None:
                fine = np.array([text.strip() in ("", "ok") for text in status], np.bool_)
                self.source.failed("whose status is not ok", ~fine, table.lines)
            lines = [line for line, good in zip(table.lines, fine, strict=True) if good]
            yield served(self.source, rows.where(fine), lines)

    def _prompts(self, table: Table) -> tuple[list[int], list[list[Piece]]]:
        """The tokens and the pieces of every row's prompt."""
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
                begin = [(NAME, self.source.streams.number(f"g{group}"), 0, before)]
            prompts.append(before + new)
            pieces.append(begin)
            if self.growing and session:
                said = [*begin, *([(OWN, number, 0, new)] if new else [])]
                said += [(OUTPUT, number, 0, output)] if output else []
                self._said[session] = (before + new + output, said)
        return prompts, pieces


def _known(head: Head) -> bool:
    return head.has("arrival_time_us", "input_tokens", "output_tokens") or head.has("trace_version")


BLIS = Format("blis", "BLIS trace v2 and v3 (YAML header and CSV)", _known, _rows)
