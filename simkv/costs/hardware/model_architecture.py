"""Layer shapes of a model, which determine its weights, its KV and the work of its kernels.

``parse_architecture`` in ``hf_config.py`` reads these shapes from a Hugging Face ``config.json``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simkv.costs.hardware.number_formats import FormatName, KvFormatName


@dataclass(frozen=True)
class Gqa:
    """Grouped-query attention: ``heads`` query heads share ``kv_heads`` KV heads of size
    ``head_dim``.

    A token attends to the last ``window`` tokens; 0 means all tokens. If ``chunked`` is true, a
    token attends only to earlier tokens of its chunk of ``window`` tokens, as in Llama 4. With
    ``output_gate``, the query projection also computes an output gate, as in Qwen3.5.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    output_gate: bool = False
    chunked: bool = False

    def weights(self, hidden: int) -> int:
        """Return the number of parameters of the projections.

        Biases and norms (less than 0.1 %) are not counted.
        """
        queries = self.heads * (2 if self.output_gate else 1)
        return hidden * self.head_dim * (queries + 2 * self.kv_heads + self.heads)


@dataclass(frozen=True)
class Indexer:
    """Indexer of sparse attention as in DeepSeek-V3.2. It selects ``topk`` tokens for each query.

    It has ``heads`` heads of size ``head_dim``, and stores one key of ``head_dim`` numbers per
    token.
    """

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention. It stores ``kv_lora_rank + qk_rope_head_dim`` numbers per token.

    ``q_lora_rank`` is 0 if queries are projected directly from the hidden state.
    """

    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    sparse: Indexer | None = None

    @property
    def latent_width(self) -> int:
        """Number of KV values stored per token and layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def weights(self, hidden: int) -> int:
        """Return the number of parameters of the projections, including the indexer."""
        return self.shared_weights(hidden) + self.split_weights(hidden)

    def shared_weights(self, hidden: int) -> int:
        """Return the number of parameters that every tensor-parallel GPU replicates.

        These are the parameters of the latent projections and of the indexer.
        """
        down = hidden * (self.q_lora_rank + self.latent_width)
        if not self.sparse:
            return down
        queries = (self.q_lora_rank or hidden) * self.sparse.heads * self.sparse.head_dim
        return down + queries + hidden * (self.sparse.head_dim + self.sparse.heads)

    def split_weights(self, hidden: int) -> int:
        """Return the number of parameters that tensor-parallel GPUs split by heads."""
        queries = (self.q_lora_rank or hidden) * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        keys_values = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        return self.heads * (queries + keys_values + self.v_head_dim * hidden)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta net: stores a state of fixed size per sequence instead of KV.

    ``conv`` is the width of the short convolution. ``gate_rank`` is the rank of the gate and decay
    projections in Kimi Delta Attention, or None for full projections.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    gate_rank: int = 0

    @property
    def gates(self) -> int:
        """Total number of output columns of the gate, decay and beta projections, over all
        heads.
        """
        gate = self.v_heads * self.v_dim + self.v_heads
        return (2 * self.gate_rank or gate) + self.v_heads

    @property
    def channels(self) -> int:
        """Number of channels of the convolution, over queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    def weights(self, hidden: int) -> int:
        """Return the number of parameters of all projections and of the convolution."""
        values = self.v_heads * self.v_dim
        wide = hidden * (self.channels + self.gates) + 2 * self.gate_rank * values
        return wide + self.conv * self.channels + values * hidden

    def state_bytes(self, tp: int) -> float:
        """Return the bytes of a sequence's state on each of ``tp`` GPUs.

        The state has 32 bits per number, and the stored inputs of the convolution have 16 bits.
        """
        memory = 4 * self.v_heads * self.k_dim * self.v_dim
        return (memory + 2 * (self.conv - 1) * self.channels) / tp

    @property
    def heads(self) -> int:
        """Number of heads, which are split across GPUs."""
        return self.v_heads


@dataclass(frozen=True)
class Mamba:
    """Selective state space: stores ``state`` numbers for each of ``inner`` channels instead of KV.

    Each number has ``number_bytes`` bytes. Mamba-2 has ``mamba2_heads`` heads in ``groups`` groups.
    ``rank`` is the rank of the time step projection in Mamba-1. ``conv`` is the width of the short
    convolution.
    """

    inner: int
    state: int
    conv: int
    mamba2_heads: int = 0
    groups: int = 0
    rank: int = 0
    number_bytes: int = 2

    @property
    def heads(self) -> int:
        """Number of heads (Mamba-2) or channels (Mamba-1), which are split across GPUs."""
        return self.mamba2_heads or self.inner

    def channels(self, tp: int = 1) -> int:
        """Return the number of channels of the convolution on each of ``tp`` GPUs.

        Groups are replicated if ``tp`` does not divide their number.
        """
        copies = self.groups and -self.groups % tp
        return self.inner + 2 * (self.groups + copies) * self.state

    def weights(self, hidden: int) -> int:
        """Return the number of parameters of all projections and of the convolution."""
        channels = self.channels()
        ends = hidden * (self.inner + channels) + self.inner * hidden + self.conv * channels
        if self.mamba2_heads:
            return ends + hidden * self.mamba2_heads
        return ends + self.inner * (2 * self.rank + 3 * self.state)

    def state_bytes(self, tp: int) -> float:
        """Return the bytes of a sequence's state on each of ``tp`` GPUs.

        The stored inputs of the convolution have 16 bits per number.
        """
        seen = 2 * (self.conv - 1) * self.channels(tp)
        return (self.number_bytes * self.inner * self.state + seen) / tp


#: Layers that store a state of fixed size per sequence instead of KV.
Recurrent = GatedDeltaNet | Mamba
Attention = Gqa | Mla | GatedDeltaNet | Mamba


@dataclass(frozen=True)
class DenseMlp:
    """MLP with ``intermediate`` channels, or no MLP if this is 0.

    A gated MLP has the projections gate, up and down. An ungated MLP has only up and down.
    """

    intermediate: int
    gated: bool = True

    def weights(self, hidden: int) -> int:
        """Return the number of parameters."""
        return (3 if self.gated else 2) * hidden * self.intermediate


@dataclass(frozen=True)
class MoeMlp:
    """Mixture of experts: each token uses ``per_token`` of ``experts`` experts.

    ``shared_intermediate`` is the width of an additional expert that all tokens use, or 0.
    """

    experts: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    gated: bool = True

    def expert_weights(self, hidden: int) -> int:
        """Return the number of parameters of all experts, without the shared expert."""
        return self.experts * DenseMlp(self.intermediate, self.gated).weights(hidden)

    def shared_weights(self, hidden: int) -> int:
        """Return the number of parameters of the shared expert."""
        return DenseMlp(self.shared_intermediate, self.gated).weights(hidden)

    def weights(self, hidden: int) -> int:
        """Return the number of parameters of the experts, the shared expert and the router."""
        router = hidden * self.experts
        return self.expert_weights(hidden) + self.shared_weights(hidden) + router


Mlp = DenseMlp | MoeMlp


@dataclass(frozen=True)
class LayerSpec:
    """A group of ``count`` equal layers, which may be at any positions in the model."""

    count: int
    attention: Attention
    mlp: Mlp


@dataclass(frozen=True)
class PublishedFormats:
    """Number formats of the published weights. None means the same format as ``weights``."""

    weights: FormatName = "bf16"
    attention: FormatName | None = None
    experts: FormatName | None = None
    kv: KvFormatName = "bf16"


@dataclass(frozen=True)
class RopeScaling:
    """The ``rope_scaling`` of a ``config.json``: type, factor and original context length.

    ``original`` is the number of positions before scaling, or None.
    """

    kind: str
    factor: float = 1.0
    original: int | None = None


@dataclass(frozen=True)
class Architecture:
    """A decoder of width ``hidden``, with ``layers`` grouped by kind.

    ``tied`` is true if the output head and the embedding share their weights. ``max_model_len`` is
    ``max_position_embeddings`` before scaling by ``rope``.
    """

    name: str
    hidden: int
    vocab: int
    tied: bool
    max_model_len: int
    layers: tuple[LayerSpec, ...]
    published: PublishedFormats = field(default=PublishedFormats())
    source: str = ""
    rope: RopeScaling | None = None
    model_type: str = ""

    @property
    def depth(self) -> int:
        """Total number of layers."""
        return sum(layers.count for layers in self.layers)

    @property
    def embeddings(self) -> int:
        """Number of parameters of the embedding and the output head. Shared weights count once."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """Total number of parameters. Biases and norms inside attention (below 0.1 %) are not
        counted.
        """
        norms = (2 * self.depth + 1) * self.hidden
        return (
            norms
            + self.embeddings
            + sum(
                part.count * (part.attention.weights(self.hidden) + part.mlp.weights(self.hidden))
                for part in self.layers
            )
        )

    @property
    def experts(self) -> int:
        """Number of experts per layer; 0 for a dense model."""
        return max((p.mlp.experts for p in self.layers if isinstance(p.mlp, MoeMlp)), default=0)
