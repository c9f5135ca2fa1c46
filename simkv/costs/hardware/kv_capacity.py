"""How many KV blocks fit on a GPU, as its engine finds it: what its share of memory leaves over.

vLLM runs the largest batch once and takes what then remains of ``gpu_memory_utilization``. Its peak
is estimated from the shapes that it holds, in bytes; the constants are read off the start-up logs
of tests/costs/hardware/recorded_blocks.csv:

- the MLP: per token of ``max_num_batched_tokens`` three vectors of the MLP's width (gate, up and
  their product) and five of the hidden size, 2 bytes a number;
- or the sampler: per sequence of ``max_num_seqs`` and word of the vocabulary 37 bytes up to 0.16
  (logits in 16 and 32 bits, sorted with their indices, probabilities, running sum), 14 from 0.17
  on, which does not sort; and three vectors of the hidden size per token;
- whichever is larger; and of a mixture the buffers of its experts, which stay: per token and
  expert that it takes three of the expert's width and one of the hidden size (not with mxfp4);
- outside of torch 0.13 GiB, 0.25 from 0.18 on, and 2 GiB where GPUs talk to each other;
- from 0.20 on CUDA graphs, too (1 GB).

SGLang takes ``mem_fraction_static`` of what is free before the weights are loaded. Left out, it
reserves memory for the largest chunk, the graphs and collectives (``server_args.py``, from 0.5.20
on ``arg_groups/memory_hook.py``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from simkv.core.engine_spec import KvSizing
from simkv.costs.hardware.architecture import (
    Attention,
    DenseMlp,
    Mamba,
    Mla,
    MoeMlp,
    Recurrent,
)
from simkv.costs.hardware.execution_settings_lookup import ExecutionSettings
from simkv.costs.hardware.model_memory import kv_bytes, state_bytes, weight_bytes
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.schedulers.engine_registry import ENGINES

GIB = 1 << 30
MIB = 1 << 20
#: Bytes per sequence and word of the vocabulary at the peak of vLLM's sampler, from a release on.
SAMPLER_BYTES = {(0, 0): 37, (0, 17): 14}
#: GiB that CUDA and its libraries take beside the tensors of torch, from a release on.
NON_TORCH_GIB = {(0, 0): 0.13, (0, 18): 0.25}
#: GiB more where GPUs talk to each other.
COLLECTIVES_GIB = 1.9
#: Bytes that the CUDA graphs take, and the release from which on they are left free.
CUDA_GRAPH_BYTES, CUDA_GRAPH_BYTES_SINCE = 1_000_000_000, (0, 20)
#: Tokens in the smallest block that attention's kernels take, of which blocks that hold a state are
#: multiples; and of those for latent attention from a release on (``vllm/platforms/interface.py``).
KERNEL_BLOCK = 16
LATENT_BLOCKS = {(0, 0): 64, (0, 27): 128}
#: Bytes of a GPU that a process of SGLang has in use before it loads weights.
SGLANG_CONTEXT = 0.5 * GIB
#: Decodes in SGLang's largest CUDA graph by default: MiB of a GPU below which they hold, on fewer
#: than four GPUs and on more (``server_args.py``).
SGLANG_GRAPHS = (
    (20 * 1024, 8, 8),
    (35 * 1024, 24, 80),
    (60 * 1024, 32, 160),
    (160 * 1024, 256, 512),
    (float("inf"), 512, 512),
)
#: The release from which on GPUs of 20 to 35 GiB have larger graphs, and that from which on graphs
#: of prefills are reserved for (of those that were read: 0.5.15, 0.5.20, 0.5.22, 0.5.23).
SGLANG_RAISED, RAISED = (0, 5, 20), (35 * 1024, 48, 160)
SGLANG_PREFILL_GRAPHS = (0, 5, 15)
#: MiB that a graph of a prefill takes outside of torch, and all of them with latent attention.
PREFILL_GRAPH, LATENT_PREFILL_GRAPHS = 8, 1536


@dataclass(frozen=True)
class KvCapacity:
    """What a GPU's share of memory is spent on, in bytes, and the blocks that are left.

    ``block_bytes`` are those of one block of ``block_size`` tokens, over all layers that keep KV or
    a group of them.
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
        """Bytes for KV; 0 or less if not even the weights fit."""
        return self.usable - self.weights - self.activations - self.outside

    @property
    def num_gpu_blocks(self) -> int:
        """Whole blocks; 0 if not even the weights fit."""
        return max(self.rest // self.block_bytes, 0)

    @property
    def refusal(self) -> str:
        """Why there is no room."""
        gpus = f"{self.hardware.gpus} x {self.hardware.gpu.name}"
        return (
            f"{self.hardware.architecture.name} does not fit on {gpus}: of "
            f"{self.usable / 1e9:.1f} GB that each may use weights take {self.weights / 1e9:.1f} "
            f"and the largest step {(self.activations + self.outside) / 1e9:.1f}"
        )


def compute_kv_capacity(hardware: Hardware, setting: ExecutionSettings) -> KvCapacity:
    """The blocks of ``setting.block_size`` tokens that the engine would find on each GPU.

    How it finds them is ``EngineSpec.sizing``; an unknown engine measures as the newest vLLM does.
    """
    sizing = _sizing(setting)
    weights, size = weight_bytes(hardware), block_size(hardware, setting)
    block = block_bytes(hardware, setting)
    if sizing == "static":
        free = hardware.gpu.memory_bytes - SGLANG_CONTEXT
        free -= COLLECTIVES_GIB * GIB if hardware.gpus > 1 else 0
        share = setting.memory_share or _static_share(hardware, setting)
        return KvCapacity(hardware, int(free * share), weights, 0, 0, block, size)
    release = _release(setting)
    outside = _since(NON_TORCH_GIB, release) * GIB
    outside += COLLECTIVES_GIB * GIB if hardware.gpus > 1 else 0
    outside += CUDA_GRAPH_BYTES if release >= CUDA_GRAPH_BYTES_SINCE and setting.graph_sizes else 0
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


def _sizing(setting: ExecutionSettings) -> KvSizing:
    return ENGINES[setting.engine].sizing if setting.engine in ENGINES else "measured"


def _release(setting: ExecutionSettings) -> tuple[int, ...]:
    by_release = _sizing(setting) == "measured by release"
    found = re.findall(r"\d+", setting.release)[:2] if by_release else []
    return tuple(int(part) for part in found) or (999, 0)


def _since(table: Mapping[tuple[int, int], float], release: tuple[int, ...]) -> float:
    return table[max(start for start in table if start <= release)]


def _static_share(hardware: Hardware, setting: ExecutionSettings) -> float:
    """``mem_fraction_static`` as SGLang 0.5 derives it (``_handle_gpu_memory_settings``).

    Its chunk is the server's, of which each rank of dp attention takes a share; its tensor
    parallelism counts all GPUs.
    """
    memory = hardware.gpu.memory_bytes / MIB
    release = tuple(int(part) for part in re.findall(r"\d+", setting.release)[:3])
    few, many = next((few, many) for below, few, many in SGLANG_GRAPHS if memory < below)
    if 20 * 1024 <= memory < RAISED[0] and release >= SGLANG_RAISED:
        few, many = RAISED[1:]
    largest = few if hardware.gpus < 4 else many
    graphs = largest if setting.graph_sizes else 0
    reserved = 512 + 1.5 * max(setting.max_num_batched_tokens * hardware.dp, 2048)
    reserved += 2 * graphs + hardware.gpus / 8 * 1024
    if hardware.dp > 1:
        reserved += graphs * hardware.dp * (4.5 if graphs > 300 else 3)
    if setting.graph_sizes and release >= SGLANG_PREFILL_GRAPHS:
        latent = any(isinstance(part.attention, Mla) for part in hardware.architecture.layers)
        sizes = _prefill_graphs(setting.max_num_batched_tokens * hardware.dp)
        reserved += LATENT_PREFILL_GRAPHS if latent else PREFILL_GRAPH * len(sizes)
    if memory > 60 * 1024:
        reserved = max(reserved, 10 * 1024)
    return round((memory - reserved) / memory, 3)


def _prefill_graphs(most: int) -> list[int]:
    """Tokens of the graphs of prefills (``generate_prefill_cuda_graph_batch_sizes``)."""
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
    """Bytes of one block as vLLM counts them: of all layers, or of a group (``kv_groups``)."""
    kept = [part for part in hardware.architecture.layers if kv_bytes(part.attention, hardware)]
    if len(kv_groups(hardware)) < 2 or not _keeps_states(hardware, setting):
        per_token = sum(part.count * kv_bytes(part.attention, hardware) for part in kept)
        return int(per_token * setting.block_size)
    layers = _group_size(_by_kind(hardware).values())
    size = block_size(hardware, setting)
    return int(layers * max(kv_bytes(part.attention, hardware) for part in kept) * size)


def block_size(hardware: Hardware, setting: ExecutionSettings) -> int:
    """Tokens in a block: as set, or as many more as it takes to hold a state.

    vLLM logs "Setting attention block size to 528 tokens to ensure that attention page size is >=
    mamba page size" (``vllm/platforms/interface.py`` of 0.33).
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
    """The window in tokens (0: all) of each group of layers that takes blocks of its own.

    Layers with a window, layers without, those that attend within chunks (``chunked-8192``) and
    those with a state (``mamba``) take blocks from one pool, in groups of equally many layers; a
    block is of one group. Blocks of layers with fewer bytes a token are as many times larger as
    makes all pages alike (``0/32``); where none does, their pages are padded
    (``vllm/v1/core/kv_cache_planning.py`` of 0.33).
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
    """Whether all kernels of its states can write one from within a chunk: those of Mamba-2."""
    kinds = [part.attention for part in hardware.architecture.layers]
    states = [kind for kind in kinds if isinstance(kind, Recurrent)]
    return bool(states) and all(isinstance(s, Mamba) and s.mamba2_heads > 0 for s in states)


def _keeps_states(hardware: Hardware, setting: ExecutionSettings) -> bool:
    """Whether states, if there are any, are in blocks like KV."""
    states = any(isinstance(part.attention, Recurrent) for part in hardware.architecture.layers)
    engine = ENGINES.get(setting.engine)
    since = engine.states_in_blocks_since if engine else None
    return not states or (since is not None and _release(setting) >= since)


def _by_kind(hardware: Hardware) -> dict[tuple[int | str, float], int]:
    """Layers by what they see (``mamba`` for a state) and the bytes of a token, 0 for a state."""
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
    """Layers in a group: the fewest of a kind, or the most where these are not many more."""
    least, most = min(counts), max(counts)
    return most if most < 1.5 * least else least


def _activations(hardware: Hardware, setting: ExecutionSettings, per_word: float) -> int:
    """Bytes at the peak of vLLM's largest step."""
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
