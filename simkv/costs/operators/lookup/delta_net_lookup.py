"""Durations of a layer's gated delta net (convolution and recurrence) from ``gdn_perf``."""

from __future__ import annotations

from simkv.costs.operators.operator_tables import TableStore, clean_rows, select_first_ranked
from simkv.costs.operators.operator_times import DeltaNetShape
from simkv.costs.operators.piecewise_curve import (
    Curve,
    make_curve,
    make_nondecreasing,
    sum_curves,
)


def lookup_delta_net(
    store: TableStore, shape: DeltaNetShape, phase: str
) -> tuple[Curve, str] | None:
    """Return the time (s) as a function of the number of tokens, and a note.

    The note is about substituted measurements. In the phase ``context``, the tokens belong to one
    prompt. In ``generation``, each decode has one token. Returns None if no time was measured.
    """
    rows = store.rows("gdn", {"phase": phase})
    if rows is None:
        return None
    shapes = rows[["num_k_heads", "num_v_heads", "d_model"]].drop_duplicates().values.tolist()
    near = min(
        shapes,
        key=lambda s: (
            abs(s[1] - shape.v_heads) + abs(s[0] - shape.k_heads),
            abs(s[2] - shape.hidden),
        ),
    )
    rows = rows[(rows["num_k_heads"] == near[0]) & (rows["num_v_heads"] == near[1])]
    rows = rows[rows["d_model"] == near[2]]
    rows = select_first_ranked(rows)
    kinds = rows["kernel_source"].map(lambda name: "conv" if "conv" in name else "rule")
    parts = []
    for kind in ("conv", "rule"):
        part = rows[kinds == kind]
        if len(part):
            parts.append(make_curve(make_nondecreasing(clean_rows(part, None, ("num_tokens",)))))
    scale = shape.v_heads / near[1]
    note = "" if scale == 1 else f"gated delta net: {scale:.3g} x the time of {near[1]} heads"
    return sum_curves(parts).times(scale), note
