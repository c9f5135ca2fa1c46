"""What a source of operator times answers, in seconds; two of them are ``Tables`` and ``Roofline``.

Shapes are those of one GPU: heads, widths and experts as its share. Curves are over tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from simkv.costs.hardware.architecture import Gqa, Mla
from simkv.costs.operators.piecewise_curve import Curve

#: Seconds by how many sequences, and how many tokens each has.
Lookup = Callable[[float, float], float]
Collective = Literal["all_gather", "reduce_scatter", "alltoall", "all_reduce"]


@dataclass(frozen=True)
class MoeShape:
    """The routed experts of a layer as ``tp`` x ``ep`` GPUs share them; of the whole layer."""

    hidden: int
    intermediate: int
    per_token: int
    experts: int
    tp: int
    ep: int


@dataclass(frozen=True)
class DeltaNetShape:
    """A gated delta net's share of one GPU."""

    hidden: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int


class OperatorTimes(Protocol):
    """Times of operators on one GPU. ``notes`` say what was not measured as it was asked for."""

    notes: dict[str, None]
    points: int

    def gemm(self, form: str, n: int, k: int) -> Curve:
        """Tokens x k by k x n."""

    def prefill(self, attention: Gqa, kv: str) -> Lookup:
        """Attention of so many prompts of so many tokens each; one layer."""

    def decode(self, attention: Gqa, kv: str) -> Lookup:
        """Attention of so many sequences that read so many tokens each; one layer."""

    def mla_prefill(self, attention: Mla, hidden: int, form: str, kv: str) -> Lookup:
        """MLA of prompts, or its sparse kind, with its projections; one layer."""

    def mla_decode(self, attention: Mla, hidden: int, form: str, kv: str) -> Lookup:
        """MLA of decodes, or its sparse kind, with its projections; one layer."""

    def absorbed(self, attention: Mla) -> Curve:
        """Both absorbed projections of an MLA's decodes, by tokens."""

    def experts(self, shape: MoeShape, form: str) -> Curve:
        """The routed experts of a layer, by the tokens of all GPUs that share them."""

    def delta(self, shape: DeltaNetShape, phase: Literal["context", "generation"]) -> Curve:
        """Convolution and recurrence of a gated delta net, by tokens."""

    def all_reduce(self, gpus: int, numbers: int, *, graph: bool) -> Curve:
        """All-reduce of ``numbers`` 16-bit numbers a token."""

    def collective(self, name: Collective, gpus: int, numbers: int) -> Curve:
        """Another collective over ``numbers`` 16-bit numbers a token, all GPUs' together."""

    def elementwise(self, nbytes: float) -> Curve:
        """A kernel that moves so many bytes a token."""
