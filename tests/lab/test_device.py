"""What can be seen on a GPU only; run first when one is at hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from simkv.core.scheduler import Row
from simkv.costs.hardware.shapes import MODELS
from simkv.lab.inputs import StepSize, fields_of, fill, packed_length
from simkv.lab.serve import DeviceServer
from simkv.lab.served import Setup
from tests.lab import reference, test_attention, test_model, test_serve
from tests.lab.driver import RandomServer, same_kv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")

TINY = MODELS["tiny"]
#: Largest relative error by dtype: what rounding the operands costs, with some room.
ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@pytest.mark.parametrize("dtype", ALLOWED, ids=str)
@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("block_size", [1, 16])
@pytest.mark.parametrize("heads", test_attention.HEADS, ids=str)
def test_attention_against_float64(heads, block_size, layout, dtype):
    from simkv.lab import cuda_ops

    for seed in range(4):
        c = test_attention.case(seed, *heads, block_size, layout)
        fields = type(c.fields)(*(field.cuda() for field in c.fields))
        cache = torch.stack((c.keys, c.values)).to("cuda", dtype)
        q, tables = c.q.to("cuda", dtype), c.tables.cuda()
        found = cuda_ops.attend(q, fields, c.size, cache[0], cache[1], tables)
        assert test_attention.worst(found.cpu().float(), c.expected) < ALLOWED[dtype]


def test_blocks_beyond_two_to_the_31():
    """A block-major pool of the 8B shape has 2^20 numbers per block."""
    from simkv.lab import cuda_ops

    random = np.random.default_rng(0)
    blocks, layers = 2200, 32
    pool = torch.zeros(blocks, layers, 2, 16, 8, 128, device="cuda", dtype=torch.bfloat16)
    assert pool.numel() > 2**31
    keys, values = pool[:, 31, 0], pool[:, 31, 1]
    table = torch.tensor([[2199, 2190, 2197], [0, 0, 0]], dtype=torch.int32, device="cuda")
    for row, size in ((Row(0, 1, 39), StepSize(1, 1, 0)), (Row(0, 33, 7), StepSize(64, 0, 16))):
        length = row.context + row.tokens
        k, v = random.normal(size=(2, length, 8, 128))
        q = random.normal(size=(row.tokens, 32, 128))
        for index, block in enumerate((2199, 2190, 2197)):
            part = slice(16 * index, min(16 * index + 16, length))
            keys[block, : part.stop - part.start] = torch.from_numpy(k[part]).to(pool)
            values[block, : part.stop - part.start] = torch.from_numpy(v[part]).to(pool)
        packed = torch.zeros(packed_length(size), dtype=torch.int32)
        decode = row.tokens == 1
        fill(
            fields_of(packed.numpy(), size),
            [row] if decode else [],
            [] if decode else [row],
            (),
            {0: 0},
            1,
        )
        padded = torch.zeros(size.tokens, 32, 128, device="cuda", dtype=torch.bfloat16)
        padded[: row.tokens] = torch.from_numpy(q).to(pool)
        fields = fields_of(packed.cuda(), size)
        found = cuda_ops.attend(padded, fields, size, keys, values, table)
        wanted = {0: reference.attention(q, k, v)}
        assert test_attention.worst(found.cpu().float(), wanted) < ALLOWED[torch.bfloat16]


@pytest.mark.parametrize("seed", range(6))
def test_tokens_against_the_dense_model(seed):
    shape = (TINY, test_model.TINY_QWEN)[seed % 2]
    layout = ("block", "layer")[seed % 3 == 0]
    block_size = (1, 4, 16)[seed % 3]
    server = RandomServer(seed, shape, block_size=block_size, layout=layout, device="cuda")
    assert test_model.wrong_tokens(server) == 0


def test_graphs_change_nothing():
    emitted = []
    for graph_tokens in (64, 0):
        server = RandomServer(3, TINY, block_size=4, graph_tokens=graph_tokens, device="cuda")
        emitted.append([live.emitted for live in server.run()])
    assert emitted[0] == emitted[1]


def test_graphs_are_equal_bit_for_bit_in_bfloat16():
    """Logits are not kept, but a cache that is equal to the last bit says as much."""
    pools = []
    for graph_tokens in (64, 0):
        server = RandomServer(
            4,
            replace(TINY, hidden=256, head_dim=64),
            block_size=16,
            graph_tokens=graph_tokens,
            device="cuda",
            dtype=torch.bfloat16,
            poison=False,
        )
        server.run()
        pools.append(server.runner.pool)
    assert same_kv(*pools)


@pytest.mark.parametrize(("engine", "variant"), test_serve.ENGINES, ids=lambda name: name)
def test_a_real_run_replays(engine, variant):
    scenario = test_serve.plain_scenario(engine, variant)
    server = DeviceServer(scenario, Setup(TINY, "cuda", graph_tokens=128))
    run = server.serve()
    test_serve.check_l0(run)
    assert run.summary["finished"] == len(run.requests)
    assert run.summary["graph_share"] > 0.9
