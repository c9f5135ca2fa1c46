"""Protocol of operator times in seconds, implemented by ``MeasuredOperators`` and ``Roofline``.

All shapes are per GPU: heads, experts and widths are counted on one GPU. A ``Curve`` is a function
of the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from simkv.costs.hardware.model_architecture import Gqa, Mla
from simkv.costs.operators.piecewise_curve import Curve

#: Duration in seconds, given the number of sequences and the tokens per sequence.
Lookup = Callable[[float, float], float]
Collective = Literal["all_gather", "reduce_scatter", "alltoall", "all_reduce"]


@dataclass(frozen=True)
class MoeShape:
    """Shape of the routed experts of a layer on ``tp`` x ``ep`` GPUs."""

    hidden: int
    intermediate: int
    per_token: int
    experts: int
    tp: int
    ep: int


@dataclass(frozen=True)
class DeltaNetShape:
    """Shape of the part of a gated delta net (linear attention) on one GPU."""

    hidden: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int


class OperatorTimes(Protocol):
    """Durations of operators on one GPU.

    ``notes`` lists the operators whose times are from other measurements or estimates.
    """

    notes: dict[str, None]
    points: int

    def gemm(self, form: str, n: int, k: int) -> Curve:
        """Return the duration of a matrix product of shapes (tokens, ``k``) and (``k``, ``n``).

        The result is a function of the number of tokens. ``form`` is the number format.
        """

    def prefill(self, attention: Gqa, kv: str) -> Lookup:
        """Return the duration of one layer's attention for prompts.

        The result is a function of the number of prompts and their length.
        """

    def decode(self, attention: Gqa, kv: str) -> Lookup:
        """Return the duration of one layer's attention for decodes.

        The result is a function of the number of decodes and their context.
        """

    def mla_prefill(self, attention: Mla, hidden: int, form: str, kv: str) -> Lookup:
        """Return the duration of one layer's multi-head latent attention for prompts.

        The result is a function of the number of prompts and their length. For sparse attention,
        the duration includes the projections.
        """

    def mla_decode(self, attention: Mla, hidden: int, form: str, kv: str) -> Lookup:
        """Return the duration of one layer's multi-head latent attention for decodes.

        The result is a function of the number of decodes and their context. For sparse attention,
        the duration includes the projections.
        """

    def absorbed(self, attention: Mla) -> Curve:
        """Return the duration of the absorbed projections of MLA decodes.

        The result is a function of the number of tokens. The absorbed projections convert queries
        to latents, and the output of the attention back.
        """

    def experts(self, shape: MoeShape, form: str) -> Curve:
        """Return the duration of a layer's routed experts.

        The result is a function of the total number of tokens of all GPUs that share the experts.
        """

    def delta(self, shape: DeltaNetShape, phase: Literal["context", "generation"]) -> Curve:
        """Return the duration of a gated delta net's convolution and recurrence.

        The result is a function of the number of tokens.
        """

    def all_reduce(self, gpus: int, numbers: int, *, graph: bool) -> Curve:
        """Return the duration of an all-reduce over ``gpus`` GPUs as a function of the number of
        tokens.

        ``numbers`` is the number of 16-bit values per token. With ``graph``, the all-reduce is part
        of a CUDA graph.
        """

    def collective(self, name: Collective, gpus: int, numbers: int) -> Curve:
        """Return the duration of the collective ``name`` over ``gpus`` GPUs.

        The result is a function of the number of tokens of all GPUs. ``numbers`` is the number of
        16-bit values per token.
        """

    def elementwise(self, nbytes: float) -> Curve:
        """Return the duration of a kernel that moves ``nbytes`` bytes per token.

        The result is a function of the number of tokens.
        """
