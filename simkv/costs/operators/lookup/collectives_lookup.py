"""Durations of collectives from the tables ``custom_allreduce_perf`` and ``nccl_perf``."""

from __future__ import annotations

from simkv.costs.operators.operator_tables import (
    TableStore,
    clean_rows,
    select_first_ranked,
    select_plausible_curve,
)
from simkv.costs.operators.piecewise_curve import Curve, make_curve, make_nondecreasing


def lookup_all_reduce(store: TableStore, gpus: int, *, graph: bool) -> Curve | None:
    """Return the time (s) of an all-reduce as a function of the number of 16-bit values.

    ``graph`` selects launches in a CUDA graph. Returns None if no all-reduce was measured.
    """
    own = _curves(store, gpus, graph=graph, anyone=False)
    if not own:
        return lookup_nccl(store, "all_reduce", gpus)
    return select_plausible_curve(own, _curves(store, gpus, graph=graph, anyone=True))


def _curves(store: TableStore, gpus: int, *, graph: bool, anyone: bool) -> list[Curve]:
    """Return one curve per version of the table, in order of preference.

    Launches in a CUDA graph and other launches replace each other if one kind was not measured.
    """
    rows = store.rows("custom_allreduce", {"num_gpus": gpus}, anyone=anyone)
    if rows is None:
        return []
    kernel = rows["kernel_source"].astype(str)
    for end in ("_graph", "_eager") if graph else ("_eager", "_graph"):
        if kernel.str.endswith(end).any():
            rows = rows[kernel.str.endswith(end)]
            break
    return [
        make_curve(make_nondecreasing(clean_rows(part, None, ("message_size",))))
        for _, part in rows.groupby("rank")
    ]


def lookup_nccl(store: TableStore, name: str, gpus: int) -> Curve | None:
    """Return the time (s) of an NCCL collective as a function of the number of 16-bit values.

    Returns None if it was not measured.
    """
    rows = store.rows("nccl", {"op_name": name, "num_gpus": gpus, "nccl_dtype": "half"})
    if rows is None:
        return None
    return make_curve(
        make_nondecreasing(clean_rows(select_first_ranked(rows), None, ("message_size",)))
    )
