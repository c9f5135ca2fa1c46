"""Fit a cost profile to requests that ran in isolation on an engine.

Isolated requests show the duration of a prefill as a function of its tokens, and the duration of a
decode step of one request as a function of its KV. The model of a step that only decodes is

    decode step + token x tokens + context x KV read by decodes

and the model of a step with prefills is

    weights, then tokens (below) + pair x pairs + MIXED_DECODE_FACTOR x context x KV read by decodes

where pairs is the number of attention pairs (token, attended token), and "weights, then tokens" is
explained below. A token is assumed to cost the same in a prefill, in a decode beside a prefill, and
in a batch of decodes, because isolated requests cannot show a difference. The fit minimizes
relative errors with equal weights.

**Weights, then tokens.** Every step reads the weights, which takes as long as one decode without
its KV. A step with many tokens takes prefill step + token x tokens, and reading the weights
overlaps with this computation. The transition between both is the cube root of the sum of cubes: a
chunk of 64 tokens on an H100 took 27.5 ms, where a decode takes 26 ms and the linear part gives
14.6 ms. In the kernel tables that simkv reads, exponents of 2 to 4 fit best. The profile is
therefore also valid for token budgets other than the fitted one. In a mixture of experts, a step
with few tokens reads only a part of the weights, depending on the number of activated experts, and
the cost of tokens is added.

The costs of a token, of a pair and of KV are hard to separate with a few requests of similar
length, or with chunks of one size. If model and GPU are known, the fit therefore has one additional
observation for each of three typical values: KV is read at ``BANDWIDTH_SHARE`` of the GPU's
bandwidth, prefill attention reaches ``ATTENTION_FLOPS_SHARE`` of its FLOP/s, and matrix products
reach ``PRODUCT_FLOPS_SHARE``. The first two are values of vLLM's attention in aiconfigurator's
table of an H100 (vLLM 0.14): 2.9 to 3.05 TB/s of 3.35 from 130,000 tokens on, and 390 to 515
TFLOP/s of 989 at prompts of 2,000 to 4,000 tokens and 64 heads. The third is the value of steps of
1,000 to 2,000 tokens without attention, embedding and head: 0.77 (A100, Vidur; RTX PRO 6000,
LLMServingSim), 0.85 (H100, aiconfigurator), 0.96 (RTX 4090, whose data sheet is conservative). The
fixed cost of a step, besides weights and tokens, is ``PREFILL_STEP_RATIO`` times a decode step: 0.1
to 0.3 in these tables. The second number of each constant is its relative uncertainty.

Attention of decodes beside a prefill takes ``MIXED_DECODE_FACTOR`` times as long as without a
prefill: 1.5 and 2.1 in LLMServingSim's tables of two GPUs (medians over batches with 8 or more
decodes). This factor is uncertain: for eight in ten of these batches it is between 1.0 and 3.6, and
isolated requests cannot show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares, nnls

from simkv.costs.cost_profile import (
    CostProfile,
    CostTerm,
    Feature,
    FitQuality,
    StepError,
)
from simkv.costs.hardware.model_gpu_catalog import Gpu
from simkv.costs.held_out_errors import summarize_errors_by_kind
from simkv.costs.sources.single_request import (
    MIN_OUTPUT_TOKENS,
    Floats,
    IsolatedRequests,
    ModelTraits,
)

BANDWIDTH_SHARE = (0.87, 0.07)
ATTENTION_FLOPS_SHARE = (0.45, 0.15)
PRODUCT_FLOPS_SHARE = (0.8, 0.12)
PREFILL_STEP_RATIO = (0.2, 1.0)
MIXED_DECODE_FACTOR = 1.8
#: Exponent of the transition: ``(a**POWER + b**POWER) ** (1 / POWER)``.
POWER = 3.0
#: Relative error of a decode step per doubling of the batch size. It is the mean error divided by
#: the mean number of doublings, for 2 to 64 decodes on the devices of ``simkv validate budgets``,
#: without mixtures of experts. The errors were 0.2 to 1.9 %; 90 % of them are below this value.
BATCH_DOUBLING_ERROR = 0.019
#: Token counts at which the curve of weights and tokens is tabulated.
TOKEN_KNOTS = np.unique(np.round(2.0 ** (np.arange(113) / 8)))


@dataclass(frozen=True)
class CostCoefficients:
    """Fitted costs in seconds per prefill step, decode step, token, attention pair and context
    token.
    """

    prefill_step: float
    decode_step: float
    token: float
    pair: float
    context: float


def fit_cost_coefficients(
    alone: IsolatedRequests, shape: ModelTraits, gpu: Gpu | None
) -> CostCoefficients:
    """Return the coefficients fitted to the measured times of isolated requests."""
    decodes, times = _decodes(alone)
    likely = {}
    if gpu:
        likely[1] = (
            shape.kv_bytes_per_token / (BANDWIDTH_SHARE[0] * gpu.bandwidth),
            BANDWIDTH_SHARE[1],
        )
    one, context = _solve(decodes, times, likely)
    aims = {0: (PREFILL_STEP_RATIO[0] * one, PREFILL_STEP_RATIO[1])}
    if gpu and shape.flops_per_token:
        aims[1] = (
            shape.flops_per_token / (PRODUCT_FLOPS_SHARE[0] * gpu.flops),
            PRODUCT_FLOPS_SHARE[1],
        )
    if gpu:
        aims[2] = (
            shape.flops_per_pair / (ATTENTION_FLOPS_SHARE[0] * gpu.flops),
            ATTENTION_FLOPS_SHARE[1],
        )
    step, token, pair = _curved(alone, shape, one, aims)
    return CostCoefficients(step, max(one - token, 0.0), token, pair, context)


def compute_non_attention_seconds(
    tokens: Floats, prices: CostCoefficients, shape: ModelTraits
) -> Floats:
    """Return the durations in seconds of steps with prefills, without the time of attention.

    ``tokens`` contains the number of tokens of each step.
    """
    floor = prices.decode_step + prices.token
    return _products(tokens, floor, prices.prefill_step, prices.token, shape)


def _products(tokens: Floats, one: float, step: float, token: float, shape: ModelTraits) -> Floats:
    """Return the durations in seconds of a step's matrix products, for each number of ``tokens``.

    ``one`` is the duration of a decode step of one request without the time to read its KV.
    """
    if shape.expert_share:
        return _weights(tokens, one, step, shape) + token * (tokens - 1)
    line = step + token * tokens
    most = np.maximum(one, line)
    gentle: Floats = ((one / most) ** POWER + (line / most) ** POWER) ** (1 / POWER)
    return most * gentle


def _weights(tokens: Floats, one: float, step: float, shape: ModelTraits) -> Floats:
    """Return the time in seconds to read the needed weights, for each number of ``tokens``.

    The time to read all weights is ``step`` or the time derived from ``one``, whichever is longer.
    """
    if not shape.expert_share:
        return np.full(len(tokens), one)
    activated = 1 - (1 - shape.chosen) ** tokens
    every = max(step, one / (1 - shape.expert_share * (1 - shape.chosen)))
    return one + (every - one) * (activated - shape.chosen) / (1 - shape.chosen)


def make_cost_terms(prices: CostCoefficients, shape: ModelTraits) -> list[CostTerm]:
    """Return the cost terms of a profile with the given coefficients."""
    one = prices.decode_step + prices.token
    decodes = _weights(TOKEN_KNOTS, one, prices.prefill_step, shape) + prices.token * (
        TOKEN_KNOTS - 1
    )
    beside = (MIXED_DECODE_FACTOR - 1) * prices.context

    def table(seconds: Floats) -> list[tuple[float, float]]:
        return list(zip(TOKEN_KNOTS.tolist(), seconds.tolist(), strict=True))

    return [
        CostTerm(
            name="weights, then tokens",
            feature="tokens",
            when="prefill",
            table=table(compute_non_attention_seconds(TOKEN_KNOTS, prices, shape)),
        ),
        CostTerm(
            name="weights and decodes", feature="tokens", when="pure decode", table=table(decodes)
        ),
        CostTerm(name="pair", feature="prefill_pairs", seconds=prices.pair),
        CostTerm(name="KV read", feature="decode_context", when="decode", seconds=prices.context),
        CostTerm(
            name="KV read beside a prefill", feature="decode_context", when="mixed", seconds=beside
        ),
    ]


def fit_single_request_profile(
    alone: IsolatedRequests,
    shape: ModelTraits,
    gpu: Gpu | None,
    *,
    name: str,
    engine: str,
    model: str,
    on: str,
) -> CostProfile:
    """Return a cost profile fitted to isolated requests. ``on`` is the name of the GPU.

    The errors in the profile are leave-one-out errors of each request's prefill and mean decode
    step.
    """
    prices = fit_cost_coefficients(alone, shape, gpu)
    decodes, _ = _decodes(alone)
    computed = alone.prompt - alone.hits
    basis = f"with typical KV and attention times of {gpu.name}" if gpu else "GPU unknown"
    return CostProfile(
        name=name,
        engine=engine,
        model=model,
        gpu=on,
        basis="measured",
        terms=make_cost_terms(prices, shape),
        idle_pass_s=1e-5,
        front_s=max(float(np.median(alone.front)), 0.0),
        range={
            "prefill_tokens": (float(computed.min()), float(computed.max())),
            "decode_seqs": (1, 1),
            "decode_context": (float(decodes[:, 1].min()), float(decodes[:, 1].max())),
        },
        fit=FitQuality(
            points=len(alone),
            note=f"least squares of relative errors over {len(alone)} isolated requests, {basis}; "
            "leave-one-out errors",
            held_out=_left_out(alone, shape, gpu),
            beyond=_beyond(alone, shape, gpu),
        ),
        source=[f"{len(alone)} isolated requests, without the first of the run"],
    )


def _left_out(alone: IsolatedRequests, shape: ModelTraits, gpu: Gpu | None) -> dict[str, StepError]:
    """Return the leave-one-out errors of prefills and decode steps, by kind of step.

    Each request is predicted by a fit to the other requests.
    """

    def named() -> Iterator[tuple[str, float]]:
        for index in range(len(alone)):
            keep = np.arange(len(alone)) != index
            rest, one = (_kept(alone, rows) for rows in (keep, ~keep))
            p = fit_cost_coefficients(rest, shape, gpu)
            predicted = _predicted(one, shape, p)
            yield "prefill", float((predicted / one.prefill - 1)[0])
            rows, times = _decodes(one)
            if len(rows):
                predicted = rows @ (p.decode_step + p.token, p.context)
                yield "decode", float((predicted / times - 1)[0])

    return summarize_errors_by_kind(named())


def _beyond(alone: IsolatedRequests, shape: ModelTraits, gpu: Gpu | None) -> dict[Feature, float]:
    """Return the relative step error per doubling outside the fitted range, by feature.

    The longest and the shortest third of the requests are predicted by a fit to the rest. The error
    for the batch size is ``BATCH_DOUBLING_ERROR``, because isolated requests are not batched.
    """
    found: dict[Feature, float] = {"decode_seqs": BATCH_DOUBLING_ERROR}
    computed = alone.prompt - alone.hits
    for feature, sizes in (("prefill_tokens", computed), ("decode_context", _decoded(alone))):
        errors = list(_ends(alone, sizes, shape, gpu, decodes=feature == "decode_context"))
        if errors:
            found[feature] = max(errors)  # type: ignore[index]
    return found


def _ends(
    alone: IsolatedRequests, sizes: Floats, shape: ModelTraits, gpu: Gpu | None, *, decodes: bool
) -> Iterator[float]:
    """Yield the mean error per doubling for requests below the fitted sizes, and for requests
    above.
    """
    low, high = np.quantile(sizes, (1 / 3, 2 / 3))
    for keep, edge in ((sizes <= high, high), (sizes >= low, low)):
        far = ~keep & (np.abs(np.log2(sizes / edge)) > 0.1)
        rest, end = _kept(alone, keep), _kept(alone, far)
        if len(rest) < 3 or not len(end) or (rest.output >= MIN_OUTPUT_TOKENS).sum() < 2:
            continue
        p = fit_cost_coefficients(rest, shape, gpu)
        away = np.abs(np.log2(sizes[far] / edge))
        if decodes:
            rows, times = _decodes(end)
            off = rows @ (p.decode_step + p.token, p.context) / times - 1
            away = away[end.output >= MIN_OUTPUT_TOKENS]
        else:
            off = _predicted(end, shape, p) / end.prefill - 1
        if len(off):
            yield float(abs(off.mean()) / away.mean())


def _kept(alone: IsolatedRequests, rows: npt.NDArray[np.bool_]) -> IsolatedRequests:
    return IsolatedRequests(
        *(getattr(alone, name)[rows] for name in IsolatedRequests.__dataclass_fields__)
    )


def _predicted(alone: IsolatedRequests, shape: ModelTraits, p: CostCoefficients) -> Floats:
    """Return the predicted duration in seconds of each request's prefill, in chunks of the token
    budget.
    """
    return _chunked(alone, shape, p.decode_step + p.token, p.prefill_step, p.token, p.pair)


def _chunked(
    alone: IsolatedRequests, shape: ModelTraits, one: float, step: float, token: float, pair: float
) -> Floats:
    computed, budget = alone.prompt - alone.hits, float(shape.max_num_batched_tokens)
    full, rest = np.divmod(computed, budget)
    whole = _products(np.array([budget]), one, step, token, shape)
    last = np.where(rest > 0, _products(np.maximum(rest, 1.0), one, step, token, shape), 0.0)
    pairs = computed * alone.hits + computed * (computed + 1) / 2
    return np.asarray(full * whole + last + pair * pairs)


def _curved(
    alone: IsolatedRequests, shape: ModelTraits, one: float, aims: dict[int, tuple[float, float]]
) -> tuple[float, float, float]:
    """Return the costs in seconds of a prefill step, a token and a pair with the least relative
    error.

    ``aims`` are additional observations, as in ``_solve``.
    """
    scale = np.array([one, one / 300, one / 1e6])
    for column, (value, _) in aims.items():
        scale[column] = value
    wanted = [(column, value, uncertainty) for column, (value, uncertainty) in aims.items()]

    def apart(prices: Floats) -> Floats:
        step, token, pair = prices
        return _chunked(alone, shape, one, step, token, pair) / alone.prefill - 1

    def missed(scaled: Floats, scatter: float) -> Floats:
        prices = scaled * scale
        extra = [scatter / u * (prices[column] / value - 1) for column, value, u in wanted]
        return np.concatenate([apart(prices), extra])

    found = scale
    for _ in range(4):
        scatter = max(float(np.sqrt(np.mean(apart(found) ** 2))), 1e-6)
        start = np.maximum(found / scale, 1e-3)
        found = least_squares(missed, start, bounds=(0, np.inf), args=(scatter,)).x * scale
    step, token, pair = found.tolist()
    return step, token, pair


def _decodes(alone: IsolatedRequests) -> tuple[Floats, Floats]:
    """Return the inputs and durations of decode steps, for requests with enough output tokens.

    The inputs are 1 and the mean number of KV tokens that a step reads.
    """
    kept = alone.output >= MIN_OUTPUT_TOKENS
    return np.stack([np.ones(len(alone)), _decoded(alone)], 1)[kept], alone.decode[kept]


def _decoded(alone: IsolatedRequests) -> Floats:
    """Return the mean number of KV tokens read by a decode step of each request."""
    return alone.prompt + (alone.output - 1) / 2


def _solve(rows: Floats, times: Floats, likely: dict[int, tuple[float, float]]) -> Sequence[float]:
    """Return the non-negative coefficients with the least relative error.

    ``likely`` contains additional observations by column: a value of the coefficient and its
    relative uncertainty. The weight is the scatter of the rows divided by the uncertainty.
    """
    scaled = rows / times[:, None]
    prices, _ = nnls(scaled, np.ones(len(times)))
    for _ in range(8):
        scatter = float(np.sqrt(np.mean((scaled @ prices - 1) ** 2))) or 1e-6
        extra = np.zeros((len(likely), rows.shape[1]))
        aims = np.zeros(len(likely))
        for row, (column, (value, uncertainty)) in enumerate(likely.items()):
            extra[row, column] = scatter / (uncertainty * value)
            aims[row] = scatter / uncertainty
        both = np.vstack([scaled, extra])
        prices, _ = nnls(both, np.concatenate([np.ones(len(times)), aims]))
    return [float(price) for price in prices]
