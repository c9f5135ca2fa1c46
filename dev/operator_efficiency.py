"""Fractions of data-sheet rates that operators reach, from the tables of measured GPUs.

A fraction is the median over a GPU's large shapes, whose time depends on a single rate; fixed
overheads are the median over its smallest shapes. The result is the median over GPUs. ``errors_of``
measures the error of such estimates against the tables of a GPU that was left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import pandas as pd

from simkv.costs.cost_profile import CostProfile, StepCost, StepError
from simkv.costs.hardware.model_gpu_catalog import Gpu
from simkv.costs.held_out_errors import summarize_errors_by_kind
from simkv.costs.operators.operator_tables import SLACK, TableStore
from simkv.costs.operators.roofline import Efficiency
from simkv.costs.scaled_executor import classify_step
from simkv.costs.step_load import StepLoad, count_attention_pairs

#: Minimum sizes of large shapes: matrix sides, tokens, prompt length in tokens, and bytes of KV.
SIDE, TOKENS, LENGTH, NBYTES = 4096, 4096, 4096, 128e6


def shares_of(store: TableStore, gpu: Gpu) -> dict[str, float]:
    """Return the fractions that can be computed from the tables of one GPU."""
    found: dict[str, float] = {}
    families = (_products, _prompts, _decodes, _experts, _latent, _elementwise, _links)
    for rates in families:
        found |= {key: float(value) for key, value in rates(store, gpu).items() if value > 0}
    return found


def joined(shares: Sequence[Mapping[str, float]]) -> Efficiency:
    """Return the median of each fraction over the GPUs for which it is known."""
    names = Efficiency.model_fields
    return Efficiency(
        **{
            name: float(f"{median(one[name] for one in shares if name in one):.3g}")
            for name in names
        }
    )


#: Steps whose durations are compared.
LOADS = [
    *(
        StepLoad(0, 0, 0, seqs, seqs * context, 0, seqs)
        for seqs in (1, 8, 64, 256)
        for context in (500, 4000)
    ),
    *(
        StepLoad(count, count * tokens, 0, 0, 0, count * count_attention_pairs(tokens, 0), count)
        for count, tokens in ((1, 512), (1, 2048), (8, 1024), (1, 8192))
    ),
    StepLoad(1, 2048, 0, 64, 64 * 2000, count_attention_pairs(2048, 0), 65),
]


def against(
    estimated: Sequence[CostProfile], measured: Sequence[CostProfile]
) -> Iterator[tuple[str, float]]:
    """Yield the kind of each step and the relative error of its estimated duration."""
    for guess, truth in zip(estimated, measured, strict=True):
        ours, theirs = StepCost(guess), StepCost(truth)
        for load in LOADS:
            yield classify_step(load), ours(load) / theirs(load) - 1


def errors_of(pairs_of_profiles: Sequence[tuple[CostProfile, CostProfile]]) -> dict[str, StepError]:
    """Return the errors of estimated against measured profiles, by kind of step."""
    guesses, truths = zip(*pairs_of_profiles, strict=True)
    return summarize_errors_by_kind(against(guesses, truths))


def _median(rows: pd.DataFrame, value: Callable[[pd.DataFrame], Any]) -> float:
    return float(value(rows).median()) if len(rows) else 0.0


def _rows(store: TableStore, table: str, where: Mapping[str, object]) -> pd.DataFrame:
    found = store.rows(table, where)
    return pd.DataFrame({"latency": []}) if found is None else found


def _products(store: TableStore, gpu: Gpu) -> dict[str, float]:
    rows = _rows(store, "gemm", {"gemm_dtype": "bfloat16"})
    if rows.empty:
        return {}
    large = rows[(rows["n"] >= SIDE) & (rows["k"] >= SIDE)]
    work, nbytes = 2e3 * rows["m"] * rows["n"] * rows["k"], 2e3 * rows["n"] * rows["k"]
    possible = rows["latency"] * SLACK >= work / gpu.flops
    many = large[(large["m"] >= TOKENS) & possible[large.index]]
    few = large[large["m"] <= 16]
    tiny = rows[(rows["m"] <= 16) & (rows["n"] <= 512) & (rows["k"] <= 512)]
    return {
        "gemm_flops": _median(many, lambda r: work / r["latency"] / gpu.flops),
        "gemm_bytes": _median(few, lambda r: nbytes / r["latency"] / gpu.bandwidth),
        "gemm_s": _median(tiny, lambda r: 1e-3 * r["latency"]),
    }


def _prompts(store: TableStore, gpu: Gpu) -> dict[str, float]:
    where = {"kv_cache_dtype": "bfloat16", "head_dim": 128, "window_size": 0, "step": 0}
    rows = _rows(store, "context_attention", where)
    if rows.empty:
        return {}
    long = rows[(rows["isl"] >= LENGTH) & (rows["num_heads"] >= 8)]
    short = rows[(rows["isl"] <= 64) & (rows["batch_size"] == 1)]
    work = 2e3 * rows["num_heads"] * 128 * rows["isl"] ** 2 * rows["batch_size"]
    return {
        "prefill_flops": _median(long, lambda r: work / r["latency"] / gpu.flops),
        "prefill_s": _median(short, lambda r: 1e-3 * r["latency"]),
    }


def _decodes(store: TableStore, gpu: Gpu) -> dict[str, float]:
    where = {"kv_cache_dtype": "bfloat16", "head_dim": 128, "window_size": 0}
    rows = _rows(store, "generation_attention", where)
    if rows.empty:
        return {}
    context = rows["isl"] + rows["step"]
    nbytes = 4.0 * rows["num_key_value_heads"] * 128 * context * rows["batch_size"]
    large, small = rows[nbytes >= NBYTES], rows[(context <= 64) & (rows["batch_size"] == 1)]
    return {
        "decode_bytes": _median(large, lambda r: 1e3 * nbytes / r["latency"] / gpu.bandwidth),
        "decode_s": _median(small, lambda r: 1e-3 * r["latency"]),
    }


def _experts(store: TableStore, gpu: Gpu) -> dict[str, float]:
    rows = _rows(store, "moe", {"moe_dtype": "bfloat16", "distribution": "balanced"})
    if rows.empty:
        return {}
    whole = rows[(rows["moe_tp_size"] == 1) & (rows["moe_ep_size"] == 1)]
    each = 3.0 * whole["hidden_size"] * whole["inter_size"]
    picked = whole["topk"] / whole["num_experts"]
    hit = whole["num_experts"] * (1 - (1 - picked) ** whole["num_tokens"])
    nbytes, work = 2e3 * each * hit, 2e3 * each * whole["topk"] * whole["num_tokens"]
    few, many = whole[whole["num_tokens"] <= 16], whole[whole["num_tokens"] >= TOKENS]
    return {
        "experts_bytes": _median(few, lambda r: nbytes / r["latency"] / gpu.bandwidth),
        "experts_flops": _median(many, lambda r: work / r["latency"] / gpu.flops),
        "experts_s": 1e-3 * float(rows["latency"].min()),
    }


def _latent(store: TableStore, gpu: Gpu) -> dict[str, float]:
    """Return the fractions that latent attention with the shape of DeepSeek-V3 reaches.

    Keys have 128 + 64 dimensions, values have 128, and the latent vector has 576.
    """
    found = {}
    rows = _rows(store, "context_mla", {"kv_cache_dtype": "bfloat16"})
    if len(rows):
        long = rows[(rows["isl"] >= LENGTH) & (rows["num_heads"] >= 8)]
        work = 1e3 * rows["num_heads"] * 320 * rows["isl"] ** 2 * rows["batch_size"]
        found["mla_prefill_flops"] = _median(long, lambda r: work / r["latency"] / gpu.flops)
    rows = _rows(store, "generation_mla", {"kv_cache_dtype": "bfloat16"})
    if len(rows):
        nbytes = 2.0 * 576 * (rows["isl"] + rows["step"]) * rows["batch_size"]
        large = rows[nbytes >= NBYTES]
        found["mla_decode_bytes"] = _median(
            large, lambda r: 1e3 * nbytes / r["latency"] / gpu.bandwidth
        )
    return found


def _elementwise(store: TableStore, gpu: Gpu) -> dict[str, float]:
    rows = _rows(store, "scale_matrix", {})
    if rows.empty:
        return {}
    nbytes = 3.0 * rows["m"] * rows["k"]
    large = rows[nbytes >= NBYTES]
    return {
        "elementwise_bytes": _median(large, lambda r: 1e3 * nbytes / r["latency"] / gpu.bandwidth),
        "elementwise_s": 1e-3 * float(rows["latency"].quantile(0.05)),
    }


def _links(store: TableStore, gpu: Gpu) -> dict[str, float]:
    rows = _rows(store, "custom_allreduce", {})
    if rows.empty:
        return {}
    kernel = rows["kernel_source"].astype(str)
    inside, outside = rows[kernel.str.endswith("graph")], rows[kernel.str.endswith("eager")]
    large = inside[inside["message_size"] >= 1 << 24]
    trips = 2 * (large["num_gpus"] - 1) / large["num_gpus"]
    rate = gpu.interconnect().bandwidth
    share = 2e3 * trips * large["message_size"] / large["latency"] / rate
    small = inside[inside["message_size"] <= 4096], outside[outside["message_size"] <= 4096]
    return {
        "link": float(share.median()) if len(share) else 0.0,
        "link_graph_s": _median(small[0], lambda r: 1e-3 * r["latency"]),
        "link_eager_s": _median(small[1], lambda r: 1e-3 * r["latency"]),
    }
