"""Tests of small parts: sizes, flat inputs, table deltas, block copies and token ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import BatchRow
from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu.batch_inputs import (
    StepSize,
    TableTracker,
    fill,
    input_views,
    packed_length,
)
from simkv.gpu.batch_runner import Runner, RunnerConfig
from simkv.gpu.graph_buckets import graph_sizes, step_size
from simkv.gpu.kv_pool import KVPool
from simkv.gpu.prompt_token_ids import prompt_ids


def test_published_sizes():
    """Parameters read per step and bytes of KV per token agree with the model cards."""
    llama, qwen = MODEL_SHAPES["llama-3-8b"], MODEL_SHAPES["qwen2.5-0.5b"]
    assert round(2 * llama.step_weights / 1e9, 2) == 15.01
    assert llama.kv_bytes_per_token(2) == 131072
    assert round(2 * qwen.step_weights / 1e9, 3) == 0.988
    assert qwen.kv_bytes_per_token(2) == 12288


def test_every_step_has_a_sufficient_size():
    sizes = set(graph_sizes(40, 300))
    for decodes in range(41):
        for prefills, tokens in ((0, decodes), (1, decodes + 2), (3, decodes + 200)):
            if not tokens:
                continue
            size = step_size(decodes, prefills, tokens, 40)
            assert size in sizes
            assert size.tokens >= tokens
            assert size.tokens >= size.decodes >= decodes
            assert size.prefills >= prefills


def test_more_prefills_than_a_graph_has_room_for():
    size = step_size(3, 17, 100, 40)
    assert size == StepSize(128, 40, 17)
    assert size not in graph_sizes(40, 300)


def test_fields_of_a_mixed_step():
    size = StepSize(12, 4, 3)
    packed = np.full(packed_length(size), -1, dtype=np.int32)
    fields = input_views(packed, size)
    decodes = [BatchRow(7, 1, 20), BatchRow(8, 1, 0)]
    prefills = [BatchRow(5, 3, 16), BatchRow(6, 4, 0)]
    fill(fields, decodes, prefills, {7, 6}, {5: 0, 6: 1, 7: 2, 8: 3}, 9)
    assert fields.seat.tolist() == [2, 3, 0, 0, 0, 1, 1, 1, 1, 9, 9, 9]
    assert fields.position.tolist() == [20, 0, 16, 17, 18, 0, 1, 2, 3, 0, 0, 0]
    assert fields.row_seat.tolist() == [2, 3, 9, 9, 0, 1, 9]
    assert fields.length.tolist() == [21, 1, 0, 0, 19, 4, 0]
    assert fields.out_seat.tolist() == [2, 9, 9, 9, 9, 1, 9]
    assert fields.out_position.tolist() == [21, 1, 0, 0, 19, 4, 0]
    assert fields.start.tolist() == [2, 5, 9, 9]


def test_only_new_entries_of_a_table_are_sent():
    watch = TableTracker(block_size=4, width=10)
    table = [5, 6]
    assert watch.delta([BatchRow(1, 8, 0)], {1: table}, {1: 2}) == ([20, 21], [5, 6], 0)
    assert watch.delta([BatchRow(1, 1, 7)], {1: table}, {1: 2}) == ([], [], 0)
    table.append(9)
    assert watch.delta([BatchRow(1, 1, 8)], {1: table}, {1: 2}) == ([22], [9], 0)
    other = [5, 3, 9]
    assert watch.delta([BatchRow(1, 1, 9)], {1: other}, {1: 2}) == ([20, 21, 22], other, 0)


def test_tokens_without_a_block_go_to_the_null_block_and_are_counted():
    watch = TableTracker(block_size=4, width=10)
    assert watch.delta([BatchRow(1, 6, 0)], {1: [5]}, {1: 0}) == ([0, 1], [5, 0], 2)
    assert watch.delta([BatchRow(2, 3, 0)], {}, {2: 1}) == ([10], [0], 3)
    late = [5, 8]
    assert watch.delta([BatchRow(1, 1, 6)], {1: late}, {1: 0}) == ([0, 1], [5, 8], 0)


def test_pool_views():
    pool = KVPool(MODEL_SHAPES["tiny"], 3, 4, "cpu", torch.float32)
    keys, values = pool.layer(1)
    assert keys.shape == values.shape == (4, 4, 2, 16)
    keys[2, 3] = 7.0
    assert pool.blocks[2, 1, 0, 3].eq(7.0).all()
    assert pool.block_bytes == 2 * 2 * 4 * 2 * 16 * 4


def test_token_ids_are_equal_for_equal_tokens_only():
    a = Prompt(1, 30, 1, segments=(Segment("gx", 0, 20), Segment("u1", 0, 10)))
    b = Prompt(2, 25, 1, segments=(Segment("gx", 5, 20), Segment("u2", 0, 10)))
    ids, other = prompt_ids(a, 100_000), prompt_ids(b, 100_000)
    assert ids[5:20].tolist() == other[:15].tolist()
    assert not set(ids[20:].tolist()) & set(other[15:].tolist())
    assert prompt_ids(Prompt(1, 10, 1), 100_000).tolist() == ids[20:].tolist()
    assert ids.min() >= 0
    assert ids.max() < 100_000


def test_prompt_may_contain_output_of_another_request():
    runner = Runner(MODEL_SHAPES["tiny"], RunnerConfig(num_blocks=8, block_size=16, max_len=64))
    runner.admit(Prompt(0, 10, 8))
    tables = {0: [1, 2]}
    said = []
    for context, new in [(0, 10), *((c, 1) for c in range(10, 14))]:
        said.append(runner.wait(runner.launch([BatchRow(0, new, context)], {0}, tables)).tokens[0])
    quote = (Segment("u0", 0, 10), Segment("o0", 0, 5), Segment("u1", 0, 3))
    runner.admit(Prompt(1, 18, 8, segments=quote))
    assert runner.tokens(1, 15) == runner.tokens(0, 10) + said


def test_a_token_before_the_end_of_its_prompt_is_counted():
    runner = Runner(MODEL_SHAPES["tiny"], RunnerConfig(num_blocks=8, block_size=16, max_len=64))
    runner.admit(Prompt(0, 10, 8))
    steps = [
        (BatchRow(0, 9, 0), 1),
        (BatchRow(0, 10, 0), 0),
        (BatchRow(0, 1, 10), 0),
        (BatchRow(0, 11, 0), 0),
    ]
    for row, premature in [*steps, (BatchRow(0, 10, 0), 1)]:
        flight = runner.launch([row], {0}, {0: [1, 2]})
        assert runner.wait(flight).timing.premature == premature


def test_what_does_not_fit_is_refused():
    runner = Runner(
        MODEL_SHAPES["tiny"], RunnerConfig(num_blocks=8, block_size=16, seats=1, max_len=64)
    )
    runner.admit(Prompt(0, 10, 8))
    with pytest.raises(RuntimeError, match="request 0: 0 \\+ 64 tokens do not fit into max_len 64"):
        runner.launch([BatchRow(0, 64, 0)], {0}, {0: [1, 2, 3, 4]})
    with pytest.raises(RuntimeError, match="all 1 request slots"):
        runner.admit(Prompt(1, 10, 8))
