"""Measured points as rows of a CSV file: configurations and their results.

Required columns: id, backend, backend_version, model, system, precision, isl, osl, concurrency, tp,
dp, ep. Optional columns: measurement, engine_found, precision_note, parallel_note, measured_on,
image, source, protocol, warmup, suspect. The columns ttft_ms and tpot_ms are also optional, but
only together. Predictions of another tool, such as ``aic``, are in ``aic_ttft_ms`` and
``aic_tpot_ms``.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from simkv.core.errors import InputError, spelling_hint
from simkv.core.input_files import read_text

REQUIRED_COLUMNS = (
    *("id", "backend", "backend_version", "model", "system", "precision"),
    *("isl", "osl", "concurrency", "tp", "dp", "ep"),
)
BACKENDS = ("vllm", "sglang")
#: Column prefixes of other tools whose predictions may be in the file.
OTHER_TOOLS = ("aic", "aicfix", "aichyb")
#: Maximum length or concurrency; larger values are rejected as typos.
MAX_NUMBER = 1_000_000


class Latency(NamedTuple):
    """Mean time to first token and mean time per token after it, in ms."""

    ttft: float
    tpot: float


@dataclass(frozen=True)
class MeasuredRow:
    """A measured configuration with its results.

    ``line`` is the line number in the file. Lengths are in tokens. ``version`` is the engine's
    version as digits and dots, or empty. Repeated entries have equal ``measurement``.
    """

    line: int
    id: str
    measurement: str
    backend: str
    version: str
    model: str
    system: str
    precision: str
    isl: int
    osl: int
    concurrency: int
    tp: int
    dp: int
    ep: int
    measured_on: date | None = None
    image: str = ""
    source: str = ""
    protocol: str = ""
    warmup: str = ""
    suspect: str = ""
    parallel_note: str = ""
    precision_note: str = ""
    measured: Latency | None = None
    anchors: Mapping[str, Latency] = field(default_factory=dict)

    @property
    def group(self) -> tuple[str, str, str]:
        """Names of the engine, the model and the GPU."""
        return self.backend, self.model, self.system

    @property
    def configuration(self) -> tuple[str | int, ...]:
        """Requested configuration without the engine version.

        Rows with equal configurations are held out together.
        """
        return (
            *(self.backend, self.model, self.system, self.precision),
            *(self.tp, self.dp, self.ep, self.isl, self.osl, self.concurrency),
        )


def read_rows(path: Path) -> list[MeasuredRow]:
    """Read the points of a CSV file. Raises InputError with line and field for invalid input."""
    reader = csv.DictReader(StringIO(read_text(path, "utf-8-sig"), newline=""), strict=True)
    try:
        _check_columns(path, list(reader.fieldnames or []))
        rows = [_Fields(path, reader.line_num, record).row() for record in reader]
    except csv.Error as error:
        raise InputError(f"{path}: not a CSV file: {error}") from error
    if not rows:
        raise InputError(f"{path}: contains no rows; expected one row per line after the header")
    lines: dict[str, int] = {}
    for row in rows:
        if row.id in lines:
            raise InputError(
                f"{path}: line {row.line}: id: duplicate {row.id!r}, also in line {lines[row.id]}"
            )
        lines[row.id] = row.line
    return rows


def _check_columns(path: Path, found: list[str]) -> None:
    for name in REQUIRED_COLUMNS:
        if name not in found:
            raise InputError(
                f"{path}: line 1: missing column {name}{spelling_hint(name, found)}; "
                f"required: {', '.join(REQUIRED_COLUMNS)}"
            )
    if ("ttft_ms" in found) != ("tpot_ms" in found):
        raise InputError(f"{path}: line 1: ttft_ms and tpot_ms must be given together")
    if twice := {name for name in found if found.count(name) > 1}:
        raise InputError(f"{path}: line 1: duplicate column {min(twice)}")


class _Fields:
    """Parser for the fields of one CSV line. Errors name the line and the field."""

    def __init__(self, path: Path, line: int, record: Mapping[str | None, str | None]) -> None:
        self._where = f"{path}: line {line}"
        self._line = line
        if None in record or None in record.values():
            raise InputError(f"{self._where}: number of fields differs from line 1")
        self._record = {str(k): (v or "").strip() for k, v in record.items()}

    def row(self) -> MeasuredRow:
        backend = self._text("backend").lower()
        if backend not in BACKENDS:
            raise InputError(
                f"{self._where}: backend: unknown backend "
                f"{backend!r}{spelling_hint(backend, BACKENDS)}; "
                f"expected {' or '.join(BACKENDS)}"
            )
        name = self._text("id")
        whole = {n: self._whole(n) for n in ("isl", "osl", "concurrency", "tp", "dp", "ep")}
        notes = ("image", "source", "protocol", "warmup", "suspect")
        texts = {n: self._text(n, "") for n in (*notes, "parallel_note", "precision_note")}
        return MeasuredRow(
            line=self._line,
            id=name,
            measurement=self._text("measurement", "") or name,
            backend=backend,
            version=_digits(self._text("backend_version", ""))
            or _digits(self._text("engine_found", "")),
            model=self._text("model"),
            system=self._text("system"),
            precision=self._text("precision", "").lower(),
            measured_on=self._day("measured_on"),
            measured=self._latency(""),
            anchors={
                tool: found
                for tool in OTHER_TOOLS
                if (found := self._latency(f"{tool}_")) is not None
            },
            **whole,  # type: ignore[arg-type]
            **texts,  # type: ignore[arg-type]
        )

    def _text(self, name: str, default: str | None = None) -> str:
        value = self._record.get(name, "") or default
        if value is None:
            raise InputError(f"{self._where}: {name}: is empty")
        return value

    def _whole(self, name: str) -> int:
        text = self._text(name)
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not (1 <= number <= MAX_NUMBER and number == int(number)):
            raise InputError(
                f"{self._where}: {name}: must be an integer from 1 to {MAX_NUMBER:,}, got {text!r}"
            )
        return int(number)

    def _milliseconds(self, name: str) -> float | None:
        text = self._text(name, "")
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise InputError(
                f"{self._where}: {name}: must be milliseconds greater than 0, got {text!r}"
            )
        return value

    def _latency(self, tool: str) -> Latency | None:
        ttft, tpot = self._milliseconds(f"{tool}ttft_ms"), self._milliseconds(f"{tool}tpot_ms")
        if (ttft is None) != (tpot is None):
            missing = f"{tool}{'ttft' if ttft is None else 'tpot'}_ms"
            raise InputError(
                f"{self._where}: {missing}: is empty although the other latency is given"
            )
        return None if ttft is None or tpot is None else Latency(ttft, tpot)

    def _day(self, name: str) -> date | None:
        text = self._text(name, "")
        if not text:
            return None
        try:
            return date.fromisoformat(text)
        except ValueError as error:
            raise InputError(
                f"{self._where}: {name}: must be a date such as 2026-01-31, got {text!r}"
            ) from error


def _digits(text: str) -> str:
    """Return the digits and dots of a version, such as ``0.5.9`` for ``0.5.9.post1``."""
    found = re.match(r"v?(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else ""
