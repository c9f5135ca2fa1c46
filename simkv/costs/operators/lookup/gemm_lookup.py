"""Durations of matrix products from ``gemm_perf``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from simkv.costs.interpolation import bracket, lerp
from simkv.costs.operators.kernel_table import Kernel
from simkv.costs.operators.operator_tables import (
    TableStore,
    clean_rows,
    select_first_ranked,
    select_kernel,
)
from simkv.costs.operators.piecewise_curve import Curve, make_curve, make_nondecreasing

if TYPE_CHECKING:
    import pandas as pd

#: Names of number formats in the tables.
DTYPES = {"bf16": "bfloat16", "fp8": "fp8", "fp8_block": "fp8_block", "nvfp4": "nvfp4"}


def lookup_gemm(
    store: TableStore, form: str, n: int, k: int, flops: float, kernel: Kernel | None = None
) -> tuple[Curve, bool] | None:
    """Return the time (s) of a matrix product as a function of the number of tokens.

    The second value is true if the time was measured with ``kernel``, or if ``kernel`` is None.
    ``flops`` is the peak rate of the format. Returns None if the number format was not measured.
    """
    for table in kernel.tables if kernel else ():
        of_kernel = select_kernel(
            store.rows("gemm", {"gemm_dtype": table.dtype}, anyone=table.backend != store.backend),
            table.source,
        )
        if of_kernel is not None and (curve := _curve(of_kernel, None, n, k, flops)) is not None:
            return curve, True
    if (dtype := DTYPES.get(form)) is None:
        return None
    rows_here = store.rows("gemm", {"gemm_dtype": dtype})
    if rows_here is None:
        return None
    others = store.rows("gemm", {"gemm_dtype": dtype}, anyone=True)
    curve = _curve(rows_here, others, n, k, flops)
    return None if curve is None else (curve, kernel is None)


def _curve(
    rows_here: pd.DataFrame, others: pd.DataFrame | None, n: int, k: int, flops: float
) -> Curve | None:
    """Return the time of a matrix product from ``rows_here``.

    ``others`` are used to detect host-bound measurements (rule 3 of ``operator_tables.py``).
    """
    import pandas as pd

    rows, columns = (
        _ends(sorted(rows_here[name].unique().tolist()), value)
        for name, value in (("n", n), ("k", k))
    )

    def corners_of(frame: pd.DataFrame) -> pd.DataFrame:
        return frame[frame["n"].isin(rows[:2]) & frame["k"].isin(columns[:2])]

    near = corners_of(rows_here)
    every = near if others is None else pd.concat([near, corners_of(others)])
    found = clean_rows(
        select_first_ranked(near),
        every,
        ("n", "k", "m"),
        lambda r: 2e3 / flops * r["m"] * r["n"] * r["k"],
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
