"""Swapped KV: what goes out comes back, wherever its blocks are by then."""

from __future__ import annotations

import pytest
import torch

from simkv.costs.hardware.shapes import MODELS
from simkv.lab.pool import KVPool, SwapSpace
from tests.lab.driver import RandomServer, same_kv


@pytest.fixture
def pool():
    made = KVPool(MODELS["tiny"], 12, 4, "cpu", torch.float32)
    made.blocks.normal_()
    return made


def test_kv_comes_back_to_other_blocks(pool):
    space = SwapSpace(pool, 6)
    first, second = pool.blocks[[3, 4, 9]].clone(), pool.blocks[[1]].clone()
    space.out(7, [3, 4, 9])
    space.out(8, [1])
    pool.blocks.fill_(torch.nan)
    space.back(7, [10, 2, 3])
    assert torch.equal(pool.blocks[[10, 2, 3]], first)
    space.out(9, [10, 2, 3])  # the room of 7 is free again
    space.back(8, [5])
    assert torch.equal(pool.blocks[[5]], second)
    space.back(9, [6, 7, 8])
    assert torch.equal(pool.blocks[[6, 7, 8]], first)


def test_there_is_only_so_much_room(pool):
    space = SwapSpace(pool, 3)
    space.out(0, [1, 2])
    with pytest.raises(RuntimeError, match="2 blocks to swap out, room for 1"):
        space.out(1, [3, 4])
    space.forget(0)
    space.out(1, [3, 4])
    space.clear()
    space.out(2, [1, 2, 3])


def test_pools_are_compared_without_what_padding_rows_leave():
    """As the test of graphs does on a GPU, where such rows carry what lay in memory."""
    pools = []
    for graph_tokens in (64, 0):
        server = RandomServer(
            4, MODELS["tiny"], block_size=4, graph_tokens=graph_tokens, poison=False
        )
        server.run()
        pools.append(server.runner.pool)
    a, b = pools
    b.blocks[0].normal_()
    assert same_kv(a, b)
    used = b.blocks[1:].nonzero()[0]
    b.blocks[1:][tuple(used)] *= 1 + 1e-6
    assert not same_kv(a, b)
    for empty in pools:
        empty.blocks[1:] = 0.0
    assert not same_kv(a, b)  # nothing was compared
