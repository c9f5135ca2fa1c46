"""Durations by batch size and length, interpolated and extrapolated from measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from simkv.costs.interpolation import bracket, interpolate, lerp
from simkv.costs.operators.piecewise_curve import Curve, make_curve, make_nondecreasing


class BatchLengthPlane:
    """Duration in seconds of ``batch`` sequences of ``length`` tokens, interpolated from
    ``points``.

    Above the largest measured batch, the duration is proportional to the batch. Above the longest
    measured length, the duration is proportional to ``work(length)``.
    """

    def __init__(
        self,
        points: Mapping[tuple[float, float], float],
        work: Callable[[float], float],
        scale: float = 1.0,
    ) -> None:
        self._work = work
        columns: dict[float, dict[float, float]] = {}
        for (batch, length), seconds in points.items():
            columns.setdefault(length, {})[batch] = seconds
        columns = {length: make_nondecreasing(column) for length, column in columns.items()}
        batches = {batch for column in columns.values() for batch in column}
        for batch in batches:
            row = {length: column[batch] for length, column in columns.items() if batch in column}
            for length, seconds in make_nondecreasing(row).items():
                columns[length][batch] = seconds
        self._lengths = sorted(columns)
        self._columns: list[Curve] = [
            make_curve(columns[length]).times(scale) for length in self._lengths
        ]

    def __call__(self, batch: float, length: float) -> float:
        last = self._lengths[-1]
        if length > last:
            ratio = self._work(length) / self._work(last)
            return max(self._column(-1, batch) * ratio, self._column(-1, batch))
        low, high, share = bracket(self._lengths, length)
        first = self._column(low, batch)
        return lerp(first, self._column(high, batch), share) if share else first

    def _column(self, index: int, batch: float) -> float:
        curve = self._columns[index]
        most = curve.xs[-1]
        return (
            curve.ys[-1] * batch / most if batch > most else interpolate(curve.xs, curve.ys, batch)
        )
