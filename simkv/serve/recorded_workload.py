"""Convert received requests to a scenario or a trace that can be simulated."""

from __future__ import annotations

import asyncio
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simkv.core.atomic_files import atomic_file, translate_disk_errors
from simkv.core.errors import InputError
from simkv.core.request import Request
from simkv.scenario.scenario import Scenario
from simkv.workload.formats.simkv_csv import (
    COLUMN_PARSERS,
    format_column,
    used_columns,
    write_file,
)
from simkv.workload.listed_requests import ListedRequest, acceptance_fields
from simkv.workload.request_columns import PromptPieces, RequestRows, piece_from_segment
from simkv.workload.trace_selection import Selection
from simkv.workload.trace_source import TraceSource
from simkv.workload.workload_section import Workload


def recorded_scenario(
    scenario: Scenario, requests: Sequence[Request], until: float | None = None
) -> Scenario:
    """Return the scenario with the received requests as its workload.

    The simulation is cut off at ``until`` (s), if given.
    """
    listed = [
        ListedRequest(
            arrival=request.arrival,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            ignore_eos=request.ignore_eos,
            lora=request.lora,
            routing_key=request.routing_key,
            client=request.client,
            logprobs_from=request.logprobs_from,
            timeout=request.timeout,
            **acceptance_fields(request),
            segments=list(request.segments) or None,
        )
        for request in requests
    ]
    changes = {"workload": Workload(requests=listed), "horizon": until}
    return scenario.model_copy(update=changes)


def write_recorded_trace(path: Path, requests: Sequence[Request]) -> None:
    """Write received requests as a simkv trace. Raises InputError if the file cannot be written."""
    with atomic_file(path) as new:
        source = TraceSource(path, Selection())
        rows = _rows(requests, source)
        write_file(new, [rows], used_columns(rows, ["arrival"]), source)


#: Time (s) between two additions to a growing trace.
SAVE_EVERY_S = 0.5
#: Number of characters reserved in each row for the time at which the client leaves: the longest
#: float.
TIMEOUT_WIDTH = 24
#: Columns of a growing trace; all are written, because it is not known which columns later rows
#: need.
_UNUSED = ("has_images", "session", "think_time", "tool_time", "waits_for")
GROWING_COLUMNS = [name for name in COLUMN_PARSERS if name not in _UNUSED]


class GrowingTrace:
    """Trace file that grows while the server runs: one row per received request.

    The file can be read at any time. A row contains blanks for the time at which the client leaves.
    If the file cannot be written, ``warn`` receives a message, and the rows are written later.
    """

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        self._path, self._warn = path, warn
        self._changes: list[Request] = []
        self._source = TraceSource(path, Selection())
        self._departures = array("q")
        self._failing = False
        header = (",".join(GROWING_COLUMNS) + "\n").encode()
        self._size = len(header)
        with translate_disk_errors(path, "written"):
            path.write_bytes(header)

    def add(self, request: Request) -> None:
        """Add a new request, or a request whose client has left, for the next ``save``."""
        self._changes.append(request)

    async def grow(self) -> None:
        """Add new rows to the file at regular intervals, until this coroutine is cancelled."""
        while True:
            await asyncio.sleep(SAVE_EVERY_S)
            try:
                self.save()
            except InputError as error:
                if not self._failing:
                    self._warn(
                        f"{error}; recording (--record) continues when the file can be written "
                        "again"
                    )
                self._failing = True
            else:
                self._failing = False

    def save(self) -> None:
        """Write new requests and departures.

        Raises InputError if this fails. The file then still contains only whole rows.
        """
        new: list[Request] = []
        left: dict[int, str] = {}
        for request in self._changes:
            if request.id >= len(self._departures) + len(new):
                new.append(request)
            elif request.timeout is not None:
                left[request.id] = repr(request.timeout)
        rows = self._format(new) if new else []
        with translate_disk_errors(self._path, "written"), self._path.open("r+b") as file:
            self._append(file.fileno(), b"".join(row for row, _ in rows))
            for row, place in rows:
                self._departures.append(self._size + place)
                self._size += len(row)
            for number, seconds in left.items():
                file.seek(self._departures[number])
                file.write(seconds.encode())
        self._changes.clear()

    def _append(self, file: int, content: bytes) -> None:
        """Write all rows at the end of the file, or none if an error occurs."""
        try:
            os.lseek(file, self._size, os.SEEK_SET)
            while content:
                content = content[os.write(file, content) :]
        except OSError:
            os.ftruncate(file, self._size)
            raise

    def _format(self, requests: Sequence[Request]) -> list[tuple[bytes, int]]:
        """Return the row of each request, and the position in the row for the time of departure."""
        rows, at = _rows(requests, self._source), GROWING_COLUMNS.index("timeout")
        fields = [format_column(rows, name, self._source) for name in GROWING_COLUMNS]
        found = []
        for values in zip(*fields, strict=True):
            before = "".join(f"{value}," for value in values[:at])
            row = ",".join((values[at].ljust(TIMEOUT_WIDTH), *values[at + 1 :]))
            found.append((f"{before}{row}\n".encode(), len(before.encode())))
        return found


def _rows(requests: Sequence[Request], source: TraceSource) -> RequestRows:
    pieces = [
        [piece_from_segment(s, source.streams) for s in _shared(request)] for request in requests
    ]
    return RequestRows(
        arrival=np.array([r.arrival for r in requests], np.float64),
        prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int64),
        output_tokens=np.array([r.output_tokens for r in requests], np.int64),
        max_tokens=np.array([r.max_tokens for r in requests], np.int64),
        priority=np.array([r.priority for r in requests], np.int64),
        timeout=np.array([r.timeout or np.nan for r in requests], np.float64),
        ignore_eos=np.array([r.ignore_eos for r in requests], np.bool_),
        acceptance=np.array([_chance(r) for r in requests], np.float64),
        lora=np.array([-1 if r.lora is None else source.loras.number(r.lora) for r in requests]),
        client=np.array(
            [-1 if r.client is None else source.clients.number(r.client) for r in requests]
        ),
        pieces=PromptPieces.of(pieces),
    )


def _chance(request: Request) -> float:
    """Return the acceptance rate of draft tokens, or NaN if a trace cannot express it."""
    rates = request.acceptance.rates if request.acceptance else np.nan
    return np.nan if isinstance(rates, tuple) else rates


def _shared(request: Request) -> Iterator[Any]:
    """Yield the segments of a prompt, without its unique tokens."""
    return (segment for segment in request.segments if segment.stream != f"u{request.id}")
