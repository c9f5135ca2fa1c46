"""Attention times from ``context_attention_perf`` and ``generation_attention_perf``."""

from __future__ import annotations

from collections.abc import Iterable
from math import log
from typing import TYPE_CHECKING

from simkv.costs.hardware.model_architecture import Gqa
from simkv.costs.operators.kernel_table import Kernel
from simkv.costs.operators.lookup.batch_length_plane import BatchLengthPlane
from simkv.costs.operators.operator_tables import (
    TableStore,
    clean_rows,
    select_first_ranked,
    select_kernel,
)
from simkv.costs.operators.operator_times import Lookup

if TYPE_CHECKING:
    import pandas as pd

#: Amount of KV in bytes that exceeds the L2 cache of every GPU in the catalog.
MIN_UNCACHED_BYTES = 128e6
_SHAPE = ["num_heads", "num_key_value_heads", "head_dim", "window_size"]


def prompt_pairs(length: float, window: int = 0) -> float:
    """Return the number of attention pairs (token, attended token) of a prompt of ``length``
    tokens.

    ``window`` is the size of the sliding window, or 0 for full attention.
    """
    if window and length > window:
        return window * (window + 1) / 2 + window * (length - window)
    return length * (length + 1) / 2


def lookup_prefill(
    store: TableStore, shape: Gqa, kv: str, flops: float, kernel: Kernel | None = None
) -> tuple[Lookup, str, bool] | None:
    """Return the attention time of prompts as a function of their number and length.

    The second value is a note about substituted measurements. The third value is true if the time
    was measured with ``kernel``. Returns None if no time was measured.
    """
    found = _nearest(store, "context_attention", shape, kv, kernel)
    if found is None:
        return None
    near, own, note, known = found
    own = select_first_ranked(own[own["step"] == 0])
    work = 4.0 * near.heads * near.head_dim * own["batch_size"]
    work = work * own["isl"].map(lambda isl: prompt_pairs(isl, near.window))
    points = clean_rows(own, None, ("batch_size", "isl"), lambda _: 1e3 * work / flops)
    scale = shape.heads * shape.head_dim / (near.heads * near.head_dim)
    plane = BatchLengthPlane(points, lambda isl: prompt_pairs(isl, near.window), scale)
    if shape.window and not near.window:
        return _windowed_prefill(plane, shape.window), f"prefill {note}", known
    return plane, note and f"prefill {note}", known


def _windowed_prefill(plane: Lookup, window: int) -> Lookup:
    """Return the attention time with a sliding window, scaled by the number of attended pairs."""

    def seconds(batch: float, length: float) -> float:
        pairs = prompt_pairs(length, window) / prompt_pairs(length)
        return max(pairs * plane(batch, length), plane(batch, min(length, window)))

    return seconds


def lookup_decode(
    store: TableStore, shape: Gqa, kv: str, bandwidth: float, kernel: Kernel | None = None
) -> tuple[Lookup, str, bool] | None:
    """Return the attention time of decodes as a function of their number and context.

    The second value is a note about substituted measurements. The third value is true if the time
    was measured with ``kernel``. Returns None if no time was measured.
    """
    found = _nearest(store, "generation_attention", shape, kv, kernel)
    if found is None:
        return None
    near, own, note, known = found
    own = select_first_ranked(own)
    own = own.assign(context=own["isl"] + own["step"])
    seen = own["context"].clip(upper=near.window) if near.window else own["context"]
    nbytes = 2.0 * near.kv_heads * near.head_dim * seen * own["batch_size"]
    nbytes = nbytes * (1 if kv != "bf16" else 2)
    fastest = (1e3 * nbytes / bandwidth).where(nbytes > MIN_UNCACHED_BYTES, 0.0)
    points = clean_rows(own, None, ("batch_size", "context"), lambda _: fastest)
    scale = shape.kv_heads * shape.head_dim / (near.kv_heads * near.head_dim)
    reach = near.window or float("inf")
    plane = BatchLengthPlane(points, lambda context: min(context, reach), scale)
    if shape.window and not near.window:
        return (
            lambda batch, context: plane(batch, min(context, shape.window)),
            f"decode {note}",
            known,
        )
    return plane, note and f"decode {note}", known


def _nearest(
    store: TableStore, table: str, shape: Gqa, kv: str, kernel: Kernel | None
) -> tuple[Gqa, pd.DataFrame, str, bool] | None:
    """Return the most similar measured shape, its rows, a note, and whether the kernel was
    measured.

    Tables of the kernel are searched first, then tables of the engine, then tables of other
    engines. An equal shape in any table is preferred to a similar shape. Returns None if there are
    no tables.
    """
    for dtype in ("bfloat16",) if kv == "bf16" else ("fp8", "bfloat16"):
        where = {"kv_cache_dtype": dtype}
        own, others = store.rows(table, where), store.rows(table, where, anyone=True)
        of_kernel = None
        for one in kernel.tables if kernel else ():
            if of_kernel is None:
                rows = own if one.backend == store.backend else others
                of_kernel = select_kernel(rows, one.source)
        tables = [
            (rows, whose, known)
            for rows, whose, known in (
                (of_kernel, "", True),
                (own, "", kernel is None),
                (others, "from the tables of another engine", kernel is None),
            )
            if rows is not None
        ]
        for rows, whose, known in tables:
            mine = _rows_of(rows, shape)
            if len(mine):
                return shape, mine, whose and f"{_name(shape)}: {whose}", known
        for rows, _, known in tables:
            shapes = [Gqa(*_whole(key)) for key in rows[_SHAPE].drop_duplicates().to_numpy()]
            near = min(shapes, key=lambda other: (_distance(shape, other), repr(other)))
            note = f"{_name(shape)}: scaled from {_describe(near)}"
            return near, _rows_of(rows, near), note, known
    return None


def _rows_of(rows: pd.DataFrame, shape: Gqa) -> pd.DataFrame:
    values = (shape.heads, shape.kv_heads, shape.head_dim, shape.window)
    for name, value in zip(_SHAPE, values, strict=True):
        rows = rows[rows[name] == value]
    return rows


def _whole(key: Iterable[object]) -> tuple[int, int, int, int]:
    heads, kv_heads, width, window = (int(str(value)) for value in key)
    return heads, kv_heads, width, window


def _distance(a: Gqa, b: Gqa) -> float:
    """Return the difference between two shapes as a number.

    The sliding window has the largest weight, then the head size, then the number of heads.
    """
    window = 0.0 if a.window == b.window else 10 + abs(log((a.window or 1e6) / (b.window or 1e6)))
    width = 3 * abs(log(a.head_dim / b.head_dim))
    return window + width + abs(log(a.heads / b.heads)) + 2 * abs(log(a.kv_heads / b.kv_heads))


def _name(shape: Gqa) -> str:
    return f"attention of {_describe(shape)}"


def _describe(shape: Gqa) -> str:
    return f"{shape.heads}/{shape.kv_heads} heads of {shape.head_dim}, window {shape.window}"
