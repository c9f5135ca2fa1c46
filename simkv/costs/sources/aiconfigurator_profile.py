"""Cost profiles from the operator tables of NVIDIA's aiconfigurator.

The input is a directory with ``context_attention_perf.parquet``,
``generation_attention_perf.parquet`` and ``gemm_perf.parquet`` (times in ms;
github.com/ai-dynamo/aiconfigurator, systems/data). Attention times are looked up by the number of
heads per GPU, for bfloat16. The times of matrix products are interpolated linearly in both matrix
dimensions. More than 8 KV heads are looked up as 8 heads with proportionally longer KV. The tables
do not include norms, activations, rotary positions, collectives and host time.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, CostTerm, Feature
from simkv.costs.hardware.model_gpu_catalog import Model
from simkv.costs.interpolation import interpolate
from simkv.costs.sources.measurement_files import read_table
from simkv.costs.sources.operator_profile import check_dense, operators_profile

DTYPE = "bfloat16"


def aiconfigurator_profile(folder: Path, model: Model, tp: int = 1) -> CostProfile:
    """Return the cost profile of ``model`` on ``tp`` GPUs. Raises InputError for unsuitable
    tables.
    """
    check_dense(model)
    prefills = _prefills(folder, model, tp)
    decodes, most = _decodes(folder, model, tp)
    terms, sizes = _products(folder, model, tp)
    device = _device(folder)
    return operators_profile(
        f"aiconfigurator {model.name} on {device}, tp{tp}",
        model,
        device,
        terms,
        sizes,
        prefills,
        decodes,
        [
            "operator tables of aiconfigurator (github.com/ai-dynamo/aiconfigurator, Apache-2.0)",
            f"{folder.name}: attention and matrix products in {DTYPE} only; no norms, activations, "
            "collectives or host time; decodes cost the same with and without prefills in the step",
            *([f"decodes measured with {most} KV heads, scaled to more KV"] if most else []),
        ],
    )


def _device(folder: Path) -> str:
    frame = read_table(folder / "gemm_perf.parquet", {"device": "text"})
    return str(frame["device"].iloc[0])


def _heads(folder: Path, name: str, model: Model, heads: int, kv_heads: int) -> pd.DataFrame:
    """Return the rows of an attention table for the given numbers of heads per GPU.

    Only the fastest kernel, the model's head size and full attention are included.
    """
    path = folder / f"{name}_perf.parquet"
    numbers = ("batch_size", "isl", "num_heads", "num_key_value_heads", "step")
    frame = read_table(
        path,
        {**dict.fromkeys(numbers, "whole"), "latency": "number", "kv_cache_dtype": "text"},
        rows=lambda frame: _alike(frame, model.head_dim),
    )
    kept = frame[
        (frame["num_heads"] == heads)
        & (frame["num_key_value_heads"] == kv_heads)
        & (frame["kv_cache_dtype"] == DTYPE)
    ]
    if kept.empty:
        raise InputError(
            f"{path}: no rows for {heads} heads, {kv_heads} KV heads and {DTYPE}; found "
            f"heads {sorted(frame['num_heads'].unique().tolist())} and KV heads "
            f"{sorted(frame['num_key_value_heads'].unique().tolist())}"
        )
    return kept.sort_values("latency").drop_duplicates(["batch_size", "isl", "step"]).sort_index()


def _alike(frame: pd.DataFrame, head_dim: int) -> pd.Series[bool]:
    """Return a mask of the rows with the given head size and without a sliding window."""
    kept = pd.Series(True, index=frame.index)
    for column, wanted in (("head_dim", head_dim), ("window_size", 0)):
        if column in frame:
            kept &= frame[column] == wanted
    return kept


def _prefills(folder: Path, model: Model, tp: int) -> pd.DataFrame:
    heads, kv_heads = model.heads // tp, max(model.kv_heads // tp, 1)
    rows = _heads(folder, "context_attention", model, heads, kv_heads)
    rows = rows[(rows["batch_size"] == 1) & (rows["step"] == 0)]
    return pd.DataFrame(
        {
            "tokens": rows["isl"],
            "before": 0,
            "seconds": (rows["latency"] * 1e-3 * model.layers).round(12),
        }
    )


def _decodes(folder: Path, model: Model, tp: int) -> tuple[pd.DataFrame, int]:
    """Return the table of decode times, and the number of KV heads if it is not in the table, or
    0.
    """
    heads, kv_heads = model.heads // tp, max(model.kv_heads // tp, 1)
    path = folder / "generation_attention_perf.parquet"
    most = int(read_table(path, {"num_key_value_heads": "whole"})["num_key_value_heads"].max())
    ratio = max(kv_heads // most, 1)
    rows = _heads(folder, "generation_attention", model, heads, min(kv_heads, most))
    frame = pd.DataFrame(
        {
            "seqs": rows["batch_size"],
            "context": (rows["isl"] + rows["step"]) // ratio,
            "seconds": (rows["latency"] * 1e-3 * model.layers).round(12),
        }
    )
    return frame[frame["context"] > 0], kv_heads if ratio > 1 else 0


def _products(folder: Path, model: Model, tp: int) -> tuple[list[CostTerm], list[float]]:
    """Return the cost terms of the matrix products, and the token counts of the measurements."""
    path = folder / "gemm_perf.parquet"
    columns = dict.fromkeys(("m", "n", "k"), "whole")
    frame = read_table(path, {**columns, "latency": "number", "gemm_dtype": "text"})  # type: ignore[dict-item]
    frame = frame[frame["gemm_dtype"] == DTYPE]
    width = (model.heads + 2 * model.kv_heads) * model.head_dim // tp
    inner, attended = model.intermediate // tp, model.heads * model.head_dim // tp
    products: list[tuple[str, int, int, int, Feature]] = [
        ("qkv", width, model.hidden, model.layers, "tokens"),
        ("attention output", model.hidden, attended, model.layers, "tokens"),
        ("gate and up", 2 * inner, model.hidden, model.layers, "tokens"),
        ("down", model.hidden, inner, model.layers, "tokens"),
        ("output head", model.vocab // tp, model.hidden, 1, "emits"),
    ]
    sizes = sorted(float(m) for m in frame["m"].unique())
    parts = dict(iter(frame.groupby("m")))
    terms = []
    for name, n, k, count, feature in products:
        seconds = (1e-3 * count * _product(parts[int(m)], n, k) for m in sizes)
        points = [(m, round(s, 12)) for m, s in zip(sizes, seconds, strict=True)]
        terms.append(CostTerm(name=f"{name} x{count}", feature=feature, table=points))
    return terms, sizes


def _product(part: pd.DataFrame, n: int, k: int) -> float:
    """Return the interpolated time (ms) of a matrix product with ``n`` columns and depth ``k``."""
    depths, times = [], []
    for depth, rows in part.groupby("k"):
        rows = rows.sort_values("n")
        depths.append(float(str(depth)))
        times.append(interpolate(rows["n"].tolist(), rows["latency"].tolist(), n))
    return interpolate(depths, times, k)
