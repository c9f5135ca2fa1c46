"""Simple cost models for comparison with a profile, which must be better than these.

constant step     the same time for every step: the best constant for the evaluated run
tokens only       a line over the tokens of a step, also the best for that run
roofline          weights, KV and FLOPs over the two ceilings of the device; not fitted
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from typing import Any

import numpy as np

from simkv.costs.cost_profile import (
    CostProfile,
    CostTerm,
    FitQuality,
    LinearPiece,
)
from simkv.costs.hardware.model_shape import ModelShape
from simkv.costs.step_load import StepLoad


def baselines(
    steps: Sequence[tuple[StepLoad, float]], profile: CostProfile
) -> dict[str, CostProfile]:
    """Return the two fitted models with the least relative error on ``steps`` (load, seconds)."""
    seconds = np.array([s for _, s in steps])
    tokens = np.array([load.prefill_tokens + load.decode_seqs for load, _ in steps])
    ones = np.ones(len(seconds))
    constant = float((1 / seconds).sum() / (1 / seconds**2).sum())
    rows = np.stack((ones, tokens), axis=1) / seconds[:, None]
    (base, slope), *_ = np.linalg.lstsq(rows, ones, rcond=None)
    fit = FitQuality(points=len(seconds), note="a baseline, fitted to the run that it is judged by")
    forms = {
        "constant step": [CostTerm(name="constant", feature="steps", seconds=constant)],
        "tokens only": [
            CostTerm(name="constant", feature="steps", seconds=max(float(base), 1e-9)),
            CostTerm(name="tokens", feature="tokens", seconds=max(float(slope), 0.0)),
        ],
    }
    plain: dict[str, Any] = {"fit": fit, "range": {}, "attention": None, "graph_sizes": []}
    return {
        name: profile.model_copy(update={"name": name, "terms": terms, **plain})
        for name, terms in forms.items()
    }


def roofline(
    shape: ModelShape,
    itemsize: int,
    bytes_per_s: float,
    flops_per_s: float,
) -> CostProfile:
    """Return the costs of steps at the ceilings of a device (bytes/s and FLOP/s), without overhead.

    A step takes the larger of reading the weights and multiplying by them, plus the KV reads of
    decodes and the FLOPs of prefill attention. Kernels run one after another, so the parts add up.
    """
    weights = shape.step_weights * itemsize / bytes_per_s
    multiplied = shape.step_weights - shape.vocab * shape.hidden  # excludes the output head
    per_token = 2 * multiplied / flops_per_s
    knee = max(floor(weights / per_token), 1)
    context = shape.kv_bytes_per_token(itemsize) / bytes_per_s
    pair = 4 * shape.layers * shape.heads * shape.head_dim / flops_per_s
    pieces = [LinearPiece(up_to=knee, base=weights), LinearPiece(base=0.0, slope=per_token)]
    return CostProfile(
        name="roofline",
        engine="none",
        model=shape.name,
        gpu=f"{bytes_per_s / 1e9:.4g} GB/s, {flops_per_s / 1e12:.4g} TFLOP/s",
        basis="assumed",
        terms=[
            CostTerm(name="weights or their FLOPs", feature="tokens", pieces=pieces),
            CostTerm(name="KV of the decodes", feature="decode_context", seconds=context),
            CostTerm(name="attention of the prefills", feature="prefill_pairs", seconds=pair),
        ],
        idle_pass_s=1e-5,
        range={},
        fit=FitQuality(points=0, note="fitted to nothing: the two ceilings of the device"),
        source=["the larger of bytes and FLOPs of each part, over the ceilings of the device"],
    )
