"""Estimate step costs from the times of requests that were served concurrently.

The duration of each prefill and decode is a sum of unit costs, multiplied by the work of the engine
during that time. The work for other requests is estimated from the overlap of their prefills and
decodes. The fit minimizes relative errors (non-negative least squares). A request that was
preempted or skipped distorts only its own equation; the later fit by simulation corrects this
error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.optimize import nnls

from simkv.costs.hardware.model_gpu_catalog import Gpu
from simkv.costs.sources.single_request import ModelTraits
from simkv.costs.sources.single_request_fit import (
    ATTENTION_FLOPS_SHARE,
    BANDWIDTH_SHARE,
    POWER,
    PREFILL_STEP_RATIO,
    PRODUCT_FLOPS_SHARE,
)
from simkv.incident.step_costs import UnitCosts

Floats = npt.NDArray[np.float64]
#: Defaults for unknown GPUs: number of query-key pairs computed in the time of one prefill token,
#: and number of KV tokens read in the time of reading the weights once. From A100 to RTX 4090 and
#: for models of 7 to 34 billion parameters, the numbers are 10 to 60 thousand and 130 to 400
#: thousand. The second value of each pair is the uncertainty as a logarithm.
PAIRS_PER_TOKEN, CONTEXT_PER_STEP = (20_000.0, 1.0), (250_000.0, 0.8)
#: Uncertainties as logarithms: of an unknown cost, of the ratio between the costs of a sequence and
#: of a token, and of the exponent that combines the times of weights and tokens.
UNKNOWN_SIGMA, SEQUENCE_SIGMA, POWER_SIGMA = 3.0, 1.0, 0.7
#: Maximum number of rows, because every request is compared with every other request.
MAX_ROWS = 1500


@dataclass(frozen=True)
class CostPrior:
    """Likely value of a unit cost. ``sigma`` is the standard deviation of its logarithm."""

    price: float
    sigma: float


def guess_unit_costs(observed: pd.DataFrame, budget: int) -> UnitCosts:
    """Return the unit costs that best match the measured times of the requests.

    ``budget`` is the maximum number of tokens of a step.
    """
    known = observed.dropna(subset=["ttft_ms", "e2e_ms"]).head(MAX_ROWS)
    spans = _Spans(known)
    rows = np.vstack([spans.decodes(), spans.prefills(budget)])
    seconds = np.concatenate([spans.decode, spans.prefill])
    steps = np.concatenate([spans.output - 1, np.ones(len(known))])
    good = np.isfinite(seconds) & (seconds > 0) & (steps > 0)
    scaled = rows[good] / seconds[good][:, None]
    norm = np.where(scaled.max(axis=0) > 0, scaled.max(axis=0), 1.0)
    prices, _ = nnls(scaled / norm, np.ones(int(good.sum())))
    return _sound((prices / norm).tolist(), spans)


def _sound(found: list[float], spans: _Spans) -> UnitCosts:
    """Replace zero costs by small ones, because the next fit multiplies costs by factors."""
    step, prefill_step, token, pair, context = found
    single = np.nanmedian(spans.decode / np.maximum(spans.output - 1, 1))
    if not np.isfinite(single):
        single = np.nanmedian(spans.prefill)
    step = step or float(single) or 1e-3
    token = token or step / 300
    return UnitCosts(
        decode_step=step,
        prefill_step=max(prefill_step, 0.1 * PREFILL_STEP_RATIO[0] * step),
        decode_seq=token,
        token=token,
        pair=max(pair, 0.02 * token / PAIRS_PER_TOKEN[0]),
        context=max(context, 0.02 * step / CONTEXT_PER_STEP[0]),
        power=POWER,
    )


class _Spans:
    """Start and end times of each request's prefill and decode, and the engine's work between
    them.
    """

    def __init__(self, known: pd.DataFrame) -> None:
        def column(name: str) -> Floats:
            return known[name].to_numpy(np.float64)

        ttft, e2e = column("ttft_ms") / 1e3, column("e2e_ms") / 1e3
        queue = known["queue_ms"].fillna(0.0).to_numpy(np.float64) / 1e3
        told = column("prefill_ms") / 1e3 if "prefill_ms" in known else np.full(len(known), np.nan)
        self.prefill = np.where(np.isfinite(told), told, np.maximum(ttft - queue, 0.0))
        self.first = column("t_s") + ttft
        self.begun = self.first - self.prefill
        self.end = column("t_s") + e2e
        self.decode = self.end - self.first
        self.prompt, self.output = column("prompt_tokens"), column("output_tokens")

    def _during(self, start: Floats, end: Floats) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the work of all requests in each interval from ``start`` to ``end`` (s).

        The four arrays are the numbers of decoded tokens, KV tokens read, prefilled tokens, and
        query-key pairs of the prefilled tokens.
        """
        in_decode = _overlap(start, end, self.first, self.end)
        in_prefill = _overlap(start, end, self.begun, self.first)
        tokens = np.maximum(self.output - 1, 0.0)
        context = tokens * (self.prompt + self.output / 2)
        pairs = self.prompt**2 / 2
        return in_decode @ tokens, in_decode @ context, in_prefill @ self.prompt, in_prefill @ pairs

    def decodes(self) -> Floats:
        """Return the work during the decode of each request.

        The columns are steps, prefill steps, prefilled tokens, query-key pairs and KV tokens read.
        """
        decoded, context, prefilled, pairs = self._during(self.first, self.end)
        steps = np.maximum(self.output - 1, 0.0)
        return np.stack([steps, 0 * steps, decoded + prefilled, pairs, context], axis=1)

    def prefills(self, budget: int) -> Floats:
        """Return the work during the prefill of each request, with the same columns as ``decodes``.

        A prefill takes one step per ``budget`` tokens.
        """
        decoded, context, prefilled, pairs = self._during(self.begun, self.first)
        chunks = np.ceil(self.prompt / budget)
        return np.stack([0 * chunks, chunks, decoded + prefilled, pairs, context], axis=1)


def _overlap(start: Floats, end: Floats, begin: Floats, stop: Floats) -> Floats:
    """Return the fraction of each interval from ``begin`` to ``stop`` that lies between ``start``
    and ``end``.

    The result has shape (len(start), len(begin)).
    """
    shared = np.minimum(end[:, None], stop[None, :]) - np.maximum(start[:, None], begin[None, :])
    return np.asarray(np.maximum(shared, 0.0) / np.maximum(stop - begin, 1e-9)[None, :])


def cost_priors(
    guess: UnitCosts, shape: ModelTraits | None, gpu: Gpu | None
) -> dict[str, CostPrior]:
    """Return the prior of each unit cost by name, from the GPU and the model if known."""
    step, token = guess.decode_step, guess.token
    found = {
        "decode_step": CostPrior(step, UNKNOWN_SIGMA),
        "prefill_step": CostPrior(PREFILL_STEP_RATIO[0] * step, PREFILL_STEP_RATIO[1]),
        "decode_seq": CostPrior(token, SEQUENCE_SIGMA),
        "token": CostPrior(token, UNKNOWN_SIGMA),
        "power": CostPrior(POWER, POWER_SIGMA),
        "pair": CostPrior(token / PAIRS_PER_TOKEN[0], PAIRS_PER_TOKEN[1]),
        "context": CostPrior(step / CONTEXT_PER_STEP[0], CONTEXT_PER_STEP[1]),
    }
    if gpu and shape:
        found["context"] = CostPrior(
            shape.kv_bytes_per_token / (BANDWIDTH_SHARE[0] * gpu.bandwidth), BANDWIDTH_SHARE[1]
        )
        found["pair"] = CostPrior(
            shape.flops_per_pair / (ATTENTION_FLOPS_SHARE[0] * gpu.flops), ATTENTION_FLOPS_SHARE[1]
        )
        if shape.flops_per_token:
            token = shape.flops_per_token / (PRODUCT_FLOPS_SHARE[0] * gpu.flops)
            found["token"] = CostPrior(token, PRODUCT_FLOPS_SHARE[1])
            found["decode_seq"] = CostPrior(token, SEQUENCE_SIGMA)
    return found
