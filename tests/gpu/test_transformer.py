"""Tests that the paged model emits the tokens of the dense model under any scheduling decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from simkv.costs.hardware.model_shape import MODEL_SHAPES
from tests.gpu import reference_model
from tests.gpu.random_scheduler import RandomServer

TINY = MODEL_SHAPES["tiny"]
#: Biases, a tied embedding and an odd number of heads per group, as in Qwen2.5-0.5B.
TINY_QWEN = replace(TINY, name="tiny-qwen", heads=6, kv_heads=2, qkv_bias=True, tied=True)


def wrong_tokens(server: RandomServer) -> int:
    """Return the number of tokens that the dense model would not have emitted after the preceding
    tokens.
    """
    wrong = 0
    runner = server.runner
    for live in server.run():
        length = live.prompt.prompt_tokens
        assert len(live.emitted) == live.output
        tokens = runner.tokens(live.prompt.id, length + live.output)
        assert tokens[length:] == live.emitted
        scores = reference_model.logits(runner.shape, runner.model.weights, tokens[:-1])
        want = scores[length - 1 :].argmax(-1).tolist()
        wrong += sum(a != b for a, b in zip(live.emitted, want, strict=True))
    return wrong


@pytest.mark.parametrize("seed", range(8))
def test_tokens(seed):
    shape = (TINY, TINY_QWEN)[seed % 2]
    block_size = (1, 4, 16, 5)[seed % 4]
    graph_tokens = (64, 0)[seed == 7]
    server = RandomServer(seed, shape, block_size=block_size, graph_tokens=graph_tokens)
    assert wrong_tokens(server) == 0


def test_random_server_makes_all_decisions():
    seen: dict[str, int] = {}
    for seed in range(3):
        server = RandomServer(seed, TINY, block_size=4)
        server.run()
        for what, count in server.seen.items():
            seen[what] = seen.get(what, 0) + count
    assert set(seen) == {"chunk", "whole", "mixed", "shared", "recomputed"}
    assert min(seen.values()) > 2, seen


def test_tokens_depend_on_the_context():
    """If tokens did not depend on the context, the tests above could not detect a wrong block."""
    runner = RandomServer(0, TINY, block_size=4).runner
    tokens = list(range(40))
    changed = [511, *tokens[1:]]
    scores = reference_model.logits(TINY, runner.model.weights, tokens)
    other = reference_model.logits(TINY, runner.model.weights, changed)
    assert (scores[1:].argmax(-1) != other[1:].argmax(-1)).float().mean() > 0.2
    assert torch.isfinite(scores).all()
