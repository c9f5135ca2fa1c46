"""Durations of multi-head latent attention (MLA), dense and sparse.

vLLM's tables contain the whole module with host time: 95 us for one sequence, of which the kernels
take 45 us. The attention core is therefore read from SGLang's tables ``context_mla`` and
``generation_mla``, and the projections from the tables of matrix products. Sparse attention was
measured only together with its projections.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from simkv.costs.hardware.model_architecture import Mla
from simkv.costs.operators.lookup.attention_lookup import prompt_pairs
from simkv.costs.operators.lookup.batch_length_plane import BatchLengthPlane
from simkv.costs.operators.operator_tables import TableStore, clean_rows, select_first_ranked
from simkv.costs.operators.operator_times import Lookup
from simkv.costs.operators.piecewise_curve import Curve, make_curve, make_nondecreasing

if TYPE_CHECKING:
    import pandas as pd


def lookup_mla_core(store: TableStore, shape: Mla, kv: str, *, context: bool) -> Lookup | None:
    """Return the attention time as a function of batch size and length, or None if not measured.

    ``context`` selects prompts instead of decodes.
    """
    table = "context_mla" if context else "generation_mla"
    for dtype in ("bfloat16",) if kv == "bf16" else ("fp8", "bfloat16"):
        where = {"kv_cache_dtype": dtype}
        rows = store.rows(table, where)
        if rows is None:
            rows = store.rows(table, where, anyone=True)
        if rows is None:
            continue
        heads = min(rows["num_heads"].unique().tolist(), key=lambda h: (abs(h - shape.heads), h))
        rows = select_first_ranked(rows[rows["num_heads"] == heads])
        rows = rows.assign(length=rows["isl"] + rows["step"])
        points = clean_rows(rows, None, ("batch_size", "length"))
        # All heads read the same latent, so the time of a decode hardly depends on the number of
        # heads.
        scale = shape.heads / heads if context else 1.0
        return BatchLengthPlane(points, prompt_pairs if context else float, scale)
    return None


def lookup_absorbed_projections(store: TableStore, heads: int) -> Curve | None:
    """Return the time of the two absorbed projections of decodes, or None if not measured.

    The time is a function of the number of tokens.
    """
    found: list[Curve] = []
    for name in ("mla_gen_pre", "mla_gen_post"):
        rows = store.rows("mla_bmm", {"op_name": name})
        if rows is None:
            rows = store.rows("mla_bmm", {"op_name": name}, anyone=True)
        if rows is None:
            return None
        near = min(rows["num_heads"].unique().tolist(), key=lambda h: (abs(h - heads), h))
        mine = select_first_ranked(rows[rows["num_heads"] == near])
        points = clean_rows(mine, None, ("num_tokens",))
        found.append(make_curve(make_nondecreasing(points)).times(heads / near))
    first, second = found
    xs = sorted({*first.xs, *second.xs})
    return Curve(tuple(xs), tuple(first(x) + second(x) for x in xs))


def lookup_sparse_mla(
    store: TableStore, shape: Mla, hidden: int, form: str, kv: str, *, context: bool
) -> tuple[Lookup, str] | None:
    """Return the time of a layer's sparse attention with its projections, and a note.

    The time is a function of the batch size and the length. The note is about substituted
    measurements. Returns None if no time was measured.
    """
    assert shape.sparse
    table = "dsa_context_module" if context else "dsa_generation_module"
    dtypes = {"bf16": ("bfloat16",)}.get(kv, ("fp8", "bfloat16"))
    forms = {"bf16": ("bfloat16",), "nvfp4": ("nvfp4", "bfloat16")}.get(form, ("fp8_block",))
    for anyone in (False, True):
        for dtype in dtypes:
            for gemm_type in forms:
                where = {"kv_cache_dtype": dtype, "gemm_type": gemm_type}
                rows = store.rows(table, {**where, "op_name": table}, anyone=anyone)
                if rows is None:
                    continue
                heads, own = _like(rows, shape.heads, hidden, context=context)
                wanted = {**where, "op_name": table, "num_heads": heads}
                others = store.rows(table, wanted, anyone=not anyone)
                elsewhere = None
                if others is not None:
                    _, elsewhere = _like(others, heads, hidden, context=context)
                points = clean_rows(own, elsewhere, ("batch_size", "length"))
                plane = BatchLengthPlane(points, partial(_sparse_work, context, shape.sparse.topk))
                note = (
                    "" if heads == shape.heads else f"sparse attention: measured with {heads} heads"
                )
                return plane, note
    return None


def _like(
    rows: pd.DataFrame, wanted: int, hidden: int, *, context: bool
) -> tuple[int, pd.DataFrame]:
    """Return the measured number of heads nearest to ``wanted``, and its rows with a column
    ``length``.
    """
    glm = rows["architecture"].astype(str).str.contains("Glm")
    rows = rows[glm if hidden != 7168 and glm.any() else ~glm]
    heads = min(rows["num_heads"].unique().tolist(), key=lambda h: (abs(h - wanted), h))
    rows = select_first_ranked(rows[rows["num_heads"] == heads])
    if context:
        rows = rows[rows["step"] == 0]
    return heads, rows.assign(length=rows["isl"] if context else rows["isl"] + rows["step"])


def _sparse_work(context: bool, topk: int, length: float) -> float:
    return prompt_pairs(length, topk) if context else min(length, topk)
