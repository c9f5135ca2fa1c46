"""Tests that need a GPU."""

from __future__ import annotations

import pytest
import torch

from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu.execution_record import GpuSetup
from simkv.gpu.scenario_execution import ScenarioExecution
from tests.gpu import (
    device_checks,
    test_attention,
    test_overlapped_engine,
    test_scenario_execution,
    test_transformer,
)
from tests.gpu.device_checks import ALLOWED
from tests.gpu.random_scheduler import RandomServer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

TINY = MODEL_SHAPES["tiny"]


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("heads", test_attention.HEADS, ids=str)
def test_attention_against_float64(heads, block_size, layout, dtype):
    for seed in range(4):
        error = device_checks.attention_error(seed, heads, block_size, layout, dtype, "cuda")
        assert error < ALLOWED[dtype]


def test_blocks_beyond_two_to_the_31():
    assert max(device_checks.far_errors("cuda")) < ALLOWED[torch.bfloat16]


@pytest.mark.parametrize("seed", range(6))
def test_tokens_against_the_dense_model(seed):
    shape = (TINY, test_transformer.TINY_QWEN)[seed % 2]
    block_size = (1, 4, 16)[seed % 3]
    server = RandomServer(seed, shape, block_size=block_size, device="cuda")
    assert test_transformer.wrong_tokens(server) == 0


def test_graphs_change_nothing():
    emitted = []
    for graph_tokens in (64, 0):
        server = RandomServer(3, TINY, block_size=4, graph_tokens=graph_tokens, device="cuda")
        emitted.append([live.emitted for live in server.run()])
    assert emitted[0] == emitted[1]


def test_graphs_are_equal_bit_for_bit_in_bfloat16():
    """Logits are not stored, so KV caches are compared."""
    assert device_checks.graphs_change_nothing("cuda")


@pytest.mark.parametrize(
    ("engine", "variant"), test_scenario_execution.ENGINES, ids=lambda name: name
)
def test_a_real_run_replays(engine, variant):
    scenario = test_scenario_execution.plain_scenario(engine, variant)
    server = ScenarioExecution(scenario, GpuSetup(TINY, "cuda", graph_tokens=128))
    run = server.serve()
    test_scenario_execution.check_l0(run)
    assert run.summary["finished"] == len(run.requests)
    assert run.summary["graph_share"] > 0.9


def test_overlapped_steps_replay_and_emit_tokens_of_the_model():
    scenario = test_overlapped_engine.pipelined()
    server = ScenarioExecution(scenario, GpuSetup(TINY, "cuda", graph_tokens=128, overlap=True))
    run = server.serve()
    test_scenario_execution.check_l0(run)
    one_by_one = ScenarioExecution(scenario, GpuSetup(TINY, "cuda", graph_tokens=128))
    one_by_one.serve()
    for life in run.record.requests.values():
        i, count = life.request.id, life.request.prompt_tokens + life.tokens
        assert server.runner.tokens(i, count) == one_by_one.runner.tokens(i, count)
