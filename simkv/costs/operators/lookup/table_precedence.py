"""Which of several tables of one shape is to be believed as a whole (rule 3 of ``tables.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from simkv.costs.operators.operator_tables import HOST_BOUND
from simkv.costs.operators.piecewise_curve import Curve


def select_plausible_curve(own: Sequence[Curve], others: Sequence[Curve]) -> Curve:
    """The first of ``own``, which are in the order in which they count, not slow as a whole.

    In the median over its points it takes at most ``HOST_BOUND`` times the fastest of all. Without
    one, the fastest.
    """
    every = [*own, *others]
    for curve in own:
        ratios = [
            y / min(other(x) for other in every) for x, y in zip(curve.xs, curve.ys, strict=True)
        ]
        if median(ratios) <= HOST_BOUND:
            return curve
    return min(every, key=lambda curve: sum(curve.ys) / len(curve.ys))
