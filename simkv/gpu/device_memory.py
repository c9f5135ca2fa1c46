"""Models and KV pools that fit into the free memory of a device."""

from __future__ import annotations

import gc
from dataclasses import replace

import torch

from simkv.core.errors import InputError
from simkv.costs.hardware.model_shape import MODEL_SHAPES, ModelShape
from simkv.gpu.batch_runner import Runner, RunnerConfig
from simkv.gpu.campaign_plan import Limits
from simkv.gpu.execution_record import GpuSetup

#: Fraction of the free memory that weights, KV pool and activations may use.
USABLE_SHARE = 0.9
#: Models to choose from on a GPU, and the size of the KV pool in tokens that must fit in addition
#: to the weights.
DEFAULT_MODELS, DEFAULT_POOL = ("llama-3-8b", "qwen2.5-0.5b"), 100_000
#: Minimum size of the KV pool for a campaign, in tokens.
SMALLEST_POOL = 8192
#: Free memory assumed on a CPU, in bytes.
CPU_MEMORY = 8 << 30


def release_memory(device: str) -> None:
    """Free the memory of runners that are no longer referenced."""
    gc.collect()
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()


def free_memory(device: str) -> int:
    """Return the free bytes of a device."""
    if torch.device(device).type != "cuda":
        return CPU_MEMORY
    return int(torch.cuda.mem_get_info(torch.device(device))[0])


def default_model(device: str) -> str:
    """Return the largest default model that fits on a GPU together with a KV pool.

    On a CPU, return ``small``.
    """
    if torch.device(device).type != "cuda":
        return "small"
    for name in DEFAULT_MODELS:
        if fitting_tokens(MODEL_SHAPES[name], 2, free_memory(device)) >= DEFAULT_POOL:
            return name
    return DEFAULT_MODELS[-1]


def weight_bytes(shape: ModelShape, itemsize: int) -> int:
    """Return the size of all weights in bytes."""
    return (shape.step_weights + (0 if shape.tied else shape.vocab * shape.hidden)) * itemsize


def fitting_tokens(shape: ModelShape, itemsize: int, free: int) -> int:
    """Return the number of KV tokens that fit beside weights and activations.

    The number is rounded down to a multiple of 1,000.
    """
    step = 8192 * 3 * 2 * shape.intermediate * itemsize + 512 * shape.vocab * (itemsize + 4)
    left = USABLE_SHARE * free - weight_bytes(shape, itemsize) - (step if itemsize == 2 else 0)
    return max(int(left / shape.kv_bytes_per_token(itemsize)) // 1000 * 1000, 0)


def fit_limits(setup: GpuSetup, limits: Limits, kv_tokens: int | None) -> Limits:
    """Return the limits with a KV pool that fits on the device.

    ``kv_tokens`` is the requested size of the pool. Raises InputError if the pool or the weights do
    not fit.
    """
    release_memory(setup.device)
    free = free_memory(setup.device)
    largest = fitting_tokens(setup.shape, setup.itemsize, free)
    needed = min(limits.kv_tokens, SMALLEST_POOL)
    if largest < needed:
        raise InputError(
            f"--model {setup.shape.name}: needs "
            f"{_gib(weight_bytes(setup.shape, setup.itemsize))} for weights and additional "
            f"memory for KV, but {setup.device} has {_gib(free)} free; try --model "
            f"{DEFAULT_MODELS[-1]}"
        )
    if kv_tokens and kv_tokens > largest:
        raise InputError(
            f"--kv-tokens {kv_tokens}: does not fit beside {setup.shape.name} on {setup.device} "
            f"with {_gib(free)} free; use at most {largest} tokens"
        )
    return replace(limits, kv_tokens=kv_tokens or min(limits.kv_tokens, largest))


def new_runner(setup: GpuSetup, config: RunnerConfig) -> Runner:
    """Free the memory of the last runner and return a new runner.

    Raises InputError if the new runner does not fit into the device memory.
    """
    release_memory(setup.device)
    check_fits(setup, config)
    return Runner(setup.shape, config, setup.device)


def check_fits(setup: GpuSetup, config: RunnerConfig) -> None:
    """Raise InputError if weights, KV pool and token store exceed the device's free memory."""
    shape, itemsize, free = setup.shape, setup.itemsize, free_memory(setup.device)
    token = shape.kv_bytes_per_token(itemsize)
    fixed = weight_bytes(shape, itemsize) + 4 * (config.seats + 1) * config.max_len
    cache = (config.num_blocks + 1) * config.block_size * token
    if fixed + cache > 0.95 * free:
        blocks = int((0.95 * free - fixed) / (config.block_size * token)) - 1
        raise InputError(
            f"{shape.name} on {setup.device}: {config.num_blocks} KV blocks ({_gib(cache)}), and "
            f"weights and token ids ({_gib(fixed)}), do not fit into the free memory "
            f"({_gib(free)}); use at most {max(blocks, 0)} KV blocks"
        )


def _gib(count: float) -> str:
    return f"{count / (1 << 30):.1f} GiB"
