"""Shapes of the decoder-only transformers that simkv can run on a GPU, without their weights."""

from __future__ import annotations

from dataclasses import dataclass

from simkv.costs.hardware.model_gpu_catalog import find_model


@dataclass(frozen=True)
class ModelShape:
    """A Llama-like decoder: RMSNorm, rotary positions, grouped-query attention, SiLU-gated MLP.

    ``heads`` query heads share ``kv_heads`` KV heads of size ``head_dim``. ``tied`` is true if the
    output head and the embedding share their weights. With ``qkv_bias``, the query, key and value
    projections have biases, as in Qwen2.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    rope_theta: float
    norm_eps: float
    qkv_bias: bool = False
    tied: bool = False

    @property
    def group(self) -> int:
        """Number of query heads per KV head."""
        return self.heads // self.kv_heads

    @property
    def qkv_width(self) -> int:
        """Number of output columns of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def step_weights(self) -> int:
        """Number of parameters that every step reads, with the output head and without the
        embedding.
        """
        attention = self.hidden * self.qkv_width + self.heads * self.head_dim * self.hidden
        mlp = 3 * self.hidden * self.intermediate
        norms = 2 * self.hidden
        biases = self.qkv_width if self.qkv_bias else 0
        head = self.vocab * self.hidden
        return self.layers * (attention + mlp + norms + biases) + self.hidden + head

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Return the bytes of keys and values per token over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def _published(
    name: str, hub: str, rope_theta: float, norm_eps: float, *, qkv_bias: bool = False
) -> ModelShape:
    """Return the shape of a model in the catalog. The other arguments are not in the catalog."""
    m = find_model(hub)
    sizes = (m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.intermediate, m.vocab)
    return ModelShape(name, *sizes, rope_theta, norm_eps, qkv_bias, m.tied)


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        _published("llama-3-8b", "meta-llama/Meta-Llama-3-8B", 500000.0, 1e-5),
        _published("qwen2.5-0.5b", "Qwen/Qwen2.5-0.5B", 1e6, 1e-6, qkv_bias=True),
        ModelShape("small", 6, 384, 6, 2, 64, 1024, 2048, 10000.0, 1e-5),
        ModelShape("tiny", 2, 64, 4, 2, 16, 128, 512, 10000.0, 1e-5),
    )
}
