"""Requests that had the engine to themselves, and what is known of the model they ran on."""

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

#: Fewer requests than this are not fitted to.
MIN_REQUESTS = 8
#: Outputs of fewer tokens tell little of a decode step.
MIN_OUTPUT_TOKENS = 8


@dataclass(frozen=True)
class ModelTraits:
    """What the fit knows of the model: bytes of KV per token and FLOP per pair, over all layers.

    ``max_num_batched_tokens`` and ``block_size`` are the engine's. ``flops_per_token`` are those of
    a token that is computed (0 if not known). Of a mixture of experts ``in_experts`` is the share
    of the weights that experts are, ``chosen`` the share of the experts that a token takes.
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
    """What is known of a model of the catalog, on each of the GPUs that share it."""
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
    """Requests that were alone, one entry each: tokens, and times in seconds.

    ``hits`` are leading tokens found in the prefix cache, ``front`` the time before the engine
    core had the request; ``decode`` is the mean of a decode step, NaN for a single token.
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
    """The rows of a ``stage`` of a request table, without the run's first, which is cold.

    Columns: prompt_tokens, output_tokens, prefill_ms, ttft_ms, e2e_ms, queue_ms, and if there
    arrival_s (else the file's first row is the cold one), stage (else all rows count) and
    shared_prefix_tokens, found in the cache where there is ``caching``. Raises InputError if they
    are missing, too few, or of no use.
    """
    columns = ("prompt_tokens", "output_tokens", "queue_ms", "prefill_ms", "ttft_ms", "e2e_ms")

    def alone(table: pd.DataFrame) -> pd.Series[bool]:
        order = pd.to_numeric(table.get("arrival_s", table.index.to_series()), errors="coerce")
        cold = order.rank(method="first") == 1
        return ~cold & (table["stage"] == stage) if "stage" in table else ~cold

    rows = read_table(path, dict.fromkeys(columns, "number"), alone)
    if len(rows) < MIN_REQUESTS:
        raise InputError(
            f"{path}: {len(rows)} requests in stage {stage!r} besides the first; at least "
            f"{MIN_REQUESTS} are needed to fit to"
        )
    _check(path, rows)
    values = {name: rows[name].to_numpy(dtype=np.float64) for name in columns}
    steps = values["output_tokens"] - 1
    decode = (values["e2e_ms"] - values["ttft_ms"]) / np.where(steps > 0, steps, np.nan)
    shared = np.zeros(len(rows))
    whole = pd.read_csv(path).loc[rows.index]
    if caching and "shared_prefix_tokens" in whole:
        shared = pd.to_numeric(whole["shared_prefix_tokens"], errors="coerce").fillna(0).to_numpy()
    # The last token of a prompt is computed in any case.
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
    """Raise InputError for times that no request takes, or if nothing tells of decodes."""
    long = rows["output_tokens"] >= MIN_OUTPUT_TOKENS
    wrong = {
        "prompt_tokens: should be above 0": rows["prompt_tokens"] <= 0,
        "prefill_ms: should be above 0": rows["prefill_ms"] <= 0,
        "e2e_ms: should be above ttft_ms": long & (rows["e2e_ms"] <= rows["ttft_ms"]),
    }
    for what, where in wrong.items():
        if where.any():
            raise InputError(f"{path}:{rows.index[where][0] + 2}: {what}")
    if long.sum() < 2:
        raise InputError(
            f"{path}: {long.sum()} of the {len(rows)} requests to fit to have "
            f"{MIN_OUTPUT_TOKENS} or more "
            f"output tokens; at least 2 are needed to tell what a decode step costs"
        )
