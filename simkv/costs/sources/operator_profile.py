"""Cost profiles built from measured attention times and from cost terms of all other operators."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from simkv.core.errors import InputError
from simkv.costs.attention_table import AttentionRow, AttentionSlice, AttentionTable
from simkv.costs.cost_profile import (
    CostProfile,
    CostTerm,
    Feature,
    FitQuality,
)
from simkv.costs.hardware.model_gpu_catalog import Model
from simkv.costs.held_out_errors import add_error_estimates


def build_attention_table(prefills: pd.DataFrame, decodes: pd.DataFrame) -> AttentionTable:
    """Return an attention table with measured times of prefill attention and of decode attention.

    ``prefills`` has the columns ``tokens``, ``before`` (cached tokens before the prefill) and
    ``seconds``. ``decodes`` has the columns ``seqs``, ``context`` and ``seconds``. Repeated
    measurements are replaced by their median.
    """
    slices = []
    for _, part in prefills.groupby("tokens"):
        at = part.groupby("before")["seconds"].median()
        rows = [
            AttentionRow(prefill_context=int(before), decode_context=[0], seconds=[float(seconds)])
            for before, seconds in zip(at.index.tolist(), at.tolist(), strict=True)
        ]
        tokens = int(part["tokens"].iloc[0])
        slices.append(AttentionSlice(prefill_tokens=tokens, decode_seqs=0, rows=rows))
    for _, part in decodes.groupby("seqs"):
        at = part.groupby("context")["seconds"].median()
        contexts = [int(context) for context in at.index.tolist()]
        row = AttentionRow(prefill_context=0, decode_context=contexts, seconds=at.tolist())
        seqs = int(part["seqs"].iloc[0])
        slices.append(AttentionSlice(prefill_tokens=0, decode_seqs=seqs, rows=[row]))
    return AttentionTable(slices=slices)


def check_dense(model: Model) -> None:
    """Raise InputError for a mixture of experts."""
    if model.experts:
        raise InputError(
            f"{model.name}: this model is a mixture of experts, but these tables support dense "
            "models only"
        )


def operators_profile(
    name: str,
    model: Model,
    gpu: str,
    terms: list[CostTerm],
    sizes: Sequence[float],
    prefills: pd.DataFrame,
    decodes: pd.DataFrame,
    source: list[str],
) -> CostProfile:
    """Return a profile from cost terms and attention times.

    ``sizes`` are the numbers of tokens at which the terms were measured. ``prefills`` and
    ``decodes`` have the columns of ``build_attention_table``. ``source`` describes the origin of
    the data.
    """
    ranges: dict[Feature, tuple[float, float]] = {
        "tokens": (min(sizes), max(sizes)),
        "prefill_tokens": _ends(prefills["tokens"]),
        "prefill_context": (0.0, float(prefills["before"].max())),
        "decode_seqs": _ends(decodes["seqs"]),
        "decode_mean": _ends(decodes["context"]),
        "mixed_decode_seqs": (0.0, 0.0),
    }
    return add_error_estimates(
        CostProfile(
            name=name,
            engine="operators alone",
            model=model.name,
            gpu=gpu,
            basis="measured",
            terms=terms,
            attention=build_attention_table(prefills, decodes),
            idle_pass_s=1e-4,
            range=ranges,
            fit=FitQuality(
                points=len(prefills) + len(decodes) + len(sizes),
                note="errors of excluded attention table points, relative to the whole step",
            ),
            source=[*source, "idle_pass_s is assumed"],
        )
    )


def _ends(values: pd.Series[float]) -> tuple[float, float]:
    return float(values.min()), float(values.max())
