"""Number of KV blocks that an engine allocates, computed from the memory of the GPU.

At start-up, vLLM runs the largest batch once. It then uses the memory that remains, within the
fraction ``gpu_memory_utilization``, for KV. The peak memory of that run is estimated here from
tensor shapes. The following constants were derived from the start-up logs in
tests/costs/hardware/recorded_blocks.csv:

- MLP: for each of ``max_num_batched_tokens`` tokens, three vectors of the MLP's width (gate, up and
  their product) and five vectors of the hidden size, with 2 bytes per number.
- Sampler: for each of ``max_num_seqs`` sequences, 37 bytes per vocabulary entry in releases that
  sort the logits (logits in 16 and 32 bits, sorted logits with their indices, probabilities,
  running sum), and 14 bytes in other releases. In addition, three vectors of the hidden size per
  token. Releases 0.10 to 0.11.0 use FlashInfer, which does not sort, if it is installed; vLLM's
  container images include it (``v1/sample/ops/topk_topp_sampler.py``). Releases 0.11.1 to 0.16 use
  FlashInfer only on request. From 0.17 on, a kernel of vLLM replaces the sort.
- The peak is the larger of these two. A mixture of experts also needs persistent buffers: for each
  token and selected expert, three vectors of the expert's width and one of the hidden size (not
  with mxfp4).
- Weights: vLLM pads the width and the hidden size of mxfp4 experts (gpt-oss) to multiples that the
  kernel needs (``create_weights`` in ``quantization/mxfp4.py``): Marlin 128 and 256, FlashInfer on
  compute capability 10 256 and 256. With triton_kernels the hidden size takes a multiple of 256,
  as a log shows (vllm-project/vllm#33155). On Hopper, releases before 0.12 run Marlin, as logs show
  (#23278); later ones run triton_kernels.
- Memory outside torch: 0.13 GiB, or 0.25 GiB from 0.18 on, and 1.9 GiB more if GPUs communicate.
- CUDA graphs: 1 GB from 0.20 on.

SGLang uses the fraction ``mem_fraction_static`` of the memory that is free before weights are
loaded. Its default reserves memory for the largest chunk, the CUDA graphs and collectives
(``server_args.py``, from 0.5.20 on ``arg_groups/memory_hook.py``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from simkv.core.engine_spec import KvSizing
from simkv.core.engine_version import find_version, is_since, parse_version
from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.model_architecture import (
    Attention,
    DenseMlp,
    Mamba,
    Mla,
    MoeMlp,
    Recurrent,
)
from simkv.costs.hardware.model_memory import (
    ExpertPadding,
    kv_bytes,
    state_bytes,
    weight_bytes,
)
from simkv.costs.hardware.replica_hardware import Hardware, add_layers
from simkv.schedulers.engine_registry import ENGINES

GIB = 1 << 30
MIB = 1 << 20
#: A version that is later than any release.
NEWER = "999"
#: Peak bytes of vLLM's sampler per sequence and vocabulary entry, by first release.
SAMPLER_BYTES = {"0": 37, "0.10": 14, "0.11.1": 37, "0.17": 14}
#: GiB that CUDA and its libraries use outside torch, by first release.
NON_TORCH_GIB = {"0": 0.13, "0.18": 0.25}
#: Additional GiB if GPUs communicate.
COLLECTIVES_GIB = 1.9
#: Padding of mxfp4 experts by kernel, and first release that runs triton_kernels on Hopper.
MARLIN_PADDING, TRITON_PADDING = ExpertPadding(128, 256), ExpertPadding(64, 256)
BLACKWELL_PADDING, TRITON_EXPERTS_SINCE = ExpertPadding(256, 256), "0.12"
#: Bytes of CUDA graphs, and the first release that reserves memory for them.
CUDA_GRAPH_BYTES, CUDA_GRAPH_BYTES_SINCE = 1_000_000_000, "0.20"
#: Tokens in the smallest block of attention kernels; the size of blocks with a state is a multiple
#: of it. For latent attention, the values depend on the release (``vllm/platforms/interface.py``).
KERNEL_BLOCK = 16
LATENT_BLOCKS = {"0": 64, "0.27": 128}
#: Bytes of GPU memory that an SGLang process uses before it loads weights.
SGLANG_CONTEXT = 0.5 * GIB
#: Default size of SGLang's largest CUDA graph, in decodes. Each row has the upper limit of GPU
#: memory in MiB, the size on fewer than four GPUs, and the size on four or more
#: (``server_args.py``).
SGLANG_GRAPHS = (
    (20 * 1024, 8, 8),
    (35 * 1024, 24, 80),
    (60 * 1024, 32, 160),
    (160 * 1024, 256, 512),
    (float("inf"), 512, 512),
)
#: First release with larger graphs on GPUs of 20 to 35 GiB, and first release that reserves memory
#: for prefill graphs (releases checked: 0.5.15, 0.5.20, 0.5.22, 0.5.23).
SGLANG_RAISED, RAISED = "0.5.20", (35 * 1024, 48, 160)
SGLANG_PREFILL_GRAPHS = "0.5.15"
#: MiB outside torch: per prefill graph, and in total for models with latent attention.
PREFILL_GRAPH, LATENT_PREFILL_GRAPHS = 8, 1536


@dataclass(frozen=True)
class KvCapacity:
    """Memory use of one GPU in bytes, and the number of KV blocks that fit into the rest.

    ``usable`` is the memory that the engine may use. ``activations`` is the peak memory of the
    largest step. ``outside`` is the memory allocated outside torch. ``block_bytes`` is the size of
    a KV block of ``block_size`` tokens.
    """

    hardware: Hardware
    usable: int
    weights: int
    activations: int
    outside: int
    block_bytes: int
    block_size: int

    @property
    def rest(self) -> int:
        """Bytes that remain for KV; 0 or less if the weights do not fit."""
        return self.usable - self.weights - self.activations - self.outside

    @property
    def num_gpu_blocks(self) -> int:
        """Number of KV blocks that fit; 0 if the weights do not fit."""
        return max(self.rest // self.block_bytes, 0)

    @property
    def refusal(self) -> str:
        """Error message for a model that leaves no memory for KV."""
        gpus = f"{self.hardware.gpus} x {self.hardware.gpu.name}"
        return (
            f"{self.hardware.architecture.name} does not fit on {gpus}: per GPU, "
            f"{self.usable / 1e9:.1f} GB are usable, weights take {self.weights / 1e9:.1f} GB and "
            f"the largest step {(self.activations + self.outside) / 1e9:.1f} GB"
        )


def compute_kv_capacity(hardware: Hardware, setting: ExecutionSettings) -> KvCapacity:
    """Return the number and size of the KV blocks that the engine would allocate on each GPU.

    An unknown engine is treated as the newest vLLM. Layers that propose draft tokens count as
    layers of the model.
    """
    sizing = _sizing(setting)
    hardware = add_layers(hardware, setting.draft_layers)
    weights, size = (
        weight_bytes(hardware, _padding(hardware, setting)),
        block_size(hardware, setting),
    )
    block = block_bytes(hardware, setting)
    if sizing == "static":
        free = hardware.gpu.memory_bytes - SGLANG_CONTEXT
        free -= COLLECTIVES_GIB * GIB if hardware.gpus > 1 else 0
        share = setting.memory_share or _static_share(hardware, setting)
        return KvCapacity(hardware, int(free * share), weights, 0, 0, block, size)
    release = _release(setting)
    outside = _since(NON_TORCH_GIB, release) * GIB
    outside += COLLECTIVES_GIB * GIB if hardware.gpus > 1 else 0
    outside += (
        CUDA_GRAPH_BYTES if is_since(release, CUDA_GRAPH_BYTES_SINCE) and setting.graph_sizes else 0
    )
    activations = _activations(hardware, setting, _since(SAMPLER_BYTES, release))
    share = setting.memory_share or 0.9
    usable = hardware.gpu.memory_bytes * share
    if sizing == "rest":
        usable += (weights + activations + outside) * (1 - share)
    return KvCapacity(
        hardware=hardware,
        usable=int(usable),
        weights=weights,
        activations=activations,
        outside=int(outside),
        block_bytes=block,
        block_size=size,
    )


def _padding(hardware: Hardware, setting: ExecutionSettings) -> ExpertPadding:
    """Return the padding of experts on the hardware."""
    if hardware.experts != "mxfp4" or _sizing(setting) != "measured by release":
        return ExpertPadding()
    capability = hardware.gpu.capability or (0, 0)
    if (10, 0) <= capability < (11, 0):
        return BLACKWELL_PADDING
    triton = (9, 0) <= capability < (10, 0) and is_since(_release(setting), TRITON_EXPERTS_SINCE)
    return TRITON_PADDING if triton and "marlin" not in hardware.kernels else MARLIN_PADDING


def _sizing(setting: ExecutionSettings) -> KvSizing:
    return ENGINES[setting.engine].sizing if setting.engine in ENGINES else "measured"


def _release(setting: ExecutionSettings) -> str:
    """Return the release whose memory constants apply, or ``NEWER`` for the newest constants."""
    by_release = _sizing(setting) == "measured by release"
    return setting.release if by_release and find_version(setting.release) else NEWER


def _since(table: Mapping[str, float], release: str) -> float:
    """Return the value in ``table`` of the newest release up to ``release``."""
    return table[max((start for start in table if is_since(release, start)), key=parse_version)]


def _static_share(hardware: Hardware, setting: ExecutionSettings) -> float:
    """Return the default of ``mem_fraction_static`` as SGLang 0.5 computes it.

    Source: ``_handle_gpu_memory_settings``. It uses the chunk size of the whole server, and the
    total number of GPUs as the tensor-parallel size.
    """
    memory = hardware.gpu.memory_bytes / MIB
    release = setting.release if find_version(setting.release) else NEWER
    few, many = next((few, many) for below, few, many in SGLANG_GRAPHS if memory < below)
    if 20 * 1024 <= memory < RAISED[0] and is_since(release, SGLANG_RAISED):
        few, many = RAISED[1:]
    largest = few if hardware.gpus < 4 else many
    graphs = largest if setting.graph_sizes else 0
    reserved = 512 + 1.5 * max(setting.max_num_batched_tokens * hardware.dp, 2048)
    reserved += 2 * graphs + hardware.gpus / 8 * 1024
    if hardware.dp > 1:
        reserved += graphs * hardware.dp * (4.5 if graphs > 300 else 3)
    if setting.graph_sizes and is_since(release, SGLANG_PREFILL_GRAPHS):
        latent = any(isinstance(part.attention, Mla) for part in hardware.architecture.layers)
        sizes = _prefill_graphs(setting.max_num_batched_tokens * hardware.dp)
        reserved += LATENT_PREFILL_GRAPHS if latent else PREFILL_GRAPH * len(sizes)
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((memory - reserved) / memory, 3)


def _prefill_graphs(most: int) -> list[int]:
    """Return the sizes of SGLang's prefill graphs in tokens, up to ``most`` tokens.

    Source: ``generate_prefill_cuda_graph_batch_sizes``.
    """
    sizes = (
        *range(4, 33, 4),
        *range(48, 257, 16),
        *range(288, 513, 32),
        *range(576, 1025, 64),
        *range(1280, 4097, 256),
        *range(4608, most + 1, 512),
    )
    return [size for size in sizes if size <= most]


def block_bytes(hardware: Hardware, setting: ExecutionSettings) -> int:
    """Return the size of a KV block in bytes, as in vLLM.

    A block covers all layers, or the layers of one group if there are several groups
    (``kv_groups``).
    """
    kept = [part for part in hardware.architecture.layers if kv_bytes(part.attention, hardware)]
    if len(kv_groups(hardware)) < 2 or not _keeps_states(hardware, setting):
        per_token = sum(part.count * kv_bytes(part.attention, hardware) for part in kept)
        return int(per_token * setting.block_size)
    layers = _group_size(_by_kind(hardware).values())
    size = block_size(hardware, setting)
    return int(layers * max(kv_bytes(part.attention, hardware) for part in kept) * size)


def block_size(hardware: Hardware, setting: ExecutionSettings) -> int:
    """Return the number of tokens per block.

    The number is larger than configured if the recurrent state of a layer needs a larger block, as
    in vLLM 0.33 (``vllm/platforms/interface.py``).
    """
    layers = hardware.architecture.layers
    state = max(state_bytes(part.attention, hardware) for part in layers)
    per_token = max(kv_bytes(part.attention, hardware) for part in layers)
    if not state or not per_token or not _keeps_states(hardware, setting):
        return setting.block_size
    latent = any(isinstance(part.attention, Mla) for part in layers)
    kernel = _since(LATENT_BLOCKS, _release(setting)) if latent else KERNEL_BLOCK
    least = max(setting.block_size, kernel)
    return int(least * -(-state // (least * per_token)))


def kv_groups(hardware: Hardware, block_size: int = 16) -> list[int | str]:
    """Return the kind of each layer group, in the format of vLLM's config.

    Each group has its own block table. A kind is a sliding window in tokens (0 for full attention),
    ``chunked-8192`` for chunked attention, or ``mamba`` for a recurrent state. A suffix such as
    ``/32`` is the number of tokens per block. All groups have equal numbers of layers and equal
    block sizes in bytes (``vllm/v1/core/kv_cache_planning.py`` of 0.33).
    """
    counts = _by_kind(hardware)
    if len({name for name, _ in counts}) < 2:
        return [0]
    size, largest = _group_size(counts.values()), max(per_token for _, per_token in counts)
    groups: list[int | str] = []
    for kind in sorted(counts, key=lambda kind: (isinstance(kind[0], str), *kind)):
        name, per_token = kind
        times = int(largest / per_token) if per_token and largest % per_token == 0 else 1
        name = f"{name}/{times * block_size}" if times > 1 else name
        groups += [name] * -(-counts[kind] // size)
    return groups


def can_checkpoint_states(hardware: Hardware) -> bool:
    """Return whether all kernels with a recurrent state can save it in the middle of a prefill
    chunk.
    """
    kinds = [part.attention for part in hardware.architecture.layers]
    states = [kind for kind in kinds if isinstance(kind, Recurrent)]
    return bool(states) and all(isinstance(s, Mamba) and s.mamba2_heads > 0 for s in states)


def _keeps_states(hardware: Hardware, setting: ExecutionSettings) -> bool:
    """Return whether the engine stores recurrent states in KV blocks; True without recurrent
    states.
    """
    states = any(isinstance(part.attention, Recurrent) for part in hardware.architecture.layers)
    engine = ENGINES.get(setting.engine)
    since = engine.states_in_blocks_since if engine else None
    return not states or (since is not None and is_since(_release(setting), since))


def _by_kind(hardware: Hardware) -> dict[tuple[int | str, float], int]:
    """Return the number of layers by kind of layer and KV bytes per token.

    The kind has the format of ``kv_groups``, without a block size. Layers with a recurrent state
    have 0 bytes per token.
    """
    counts: dict[tuple[int | str, float], int] = {}
    for part in hardware.architecture.layers:
        per_token = kv_bytes(part.attention, hardware)
        if per_token or isinstance(part.attention, Recurrent):
            kind = _seen(part.attention), per_token
            counts[kind] = counts.get(kind, 0) + part.count
    return counts


def _seen(attention: Attention) -> int | str:
    if isinstance(attention, Recurrent):
        return "mamba"
    if isinstance(attention, Mla):
        return 0
    return f"chunked-{attention.window}" if attention.chunked else attention.window


def _group_size(counts: Collection[int]) -> int:
    """Return the number of layers per group: the smallest number of layers of a kind.

    If the largest number is less than 1.5 times the smallest, return the largest.
    """
    least, most = min(counts), max(counts)
    return most if most < 1.5 * least else least


def _activations(hardware: Hardware, setting: ExecutionSettings, per_word: float) -> int:
    """Return the peak memory of vLLM's largest step in bytes.

    ``per_word`` is the memory of the sampler in bytes per logit.
    """
    model, tokens = hardware.architecture, setting.max_num_batched_tokens
    dense = [part.mlp.intermediate for part in model.layers if isinstance(part.mlp, DenseMlp)]
    width = max(dense, default=0) // hardware.tp
    mlp = tokens * 2 * (3 * width + 5 * model.hidden) if dense else 0
    words = min(setting.max_num_seqs, tokens) * model.vocab
    sampler = words * per_word + tokens * 2 * 3 * model.hidden
    mixtures = [part.mlp for part in model.layers if isinstance(part.mlp, MoeMlp)]
    buffers = 0
    if mixtures and hardware.experts != "mxfp4":
        one = mixtures[0]
        width = one.intermediate if hardware.ep > 1 else one.intermediate // hardware.gpus
        buffers = tokens * one.per_token * 2 * (3 * width + model.hidden)
    return int(max(mlp, sampler)) + buffers
