"""Operator times estimated from a GPU's data sheet.

An operator takes a constant time plus the longer of its compute time and its memory time, at
fractions of the peak rates. ``efficiency.json`` contains the fractions that were measured on
several GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Literal

from simkv.costs.cost_profile import StepError
from simkv.costs.frozen_model import FrozenModel
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.model_architecture import Gqa, Mla
from simkv.costs.hardware.model_gpu_catalog import Gpu
from simkv.costs.hardware.number_formats import find_number_format
from simkv.costs.operators.lookup.attention_lookup import prompt_pairs
from simkv.costs.operators.operator_times import (
    Collective,
    DeltaNetShape,
    Lookup,
    MoeShape,
)
from simkv.costs.operators.piecewise_curve import Curve, make_curve

#: Token counts at which curves are evaluated.
CURVE_TOKENS = (
    *(1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768),
    *(1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768),
)


class Efficiency(FrozenModel):
    """Fractions of the data sheet's rates that operators reach, and the constant time per operator
    (s).
    """

    gemm_flops: float
    gemm_bytes: float
    gemm_s: float
    prefill_flops: float
    prefill_s: float
    decode_bytes: float
    decode_s: float
    experts_flops: float
    experts_bytes: float
    experts_s: float
    mla_prefill_flops: float
    mla_decode_bytes: float
    elementwise_bytes: float
    elementwise_s: float
    link: float
    link_graph_s: float
    link_eager_s: float


class EfficiencyFile(FrozenModel):
    """Content of ``efficiency.json``: the fractions, and the errors of estimates by kind of
    step.
    """

    shares: Efficiency
    left_out: dict[str, StepError]
    source: str


@lru_cache(maxsize=1)
def _seen() -> EfficiencyFile:
    path = Path(__file__).with_name("efficiency.json")
    return EfficiencyFile.model_validate(json.loads(path.read_text(encoding="utf-8")))


def efficiency() -> Efficiency:
    """Return the fractions of the data sheet's rates that operators reach on the measured GPUs."""
    return _seen().shares


def estimate_errors() -> dict[str, StepError]:
    """Return the errors of data-sheet estimates for the measured GPUs, by kind of step.

    The estimate for a GPU uses the efficiency of the other GPUs.
    """
    return _seen().left_out


class Roofline:
    """Operator times estimated from a data sheet, for GPUs or shapes without measurements."""

    def __init__(self, gpu: Gpu, link: Interconnect, shares: Efficiency | None = None) -> None:
        self.gpu = gpu
        self.link = link
        self.shares = shares or efficiency()
        self.notes: dict[str, None] = {}
        self.points = 0

    def gemm(self, form: str, n: int, k: int) -> Curve:
        weights = find_number_format(form)
        flops = self.gpu.peak_flops(weights.activations) * self.shares.gemm_flops
        rate = self.gpu.bandwidth * self.shares.gemm_bytes

        def seconds(m: float) -> float:
            nbytes = weights.bytes * n * k + 2 * m * (n + k)
            return self.shares.gemm_s + max(2 * m * n * k / flops, nbytes / rate)

        return _curve(seconds)

    def prefill(self, attention: Gqa, kv: str) -> Lookup:
        del kv
        rate = self.gpu.flops * self.shares.prefill_flops
        per_pair = 4 * attention.heads * attention.head_dim
        return lambda batch, length: (
            self.shares.prefill_s + batch * per_pair * prompt_pairs(length, attention.window) / rate
        )

    def decode(self, attention: Gqa, kv: str) -> Lookup:
        rate = self.gpu.bandwidth * self.shares.decode_bytes
        per_token = 2 * attention.kv_heads * attention.head_dim * (2 if kv == "bf16" else 1)
        reach = attention.window or float("inf")
        return lambda batch, length: (
            self.shares.decode_s + batch * per_token * min(length, reach) / rate
        )

    def mla_prefill(self, attention: Mla, hidden: int, form: str, kv: str) -> Lookup:
        del kv
        width = attention.qk_nope_head_dim + attention.qk_rope_head_dim + attention.v_head_dim
        rate = self.gpu.flops * self.shares.mla_prefill_flops
        window = attention.sparse.topk if attention.sparse else 0
        products = self._sparse_products(attention, hidden, form)
        return lambda batch, length: (
            self.shares.prefill_s
            + batch * 2 * attention.heads * width * prompt_pairs(length, window) / rate
            + products(batch * length)
        )

    def mla_decode(self, attention: Mla, hidden: int, form: str, kv: str) -> Lookup:
        rate = self.gpu.bandwidth * self.shares.mla_decode_bytes
        per_token = attention.latent_width * (2 if kv == "bf16" else 1)
        reach = attention.sparse.topk if attention.sparse else float("inf")
        products = self._sparse_products(attention, hidden, form)
        return lambda batch, length: (
            self.shares.decode_s + batch * per_token * min(length, reach) / rate + products(batch)
        )

    def _sparse_products(self, attention: Mla, hidden: int, form: str) -> Curve:
        """Return the time of the projections, which measured times of sparse attention include."""
        if not attention.sparse:
            return Curve((1.0,), (0.0,))
        return self.gemm(form, attention.weights(hidden) // hidden, hidden)

    def absorbed(self, attention: Mla) -> Curve:
        """Return the time of the two absorbed projections of MLA decodes by number of tokens."""
        width = attention.qk_nope_head_dim + attention.v_head_dim
        nbytes = 2 * attention.heads * width * attention.kv_lora_rank
        flops = self.gpu.flops * self.shares.gemm_flops
        rate = self.gpu.bandwidth * self.shares.gemm_bytes
        return _curve(lambda m: 2 * self.shares.gemm_s + max(m * nbytes / flops, nbytes / rate))

    def experts(self, shape: MoeShape, form: str) -> Curve:
        weights = find_number_format(form)
        share = shape.tp * shape.ep
        each = 3 * shape.hidden * shape.intermediate
        flops = self.gpu.peak_flops(weights.activations) * self.shares.experts_flops
        rate = self.gpu.bandwidth * self.shares.experts_bytes

        def seconds(m: float) -> float:
            hit = shape.experts * (1 - float((1 - shape.per_token / shape.experts) ** m))
            nbytes = weights.bytes * each * hit / share
            work = 2 * m * shape.per_token * each / share
            return self.shares.experts_s + max(work / flops, nbytes / rate)

        return _curve(seconds)

    def delta(self, shape: DeltaNetShape, phase: Literal["context", "generation"]) -> Curve:
        state = 4 * shape.v_heads * shape.k_dim * shape.v_dim
        rate = self.gpu.bandwidth * self.shares.elementwise_bytes
        # A decode reads and writes its state once; a prompt reads and writes it once per chunk of
        # 64 tokens.
        per_token = 2 * state / (1 if phase == "generation" else 64)
        return _curve(lambda m: 2 * self.shares.elementwise_s + m * per_token / rate)

    def all_reduce(self, gpus: int, numbers: int, *, graph: bool) -> Curve:
        start = self.shares.link_graph_s if graph else self.shares.link_eager_s
        if self.link.measured:
            start = self.link.latency
        return self._over_link(2 * (gpus - 1) / gpus, numbers, start)

    def collective(self, name: Collective, gpus: int, numbers: int) -> Curve:
        trips = 2 if name == "all_reduce" else 1
        start = self.link.latency if self.link.measured else self.shares.link_eager_s
        return self._over_link(trips * (gpus - 1) / gpus, numbers, start)

    def elementwise(self, nbytes: float) -> Curve:
        rate = self.gpu.bandwidth * self.shares.elementwise_bytes
        return _curve(lambda m: self.shares.elementwise_s + m * nbytes / rate)

    def _over_link(self, trips: float, numbers: int, start: float) -> Curve:
        share = 1.0 if self.link.measured else self.shares.link
        rate = self.link.bandwidth * share
        return _curve(lambda m: start + trips * 2 * numbers * m / rate)


def _curve(seconds: Callable[[float], float], tokens: Iterable[float] = CURVE_TOKENS) -> Curve:
    return make_curve({m: seconds(m) for m in tokens})
