"""What steps cost in a few prices, as terms of a profile.

The form is that of ``costs/sources/sync.py``: a step of decodes costs a step, something per
sequence, and the KV that it reads; one that prefills reads the weights too, which many tokens hide.
Two things are open here that are fixed there, for requests in company tell them: what a sequence
costs in a step of decodes (there a token of a prefill), and how the weights give way to the tokens
(there as third powers; 1 is a plain sum, more is nearer to the greater of the two).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from simkv.costs.profile import Term
from simkv.costs.sources.alone import Traits
from simkv.costs.sources.sync import BESIDE, KNOTS, Prices, price_terms, weights_and_tokens

Floats = npt.NDArray[np.float64]


#: Powers beyond these are a sum, or the greater of the two, in all but name.
LEAST, MOST = 0.5, 30.0


@dataclass(frozen=True)
class StepPrices:
    """Seconds of a step of decodes and of one that prefills, per decode, per token that is
    prefilled, per pair of tokens, and per token of KV that decodes read; and the ``power``."""

    decode_step: float
    prefill_step: float
    decode_seq: float
    token: float
    pair: float
    context: float
    power: float


PRICES = tuple(one.name for one in fields(StepPrices))


def terms_of(prices: StepPrices, shape: Traits | None) -> list[Term]:
    """What a step costs at these prices. Of a mixture of experts, few tokens read few of them."""
    if shape and shape.in_experts:
        return price_terms(_plain(prices), shape)
    return [
        Term(name="weights, then tokens", feature="tokens", when="prefill", table=_table(prices)),
        Term(name="step", feature="steps", when="pure decode", seconds=prices.decode_step),
        Term(name="decodes", feature="decode_seqs", when="pure decode", seconds=prices.decode_seq),
        Term(name="pair", feature="prefill_pairs", seconds=prices.pair),
        Term(name="KV read", feature="decode_context", when="decode", seconds=prices.context),
        Term(
            name="KV read beside a prefill",
            feature="decode_context",
            when="mixed",
            seconds=(BESIDE - 1) * prices.context,
        ),
    ]


def _plain(prices: StepPrices) -> Prices:
    return Prices(
        prices.prefill_step, prices.decode_step, prices.token, prices.pair, prices.context
    )


def without_attention(
    prefill_tokens: Floats, decodes: Floats, prices: StepPrices, shape: Traits | None
) -> Floats:
    """Seconds of steps by their tokens, those of attention left out."""
    tokens = prefill_tokens + decodes
    if shape and shape.in_experts:
        return weights_and_tokens(tokens, _plain(prices), shape)
    pure = prices.decode_step + prices.decode_seq * decodes
    return np.where(prefill_tokens > 0, products(tokens, prices), pure)


def _table(prices: StepPrices) -> list[tuple[float, float]]:
    """Seconds of steps that prefill by their tokens, without attention."""
    seconds = products(KNOTS, prices)
    return list(zip(KNOTS.tolist(), seconds.tolist(), strict=True))


def products(tokens: Floats, prices: StepPrices) -> Floats:
    """The same for any numbers of tokens."""
    floor = prices.decode_step + prices.decode_seq
    line = prices.prefill_step + prices.token * tokens
    most = np.maximum(floor, line)
    power = min(max(prices.power, LEAST), MOST)
    both = (floor / most) ** power + (line / most) ** power
    return np.asarray(most * both ** (1 / power))
