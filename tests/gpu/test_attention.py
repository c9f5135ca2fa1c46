"""Tests of paged attention against float64 on random batches; all unused memory is poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from simkv.core.scheduler_protocol import BatchRow, blocks_for
from simkv.gpu import cpu_ops
from simkv.gpu.batch_inputs import (
    fill,
    input_views,
    packed_length,
    split_rows,
)
from simkv.gpu.graph_buckets import step_size
from tests.gpu import reference_model

#: heads, kv_heads, head_dim
HEADS = [(4, 2, 16), (14, 2, 64), (8, 2, 128), (4, 4, 32)]
#: Numbers of context tokens and new tokens near block edges; one new token is a decode or a prompt
#: with one token.
LENGTHS = [(0, 1), (14, 1), (15, 1), (16, 1), (63, 1), (64, 1), (130, 1), (0, 2), (0, 15), (0, 16)]
LENGTHS += [(0, 17), (0, 65), (16, 16), (7, 30), (33, 64), (100, 5), (200, 1), (0, 130), (1, 2)]
FAR = 2**30  # a block that does not exist: a read is an error instead of a wrong number


def case(
    seed: int,
    heads: int,
    kv_heads: int,
    dim: int,
    block_size: int,
    layout: str,
    lengths: Sequence[tuple[int, int]] = LENGTHS,
):
    """Return a random batch: fields, queries, pool and tables of one layer, and the expected
    output.
    """
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 9))
    picked = [lengths[i] for i in random.integers(0, len(lengths), count)]
    rows = [BatchRow(i, new, context) for i, (context, new) in enumerate(picked)]
    decodes, prefills = split_rows(rows)
    tokens = sum(row.tokens for row in rows)
    size = step_size(len(decodes), len(prefills), tokens, 16)
    width = 1 + max(blocks_for(row.context + row.tokens, block_size) for row in rows)
    pool_blocks = 1 + width * count
    shape = (pool_blocks, 2, block_size, kv_heads, dim)
    data = torch.full(shape, torch.nan)
    if layout == "layer":
        data = torch.full((2, pool_blocks, *shape[2:]), torch.nan).transpose(0, 1)
    data[0] = 0.0
    tables = torch.full((count + 1, width), FAR, dtype=torch.int32)
    tables[count] = 0
    free = list(random.permutation(np.arange(1, pool_blocks)))
    q = torch.full((size.tokens, heads, dim), torch.nan)
    expected, at = {}, 0
    for row in decodes + prefills:
        length = row.context + row.tokens
        k, v = random.normal(size=(2, length, kv_heads, dim))
        queries = random.normal(size=(row.tokens, heads, dim))
        for index in range(blocks_for(length, block_size)):
            block = free.pop()
            tables[row.id, index] = int(block)
            part = slice(index * block_size, (index + 1) * block_size)
            inside = len(k[part])
            data[block, 0, :inside] = torch.from_numpy(k[part])
            data[block, 1, :inside] = torch.from_numpy(v[part])
        q[at : at + row.tokens] = torch.from_numpy(queries)
        expected[at] = reference_model.attention(queries, k, v)
        at += row.tokens
    packed = torch.zeros(packed_length(size), dtype=torch.int32)
    fields = input_views(packed.numpy(), size)
    fill(fields, decodes, prefills, (), {i: i for i in range(count)}, count)
    return SimpleNamespace(
        q=q,
        fields=input_views(packed, size),
        size=size,
        keys=data[:, 0],
        values=data[:, 1],
        tables=tables,
        expected=expected,
    )


def worst(found: torch.Tensor, expected: dict[int, np.ndarray]) -> float:
    """Return the largest relative error of any row, in the 2-norm; NaN counts as infinite."""
    errors = []
    for at, want in expected.items():
        got = found[at : at + len(want)].double().numpy()
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        errors.append(np.inf if np.isnan(error) else float(error))
    return max(errors)


@pytest.mark.parametrize("layout", ["block", "layer"])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_float64(heads, block_size, layout):
    for seed in range(4):
        c = case(seed, *heads, block_size, layout)
        found = cpu_ops.attend(c.q, c.fields, c.size, c.keys, c.values, c.tables)
        assert worst(found, c.expected) < 1e-6
