"""Choice between several tables of one operator shape (rule 3 of ``operator_tables.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from simkv.costs.operators.operator_tables import HOST_BOUND
from simkv.costs.operators.piecewise_curve import Curve


def select_plausible_curve(own: Sequence[Curve], others: Sequence[Curve]) -> Curve:
    """Return the first curve of ``own`` that is not implausibly slow.

    ``own`` is in order of preference. For each point of a curve, its time is divided by the fastest
    time of all curves there. The curve is plausible if the median of these ratios is at most
    ``HOST_BOUND``. If no curve is plausible, the fastest curve is returned.
    """
    every = [*own, *others]
    for curve in own:
        ratios = [
            y / min(other(x) for other in every) for x, y in zip(curve.xs, curve.ys, strict=True)
        ]
        if median(ratios) <= HOST_BOUND:
            return curve
    return min(every, key=lambda curve: sum(curve.ys) / len(curve.ys))
