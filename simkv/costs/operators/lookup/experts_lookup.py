"""Durations of a layer's routed experts from ``moe_perf``."""

from __future__ import annotations

from dataclasses import astuple
from math import log
from statistics import median
from typing import TYPE_CHECKING

from simkv.costs.operators.kernel_table import Kernel
from simkv.costs.operators.operator_tables import (
    OLDER_RANK,
    SAME_MINOR,
    TableStore,
    clean_rows,
    select_kernel,
    select_plausible_curve,
)
from simkv.costs.operators.operator_times import MoeShape
from simkv.costs.operators.piecewise_curve import Curve, make_curve, make_nondecreasing

if TYPE_CHECKING:
    import pandas as pd

#: Names of number formats in the tables: for each format its own names, then names of similar
#: formats.
DTYPES = {
    "bf16": ("bfloat16",),
    "fp8": ("fp8", "fp8_block"),
    "fp8_block": ("fp8_block", "fp8"),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "int4_wo"),
    "int4": ("int4_wo",),
    "int4_g32": ("int4_wo",),
}
#: Largest distance of a similar shape (``_distance``): a factor of four in one dimension.
MAX_DISTANCE = log(4)
#: Numbers of tokens at which the times of kernels are compared.
SPREAD_TOKENS = (8, 64, 512, 4096)
_SHAPE = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]


def name_expert_distribution(experts: int) -> str:
    """Return the distribution of tokens over experts to look up, by its name in the tables.

    The exponents of the power law are from aiconfigurator's model files.
    """
    return "power_law_1.01" if experts >= 256 else "power_law_1.2"


def lookup_experts(
    store: TableStore, shape: MoeShape, form: str, flops: float, kernel: Kernel | None = None
) -> tuple[Curve, str, bool] | None:
    """Return the time (s) of routed experts as a function of the number of tokens.

    The second value is a note about substituted measurements. The third value is true if the time
    was measured with ``kernel``, or if ``kernel`` is None. Returns None if no time was measured.
    """
    distribution = name_expert_distribution(shape.experts)
    of_kernel = []
    for table in kernel.tables if kernel else ():
        where = {"moe_dtype": table.dtype, "distribution": distribution}
        anyone = table.backend != store.backend
        rows = select_kernel(store.rows("moe", where, anyone=anyone), table.source)
        if rows is not None:
            near = _nearest(shape, rows)
            of_kernel.append((_distance(shape, near), near, rows, str(table.dtype), anyone))
    # A table that contains the shape itself precedes an earlier table with a similar shape.
    if of_kernel:
        distance, near, rows, dtype, anyone = min(of_kernel, key=lambda found: found[0])
        if distance <= MAX_DISTANCE:
            curve = _scaled(_curve(rows, None, near, flops), shape, near)
            return curve, _note(shape, near, form, dtype, anyone), True
    for anyone in (False, True):
        for dtype in DTYPES.get(form, ()):
            where = {"moe_dtype": dtype, "distribution": distribution}
            rows = store.rows("moe", where, anyone=anyone)
            if rows is None:
                continue
            near = _nearest(shape, rows)
            if _distance(shape, near) > MAX_DISTANCE:
                continue
            others = store.rows("moe", where, anyone=not anyone)
            curve = _scaled(_curve(rows, others, near, flops), shape, near)
            return curve, _note(shape, near, form, dtype, anyone), kernel is None
    return None


def find_kernel_spread(
    store: TableStore, shape: MoeShape, form: str, flops: float
) -> tuple[float, float]:
    """Return the smallest and the largest log(time / used time) over the possible kernels of a
    release.

    Use this function for number formats whose kernel is unknown. The result is (0, 0) if a table of
    the release exists, or if all tables are older. Otherwise, the possible kernels are those in the
    last table before the release and in the first table after it. If all tables are newer, all
    kernels of both engines are possible, including kernels for similar number formats.
    """
    used = lookup_experts(store, shape, form, flops)
    distribution = name_expert_distribution(shape.experts)
    dtypes = DTYPES.get(form, ())
    own = store.rows("moe", {"moe_dtype": dtypes[:1], "distribution": distribution})
    if used is None or own is None:
        return 0.0, 0.0
    ranks = sorted(own["rank"].unique().tolist())
    later, earlier = [r for r in ranks if r < OLDER_RANK], [r for r in ranks if r >= OLDER_RANK]
    if not later or later[0] < SAME_MINOR:
        return 0.0, 0.0
    tables = [own[own["rank"].isin([later[0], *earlier[:1]])]]
    if not earlier:
        where = {"moe_dtype": dtypes, "distribution": distribution}
        found = (store.rows("moe", where, anyone=anyone) for anyone in (False, True))
        tables = [rows for rows in found if rows is not None]
    logs = [0.0]
    for rows in tables:
        for _, part in rows.groupby(["moe_dtype", "kernel_source"], observed=True):
            near = _nearest(shape, part)
            if _distance(shape, near) > MAX_DISTANCE:
                continue
            for curve in _by_rank(part, near, flops):
                scaled = _scaled(curve, shape, near)
                logs.append(median(log(scaled(n) / used[0](n)) for n in SPREAD_TOKENS))
    return min(logs), max(logs)


def _nearest(shape: MoeShape, rows: pd.DataFrame) -> MoeShape:
    keys = rows[_SHAPE].drop_duplicates().to_numpy().tolist()
    shapes = [MoeShape(*(int(value) for value in key)) for key in keys]
    return min(shapes, key=lambda other: (_distance(shape, other), repr(other)))


def _curve(rows: pd.DataFrame, others: pd.DataFrame | None, near: MoeShape, flops: float) -> Curve:
    own = _by_rank(rows, near, flops)
    return select_plausible_curve(own, [] if others is None else _by_rank(others, near, flops))


def _by_rank(rows: pd.DataFrame, near: MoeShape, flops: float) -> list[Curve]:
    """Return one curve per table version that contains the shape, in order of preference."""
    mine = rows[(rows[_SHAPE] == [*astuple(near)]).all(axis=1)]
    # The GPU with the most tokens computes at least the mean number of tokens.
    each = 6.0 * near.hidden * near.intermediate * near.per_token / (near.tp * near.ep)
    found = []
    for _, part in mine.groupby("rank"):
        points = clean_rows(
            part, None, ("num_tokens",), lambda r: 1e3 * each / flops * r["num_tokens"]
        )
        if points:
            found.append(make_curve(make_nondecreasing(points)))
    return found


def _scaled(curve: Curve, shape: MoeShape, near: MoeShape) -> Curve:
    return curve.times(_share(shape) / _share(near))


def _note(shape: MoeShape, near: MoeShape, form: str, dtype: str, anyone: bool) -> str:
    if shape != near:
        ratio = _share(shape) / _share(near)
        return f"experts of {astuple(shape)}: {ratio:.3g} x the time of {astuple(near)}"
    if dtype != DTYPES[form][0]:
        return f"experts in {form}: from the table of {dtype}"
    return "experts: from the tables of another engine" if anyone else ""


def _share(shape: MoeShape) -> float:
    """Return a number proportional to the expert weights per GPU."""
    return shape.hidden * shape.intermediate * shape.experts / (shape.tp * shape.ep)


def _distance(a: MoeShape, b: MoeShape) -> float:
    """Return the difference between two shapes as a number; 0 if they are equal."""
    return (
        abs(log(a.hidden / b.hidden))
        + abs(log(a.intermediate / b.intermediate))
        + abs(log(a.experts / b.experts))
        + 2 * abs(log(a.per_token / b.per_token))
        + 0.5 * abs(log(a.tp / b.tp))
        + 0.5 * abs(log(a.ep / b.ep))
    )
