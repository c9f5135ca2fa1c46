"""Tests of layer groups with states in vLLM: blocks, ends of chunks and prefix-cache hits."""

from __future__ import annotations

from typing import Any

import pytest

from simkv.core.request import Prompt, Segment
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import NEWEST
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.state_memory import StateTable
from tests.schedulers import vllm_layer_groups
from tests.schedulers.vllm_layer_groups import hits, step

SMALL = {
    **vllm_layer_groups.SMALL,
    "num_gpu_blocks": 61,
    "max_num_batched_tokens": 10,
    "kv_cache_groups": (0, "mamba", "mamba"),
}


def engine(**knobs: Any) -> VllmScheduler:
    return vllm_layer_groups.engine(**SMALL | knobs)


def chunks(scheduler: VllmScheduler, prompt: Prompt) -> list[int]:
    """Return the numbers of prompt tokens computed in each step until the first output token."""
    scheduler.add(prompt)
    computed: list[int] = []
    while sum(computed) < prompt.prompt_tokens:
        computed.append(dict(step(scheduler).scheduled)[prompt.id])
    return computed


def test_state_has_one_block_without_prefix_cache() -> None:
    scheduler, held = engine(enable_prefix_caching=False), []
    scheduler.add(Prompt(0, 21, 20))
    for _ in range(6):
        step(scheduler)
        held.append(scheduler.blocks_held()[0])
    assert held == [n + 2 for n in (3, 5, 6, 6, 6, 6)]  # 10, 20, 21 tokens, then one token per step
    step(scheduler, (0,))
    assert scheduler.free_blocks == 60


def test_chunks_end_at_blocks_and_store_states() -> None:
    scheduler = engine()
    assert chunks(scheduler, Prompt(0, 21, 20)) == [8, 8, 4, 1]
    # Each state group holds the newest state and the previous one.
    assert scheduler.blocks_held() == {0: 6 + 2 * 2}
    step(scheduler)
    assert scheduler.blocks_held() == {0: 6 + 2}
    assert chunks(engine(enable_prefix_caching=False), Prompt(0, 21, 20)) == [10, 10, 1]


def test_state_before_last_block_is_stored_since_0_32() -> None:
    assert chunks(engine(), Prompt(0, 16, 1)) == [8, 4, 4]
    assert chunks(engine(variant="0.31.0"), Prompt(0, 16, 1)) == [8, 8]


def test_block_larger_than_chunk_is_rejected_or_filled_in_parts() -> None:
    knobs = {"block_size": 16, "num_gpu_blocks": 20}
    assert chunks(engine(**knobs), Prompt(0, 40, 1)) == [10, 6, 10, 6, 8]
    with pytest.raises(ValueError, match="max_num_batched_tokens: 10 must be at least block_size"):
        engine(variant="0.26.0", **knobs)


def test_inner_states_avoid_split_but_need_one_more_block() -> None:
    cut, whole = (
        engine(max_num_batched_tokens=64, mamba_prefill_checkpoints=given)
        for given in (False, True)
    )
    assert chunks(cut, Prompt(0, 21, 20)) == [20, 1]
    assert chunks(whole, Prompt(0, 21, 20)) == [21]
    # Each state group holds two states, after 20 and 21 tokens.
    assert whole.blocks_held() == {0: 6 + 2 * 2}
    assert hits(whole, chat(1, 3), chat(2, 2)) == [0, 16]
    step(whole)
    assert whole.blocks_held() == {0: 6 + 2}
    with pytest.raises(ValueError, match=r"not available in vLLM 0.31.0, added in 0.32"):
        engine(variant="0.31.0", mamba_prefill_checkpoints=True)


def chat(i: int, own: int) -> Prompt:
    """Return a prompt with 16 common tokens and ``own`` other tokens."""
    return Prompt(i, 16 + own, 1, segments=(Segment("chat", 0, 16), Segment(f"u{i}", 0, own)))


def test_hits_end_at_stored_states() -> None:
    wide = {"max_num_batched_tokens": 64}
    assert hits(engine(**wide), chat(0, 1), chat(1, 1)) == [0, 16]
    # The first prompt's chunk ends after the common prefix, so no state is stored at its end.
    assert hits(engine(**wide), chat(0, 13), chat(1, 13), chat(2, 13)) == [0, 0, 16]
    # With a state for each block, the second prompt has a hit.
    every = {"variant": "0.28.0", "mamba_cache_mode": "all"}
    assert hits(engine(**wide, **every), chat(0, 13), chat(1, 13)) == [0, 16]


def test_first_chunk_stores_state_at_branch_since_0_24() -> None:
    knobs = {"max_num_batched_tokens": 64, "enable_prefix_caching": True}
    for variant, third in (("0.23.0", 0), ("0.24.0", 16)):
        found = hits(engine(variant=variant, **knobs), chat(0, 13), chat(1, 13), chat(2, 13))
        assert found == [0, 0, third]


def test_state_cannot_be_reused_in_same_step() -> None:
    scheduler = engine(max_num_batched_tokens=64)
    scheduler.add(chat(0, 1))
    scheduler.add(chat(1, 1))
    first = step(scheduler)
    assert dict(first.scheduled) == {0: 16}
    assert first.held is not None
    assert first.held.why == "rule"
    assert dict(step(scheduler).scheduled) == {0: 1, 1: 1}


def test_prompt_waits_if_rest_of_budget_reaches_no_block_end() -> None:
    scheduler = engine(max_num_batched_tokens=6, enable_prefix_caching=True)
    for i in range(2):
        scheduler.add(Prompt(i, 21, 1))
    batch = step(scheduler)
    assert dict(batch.scheduled) == {0: 4}
    assert batch.held is not None
    assert batch.held.why == "budget"


def test_state_behind_gap_stays_until_0_29() -> None:
    table = StateTable(0)
    for blocks in (2, 4):  # two chunks in flight
        assert table.reach(blocks, 0) == ([], 1)
    assert table.places == [1, 3]
    assert table.older == 1
    assert table.behind(4, gaps=True) == [[1], []]
    assert table.behind(4, gaps=False) == [[], [1]]
    assert table.reach(6, 0) == ([], 1)
    assert table.behind(6, gaps=True) == [[3, 1], []]
    assert table.behind(6, gaps=False) == [[], [3]]


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"variant": "0.20.0"}, "not modelled for vLLM 0.20.0, which crashes"),
        (
            {"mamba_cache_mode": "all"},
            f"not available in vLLM {NEWEST}, which always uses align since 0.32",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
            "must be true with prefix",
        ),
        (
            {"variant": "0.26.0", "long_prefill_token_threshold": 3},
            "long_prefill_token_threshold: 3 must be at least block_size 4",
        ),
        # The longest sequence needs 16 blocks, and each state group two states.
        ({"num_gpu_blocks": 20}, "19 usable blocks, but a sequence .* 64 needs 20"),
    ],
)
def test_rejects_invalid_settings(knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VllmConfig(**SMALL | knobs)


def test_states_are_cached_by_default_since_0_26() -> None:
    assert engine(variant="0.25.0").memory.cache is None
    assert engine(variant="0.26.0").memory.cache is not None
