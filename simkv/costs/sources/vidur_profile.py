"""Cost profiles from the operator tables of Vidur's profiler.

``mlp.csv`` has the times in ms of all operators except attention, by tokens and tensor parallelism.
``attention.csv`` has the times of decodes (by batch size and KV length) and of single prefills (by
chunk size and KV length). Both may be gzip-compressed. Repeated measurements are replaced by their
median (github.com/microsoft/vidur, data/profiling/compute). The tables do not include mixed
batches, the output head, collectives and host time.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd

from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, CostTerm
from simkv.costs.hardware.model_gpu_catalog import Model
from simkv.costs.sources.measurement_files import ColumnKind, check_prefills_and_decodes, read_table
from simkv.costs.sources.operator_profile import check_dense, operators_profile

#: Number of runs per layer of each operator; ``emb`` runs once per step.
OPERATORS_PER_LAYER = {
    "input_layernorm": 1,
    "attn_pre_proj": 1,
    "attn_rope": 1,
    "attn_post_proj": 1,
    "post_attention_layernorm": 1,
    "mlp_up_proj": 1,
    "mlp_act": 1,
    "mlp_down_proj": 1,
    "add": 2,
}
_DEGREE = "num_tensor_parallel_workers"


def vidur_profile(mlp: Path, attention: Path, model: Model, gpu: str, tp: int = 1) -> CostProfile:
    """Return the cost profile of ``model`` on ``tp`` GPUs. Raises InputError for unsuitable
    tables.
    """
    check_dense(model)
    terms, sizes = _terms(mlp, model, tp)
    prefills, decodes = _attention(attention, model, tp)
    check_prefills_and_decodes(attention, len(prefills), len(decodes))
    return operators_profile(
        f"vidur {model.name} on {gpu}, tp{tp}",
        model,
        gpu,
        terms,
        sizes,
        prefills,
        decodes,
        [
            "operator tables of Vidur's profiler (github.com/microsoft/vidur, MIT)",
            f"{mlp.name}, {attention.name}",
            "no output head, no collectives, no host time; decodes cost the same "
            "with and without prefills in the step",
        ],
    )


def _terms(path: Path, model: Model, tp: int) -> tuple[list[CostTerm], list[float]]:
    times = {f"time_stats.{name}.median": name for name in ("emb", *OPERATORS_PER_LAYER)}
    columns: dict[str, ColumnKind] = {"num_tokens": "whole", _DEGREE: "whole", "n_embd": "whole"}
    frame = read_table(path, {**columns, **dict.fromkeys(times, "number")})
    kept = frame[(frame[_DEGREE] == tp) & (frame["n_embd"] == model.hidden)]
    if kept.empty:
        raise InputError(
            f"{path}: no rows for a hidden size of {model.hidden} and {tp} GPUs; found "
            f"{_pairs(frame, 'n_embd')}"
        )
    medians = kept.groupby("num_tokens")[list(times)].median()
    terms = []
    for column, name in times.items():
        count = OPERATORS_PER_LAYER[name] * model.layers if name in OPERATORS_PER_LAYER else 1
        seconds = (medians[column] * 1e-3 * count).round(12)
        points = list(zip(medians.index.tolist(), seconds.tolist(), strict=True))
        terms.append(CostTerm(name=f"{name} x{count}", feature="tokens", table=points))
    return terms, [float(tokens) for tokens in medians.index]


def _attention(path: Path, model: Model, tp: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    columns: dict[str, ColumnKind] = {
        "n_q_head": "whole",
        "n_kv_head": "whole",
        _DEGREE: "whole",
        "batch_size": "whole",
        "prefill_chunk_size": "whole",
        "kv_cache_size": "whole",
        "is_prefill": "text",
    }
    frame = read_table(path, columns)
    times = pd.read_csv(path)
    heads = (frame["n_q_head"] == model.heads) & (frame["n_kv_head"] == model.kv_heads)
    kept = heads & (frame[_DEGREE] == tp)
    if not kept.any():
        raise InputError(
            f"{path}: no rows for {model.heads} heads, {model.kv_heads} KV heads and {tp} GPUs; "
            f"found {_pairs(frame, 'n_q_head')}"
        )
    prefill = kept & (frame["is_prefill"] == "True")
    decode = kept & (frame["is_prefill"] == "False")
    scale = 1e-3 * model.layers
    save = times["time_stats.attn_output_reshape.median"].fillna(0.0)
    prefills = pd.DataFrame(
        {
            "tokens": frame["prefill_chunk_size"],
            "before": frame["kv_cache_size"],
            "seconds": (times["time_stats.attn_prefill.median"] + save) * scale,
        }
    )[prefill & (frame["batch_size"] == 1)].dropna()
    decodes = pd.DataFrame(
        {
            "seqs": frame["batch_size"],
            "context": frame["kv_cache_size"],
            "seconds": (times["time_stats.attn_decode.median"] + save) * scale,
        }
    )[decode].dropna()
    return prefills, decodes


def _pairs(frame: pd.DataFrame, column: str) -> str:
    found = frame[[column, _DEGREE]].drop_duplicates().sort_values([column, _DEGREE])
    return ", ".join(f"{a} on {b}" for a, b in found.itertuples(index=False))
