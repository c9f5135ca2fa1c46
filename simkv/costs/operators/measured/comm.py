"""Collectives from ``custom_allreduce_perf`` and ``nccl_perf``, by 16-bit numbers."""

from __future__ import annotations

from simkv.costs.operators.curve import Curve, curve_of, never_falling
from simkv.costs.operators.tables import TableStore, cleaned, first_ranked


def all_reduce(store: TableStore, gpus: int, *, graph: bool) -> Curve | None:
    """Seconds by 16-bit numbers, inside a CUDA graph or launched by itself."""
    rows = store.rows("custom_allreduce", {"num_gpus": gpus})
    if rows is None:
        return nccl(store, "all_reduce", gpus)
    kernel = rows["kernel_source"].str
    if (kernel.endswith("_graph") | kernel.endswith("_eager")).any():
        rows = rows[kernel.endswith("_graph" if graph else "_eager")]
    if rows.empty:
        return all_reduce(store, gpus, graph=not graph)
    return curve_of(never_falling(cleaned(first_ranked(rows), None, ("message_size",))))


def nccl(store: TableStore, name: str, gpus: int) -> Curve | None:
    """Seconds of a collective of NCCL by 16-bit numbers."""
    rows = store.rows("nccl", {"op_name": name, "num_gpus": gpus, "nccl_dtype": "half"})
    if rows is None:
        return None
    return curve_of(never_falling(cleaned(first_ranked(rows), None, ("message_size",))))
