"""Requests generated from ServeGen's statistics of production clients.

The input is a directory or a tar with two files for each client (github.com/alibaba/ServeGen,
data/): ``chunk-<client>-trace.csv`` (no header; window start in s, requests per s, CV of the gaps,
``Gamma`` or ``Weibull`` or empty, shape, scale in s) and ``chunk-<client>-dataset.json`` (window
start -> field -> a Python dict literal of probabilities).

As in ServeGen, the gaps of a client in a window are sampled from its distribution and scaled to
fill the window, so that the rate is exact. Unlike in ServeGen, the prompt length and the output
length of a request are sampled independently (ServeGen uses the same quantile for both). Each
combination of client, window and sampled quantity has its own random stream. Therefore, the
requests do not change if the trace is read from a later start, or if another client is removed.
"""

from __future__ import annotations

import ast
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from simkv.workload.column_values import describe_found
from simkv.workload.formats.trace_format import FileHead, TraceFormat
from simkv.workload.request_columns import (
    EMPTY_COLUMNS,
    Floats,
    Ints,
    RequestRows,
)
from simkv.workload.trace_source import TraceSource
from simkv.workload.workload_base import MAX_TOKEN_COUNT, make_random_stream

_TRACE = re.compile(r"chunk-(\d{1,9})-trace\.csv")
_DATASET = re.compile(r"chunk-(\d{1,9})-dataset\.json")
LENGTH_FIELDS = ("input_tokens", "output_tokens")
#: Window length in seconds for client files with a single window.
_STEP = 600.0
#: Maximum uncompressed size in bytes of a tar member.
MAX_MEMBER_BYTES = 1 << 28


@dataclass(frozen=True)
class RateWindow:
    """Time window of a client from ``start`` to ``end`` (s).

    ``rate`` is the number of requests per second. ``law`` is the distribution of the gaps between
    requests, and ``shape`` is its shape parameter.
    """

    index: int
    start: float
    end: float
    rate: float
    law: str
    shape: float


@dataclass
class ServegenClient:
    """A client with its rate windows and its length distributions.

    ``lengths`` contains pairs of a start time and the distributions that apply from then on.
    """

    # The distributions are unparsed text.

    number: int
    windows: list[RateWindow]
    lengths: list[tuple[float, dict[str, str]]]
    place: str

    def __post_init__(self) -> None:
        self._parsed: dict[tuple[int, str], tuple[Ints, Floats] | None] = {}

    def length_distribution(self, field: str, time: float) -> tuple[Ints, Floats] | None:
        """Return the lengths that apply at ``time``, and their cumulative probabilities.

        The result is None if the file has no lengths for the field.
        """
        # A window without lengths uses the lengths of the nearest earlier window; if no earlier
        # window has lengths, it uses the nearest later one.
        starts = [start for start, _ in self.lengths]
        now = int(np.searchsorted(starts, time, side="right")) - 1
        for index in [*range(now, -1, -1), *range(max(now + 1, 0), len(starts))]:
            if (law := self._law(index, field)) is not None:
                return law
        return None

    def _law(self, index: int, field: str) -> tuple[Ints, Floats] | None:
        if (index, field) not in self._parsed:
            self._parsed[index, field] = self._parse(index, field)
        return self._parsed[index, field]

    def _parse(self, index: int, field: str) -> tuple[Ints, Floats] | None:
        start, fields = self.lengths[index]
        text = fields.get(field, "{}")
        place = f"{self.place}: window {start:g}: {field}"
        try:
            table = ast.literal_eval(text)
            values = np.array(list(table), np.float64)
            weights = np.array(list(table.values()), np.float64)
        except (ValueError, SyntaxError, TypeError, AttributeError, MemoryError, RecursionError):
            raise ValueError(
                f"{place}: should be a dict literal of lengths and probabilities; "
                f"{describe_found(text)}"
            ) from None
        fine = np.isfinite(weights) & (weights >= 0) & (values >= 0) & (values <= MAX_TOKEN_COUNT)
        if not fine.all():
            raise ValueError(
                f"{place}: lengths and probabilities should be finite and non-negative"
            )
        order = np.argsort(values)
        values, weights = values[order], weights[order]
        possible = weights > 0
        if not possible.any():
            return None
        total = np.cumsum(weights[possible])
        return np.maximum(values[possible].astype(np.int64), 1), total / total[-1]


def _rows(source: TraceSource) -> Iterator[RequestRows]:
    clients = _clients(source)
    selection = source.selection
    end = np.inf if selection.duration is None else selection.start + selection.duration
    times = sorted({w.start for c in clients for w in c.windows if w.rate > 0 and w.end > w.start})
    source.tally.notes.append(
        f"sampled from the statistics of {len(clients)} clients with seed {selection.seed}, "
        "including clients without requests in the selected time"
    )
    by_time: dict[float, list[tuple[ServegenClient, RateWindow]]] = {time: [] for time in times}
    for client in clients:
        for window in client.windows:
            if window.start in by_time:
                by_time[window.start].append((client, window))
    for time, group in by_time.items():
        if time >= end:
            break
        drawn = [
            _draw(source, client, window)
            for client, window in group
            if window.end > selection.start and window.rate > 0
        ]
        if drawn:
            rows = RequestRows.concat(drawn).by_arrival()
            source.tally.rows += len(rows)
            yield rows


def _draw(source: TraceSource, client: ServegenClient, window: RateWindow) -> RequestRows:
    """Sample the requests of a client in a window."""
    seed, place = source.selection.seed, (client.number, window.index)
    gaps, prompts, outputs = (make_random_stream(seed, *place, purpose) for purpose in range(3))
    length = window.end - window.start
    count = round(window.rate * length)
    drawn = (
        gaps.weibull(window.shape, count + 1)
        if window.law == "weibull"
        else gaps.gamma(window.shape, size=count + 1)
    )
    times = np.cumsum(drawn)
    lengths = []
    for field, random in zip(LENGTH_FIELDS, (prompts, outputs), strict=True):
        try:
            law = client.length_distribution(field, window.start)
        except ValueError as error:
            raise source.error(str(error)) from error
        if law is None:
            source.failed(
                f"from client {client.number} with unknown {field}",
                np.ones(count, np.bool_),
                [0] * count,
            )
            source.tally.rows += count
            return RequestRows(*EMPTY_COLUMNS)
        values, total = law
        lengths.append(values[np.searchsorted(total, random.random(count), side="right")])
    session = np.full(count, source.sessions.number(f"client {client.number}"), np.int64)
    arrival = window.start + times[:-1] * (length / times[-1])
    prompt_tokens, output_tokens = lengths
    return RequestRows(arrival, prompt_tokens, output_tokens, session=session)


def _clients(source: TraceSource) -> list[ServegenClient]:
    """Return the clients of a directory or a tar, ordered by number."""
    texts = dict(_folder(source) if source.path.is_dir() else _members(source))
    traces = {int(m[1]): name for name in texts if (m := _TRACE.fullmatch(Path(name).name))}
    datasets = {int(m[1]): name for name in texts if (m := _DATASET.fullmatch(Path(name).name))}
    if len(traces) + len(datasets) != len(texts):
        raise source.error("contains clients of several models; pass the folder of one model")
    clients = []
    for number, name in sorted(traces.items()):
        if number not in datasets:
            source.tally.notes.append(f"client {number} is excluded: it has no dataset file")
            continue
        windows = _windows(source, name, texts[name])
        lengths = _lengths(source, datasets[number], texts[datasets[number]])
        clients.append(ServegenClient(number, windows, lengths, datasets[number]))
    if not clients:
        raise source.error("no client has both chunk-<client>-trace.csv and -dataset.json")
    return clients


def _folder(source: TraceSource) -> Iterator[tuple[str, str]]:
    for path in sorted(source.path.rglob("chunk-*")):
        if _TRACE.fullmatch(path.name) or _DATASET.fullmatch(path.name):
            with source.text(path) as lines:
                yield str(path.relative_to(source.path)), lines.read()


def _members(source: TraceSource) -> Iterator[tuple[str, str]]:
    """Yield the client files in a tar without extracting them to disk."""
    try:
        with tarfile.open(source.path, "r:*") as tar:
            for member in tar:
                name = Path(member.name).name
                if not (_TRACE.fullmatch(name) or _DATASET.fullmatch(name)):
                    continue
                if member.size > MAX_MEMBER_BYTES:
                    raise source.error(f"{member.name} is larger than {MAX_MEMBER_BYTES >> 20} MiB")
                if content := tar.extractfile(member):
                    yield member.name, content.read().decode(errors="replace")
    except (tarfile.TarError, EOFError, OSError) as error:
        raise source.error(f"incomplete or damaged tar ({error}); download it again") from error


def _windows(source: TraceSource, name: str, text: str) -> list[RateWindow]:
    rows = []
    for line, fields in enumerate((row.split(",") for row in text.splitlines()), 1):
        try:
            if len(fields) != 6:
                raise ValueError(f"row: should have 6 fields; found {len(fields)}")
            start, rate = _number(fields[0], "window start"), _number(fields[1], "rate")
            law = fields[3].strip().casefold()
            if rate > 0 and law not in ("gamma", "weibull"):
                raise ValueError(
                    f"distribution: should be Gamma or Weibull; {describe_found(fields[3])}"
                )
            shape = _number(fields[4], "shape")
            if rate > 0 and shape <= 0:
                raise ValueError(f"shape: should be greater than 0; {describe_found(fields[4])}")
            rows.append((start, rate, law, shape))
        except ValueError as error:
            column, _, what = str(error).partition(": ")
            if not source.selection.skip_bad:
                raise source.error(f"{name}:{line}: {column}: {what}") from None
            source.bad(line, f"{name}: {column}", what)
    rows.sort()
    starts = [start for start, *_ in rows]
    steps = [b - a for a, b in pairwise(starts) if b > a]
    step = min(steps, default=_STEP)
    afterwards = [*starts[1:], np.inf]
    ends = [min(start + step, after) for start, after in zip(starts, afterwards, strict=True)]
    return [
        RateWindow(round(start / step), start, end, rate, law, shape)
        for (start, rate, law, shape), end in zip(rows, ends, strict=True)
    ]


def _number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = np.nan
    if not 0 <= value < np.inf:
        raise ValueError(f"{what}: should be a number of at least 0; {describe_found(text)}")
    return value


def _lengths(source: TraceSource, name: str, text: str) -> list[tuple[float, dict[str, str]]]:
    try:
        windows = json.loads(text)
        lengths = sorted(
            ((float(start), dict(fields)) for start, fields in windows.items()),
            key=lambda window: window[0],
        )
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise source.error(f"{name}: should be a JSON object of windows and fields") from error
    for start, fields in lengths:
        missing = [field for field in LENGTH_FIELDS if not isinstance(fields.get(field), str)]
        if missing:
            raise source.error(
                f"{name}: window {start:g}: missing {' and '.join(missing)}; found "
                f"{', '.join(fields) or 'nothing'} (clients with images are not supported)"
            )
    return lengths


def is_client_file(name: str) -> bool:
    """Return whether a file name belongs to a ServeGen client."""
    return bool(_TRACE.fullmatch(name) or _DATASET.fullmatch(name))


def _known(head: FileHead) -> bool:
    if head.kind == "folder":
        return any(is_client_file(path.name) for path in head.path.rglob("chunk-*"))
    return head.kind == "tar"


SERVEGEN = TraceFormat(
    "servegen", "ServeGen client statistics (folder or tar of chunk-* files)", _known, _rows
)
