"""Attention times of a whole model, separately for the prefills and the decodes of a step.

Prefills are looked up by their total number of tokens and by the mean number of tokens that each
token attends to. Decodes are looked up by the number of sequences and by their mean context. The
time of a mixed step is the sum of both times.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from pydantic import Field, model_validator

from simkv.costs.frozen_model import FrozenModel
from simkv.costs.interpolation import bracket, interpolate, lerp
from simkv.costs.step_load import StepLoad

GridAxis = Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1)]
GridSeconds = list[list[Annotated[float, Field(ge=0)]]]


class AttentionGrid(FrozenModel):
    """Attention times (s) over all layers.

    ``prefill_s`` is indexed by ``prefill_tokens`` and ``prefill_mean``, the mean number of tokens
    that a prefill token attends to. ``decode_s`` is indexed by ``decode_seqs`` and
    ``decode_context``, the context tokens per decode.
    """

    prefill_tokens: GridAxis
    prefill_mean: GridAxis
    prefill_s: GridSeconds
    decode_seqs: GridAxis
    decode_context: GridAxis
    decode_s: GridSeconds

    @model_validator(mode="after")
    def _rectangular(self) -> AttentionGrid:
        for name in ("prefill_tokens", "prefill_mean", "decode_seqs", "decode_context"):
            axis = getattr(self, name)
            if any(a >= b for a, b in pairwise(axis)):
                raise ValueError(f"{name}: values must be strictly increasing")
        for plane, rows, columns in (
            ("prefill_s", self.prefill_tokens, self.prefill_mean),
            ("decode_s", self.decode_seqs, self.decode_context),
        ):
            found = getattr(self, plane)
            if len(found) != len(rows) or any(len(row) != len(columns) for row in found):
                raise ValueError(f"{plane}: must have {len(rows)} rows of {len(columns)} values")
        return self


class GridCost:
    """Attention time of a step in seconds, interpolated from an ``AttentionGrid``."""

    def __init__(self, grid: AttentionGrid) -> None:
        self._grid = grid
        self._lines: dict[int, list[float]] = {}

    def __call__(self, load: StepLoad) -> float:
        seconds = 0.0
        if load.prefill_tokens:
            seconds += self._prefills(load.prefill_tokens, load.prefill_pairs)
        if load.decode_seqs:
            line = self._line(load.decode_seqs)
            mean = load.decode_context / load.decode_seqs
            seconds += interpolate(self._grid.decode_context, line, mean)
        return seconds

    def ahead(self, load: StepLoad, steps: int) -> list[float]:
        """Return the durations in seconds of the next ``steps`` decode steps.

        After each step, the context of every sequence in ``load`` is one token longer.
        """
        xs, ys = self._grid.decode_context, self._line(load.decode_seqs)
        mean = load.decode_context / load.decode_seqs
        found: list[float] = []
        while len(found) < steps:
            x = mean + len(found) + 1
            left, right, _ = bracket(xs, x)
            if left == right:
                rest = steps - len(found) if len(xs) == 1 else int(xs[0] - x) + 1
                found += [ys[left]] * min(rest, steps - len(found))
                continue
            slope = (ys[right] - ys[left]) / (xs[right] - xs[left])
            rest = steps - len(found)
            if right + 1 < len(xs):
                rest = min(rest, int(xs[right] - x) + 1)
            base = ys[left] + slope * (x - xs[left])
            found += [base + slope * i for i in range(rest)]
        return found

    def _prefills(self, tokens: int, pairs: int) -> float:
        grid = self._grid
        mean = pairs / tokens
        low, high, share = bracket(grid.prefill_tokens, tokens)
        first = interpolate(grid.prefill_mean, grid.prefill_s[low], mean)
        if low == high or not share:
            return first
        return lerp(first, interpolate(grid.prefill_mean, grid.prefill_s[high], mean), share)

    def _line(self, seqs: int) -> Sequence[float]:
        """Return the decode times (s) of ``seqs`` sequences, one per value of
        ``decode_context``.
        """
        line = self._lines.get(seqs)
        if line is None:
            low, high, share = bracket(self._grid.decode_seqs, seqs)
            first, second = self._grid.decode_s[low], self._grid.decode_s[high]
            line = [lerp(a, b, share) for a, b in zip(first, second, strict=True)]
            self._lines[seqs] = line
        return line
