"""What a model's layers are: the shapes that decide its weights, its KV and its kernels.

Read from the ``config.json`` of the Hugging Face hub by ``architecture_of`` in ``hf_config.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from simkv.costs.hardware.number_formats import FormatName, KvFormatName


@dataclass(frozen=True)
class Gqa:
    """``heads`` query heads share ``kv_heads`` of ``head_dim``; a token sees ``window`` (0: all).

    ``chunked``: of these it sees what follows the last multiple of ``window``, as in Llama 4.
    ``output_gate``: queries come with as many gates for the output, as in Qwen3.5.
    """

    heads: int
    kv_heads: int
    head_dim: int
    window: int = 0
    output_gate: bool = False
    chunked: bool = False

    def weights(self, hidden: int) -> int:
        """Parameters of the projections; biases and norms are left out (below 0.1 %)."""
        queries = self.heads * (2 if self.output_gate else 1)
        return hidden * self.head_dim * (queries + 2 * self.kv_heads + self.heads)


@dataclass(frozen=True)
class Indexer:
    """Sparse attention as in DeepSeek-V3.2: every query reads the ``topk`` best of all tokens.

    They are found by ``heads`` of ``head_dim`` over one key of ``head_dim`` a token.
    """

    heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class Mla:
    """Multi-head latent attention: a token's KV is ``kv_lora_rank + qk_rope_head_dim`` numbers.

    Without ``q_lora_rank`` (0) queries are projected straight.
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
        """Numbers of KV of one token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def weights(self, hidden: int) -> int:
        """Parameters of the projections, the indexer's included."""
        return self.shared_weights(hidden) + self.split_weights(hidden)

    def shared_weights(self, hidden: int) -> int:
        """Those that each GPU of a tensor-parallel group holds whole: to latents, for the index."""
        down = hidden * (self.q_lora_rank + self.latent_width)
        if not self.sparse:
            return down
        queries = (self.q_lora_rank or hidden) * self.sparse.heads * self.sparse.head_dim
        return down + queries + hidden * (self.sparse.head_dim + self.sparse.heads)

    def split_weights(self, hidden: int) -> int:
        """Those that such GPUs share by heads."""
        queries = (self.q_lora_rank or hidden) * (self.qk_nope_head_dim + self.qk_rope_head_dim)
        keys_values = self.kv_lora_rank * (self.qk_nope_head_dim + self.v_head_dim)
        return self.heads * (queries + keys_values + self.v_head_dim * hidden)


@dataclass(frozen=True)
class GatedDeltaNet:
    """Gated delta net: a state of fixed size for each sequence in place of KV.

    ``conv`` is the width of the short convolution over keys, queries and values. With a
    ``gate_rank`` the output's gate and a decay for each channel are projected through so many
    numbers (Kimi Delta Attention); else the gate is projected straight and heads have a decay.
    """

    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int
    conv: int
    gate_rank: int = 0

    @property
    def gates(self) -> int:
        """Columns of the projections from the hidden size to gate, decay and beta a head."""
        gate = self.v_heads * self.v_dim + self.v_heads
        return (2 * self.gate_rank or gate) + self.v_heads

    @property
    def channels(self) -> int:
        """Channels that the convolution sees: queries, keys and values."""
        return 2 * self.k_heads * self.k_dim + self.v_heads * self.v_dim

    def weights(self, hidden: int) -> int:
        """Parameters: q, k, v, the output's gate, beta and decay, convolution, output."""
        values = self.v_heads * self.v_dim
        wide = hidden * (self.channels + self.gates) + 2 * self.gate_rank * values
        return wide + self.conv * self.channels + values * hidden

    def state_bytes(self, tp: int) -> float:
        """Bytes of a sequence's state on each of ``tp`` GPUs: in 32 bits, what the convolution saw
        last in 16."""
        memory = 4 * self.v_heads * self.k_dim * self.v_dim
        return (memory + 2 * (self.conv - 1) * self.channels) / tp

    @property
    def heads(self) -> int:
        """What GPUs share."""
        return self.v_heads


@dataclass(frozen=True)
class Mamba:
    """A selective state space: of each of ``inner`` channels ``state`` numbers of ``number_bytes``.

    Mamba-2 has them in ``heads``, of which each of ``groups`` shares its input and output
    matrices; Mamba-1 has none, and projects its time steps through ``rank`` numbers. ``conv`` is
    the width of the short convolution.
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
        """What GPUs share."""
        return self.mamba2_heads or self.inner

    def channels(self, tp: int = 1) -> int:
        """Channels that the convolution sees; groups that ``tp`` GPUs cannot share are copied."""
        copies = self.groups and -self.groups % tp
        return self.inner + 2 * (self.groups + copies) * self.state

    def weights(self, hidden: int) -> int:
        """Parameters: inputs with their gate, time steps, the convolution, output."""
        channels = self.channels()
        ends = hidden * (self.inner + channels) + self.inner * hidden + self.conv * channels
        if self.mamba2_heads:
            return ends + hidden * self.mamba2_heads
        return ends + self.inner * (2 * self.rank + 3 * self.state)

    def state_bytes(self, tp: int) -> float:
        """Bytes of a sequence's state on each of ``tp`` GPUs; what the convolution saw last has 16
        bits a number."""
        seen = 2 * (self.conv - 1) * self.channels(tp)
        return (self.number_bytes * self.inner * self.state + seen) / tp


#: Attention in whose place there is a state of fixed size for each sequence.
Recurrent = GatedDeltaNet | Mamba
Attention = Gqa | Mla | GatedDeltaNet | Mamba


@dataclass(frozen=True)
class DenseMlp:
    """An MLP of so many channels (0: none): gate, up and down, or without the gate."""

    intermediate: int
    gated: bool = True

    def weights(self, hidden: int) -> int:
        """Parameters."""
        return (3 if self.gated else 2) * hidden * self.intermediate


@dataclass(frozen=True)
class MoeMlp:
    """``experts`` MLPs, of which a token takes ``per_token``, and a shared one for all."""

    experts: int
    per_token: int
    intermediate: int
    shared_intermediate: int = 0
    gated: bool = True

    def expert_weights(self, hidden: int) -> int:
        """Parameters of all experts, without the shared one."""
        return self.experts * DenseMlp(self.intermediate, self.gated).weights(hidden)

    def shared_weights(self, hidden: int) -> int:
        """Parameters of the shared expert."""
        return DenseMlp(self.shared_intermediate, self.gated).weights(hidden)

    def weights(self, hidden: int) -> int:
        """Parameters of the experts, the shared one and the router."""
        router = hidden * self.experts
        return self.expert_weights(hidden) + self.shared_weights(hidden) + router


Mlp = DenseMlp | MoeMlp


@dataclass(frozen=True)
class LayerSpec:
    """``count`` layers of one kind, wherever in the model they stand."""

    count: int
    attention: Attention
    mlp: Mlp


@dataclass(frozen=True)
class PublishedFormats:
    """The number formats of the published weights; None is as ``weights``."""

    weights: FormatName = "bf16"
    attention: FormatName | None = None
    experts: FormatName | None = None
    kv: KvFormatName = "bf16"


@dataclass(frozen=True)
class RopeScaling:
    """``rope_scaling`` of a ``config.json``: its ``rope_type``, ``factor`` and the positions that
    the model was first trained for (None: not given)."""

    kind: str
    factor: float = 1.0
    original: int | None = None


@dataclass(frozen=True)
class Architecture:
    """A decoder: ``layers`` by kind, of width ``hidden``; ``tied``: the head is the embedding.

    ``max_model_len`` is ``max_position_embeddings``, which engines scale by ``rope`` if given.
    ``model_type`` is that of the whole ``config.json``.
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
        """Layers in all."""
        return sum(layers.count for layers in self.layers)

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding and, where it is not tied, of the head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All weights; biases and the norms inside attention are left out (below 0.1 %)."""
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
        """Experts of a layer that has any; 0 of a dense model."""
        return max((p.mlp.experts for p in self.layers if isinstance(p.mlp, MoeMlp)), default=0)
