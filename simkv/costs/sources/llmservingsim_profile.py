"""Cost profiles from the kernel tables of LLMServingSim's profiler.

A bundle (``meta.yaml`` and ``tp<N>/*.csv``, plain or gzip-compressed) has the times in us of one
layer's kernels: by tokens per step (``dense``), by sampled sequences (``per_sequence``), and for
attention on four axes (see ``costs.attention_table``). The time of a step is the sum over all
layers (github.com/casys-kaist/LLMServingSim, commit 5daddb2, serving/core/trace_generator.py). As
in LLMServingSim, ``skew_fit``, the additional time of decodes with unequal context length, is used
only if the bundle enables it.

The tables contain no host time. If the engine's CUDA graphs are known,
``sources/launch_overhead.py`` adds the host time of steps without a graph.

Tensor parallelism adds two all-reduces per layer. Expert parallelism adds the exchange of tokens,
as in vLLM: an all-gather of the hidden states and of the ids and weights of the selected experts (4
bytes per number), and a reduce-scatter of the results. The times of collectives come from
``hardware/gpus.json`` or from a given host link.

The experts of a mixture of experts (``moe.csv``, by tokens and activated experts) are assumed to be
selected uniformly. Their times include the router's matrix product but not the selection of
experts. Each rank of an expert-parallel group computes its own experts for the tokens of all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.errors import InputError
from simkv.costs.attention_table import (
    AttentionRow,
    AttentionSlice,
    AttentionTable,
    SkewCorrection,
)
from simkv.costs.cost_profile import (
    CostProfile,
    CostTerm,
    Feature,
    FitQuality,
)
from simkv.costs.hardware.host_links import HostLink
from simkv.costs.hardware.model_gpu_catalog import known_gpu
from simkv.costs.held_out_errors import add_error_estimates
from simkv.costs.interpolation import interpolate
from simkv.costs.sources.launch_overhead import launch_time, make_launch_term
from simkv.costs.sources.measurement_files import (
    check_prefills_and_decodes,
    find_table,
    read_settings,
    read_table,
)

#: Kernels that run once per step, and the number of runs per layer of all other kernels.
KERNELS_PER_STEP = ("embedding", "final_layernorm")
KERNELS_PER_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
SAMPLING = ("lm_head", "sampler")
#: Kernels that a bundle must contain, because steps would be too fast without them; models differ
#: in the other kernels.
REQUIRED_KERNELS = ("embedding", "final_layernorm", "layernorm", "qkv_proj", "rotary_emb", "o_proj")
#: Kernels also required for layers without experts.
DENSE_MLP = ("gate_up_proj", "act_fn", "down_proj")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Sharding:
    """Distribution of a model over GPUs, and facts about the model that the tables lack.

    ``tp`` is the number of tensor-parallel GPUs. ``hidden`` is the hidden size. ``expert_ranks`` is
    the number of GPUs that split the experts. ``link`` is the link between the GPUs, or None for
    the link in the GPU catalog.
    """

    layers: int
    tp: int = 1
    hidden: int | None = None
    experts: int = 0
    experts_per_token: int = 0
    expert_ranks: int = 1
    link: HostLink | None = None


_AXES = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def bundle_profile(
    folder: Path, layout: Sharding, graph_sizes: list[int] | None = None
) -> CostProfile:
    """Return the cost profile of a model from the tables of an LLMServingSim bundle.

    ``graph_sizes`` are the sizes of the engine's CUDA graphs in tokens, or None. Raises InputError
    if the bundle cannot be used.
    """
    layers, tp = layout.layers, layout.tp
    meta = read_settings(folder / "meta.yaml")
    tables = folder / f"tp{tp}"
    if not tables.is_dir():
        known = sorted(p.name for p in folder.glob("tp*"))
        raise InputError(f"{folder}: missing {tables.name}; found {', '.join(known) or 'none'}")
    moved, said = _collectives(str(meta.get("gpu", "")), layout)
    experts = _experts(tables, layout)
    terms = [*_dense(tables, layout), *experts, *_sampling(tables), *moved]
    launch = launch_time(str(meta.get("gpu", "")))
    host = [make_launch_term(graph_sizes, launch)] if graph_sizes and launch else []
    table = AttentionTable(slices=_slices(tables, layers), skew=_skew(folder, meta, tp))
    name = f"{meta.get('model', folder.name)} on {meta.get('gpu', 'unknown GPU')}"
    points = sum(len(row.seconds) for part in table.slices for row in part.rows)
    profile = CostProfile(
        name=f"llmservingsim {name}, tp{tp}",
        engine=f"vLLM {meta.get('vllm_version', '(version unknown)')}",
        model=str(meta.get("model", "unknown")),
        gpu=str(meta.get("gpu", "unknown")),
        basis="measured",
        terms=[*terms, *host],
        attention=table,
        graph_sizes=graph_sizes or [],
        idle_pass_s=1e-4,
        range=_range(table),
        fit=FitQuality(
            points=points,
            note="errors of attention table points interpolated between their neighbours, relative "
            "to the whole step; host time is not tested",
        ),
        source=[
            "kernel tables of LLMServingSim's profiler (github.com/casys-kaist/LLMServingSim, MIT)",
            f"bundle {folder.name}, measured {meta.get('profiled_at', 'at an unknown time')}",
            "kernels only: no gaps between kernels, "
            + (
                f"{1e3 * launch:g} ms of host time for a step over the largest CUDA graph"
                if host
                else "no host time"
            )
            + said,
            "idle_pass_s is assumed",
        ],
    )
    return add_error_estimates(profile)


def bundle_model(folder: Path) -> str:
    """Return the name of the model in an LLMServingSim bundle, or ""."""
    return str(read_settings(folder / "meta.yaml").get("model", ""))


def _dense(tables: Path, layout: Sharding) -> list[CostTerm]:
    path = find_table(tables, "dense")
    frame = read_table(path, {"layer": "text", "tokens": "whole", "time_us": "number"})
    layers = layout.layers
    counts = {
        **dict.fromkeys(KERNELS_PER_STEP, 1),
        **{k: n * layers for k, n in KERNELS_PER_LAYER.items()},
    }
    _check_whole(path, frame, REQUIRED_KERNELS + (() if layout.experts else DENSE_MLP))
    return _terms(path, frame, "tokens", "slots", counts)


def _collectives(gpu: str, layout: Sharding) -> tuple[list[CostTerm], str]:
    """Return the cost terms of the collectives, and a note about their source and missing times."""
    wanted = _wanted(layout)
    known = known_gpu(gpu)
    measured = known.collectives if known else {}
    terms, missing = [], []
    for name, ranks, per_layer, per_token in wanted:
        link = layout.link
        points = link.times(name, ranks) if link else measured.get(name, {}).get(ranks)
        if not points or not per_token:
            missing.append(f", no {name} of {ranks} GPUs")
            continue
        count = per_layer * layout.layers
        table = [(size / per_token, count * seconds) for size, seconds in points]
        terms.append(CostTerm(name=f"{name} x{count}", feature="slots", table=table))
    where = layout.link.said if layout.link else "hardware/gpus.json"
    return terms, "".join(dict.fromkeys(missing)) + (f"; collectives: {where}" if terms else "")


def _wanted(layout: Sharding) -> list[tuple[str, int, int, int]]:
    """Return the collectives of a layer as tuples: name, GPUs, number of runs, bytes per token.

    Zero bytes mean that the size is unknown.
    """
    hidden, chosen = 2 * (layout.hidden or 0), 4 * layout.experts_per_token
    found = [("all_reduce", layout.tp, 2, hidden)] if layout.tp > 1 else []
    if layout.expert_ranks > 1:
        found += [
            ("all_gather", layout.expert_ranks, 1, hidden),
            ("all_gather", layout.expert_ranks, 2, chosen),
            ("reduce_scatter", layout.expert_ranks, 1, hidden),
        ]
    return found


def scale_collectives(profile: CostProfile, times: float) -> CostProfile | None:
    """Return the profile with the times of its collectives multiplied by ``times``.

    Returns None if the profile has no collectives.
    """
    named = [term.name.partition(" ")[0] in COLLECTIVES for term in profile.terms]
    if not any(named):
        return None
    terms = [
        _longer(t, times) if is_one else t for t, is_one in zip(profile.terms, named, strict=True)
    ]
    return profile.model_copy(update={"terms": terms})


def _longer(term: CostTerm, times: float) -> CostTerm:
    assert term.table is not None
    return term.model_copy(update={"table": [(x, times * y) for x, y in term.table]})


def _experts(tables: Path, layout: Sharding) -> list[CostTerm]:
    """Return the cost term of the experts of all layers, by the total tokens of all ranks."""
    if not layout.experts:
        if any((tables / f"moe.csv{end}").is_file() for end in ("", ".gz")):
            raise InputError(
                f"{tables}: contains expert times, but the model has no experts; expected a model "
                "with experts and experts_per_token"
            )
        return []
    path = find_table(tables, "moe")
    columns = ("tokens", "activated_experts")
    frame = read_table(path, {**dict.fromkeys(columns, "whole"), "time_us": "number"})
    rows = {
        int(part["activated_experts"].iloc[0]): part.sort_values("tokens")
        for _, part in frame.groupby("activated_experts")
    }
    counts = sorted(rows)
    mine = layout.experts // layout.expert_ranks
    table = []
    for pooled in sorted({int(n) * layout.expert_ranks for n in frame["tokens"].unique()}):
        missed = (1 - layout.experts_per_token / layout.experts) ** pooled
        activated, tokens = mine * (1 - missed), pooled / layout.expert_ranks
        times = [
            interpolate(rows[n]["tokens"].tolist(), rows[n]["time_us"].tolist(), tokens)
            for n in counts
        ]
        table.append(
            (float(pooled), round(layout.layers * 1e-6 * interpolate(counts, times, activated), 12))
        )
    return [CostTerm(name=f"experts x{layout.layers}", feature="group_tokens", table=table)]


def _sampling(tables: Path) -> list[CostTerm]:
    path = find_table(tables, "per_sequence")
    frame = read_table(path, {"layer": "text", "sequences": "whole", "time_us": "number"})
    _check_whole(path, frame, SAMPLING)
    return _terms(path, frame, "sequences", "emits", dict.fromkeys(SAMPLING, 1))


def _check_whole(path: Path, frame: pd.DataFrame, needed: Sequence[str]) -> None:
    """Raise InputError if a table lacks a kernel in ``needed``."""
    missing = [name for name in needed if name not in set(frame["layer"])]
    if missing:
        raise InputError(
            f"{path}: layer: missing rows for {', '.join(missing)}, but every step runs these "
            f"layers"
        )


def _terms(
    path: Path, frame: pd.DataFrame, column: str, feature: Feature, counts: Mapping[str, int]
) -> list[CostTerm]:
    """Return one cost term for each kernel, by the values of ``column``.

    ``counts`` contains the number of runs of each kernel per step.
    """
    terms = []
    for layer, rows in frame.groupby("layer"):
        if layer not in counts:
            raise InputError(f"{path}: unknown layer {layer!r}; expected {', '.join(counts)}")
        rows = rows.drop_duplicates(column, keep="last").sort_values(column)
        seconds = rows["time_us"] * 1e-6 * counts[str(layer)]
        points = list(zip(rows[column].astype(float), seconds.round(12), strict=True))
        count = counts[str(layer)]
        terms.append(CostTerm(name=f"{layer} x{count}", feature=feature, table=points))
    return terms


def _slices(tables: Path, layers: int) -> list[AttentionSlice]:
    path = find_table(tables, "attention")
    frame = read_table(path, {**dict.fromkeys(_AXES, "whole"), "time_us": "number"})
    frame = frame.drop_duplicates(list(_AXES), keep="last").sort_values(list(_AXES))
    slices = []
    for _, part in frame.groupby(["prefill_chunk", "n_decode"]):
        rows = [
            AttentionRow(
                prefill_context=int(row["kv_prefill"].iloc[0]),
                decode_context=row["kv_decode"].tolist(),
                seconds=(row["time_us"] * 1e-6 * layers).round(12).tolist(),
            )
            for _, row in part.groupby("kv_prefill")
        ]
        tokens, seqs = int(part["prefill_chunk"].iloc[0]), int(part["n_decode"].iloc[0])
        slices.append(AttentionSlice(prefill_tokens=tokens, decode_seqs=seqs, rows=rows))
    check_prefills_and_decodes(
        path,
        [s for s in slices if s.prefill_tokens and not s.decode_seqs],
        [s for s in slices if s.decode_seqs and not s.prefill_tokens],
    )
    return slices


def _skew(folder: Path, meta: Mapping[str, Any], tp: int) -> SkewCorrection | None:
    """Return the bundle's correction for decodes of unequal length, or None if it is not
    enabled.
    """
    fit = meta.get("skew_fit") or {}
    if not fit.get("enabled"):
        return None
    try:
        axes, entry = fit["bucket_axes"], fit["per_tp"][tp]
        labels = [axes[f"{axis}_labels"] for axis in ("n", "skew_rate", "kv_big", "kp")]
        ends = [axes[f"{axis}_bins"][1:] for axis in ("n", "skew_rate", "kv_big", "kp")]
        default = float(entry["alpha_default"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{folder / 'meta.yaml'}: skew_fit: {error} is missing or invalid"
        ) from error
    path = find_table(folder / f"tp{tp}", "skew_fit")
    names = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
    frame = pd.read_csv(path)
    read_table(path, {"pc": "whole", **dict.fromkeys(names, "text")})
    shares = []
    for line, row in enumerate(frame.to_dict("records"), start=2):
        try:
            numbers = [known.index(row[name]) for known, name in zip(labels, names, strict=True)]
            shares.append((int(row["pc"]), *numbers, float(row["alpha"])))
        except (ValueError, KeyError) as error:
            raise InputError(f"{path}:{line}: {error}") from error
    return SkewCorrection(
        default=default,
        decode_seqs=ends[0],
        rate=ends[1],
        longest=ends[2],
        prefill_context=ends[3],
        shares=shares,
    )


def _range(table: AttentionTable) -> dict[Feature, tuple[float, float]]:
    parts = table.slices
    tokens = [part.prefill_tokens for part in parts if part.prefill_tokens]
    alone = [part.decode_seqs for part in parts if not part.prefill_tokens]
    beside = [part.decode_seqs for part in parts if part.prefill_tokens and part.decode_seqs]
    contexts = [x for part in parts for row in part.rows for x in row.decode_context if x]
    before = max(row.prefill_context for part in parts for row in part.rows)
    found: dict[Feature, tuple[float, float]] = {
        "prefill_tokens": (min(tokens), max(tokens)),
        "prefill_context": (0, before),
        "decode_seqs": (min(alone), max(alone)),
        "decode_mean": (min(contexts), max(contexts)),
    }
    if beside:
        found["mixed_decode_seqs"] = (min(beside), max(beside))
    return found
