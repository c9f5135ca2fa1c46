"""Protocol of operator times in seconds, provided by ``MeasuredOperators`` and ``Roofline``.

Shapes are per GPU: heads, widths and experts are its share. Curves are functions of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from simkv.costs.hardware.model_architecture import Gqa, Mla
from simkv.costs.operators.piecewise_curve import Curve

#: Seconds by number of sequences and tokens per sequence.
Lookup = Callable[[float, float], float]
Collective = Literal["all_gather", "reduce_scatter", "alltoall", "all_reduce"]


@dataclass(frozen=True)
class MoeShape:
    """Routed experts of a whole layer, distributed over ``tp`` x ``ep`` GPUs."""

    hidden: int
    intermediate: int
    per_token: int
    experts: int
    tp: int
    ep: int


@dataclass(frozen=True)
class DeltaNetShape:
    """Share of a gated delta net on a single GPU."""

    hidden: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int


class OperatorTimes(Protocol):
    """Times of operators on one GPU; ``notes`` lists substitutes for missing measurements."""

    notes: dict[str, None]
    points: int

    def gemm(self, form: str, n: int, k: int) -> Curve:
        """Return the time of a product of (tokens, k) and (k, n)."""

    def prefill(self, attention: Gqa, kv: str) -> Lookup:
        """Return the time of attention of prompts, by number and length; one layer."""

    def decode(self, attention: Gqa, kv: str) -> Lookup:
        """Return the time of attention of decodes, by number and context; one layer."""

    def mla_prefill(self, attention: Mla, hidden: int, form: str, kv: str) -> Lookup:
        """Return the time of MLA of prompts, with projections if sparse; one layer."""

    def mla_decode(self, attention: Mla, hidden: int, form: str, kv: str) -> Lookup:
        """Return the time of MLA of decodes, with projections if sparse; one layer."""

    def absorbed(self, attention: Mla) -> Curve:
        """Return the time of both absorbed projections of MLA decodes, by tokens."""

    def experts(self, shape: MoeShape, form: str) -> Curve:
        """Return the time of a layer's routed experts, by the tokens of all their GPUs."""

    def delta(self, shape: DeltaNetShape, phase: Literal["context", "generation"]) -> Curve:
        """Return the time of a gated delta net's convolution and recurrence, by tokens."""

    def all_reduce(self, gpus: int, numbers: int, *, graph: bool) -> Curve:
        """Return the time of an all-reduce of ``numbers`` 16-bit numbers per token."""

    def collective(self, name: Collective, gpus: int, numbers: int) -> Curve:
        """Return the time of a collective over ``numbers`` 16-bit numbers per token of all GPUs."""

    def elementwise(self, nbytes: float) -> Curve:
        """Return the time of a kernel that moves ``nbytes`` bytes per token."""
