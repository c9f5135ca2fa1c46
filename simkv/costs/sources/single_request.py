"""Measured times of requests that ran in isolation, and properties of their model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from simkv.core.errors import InputError
from simkv.costs.hardware.model_gpu_catalog import Model
from simkv.costs.sources.measurement_files import read_table

Floats = npt.NDArray[np.float64]

#: Minimum number of requests for a fit.
MIN_REQUESTS = 8
#: Minimum output tokens of a request for an estimate of its decode steps.
MIN_OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model and its engine that the fit uses.

    ``kv_bytes_per_token`` and ``flops_per_pair`` (FLOP per attention pair) are totals over all
    layers. ``flops_per_token`` is the FLOP per computed token without attention, or 0 if unknown.
    ``expert_share`` is the fraction of the weights in experts. ``chosen`` is the fraction of the
    experts that a token uses.
    """

    kv_bytes_per_token: int
    flops_per_pair: int
    max_num_batched_tokens: int
    block_size: int = 16
    flops_per_token: float = 0.0
    expert_share: float = 0.0
    chosen: float = 1.0


def compute_model_traits(
    model: Model, max_num_batched_tokens: int, block_size: int = 16, tensor_parallel: int = 1
) -> ModelTraits:
    """Return the properties of a catalog model, per tensor-parallel GPU."""
    chosen = model.experts_per_token / model.experts if model.experts else 1.0
    embeddings = model.vocab * model.hidden * (1 if model.tied else 2)
    computed = model.parameters - embeddings - (1 - chosen) * model.mlp_parameters
    return ModelTraits(
        model.kv_bytes_per_token // tensor_parallel,
        model.flops_per_pair // tensor_parallel,
        max_num_batched_tokens,
        block_size,
        2 * computed / tensor_parallel,
        model.mlp_parameters / model.parameters if model.experts else 0.0,
        chosen,
    )


@dataclass(frozen=True)
class IsolatedRequests:
    """Requests that ran in isolation: token counts and durations in seconds, one entry per request.

    ``hits`` is the number of tokens found in the prefix cache. ``front`` is the time until the
    engine core received the request. ``decode`` is the mean duration of a decode step, or NaN for a
    request with one output token.
    """

    prompt: Floats
    output: Floats
    hits: Floats
    prefill: Floats
    decode: Floats
    front: Floats

    def __len__(self) -> int:
        return len(self.prompt)


def read_isolated_requests(
    path: Path, stage: str = "sync", block_size: int = 16, *, caching: bool = True
) -> IsolatedRequests:
    """Return the rows of one ``stage`` of a request table, without the first request of the run.

    The first request is excluded because the engine is not warmed up. Required columns are
    prompt_tokens, output_tokens, prefill_ms, ttft_ms, e2e_ms and queue_ms. Three columns are
    optional:

    - arrival_s; without it, the first row is the first request.
    - stage; without it, all rows belong to the stage.
    - shared_prefix_tokens: number of tokens that are cache hits if ``caching`` is True.

    Raises InputError if columns are missing, or if rows are invalid or too few.
    """
    columns = ("prompt_tokens", "output_tokens", "queue_ms", "prefill_ms", "ttft_ms", "e2e_ms")

    def alone(table: pd.DataFrame) -> pd.Series[bool]:
        order = pd.to_numeric(table.get("arrival_s", table.index.to_series()), errors="coerce")
        cold = order.rank(method="first") == 1
        return ~cold & (table["stage"] == stage) if "stage" in table else ~cold

    rows = read_table(path, dict.fromkeys(columns, "number"), alone)
    if len(rows) < MIN_REQUESTS:
        raise InputError(
            f"{path}: a fit needs at least {MIN_REQUESTS} requests in stage {stage!r}, not "
            f"counting the first request of the run; found {len(rows)}"
        )
    _check(path, rows)
    values = {name: rows[name].to_numpy(dtype=np.float64) for name in columns}
    steps = values["output_tokens"] - 1
    decode = (values["e2e_ms"] - values["ttft_ms"]) / np.where(steps > 0, steps, np.nan)
    shared = np.zeros(len(rows))
    whole = pd.read_csv(path).loc[rows.index]
    if caching and "shared_prefix_tokens" in whole:
        shared = pd.to_numeric(whole["shared_prefix_tokens"], errors="coerce").fillna(0).to_numpy()
    # The last prompt token is always computed.
    hits = np.minimum(shared, values["prompt_tokens"] - 1) // block_size * block_size
    return IsolatedRequests(
        prompt=values["prompt_tokens"],
        output=values["output_tokens"],
        hits=hits,
        prefill=values["prefill_ms"] / 1e3,
        decode=decode / 1e3,
        front=(values["ttft_ms"] - values["prefill_ms"] - values["queue_ms"]) / 1e3,
    )


def _check(path: Path, rows: pd.DataFrame) -> None:
    """Raise InputError if times are impossible or if there are too few decode steps for a fit."""
    long = rows["output_tokens"] >= MIN_OUTPUT_TOKENS
    wrong = {
        "prompt_tokens: must be greater than 0": rows["prompt_tokens"] <= 0,
        "prefill_ms: must be greater than 0": rows["prefill_ms"] <= 0,
        "e2e_ms: must be greater than ttft_ms": long & (rows["e2e_ms"] <= rows["ttft_ms"]),
    }
    for what, where in wrong.items():
        if where.any():
            raise InputError(f"{path}:{rows.index[where][0] + 2}: {what}")
    if long.sum() < 2:
        raise InputError(
            f"{path}: a fit of decode steps needs at least 2 requests with {MIN_OUTPUT_TOKENS} or "
            f"more output tokens, found {long.sum()} of {len(rows)}"
        )
