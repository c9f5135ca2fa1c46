"""A profile fitted to requests that had the engine to themselves.

One request at a time shows what a prefill of so many tokens takes and what a step of one decode
takes by its KV. A step of nothing but decodes is taken to cost

    decode step + token x tokens + context x KV read by decodes

and one that prefills

    weights, then tokens (below) + pair x pairs + BESIDE x context x KV read by decodes

with pairs of a token and a token that it attends to. A token costs the same whatever it is
computed for, so the same price holds in a prefill, beside one, and in a batch of decodes, which
single requests cannot show. Errors are relative and count alike.

**Weights, then tokens.** A step reads the weights, however few tokens it computes: that takes
what a decode of one takes (without its KV). Many tokens take prefill step + token x tokens, in
which the weights are hidden. In between one gives way to the other as the third root of the sum of
third powers: a chunk of 64 tokens on an H100 took 27.5 ms where a decode takes 26 and the line says
14.6, and in the kernel tables that simkv reads powers of 2 to 4 are nearest. So a profile holds at
another budget of tokens than it was fitted at. Of a mixture of experts a few tokens read a part of
the weights, by how many experts they activate, and tokens cost on top of them.

The prices of a token, of a pair and of KV are hard to tell from a handful of rows of like length,
or of chunks of one size. Where model and GPU are known, the fit is told what their shapes make
likely, each as one more observation: KV is read at ``BANDWIDTH_SHARE`` of the GPU's bandwidth,
attention in a prefill reaches ``ATTENTION_FLOPS_SHARE`` of its operations per second, products of
matrices ``PRODUCT_FLOPS_SHARE``. The first two are what vLLM's attention reaches in
aiconfigurator's table of an H100 (vLLM 0.14): 2.9 to 3.05 TB/s of 3.35 from 130,000 tokens on, 390
to 515 TFLOP/s of 989 at prompts of 2,000 to 4,000 tokens and 64 heads. The third is what steps of
1,000 to 2,000 tokens reach without attention, the embedding and the head left out: 0.77 (A100,
Vidur; RTX PRO 6000, LLMServingSim), 0.85 (H100, aiconfigurator), 0.96 (RTX 4090, whose data sheet
is modest). What a step costs beside weights and tokens is ``PREFILL_STEP_RATIO`` of a decode step:
0.1 to 0.3 there. The second figure of each pair is the relative uncertainty.

Attention of decodes beside a prefill takes ``MIXED_DECODE_FACTOR`` times what it does alone: 1.5
and 2.1 in LLMServingSim's tables of two GPUs (medians over points with 8 or more decodes). It is
not sure, eight in ten of those points are from 1.0 to 3.6, and one request at a time cannot tell.
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
from simkv.costs.sources.single_request import (
    MIN_OUTPUT_TOKENS,
    Floats,
    IsolatedRequests,
    ModelTraits,
)
from simkv.costs.step_errors import summarize_errors_by_kind

BANDWIDTH_SHARE = (0.87, 0.07)
ATTENTION_FLOPS_SHARE = (0.45, 0.15)
PRODUCT_FLOPS_SHARE = (0.8, 0.12)
PREFILL_STEP_RATIO = (0.2, 1.0)
MIXED_DECODE_FACTOR = 1.8
#: How one gives way to the other: ``(a**POWER + b**POWER) ** (1 / POWER)``.
POWER = 3.0
#: The relative error of a step of decodes per doubling of their number, where one was measured: the
#: mean error over that of the doublings at 2 to 64 decodes, on the devices of ``simkv validate
#: budgets``, mixtures of experts aside. It was 0.2 to 1.9 %, and 90 of 100 are below this.
BATCH_DOUBLING_ERROR = 0.019
#: Tokens of a step at which the curve of weights and tokens is written down.
TOKEN_KNOTS = np.unique(np.round(2.0 ** (np.arange(113) / 8)))


@dataclass(frozen=True)
class CostCoefficients:
    """Seconds of a step that prefills, of one that only decodes, and per unit."""

    prefill_step: float
    decode_step: float
    token: float
    pair: float
    context: float


def fit_cost_coefficients(
    alone: IsolatedRequests, shape: ModelTraits, gpu: Gpu | None
) -> CostCoefficients:
    """The prices at which the requests would take what they took, as nearly as may be."""
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
    """Seconds of all but attention in steps that prefill, by their tokens."""
    floor = prices.decode_step + prices.token
    return _products(tokens, floor, prices.prefill_step, prices.token, shape)


def _products(tokens: Floats, one: float, step: float, token: float, shape: ModelTraits) -> Floats:
    """The same, ``one`` being what a decode takes without its KV."""
    if shape.expert_share:
        return _weights(tokens, one, step, shape) + token * (tokens - 1)
    line = step + token * tokens
    most = np.maximum(one, line)
    gentle: Floats = ((one / most) ** POWER + (line / most) ** POWER) ** (1 / POWER)
    return most * gentle


def _weights(tokens: Floats, one: float, step: float, shape: ModelTraits) -> Floats:
    """Seconds to read the weights that so many tokens want; all of them take ``step``, if that is
    more than the weights of ``one`` token make them take."""
    if not shape.expert_share:
        return np.full(len(tokens), one)
    activated = 1 - (1 - shape.chosen) ** tokens
    every = max(step, one / (1 - shape.expert_share * (1 - shape.chosen)))
    return one + (every - one) * (activated - shape.chosen) / (1 - shape.chosen)


def make_cost_terms(prices: CostCoefficients, shape: ModelTraits) -> list[CostTerm]:
    """What a step costs at these prices, as terms of a profile."""
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
    """The profile of an engine from requests that were alone on it.

    Its errors are those of each request's prefill and mean decode step when the fit did without
    that request.
    """
    prices = fit_cost_coefficients(alone, shape, gpu)
    decodes, _ = _decodes(alone)
    computed = alone.prompt - alone.hits
    told = f"KV and attention as likely on {gpu.name}" if gpu else "GPU not known: rows alone"
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
            note=f"least squares of relative errors over {len(alone)} requests that were alone; "
            f"{told}; errors are those of requests left out",
            held_out=_left_out(alone, shape, gpu),
            beyond=_beyond(alone, shape, gpu),
        ),
        source=[f"{len(alone)} requests one at a time, the first of the run left out"],
    )


def _left_out(alone: IsolatedRequests, shape: ModelTraits, gpu: Gpu | None) -> dict[str, StepError]:
    """Errors of each request's prefill and decode steps when the fit did without it."""

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
    """By feature, the error of a step per doubling out of range, on ends that were left out.

    The longest and the shortest third are left out in turn, and told by the rest. Of batches of
    decodes one request at a time knows nothing: ``BATCH_DOUBLING_ERROR`` stands for them.
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
    """The mean error per doubling of requests beyond the sizes that were fitted to, at both ends.

    Of all together: a request that is hardly beyond them tells of its own scatter, not of how the
    error grows.
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
    """Seconds of each request's prefill, in chunks of the budget."""
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
    """Prices of a step, a token and a pair of least relative error, as ``_solve`` finds them."""
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
    """Per request that decodes for a while: 1 and the mean KV of a step; and the step's time."""
    kept = alone.output >= MIN_OUTPUT_TOKENS
    return np.stack([np.ones(len(alone)), _decoded(alone)], 1)[kept], alone.decode[kept]


def _decoded(alone: IsolatedRequests) -> Floats:
    """Per request, the mean KV that its decodes read."""
    return alone.prompt + (alone.output - 1) / 2


def _solve(rows: Floats, times: Floats, likely: dict[int, tuple[float, float]]) -> Sequence[float]:
    """Prices (not negative) of least relative error; ``likely`` are (value, uncertainty) by column.

    What is likely counts against the rows as much as its uncertainty against their scatter.
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
