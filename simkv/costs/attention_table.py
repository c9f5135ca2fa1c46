"""Attention times of a whole model, looked up in a table of measured batches.

A measured batch has one prefill of a given length after a given number of cached tokens, and a
number of decodes of equal context. A step is converted to an equivalent batch:

- All decodes get the mean context, so the total amount of KV read stays the same.
- Several prefills become one prefill with the same numbers of tokens and of attention pairs. They
  can have fewer pairs than one prefill of this length without cached tokens. The part of the cost
  that exceeds the cost of the shortest measured prefill is then reduced in proportion to the pairs.

Interpolation is linear on all four axes. The authors of LLMServingSim report errors of 9 to 14 %
for logarithmic interpolation of these tables (commit 5daddb2). If the table has no mixed batches,
the time of a mixed step is the sum of the times of its prefills and of its decodes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import log2
from typing import Annotated

from pydantic import Field, model_validator

from simkv.costs.frozen_model import FrozenModel
from simkv.costs.interpolation import bracket, interpolate, lerp
from simkv.costs.step_load import StepLoad

Count = Annotated[int, Field(ge=0)]


class AttentionRow(FrozenModel):
    """Measured times (s) of batches whose prefill follows ``prefill_context`` cached tokens.

    ``seconds`` has one value per ``decode_context``, the context in tokens of each decode.
    """

    prefill_context: Count
    decode_context: list[Count] = Field(min_length=1)
    seconds: list[Annotated[float, Field(ge=0)]]

    @model_validator(mode="after")
    def _rises(self) -> AttentionRow:
        if len(self.seconds) != len(self.decode_context):
            raise ValueError("seconds: must have one value per decode_context")
        if self.decode_context != sorted(set(self.decode_context)):
            raise ValueError("decode_context: values must be strictly increasing")
        return self


class AttentionSlice(FrozenModel):
    """Measured batches with the same number of prefill tokens and the same number of decodes."""

    prefill_tokens: Count
    decode_seqs: Count
    rows: list[AttentionRow] = Field(min_length=1)

    @model_validator(mode="after")
    def _rises(self) -> AttentionSlice:
        contexts = [row.prefill_context for row in self.rows]
        if contexts != sorted(set(contexts)):
            raise ValueError("rows: prefill_context must be strictly increasing")
        return self


class SkewCorrection(FrozenModel):
    """Additional cost of decodes of unequal context length, computed as in LLMServingSim.

    The attention time is between the time of decodes with the mean context and the time of decodes
    with the longest context. The position between both times is looked up in a table of
    measurements.
    """

    default: float
    decode_seqs: list[float]
    rate: list[float]
    longest: list[float]
    prefill_context: list[float]
    #: Each entry: prefill tokens, the bucket number on each of the other four axes, and the share.
    shares: list[tuple[int, int, int, int, int, float]]


class AttentionTable(FrozenModel):
    """Measured attention times (s) of a step over all layers.

    ``skew`` is the correction for decodes of unequal length.
    """

    slices: list[AttentionSlice] = Field(min_length=1)
    skew: SkewCorrection | None = None

    @model_validator(mode="after")
    def _has_decodes(self) -> AttentionTable:
        kinds = {(s.prefill_tokens, s.decode_seqs) for s in self.slices}
        if len(kinds) < len(self.slices):
            raise ValueError("slices: duplicate pair of prefill_tokens and decode_seqs")
        if not any(n and not p for p, n in kinds) or not any(p and not n for p, n in kinds):
            raise ValueError(
                "slices: must include slices with only prefills and slices with only decodes"
            )
        return self


class AttentionCost:
    """Attention time of a step in seconds, interpolated from an ``AttentionTable``."""

    def __init__(self, table: AttentionTable) -> None:
        self._slices = {(s.prefill_tokens, s.decode_seqs): s for s in table.slices}
        self._contexts = {k: [r.prefill_context for r in s.rows] for k, s in self._slices.items()}
        self._decodes = {p: sorted(n for q, n in self._slices if q == p) for p, _ in self._slices}
        #: Measured prefill lengths, for prefills without decodes and for prefills beside decodes
        #: (the latter include 0 tokens).
        self._alone = sorted(p for p, n in self._slices if not n)
        self._beside = sorted({p for p, n in self._slices if n})
        self._mixed = len(self._beside) > 1
        self._shortest = self._alone[0]
        self._skew = _SkewShares(table.skew) if table.skew else None
        self._lines: dict[int, tuple[Sequence[float], Sequence[float]]] = {}

    @property
    def needs_decode_range(self) -> bool:
        """Whether the cost depends on the shortest and the longest decode context of a step."""
        return self._skew is not None

    def __call__(self, load: StepLoad) -> float:
        seqs, tokens = load.decode_seqs, load.prefill_tokens
        if tokens and seqs and not self._mixed:
            prefill = self._batch(load._replace(decode_seqs=0), 0.0)
            return prefill + self.decodes(seqs, load.decode_context / seqs)
        mean = load.decode_context / seqs if seqs else 0.0
        time = self._batch(load, mean)
        if self._skew is None or seqs < 2 or load.longest == load.shortest:
            return time
        share = self._skew(load, mean)
        return time + share * max(self._batch(load, load.longest) - time, 0.0) if share else time

    def decodes(self, seqs: int, context: float) -> float:
        """Return the attention time in seconds of ``seqs`` decodes with ``context`` tokens each."""
        line = self._lines.get(seqs)
        if line is None:
            line = self._lines[seqs] = self._line(seqs)
        return interpolate(*line, context)

    def _batch(self, load: StepLoad, context: float) -> float:
        """Return the attention time in seconds if every decode has ``context`` tokens."""
        tokens, seqs = load.prefill_tokens, load.decode_seqs
        if not tokens:
            return self.decodes(seqs, context) if seqs else 0.0
        # attention pairs of a single prompt with the tokens of all prompts
        own = tokens * (tokens + 1) / 2
        before = (load.prefill_pairs - own) / tokens
        if before >= 0:
            return self._measured(tokens, before, seqs, context)
        least = self._measured(min(self._shortest, tokens), 0.0, seqs, context)
        whole = self._measured(tokens, 0.0, seqs, context)
        return least + max(whole - least, 0.0) * load.prefill_pairs / own

    def _measured(self, tokens: int, before: float, seqs: int, context: float) -> float:
        """Return the attention time in seconds, interpolated by decodes and by prefill tokens.

        ``before`` is the number of cached tokens before the prefill.
        """
        prefills = self._beside if seqs else self._alone
        low, high, share = bracket(prefills, tokens)
        first = self._by_decodes(prefills[low], before, seqs, context)
        if low == high or not share:
            return first
        return lerp(first, self._by_decodes(prefills[high], before, seqs, context), share)

    def _by_decodes(self, tokens: int, before: float, seqs: int, context: float) -> float:
        """Return the attention time in seconds, interpolated by the number of decodes."""
        known = self._decodes[tokens]
        low, high, share = bracket(known, seqs)
        first = self._in_slice((tokens, known[low]), before, context)
        if low == high or not share:
            return first
        return lerp(first, self._in_slice((tokens, known[high]), before, context), share)

    def _in_slice(self, key: tuple[int, int], before: float, context: float) -> float:
        rows = self._slices[key].rows
        low, high, share = bracket(self._contexts[key], before)
        first = interpolate(rows[low].decode_context, rows[low].seconds, context)
        if low == high or not share:
            return first
        return lerp(
            first, interpolate(rows[high].decode_context, rows[high].seconds, context), share
        )

    def _line(self, seqs: int) -> tuple[Sequence[float], Sequence[float]]:
        """Return decode contexts and the times (s) of ``seqs`` decodes with these contexts."""
        known = self._decodes[0]
        low, high, share = bracket(known, seqs)
        rows = [self._slices[0, known[index]].rows[0] for index in (low, high)]
        xs = sorted({x for row in rows for x in row.decode_context})
        both = [[interpolate(row.decode_context, row.seconds, x) for x in xs] for row in rows]
        return xs, [lerp(a, b, share) for a, b in zip(*both, strict=True)]


class _SkewShares:
    """Lookup of the position between mean and longest context for decodes of unequal length."""

    def __init__(self, skew: SkewCorrection) -> None:
        self._skew = skew
        self._shares = {tuple(key): share for *key, share in skew.shares}
        self._prefills = sorted({key[0] for key in self._shares if key[0]})

    def __call__(self, load: StepLoad, mean: float) -> float:
        """Return the position: 0 for the time at the mean context, 1 for the time at the longest
        context.
        """
        skew, tokens = self._skew, load.prefill_tokens
        before = max(load.prefill_pairs - tokens * (tokens + 1) / 2, 0.0) / max(tokens, 1)
        rate = (mean - load.shortest) / (load.longest - load.shortest)
        key = (
            self._nearest(tokens),
            _bucket(skew.decode_seqs, load.decode_seqs),
            _bucket(skew.rate, rate),
            _bucket(skew.longest, load.longest),
            _bucket(skew.prefill_context, before),
        )
        return self._shares.get(key, skew.default)

    def _nearest(self, tokens: int) -> int:
        """Return the nearest measured number of prefill tokens on a logarithmic scale."""
        if not tokens or not self._prefills:
            return tokens
        return min(self._prefills, key=lambda measured: abs(log2(measured / tokens)))


def _bucket(ends: Sequence[float], value: float) -> int:
    """Return the index of the bucket of ``value``. ``ends`` are the upper edges of the buckets."""
    return min(bisect_left(ends, value), len(ends) - 1)
