"""Routed experts of a layer from ``moe_perf``."""

from __future__ import annotations

from math import log

from simkv.costs.operators.curve import Curve, curve_of, never_falling
from simkv.costs.operators.operators import MoeShape
from simkv.costs.operators.tables import Store, cleaned

#: What the tables call a number format, the one that is like it next.
DTYPES = {
    "bf16": ("bfloat16",),
    "fp8": ("fp8", "fp8_block"),
    "fp8_block": ("fp8_block", "fp8"),
    "nvfp4": ("nvfp4",),
    "mxfp4": ("w4a16_mxfp4", "w4a8_mxfp4_mxfp8", "int4_wo"),
    "int4": ("int4_wo",),
    "int4_g32": ("int4_wo",),
}
_SHAPE = ["hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size"]
#: Shape times this is work or bytes that one GPU has of a layer.
_Key = tuple[int, int, int, int, int, int]


def distribution(experts: int) -> str:
    """How unevenly tokens fall on experts: a power law, flatter for many (as aiconfigurator's
    model files have it: 1.01 for the kind of DeepSeek-V3, 1.2 for others)."""
    return "power_law_1.01" if experts >= 256 else "power_law_1.2"


def experts(store: Store, shape: MoeShape, form: str, flops: float) -> tuple[Curve, str] | None:
    """Seconds by tokens, and what was not as asked for (empty: nothing)."""
    for anyone in (False, True):
        for dtype in DTYPES.get(form, ()):
            where = {"moe_dtype": dtype, "distribution": distribution(shape.experts)}
            rows = store.rows("moe", where, anyone=anyone)
            if rows is None:
                continue
            keys: list[_Key] = [tuple(map(int, k)) for k in rows[_SHAPE].drop_duplicates().values]  # type: ignore[misc]
            near = min(keys, key=lambda key: (_distance(shape, key), key))
            if _distance(shape, near) > log(4):
                continue
            mine = rows[(rows[_SHAPE] == list(near)).all(axis=1)]
            work = 6.0 * near[0] * near[1] * near[2] / (near[4] * near[5]) * mine["num_tokens"]
            # The busiest GPU of a skewed distribution has more than its share, never less.
            points = cleaned(mine, None, ("num_tokens",), 1e3 * work / flops)
            curve = curve_of(never_falling(points))
            asked = (shape.hidden, shape.intermediate, shape.per_token, shape.experts)
            note = "" if not anyone else "experts: from the tables of another engine"
            if (*asked, shape.tp, shape.ep) != near:
                ratio = _share(shape) / _share(MoeShape(*near))
                curve = curve.times(ratio)
                note = f"experts of {asked}, tp {shape.tp}, ep {shape.ep}: {ratio:.3g} x {near}"
            elif dtype != DTYPES[form][0]:
                note = f"experts in {form}: from the table of {dtype}"
            return curve, note
    return None


def _share(shape: MoeShape) -> float:
    """Weights of the experts of one GPU."""
    return shape.hidden * shape.intermediate * shape.experts / (shape.tp * shape.ep)


def _distance(a: MoeShape, key: _Key) -> float:
    b = MoeShape(*key)
    return (
        abs(log(a.hidden / b.hidden))
        + abs(log(a.intermediate / b.intermediate))
        + abs(log(a.experts / b.experts))
        + 2 * abs(log(a.per_token / b.per_token))
        + 0.5 * abs(log(a.tp / b.tp))
        + 0.5 * abs(log(a.ep / b.ep))
    )
