"""Durations of memory-bound kernels from ``scale_matrix_perf``, whose kernels read 16 bits and
write 8 bits.
"""

from __future__ import annotations

from simkv.costs.operators.operator_tables import TableStore, clean_rows
from simkv.costs.operators.piecewise_curve import Curve, make_curve, make_nondecreasing


def lookup_elementwise(store: TableStore) -> Curve | None:
    """Return the time (s) of a memory-bound kernel as a function of the moved bytes.

    Returns None if it was not measured.
    """
    parts = [store.rows("scale_matrix", {}, anyone=anyone) for anyone in (False, True)]
    found: dict[float, float] = {}
    for rows in parts:
        if rows is None:
            continue
        moved = rows.assign(nbytes=3.0 * rows["m"] * rows["k"])
        for nbytes, seconds in clean_rows(moved, None, ("nbytes",)).items():
            found[nbytes] = min(seconds, found.get(nbytes, seconds))
    return _thin(make_curve(make_nondecreasing(found))) if found else None


def _thin(curve: Curve) -> Curve:
    """Return points of the curve whose x values differ by at least 20 %."""
    kept = {curve.xs[0]: curve.ys[0], curve.xs[-1]: curve.ys[-1]}
    last = curve.xs[0]
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if x > 1.2 * last:
            kept[x] = y
            last = x
    return make_curve(kept)
