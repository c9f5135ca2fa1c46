"""Tests of the models and pools that fit into the memory of a device, with simulated free
memory.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from simkv.core.errors import InputError
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu import device_memory
from simkv.gpu.batch_runner import RunnerConfig
from simkv.gpu.campaign_plan import Limits
from simkv.gpu.device_memory import (
    check_fits,
    default_model,
    fit_limits,
    fitting_tokens,
    new_runner,
)
from simkv.gpu.execution_record import GpuSetup

GIB = 1 << 30
LARGE, SMALL = MODEL_SHAPES["llama-3-8b"], MODEL_SHAPES["qwen2.5-0.5b"]


@pytest.mark.parametrize(
    ("free_gib", "model"),
    [(139, "llama-3-8b"), (79, "llama-3-8b"), (44, "llama-3-8b"), (23.5, "qwen2.5-0.5b")],
)
def test_default_model_fits_with_a_pool(free_gib, model, monkeypatch):
    monkeypatch.setattr(device_memory, "free_memory", lambda device: int(free_gib * GIB))
    assert default_model("cuda") == model
    assert default_model("cpu") == "small"


def test_pool_of_a_card_with_80_gb_covers_the_default_campaign():
    assert fitting_tokens(LARGE, 2, 79 * GIB) >= Limits().kv_tokens
    assert fitting_tokens(SMALL, 2, int(23.5 * GIB)) >= Limits().kv_tokens
    assert 20_000 < fitting_tokens(LARGE, 2, int(23.5 * GIB)) < 60_000
    assert fitting_tokens(LARGE, 2, 12 * GIB) == 0


def test_limits_follow_the_free_memory(monkeypatch):
    monkeypatch.setattr(device_memory, "free_memory", lambda device: int(23.5 * GIB))
    monkeypatch.setattr(device_memory, "release_memory", lambda device: None)
    setup = GpuSetup(LARGE, "cuda")
    largest = fitting_tokens(LARGE, 2, int(23.5 * GIB))
    assert fit_limits(setup, Limits(), None).kv_tokens == largest
    assert fit_limits(setup, Limits(), 10_000).kv_tokens == 10_000
    with pytest.raises(InputError, match=f"use at most {largest} tokens") as error:
        fit_limits(setup, Limits(), 100_000)
    assert "\n" not in str(error.value)
    monkeypatch.setattr(device_memory, "free_memory", lambda device: 12 * GIB)
    with pytest.raises(InputError, match=r"try --model qwen2\.5-0\.5b"):
        fit_limits(setup, Limits(), None)


def test_error_of_a_runner_that_does_not_fit_has_the_largest_pool(monkeypatch):
    setup = GpuSetup(MODEL_SHAPES["tiny"], "cpu")
    config = RunnerConfig(num_blocks=100, block_size=16, graph_tokens=0)
    block = 16 * setup.shape.kv_bytes_per_token(4)
    weights = device_memory.weight_bytes(setup.shape, 4) + 4 * 65 * 1024
    monkeypatch.setattr(device_memory, "CPU_MEMORY", int((weights + 50.5 * block) / 0.95))
    with pytest.raises(InputError, match="use at most 49 KV blocks"):
        check_fits(setup, config)
    check_fits(setup, replace(config, num_blocks=49))


def test_memory_of_the_previous_runner_is_freed_first(monkeypatch):
    order = []
    monkeypatch.setattr(device_memory, "release_memory", lambda device: order.append("release"))
    monkeypatch.setattr(device_memory, "free_memory", lambda device: order.append("free") or GIB)
    setup = GpuSetup(MODEL_SHAPES["tiny"], "cpu")
    runner = new_runner(setup, RunnerConfig(num_blocks=8, block_size=16, graph_tokens=0))
    assert order == ["release", "free"]
    assert isinstance(runner.pool.blocks, torch.Tensor)
