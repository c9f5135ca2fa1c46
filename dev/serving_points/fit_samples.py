"""Samples of a fit: each measurement with its prediction and the derivatives with respect to the
constants.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simkv.costs.operators.calibration_rules import CostConstants
from simkv.costs.operators.configuration_kind import Configuration
from simkv.validation.serving_points.closed_loop_replay import PointReplay
from simkv.validation.serving_points.latency_gradients import FITTED_CONSTANTS, Floats
from simkv.validation.serving_points.launch_recipe import INFERENCEMAX_PROTOCOL
from simkv.validation.serving_points.measured_rows import MeasuredRow
from simkv.validation.serving_points.serving_point import ServingPoint

#: Values of ``FITTED_CONSTANTS`` that leave predictions unchanged.
NONE = np.array([1.0, 1.0, 0.0, 0.0, 0.0, 0.0])


def constants_of(values: Floats) -> CostConstants:
    """Build constants from values in the order of ``FITTED_CONSTANTS``."""
    return CostConstants(
        **{name: float(value) for name, value in zip(FITTED_CONSTANTS, values, strict=True)}
    )


@dataclass(frozen=True)
class Residual:
    """A measurement and its replay: ``real`` has the measured and ``at`` the replayed TTFT and TPOT
    in ms.

    ``slopes`` has shape (2, constants). ``start`` are the constants of the replay, ``release``
    is the engine's release and ``source`` the export that lists the measurement first.
    ``unmeasured`` states that kernels of the release were not measured on the GPU. ``concurrency``
    is the number of clients if it is unknown how often they repeated their requests, else 0.
    """

    kind: Configuration
    measurement: str
    configuration: tuple[str | int, ...]
    real: Floats
    at: Floats
    slopes: Floats
    start: Floats
    release: str = ""
    source: str = ""
    unmeasured: bool = False
    concurrency: int = 0

    def predicted(self, values: Floats) -> Floats:
        """Return TTFT and TPOT (ms) with these constants; they are at least one fifth of the
        replayed values.
        """
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
    """Return a sample for each trusted row with a replayed measurement."""
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
            row.source,
            run.unmeasured,
            0 if row.protocol == INFERENCEMAX_PROTOCOL else row.concurrency,
        )
    return list(found.values())
