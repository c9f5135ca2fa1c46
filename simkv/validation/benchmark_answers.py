"""JSON answers of ``simkv validate`` and ``simkv calibrate``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from simkv.report.json_answers import (
    CalibrateAnswer,
    CheckedFileAnswer,
    ComparedFigureAnswer,
    ValidateAnswer,
)

if TYPE_CHECKING:
    from simkv.validation.benchmark_check import (
        Calibration,
        CalibrationCase,
        CheckedBenchmark,
        ComparedFigure,
    )


def _compared(rows: Sequence[ComparedFigure]) -> list[ComparedFigureAnswer]:
    return [
        ComparedFigureAnswer(
            name=row.name,
            measured=row.measured,
            predicted=row.predicted,
            error=row.error,
            low=row.interval.low if row.interval else None,
            high=row.interval.high if row.interval else None,
        )
        for row in rows
    ]


def build_validate_answer(found: Sequence[CheckedBenchmark]) -> ValidateAnswer:
    """Return the JSON answer of ``simkv validate`` with the predictions for benchmark results."""
    return ValidateAnswer(
        files=[
            CheckedFileAnswer(
                file=one.benchmark.name,
                requests=one.benchmark.requests,
                figures=_compared(one.figures),
                causes=list(one.causes),
            )
            for one in found
        ]
    )


def build_calibrate_answer(
    fitted: Calibration,
    explained: Sequence[tuple[CalibrationCase, list[ComparedFigure]]],
    excluded: Sequence[tuple[CalibrationCase, list[ComparedFigure]]],
    out: Path,
) -> CalibrateAnswer:
    """Return the JSON answer of ``simkv calibrate`` with a calibration and its errors."""

    def files(
        some: Sequence[tuple[CalibrationCase, list[ComparedFigure]]],
    ) -> list[CheckedFileAnswer]:
        return [
            CheckedFileAnswer(
                file=case.benchmark.name,
                requests=case.benchmark.requests,
                figures=_compared(rows),
            )
            for case, rows in some
        ]

    return CalibrateAnswer(
        decode=fitted.decode,
        prefill=fitted.prefill,
        latency_ms=1e3 * fitted.latency_s,
        request_ms=1e3 * fitted.request_s,
        fitted=files(explained),
        left_out=files(excluded),
        written=str(out),
    )
