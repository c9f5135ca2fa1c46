"""Durations of matrix products from ``gemm_perf``."""

from __future__ import annotations

from simkv.costs.interpolation import bracket, lerp
from simkv.costs.operators.operator_tables import TableStore, clean_rows, select_first_ranked
from simkv.costs.operators.piecewise_curve import Curve, make_curve, make_nondecreasing

#: Names of number formats in the tables.
DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}


def lookup_gemm(store: TableStore, form: str, n: int, k: int, flops: float) -> Curve | None:
    """Return the time (s) of a matrix product by tokens; None if the format was not measured.

    Times are interpolated bilinearly in ``n`` and ``k``, which is exact for operations and
    bytes, and extrapolated beyond the measured ``n`` and ``k``. ``flops`` is the peak rate of
    the format.
    """
    dtype = DTYPES.get(form)
    grid = store.values("gemm", "n", {"gemm_dtype": dtype}) if dtype else []
    if not grid:
        return None
    rows, columns = _ends(grid, n), _ends(store.values("gemm", "k", {"gemm_dtype": dtype}), k)
    where = {"gemm_dtype": dtype, "n": list(rows[:2]), "k": list(columns[:2])}
    rows_here, others = store.rows("gemm", where), store.rows("gemm", where, anyone=True)
    if rows_here is None:
        return None
    import pandas as pd

    own = select_first_ranked(rows_here)
    others = rows_here if others is None else pd.concat([rows_here, others])
    found = clean_rows(
        own, others, ("n", "k", "m"), lambda r: 2e3 / flops * r["m"] * r["n"] * r["k"]
    )
    corners = {
        (a, b): {m: s for (x, y, m), s in found.items() if (x, y) == (a, b)}
        for a in rows[:2]
        for b in columns[:2]
    }
    shared = set.intersection(*(set(corner) for corner in corners.values()))
    if not shared:
        return None
    (n0, n1, share_n), (k0, k1, share_k) = rows, columns
    return make_curve(
        make_nondecreasing(
            {
                m: max(
                    lerp(
                        lerp(corners[n0, k0][m], corners[n1, k0][m], share_n),
                        lerp(corners[n0, k1][m], corners[n1, k1][m], share_n),
                        share_k,
                    ),
                    min(corner[m] for corner in corners.values()),
                )
                for m in shared
            }
        )
    )


def _ends(grid: list[int], value: int) -> tuple[int, int, float]:
    low, high, share = bracket(grid, value)
    return grid[low], grid[high], share
