"""Choice between tables of one shape (rule 3 of ``operator_tables.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from simkv.costs.operators.operator_tables import HOST_BOUND
from simkv.costs.operators.piecewise_curve import Curve


def select_plausible_curve(own: Sequence[Curve], others: Sequence[Curve]) -> Curve:
    """Return the first curve of ``own``, in order of preference, that is not slow as a whole.

    A curve qualifies if the median over its points is at most ``HOST_BOUND`` times the fastest of
    all curves. Without one, the fastest curve is returned.
    """
    every = [*own, *others]
    for curve in own:
        ratios = [
            y / min(other(x) for other in every) for x, y in zip(curve.xs, curve.ys, strict=True)
        ]
        if median(ratios) <= HOST_BOUND:
            return curve
    return min(every, key=lambda curve: sum(curve.ys) / len(curve.ys))
