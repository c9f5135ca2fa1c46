"""Checks of a device before measurements, one function per check.

``tests/gpu/test_device.py`` and ``calibrate/smoke.py`` call the checks; on a CPU, the checks use
operations of torch instead of the kernels.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from simkv.core.scheduler_protocol import BatchRow
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu import cpu_ops
from simkv.gpu.batch_inputs import (
    StepSize,
    fill,
    input_views,
    packed_length,
)
from simkv.gpu.execution_record import GpuSetup
from simkv.gpu.scenario_execution import ScenarioExecution
from simkv.validation.gpu_runs.timed_replay import Agreement, check_agreement
from tests.gpu import reference_model, test_attention
from tests.gpu.random_scheduler import RandomServer, same_kv
from tests.laws.pressure_scenarios import plain_scenario

TINY = MODEL_SHAPES["tiny"]
#: Largest relative error by dtype: the rounding error of the operands, with a margin.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def ops_of(device: str) -> Any:
    """Return the model's operations on a device."""
    if not device.startswith("cuda"):
        return cpu_ops
    from simkv.gpu import cuda_ops

    return cuda_ops


def attention_error(
    seed: int, heads: tuple[int, int, int], block_size: int, layout: str, dtype: Any, device: str
) -> float:
    """Return the largest relative error of attention against float64 in a random batch."""
    c = test_attention.case(seed, *heads, block_size, layout)
    fields = type(c.fields)(*(field.to(device) for field in c.fields))
    cache = torch.stack((c.keys, c.values)).to(device, dtype)
    q, tables = c.q.to(device, dtype), c.tables.to(device)
    found = ops_of(device).attend(q, fields, c.size, cache[0], cache[1], tables)
    return test_attention.worst(found.cpu().float(), c.expected)


def far_errors(device: str) -> list[float]:
    """Return the errors of a decode and a prefill whose blocks lie beyond 2^31 numbers in memory.

    A block-major pool of the 8B shape has 2^20 numbers per block. Memory that is never written is
    not allocated on a CPU.
    """
    random = np.random.default_rng(0)
    blocks, layers = 2200, 32
    pool = torch.empty(blocks, layers, 2, 16, 8, 128, device=device, dtype=torch.bfloat16)
    assert pool.numel() > 2**31
    keys, values = pool[:, 31, 0], pool[:, 31, 1]
    keys[0], values[0] = 0.0, 0.0
    table = torch.tensor([[2199, 2190, 2197], [0, 0, 0]], dtype=torch.int32, device=device)
    errors = []
    for row, size in (
        (BatchRow(0, 1, 39), StepSize(1, 1, 0)),
        (BatchRow(0, 33, 7), StepSize(64, 0, 16)),
    ):
        length = row.context + row.tokens
        k, v = random.normal(size=(2, length, 8, 128))
        q = random.normal(size=(row.tokens, 32, 128))
        for index, block in enumerate((2199, 2190, 2197)):
            part = slice(16 * index, min(16 * index + 16, length))
            keys[block, : part.stop - part.start] = torch.from_numpy(k[part]).to(pool)
            values[block, : part.stop - part.start] = torch.from_numpy(v[part]).to(pool)
        packed = torch.zeros(packed_length(size), dtype=torch.int32)
        single = [row] if row.tokens == 1 else []
        several = [] if single else [row]
        fill(input_views(packed.numpy(), size), single, several, (), {0: 0}, 1)
        padded = torch.zeros(size.tokens, 32, 128, device=device, dtype=torch.bfloat16)
        padded[: row.tokens] = torch.from_numpy(q).to(pool)
        fields = input_views(packed.to(device), size)
        found = ops_of(device).attend(padded, fields, size, keys, values, table)
        wanted = {0: reference_model.attention(q, k, v)}
        errors.append(test_attention.worst(found.cpu().float(), wanted))
    return errors


def graphs_change_nothing(device: str) -> bool:
    """Return whether the KV cache is equal bit for bit after captured graphs and after eager
    steps.
    """
    pools = []
    for graph_tokens in (64, 0):
        server = RandomServer(
            4,
            replace(TINY, hidden=256, head_dim=64),
            block_size=16,
            graph_tokens=graph_tokens,
            device=device,
            dtype=torch.bfloat16,
            poison=False,
        )
        server.run()
        pools.append(server.runner.pool)
    return same_kv(*pools)


def l0(device: str) -> Agreement:
    """Serve a scenario with preemptions, and compare it with its replay."""
    run = ScenarioExecution(plain_scenario("vllm", "0.33.0"), GpuSetup(TINY, device)).serve()
    assert run.summary["preemptions"] > 0
    return check_agreement(run.scenario, run.passes, run.recorder)
