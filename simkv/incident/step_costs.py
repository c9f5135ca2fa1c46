"""Step costs as a few unit costs, and as terms of a profile.

The form matches ``costs/sources/single_request_fit.py``. A decode step costs a constant, an amount
per sequence, and the KV that it reads. A step with prefills also reads the weights, in parallel
with the computation of tokens. Concurrent requests determine two additional values: the cost of a
sequence in a decode step, and the exponent that combines the times for weights and for tokens. The
exponent 1 adds both times, and large exponents approach their maximum.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from simkv.costs.cost_profile import CostTerm
from simkv.costs.sources.single_request import ModelTraits
from simkv.costs.sources.single_request_fit import (
    MIXED_DECODE_FACTOR,
    TOKEN_KNOTS,
    CostCoefficients,
    compute_non_attention_seconds,
    make_cost_terms,
)

Floats = npt.NDArray[np.float64]


#: Limits of the power; beyond them, the result is practically the sum or the maximum of the two
#: times.
MIN_POWER, MAX_POWER = 0.5, 30.0


@dataclass(frozen=True)
class UnitCosts:
    """Unit costs of a step in seconds, and the exponent ``power``.

    ``decode_seq`` is the cost of a decoding sequence. ``token`` is the cost of a prefilled token,
    ``pair`` of a query-key pair, and ``context`` of a KV token that decodes read. ``power``
    combines the time for reading weights and the time for computing tokens: 1 adds them, and large
    values approach the maximum.
    """

    decode_step: float
    prefill_step: float
    decode_seq: float
    token: float
    pair: float
    context: float
    power: float


UNIT_COST_NAMES = tuple(one.name for one in fields(UnitCosts))


def cost_terms(prices: UnitCosts, shape: ModelTraits | None) -> list[CostTerm]:
    """Return the cost terms of a profile.

    ``shape`` describes the model. A mixture of experts reads only some experts in steps with few
    tokens.
    """
    if shape and shape.expert_share:
        return make_cost_terms(_plain(prices), shape)
    return [
        CostTerm(
            name="weights, then tokens", feature="tokens", when="prefill", table=_table(prices)
        ),
        CostTerm(name="step", feature="steps", when="pure decode", seconds=prices.decode_step),
        CostTerm(
            name="decodes", feature="decode_seqs", when="pure decode", seconds=prices.decode_seq
        ),
        CostTerm(name="pair", feature="prefill_pairs", seconds=prices.pair),
        CostTerm(name="KV read", feature="decode_context", when="decode", seconds=prices.context),
        CostTerm(
            name="KV read beside a prefill",
            feature="decode_context",
            when="mixed",
            seconds=(MIXED_DECODE_FACTOR - 1) * prices.context,
        ),
    ]


def _plain(prices: UnitCosts) -> CostCoefficients:
    return CostCoefficients(
        prices.prefill_step, prices.decode_step, prices.token, prices.pair, prices.context
    )


def seconds_without_attention(
    prefill_tokens: Floats, decodes: Floats, prices: UnitCosts, shape: ModelTraits | None
) -> Floats:
    """Return the duration of each step without attention, in seconds."""
    tokens = prefill_tokens + decodes
    if shape and shape.expert_share:
        return compute_non_attention_seconds(tokens, _plain(prices), shape)
    found = np.asarray(prices.decode_step + prices.decode_seq * decodes)
    prefills = prefill_tokens > 0
    found[prefills] = matrix_product_seconds(tokens[prefills], prices)
    return found


def _table(prices: UnitCosts) -> list[tuple[float, float]]:
    """Return pairs (tokens, seconds): the durations of steps with prefills, without attention."""
    seconds = matrix_product_seconds(TOKEN_KNOTS, prices)
    return list(zip(TOKEN_KNOTS.tolist(), seconds.tolist(), strict=True))


def matrix_product_seconds(tokens: Floats, prices: UnitCosts) -> Floats:
    """Return the duration of steps with prefills without attention, in seconds."""
    floor = prices.decode_step + prices.decode_seq
    line = prices.prefill_step + prices.token * tokens
    most = np.maximum(floor, line)
    power = min(max(prices.power, MIN_POWER), MAX_POWER)
    both = (floor / most) ** power + (line / most) ** power
    return np.asarray(most * both ** (1 / power))
