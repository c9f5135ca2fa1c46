"""Attention times from ``context_attention_perf`` and ``generation_attention_perf``."""

from __future__ import annotations

from collections.abc import Iterable
from math import log

from simkv.costs.hardware.model_architecture import Gqa
from simkv.costs.operators.lookup.batch_length_plane import BatchLengthPlane
from simkv.costs.operators.operator_tables import TableStore, clean_rows, select_first_ranked
from simkv.costs.operators.operator_times import Lookup

#: KV bytes that exceed the L2 cache of every GPU in the catalog.
MIN_UNCACHED_BYTES = 128e6
_SHAPE = ["num_heads", "num_key_value_heads", "head_dim", "window_size"]


def prompt_pairs(length: float, window: int = 0) -> float:
    """Return the number of pairs of a token and an attended token in a prompt of ``length`` tokens.

    ``window`` is the size of the sliding window, or 0 for full attention.
    """
    if window and length > window:
        return window * (window + 1) / 2 + window * (length - window)
    return length * (length + 1) / 2


def lookup_prefill(
    store: TableStore, shape: Gqa, kv: str, flops: float
) -> tuple[Lookup, str] | None:
    """Return the attention time of prompts by batch and length; None if it was not measured.

    The second value is a note if a similar shape replaces a shape that was not measured, else
    empty.
    """
    found = _nearest(store, "context_attention", shape, kv)
    if found is None:
        return None
    near, where = found
    own = store.rows("context_attention", where)
    assert own is not None
    own = select_first_ranked(own[own["step"] == 0])
    work = 4.0 * near.heads * near.head_dim * own["batch_size"]
    work = work * own["isl"].map(lambda isl: prompt_pairs(isl, near.window))
    points = clean_rows(own, None, ("batch_size", "isl"), lambda _: 1e3 * work / flops)
    scale = shape.heads * shape.head_dim / (near.heads * near.head_dim)
    plane = BatchLengthPlane(points, lambda isl: prompt_pairs(isl, near.window), scale)
    return plane, _note("prefill attention", shape, near)


def lookup_decode(
    store: TableStore, shape: Gqa, kv: str, bandwidth: float
) -> tuple[Lookup, str] | None:
    """Return the attention time of decodes by batch and context; None if it was not measured.

    The second value is a note if a similar shape replaces a shape that was not measured, else
    empty.
    """
    found = _nearest(store, "generation_attention", shape, kv)
    if found is None:
        return None
    near, where = found
    own = store.rows("generation_attention", where)
    assert own is not None
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
    return plane, _note("decode attention", shape, near)


def _nearest(
    store: TableStore, table: str, shape: Gqa, kv: str
) -> tuple[Gqa, dict[str, object]] | None:
    """Return the most similar measured shape and the filter for its rows; None if there is none."""
    for dtype in ("bfloat16",) if kv == "bf16" else ("fp8", "bfloat16"):
        rows = store.rows(table, {"kv_cache_dtype": dtype})
        if rows is None:
            continue
        shapes = [Gqa(*_whole(key)) for key in rows[_SHAPE].drop_duplicates().to_numpy()]
        near = min(shapes, key=lambda other: (_distance(shape, other), repr(other)))
        where = dict(
            zip(_SHAPE, (near.heads, near.kv_heads, near.head_dim, near.window), strict=True)
        )
        return near, {**where, "kv_cache_dtype": dtype}
    return None


def _whole(key: Iterable[object]) -> tuple[int, int, int, int]:
    heads, kv_heads, width, window = (int(str(value)) for value in key)
    return heads, kv_heads, width, window


def _distance(a: Gqa, b: Gqa) -> float:
    """Return a measure of the difference between two shapes.

    The sliding window has the largest weight, then the head size, then the number of heads.
    """
    window = 0.0 if a.window == b.window else 10 + abs(log((a.window or 1e6) / (b.window or 1e6)))
    width = 3 * abs(log(a.head_dim / b.head_dim))
    return window + width + abs(log(a.heads / b.heads)) + 2 * abs(log(a.kv_heads / b.kv_heads))


def _note(what: str, asked: Gqa, near: Gqa) -> str:
    if (asked.heads, asked.kv_heads, asked.head_dim, asked.window) == (
        near.heads,
        near.kv_heads,
        near.head_dim,
        near.window,
    ):
        return ""
    return (
        f"{what} of {asked.heads}/{asked.kv_heads} heads of {asked.head_dim}, window "
        f"{asked.window}: scaled from {near.heads}/{near.kv_heads} heads of {near.head_dim}, "
        f"window {near.window}"
    )
