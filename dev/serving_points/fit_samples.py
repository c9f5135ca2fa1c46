"""What a fit starts from: each measurement with what was predicted, and how constants move that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simkv.costs.operators.calibration_rules import CostConstants
from simkv.costs.operators.error_spreads import Configuration
from simkv.validation.serving_points.closed_loop_replay import PointReplay
from simkv.validation.serving_points.latency_gradients import FITTED_CONSTANTS, Floats
from simkv.validation.serving_points.measured_rows import MeasuredRow
from simkv.validation.serving_points.serving_point import ServingPoint

#: Values of ``FITTED_CONSTANTS`` that change nothing.
NONE = np.array([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])


def constants_of(values: Floats) -> CostConstants:
    """Constants of these values, in the order of ``FITTED_CONSTANTS``."""
    return CostConstants(
        **{name: float(value) for name, value in zip(FITTED_CONSTANTS, values, strict=True)}
    )


@dataclass(frozen=True)
class Residual:
    """A measurement and its replay: ``at`` and ``real`` are TTFT and TPOT in ms.

    ``slopes`` have a row for each of the two and a column for each constant; the replay was made
    with the constants ``start``; ``release`` is the engine's.
    """

    kind: Configuration
    measurement: str
    configuration: tuple[str | int, ...]
    real: Floats
    at: Floats
    slopes: Floats
    start: Floats
    release: str = ""

    def predicted(self, values: Floats) -> Floats:
        """TTFT and TPOT (ms) with these constants, never below a fifth of what was replayed."""
        moved = self.at + self.slopes @ (values - self.start)
        return np.maximum(moved, self.at / 5)

    @property
    def group(self) -> tuple[str, str, str]:
        """Engine, model and GPU."""
        return self.kind.backend, self.kind.model, self.kind.gpu


def samples_of(
    rows: Sequence[MeasuredRow],
    points: Sequence[ServingPoint | str],
    replayed: Sequence[PointReplay | None],
    start: Mapping[Configuration, Floats] | None = None,
) -> list[Residual]:
    """A sample for each measurement of trusted rows that was replayed."""
    found: dict[str, Residual] = {}
    for row, point, run in zip(rows, points, replayed, strict=True):
        if isinstance(point, str) or run is None or run.latency is None or run.moved is None:
            continue
        if not row.measured or row.suspect or row.measurement in found:
            continue
        found[row.measurement] = Residual(
            point.kind,
            row.measurement,
            row.configuration,
            np.array(row.measured),
            np.array(run.latency),
            run.moved,
            (start or {}).get(point.kind, NONE),
            row.version,
        )
    return list(found.values())
