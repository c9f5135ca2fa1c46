"""Tests of layer groups in vLLM with windows and chunked attention: blocks and prefix-cache
hits.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simkv.conformance.record.vllm_cases import make_case
from simkv.core.errors import InputError
from simkv.core.request import Prompt, Segment
from simkv.costs.hardware.kv_capacity import kv_groups
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import make_hardware
from simkv.scenario.custom.vllm_policy import CustomVllmConfig
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.spec import VLLM
from simkv.schedulers.vllm.versions import find_rules
from tests.schedulers import vllm_layer_groups
from tests.schedulers.vllm_layer_groups import hits, step

SMALL = {
    **vllm_layer_groups.SMALL,
    "num_gpu_blocks": 41,
    "max_num_batched_tokens": 64,
    "kv_cache_groups": (0, 8),
}


def engine(**knobs: Any) -> VllmScheduler:
    return vllm_layer_groups.engine(**SMALL | knobs)


def test_window_holds_only_blocks_that_next_token_sees() -> None:
    scheduler = engine(enable_prefix_caching=False)
    scheduler.add(Prompt(0, 20, 20))
    step(scheduler)
    assert scheduler.blocks_held() == {0: 10}  # five blocks in each group
    step(scheduler)
    # The window of token 21 contains tokens 14 to 21, which are in blocks 4 to 6.
    assert scheduler.blocks_held() == {0: 6 + 3}
    for _ in range(12):
        step(scheduler)
        assert scheduler.blocks_held()[0] <= 9 + 3
    step(scheduler, (0,))
    assert scheduler.free_blocks == 40


def test_leap_begins_after_first_decode_has_freed_blocks() -> None:
    scheduler = engine(enable_prefix_caching=False)
    scheduler.add(Prompt(0, 20, 20))
    step(scheduler)
    leaps = []
    for _ in range(3):
        step(scheduler)
        leaps.append(scheduler.leap(5))
    assert leaps == [1, 5, 5]


@pytest.mark.parametrize(("variant", "lag"), [("0.25.0", 0), ("0.33.0", 1)])
def test_blocks_read_by_step_in_flight_are_freed_later_in_newer_releases(
    variant: str, lag: int
) -> None:
    scheduler = engine(variant=variant, async_scheduling=True, enable_prefix_caching=False)
    scheduler.add(Prompt(0, 8, 30))
    first, held = scheduler.schedule(), []
    for _ in range(8):
        second = scheduler.schedule()
        held.append(scheduler.blocks_held()[0])
        scheduler.complete(first, ())
        first = second
    # Block 1 leaves the window of 8 tokens before token 12.
    assert held == [6, 6, 6, 5 + lag, 7, 7, 7, 6 + lag]


def test_attention_chunk_is_freed_when_next_one_begins() -> None:
    scheduler, held = engine(kv_cache_groups=(0, "chunked-8"), enable_prefix_caching=False), []
    scheduler.add(Prompt(0, 6, 30))
    for _ in range(8):
        step(scheduler)
        held.append(scheduler.blocks_held()[0])
    # Up to token 8, each group holds two blocks; token 9 attends to no earlier token.
    assert held == [4, 4, 4, 3 + 1, 3 + 1, 3 + 1, 3 + 1, 4 + 2]


def chat(i: int, own: int) -> Prompt:
    """Return a prompt with 32 common tokens and ``own`` other tokens."""
    segments = (Segment("chat", 0, 32), Segment(f"u{i}", 0, own))
    return Prompt(i, 32 + own, 1, segments=segments)


def test_same_prompt_and_repeated_branch_are_hits() -> None:
    # Since 0.29, the cache stores the window before the last token, and the window where another
    # hit ended.
    assert hits(engine(), chat(0, 1), chat(1, 1)) == [0, 32]
    assert hits(engine(), chat(0, 13), chat(1, 9), chat(2, 9)) == [0, 0, 32]
    assert hits(engine(variant="0.28.0"), chat(0, 13), chat(1, 9)) == [0, 32]


@pytest.mark.parametrize(
    ("interval", "hit"), [(0, 0), (8, 32), (12, 24), (16, 32), (24, 24), (40, 0), ("None", 32)]
)
@pytest.mark.parametrize("other", [8, "mamba"])
def test_interval_adds_places_where_hits_end(interval: Any, hit: int, other: Any) -> None:
    """Prompts have 32 common tokens; the longest hit ends at the last multiple before token 33."""
    knobs = {"kv_cache_groups": (0, other), "prefix_cache_retention_interval": interval}
    scheduler = engine(**knobs, max_num_batched_tokens=10)
    assert hits(scheduler, chat(0, 13), chat(1, 9)) == [0, hit]


def test_interval_stores_the_windows_before_its_multiples() -> None:
    scheduler = engine(prefix_cache_retention_interval=16)
    hits(scheduler, chat(0, 13))
    # 11 full blocks without a window, two blocks up to tokens 16, 32 and 44
    assert scheduler.memory.cache
    assert scheduler.memory.cache.cached == 11 + 3 * 2


def test_all_states_are_stored_with_eagle_in_0_29() -> None:
    drafts = {"num_speculative_tokens": 1, "kv_cache_groups": (0, "mamba"), "num_gpu_blocks": 90}
    for variant, interval in (("0.28.0", None), ("0.29.0", None), ("0.30.0", 0)):
        config = VllmConfig(**SMALL | drafts | {"variant": variant})
        assert config.retention_interval(find_rules(variant)) == interval
    without = VllmConfig(**SMALL | {"variant": "0.29.0", "kv_cache_groups": (0, "mamba")})
    assert without.retention_interval(find_rules("0.29.0")) == 0


def test_chunked_attention_hit_needs_blocks_after_last_multiple_only() -> None:
    both, alone = (0, "chunked-16"), ("chunked-16",)
    assert hits(engine(kv_cache_groups=both), chat(0, 1), chat(1, 9)) == [0, 32]
    # As in vLLM, a new prompt counts as cached up to its last chunk.
    assert hits(engine(kv_cache_groups=alone), Prompt(0, 20, 1)) == [16]
    assert hits(engine(kv_cache_groups=both), Prompt(0, 20, 1)) == [0]


def test_groups_have_own_block_sizes() -> None:
    scheduler = engine(kv_cache_groups=("0/8", 8), enable_prefix_caching=False)
    scheduler.add(Prompt(0, 20, 20))
    step(scheduler)
    # three blocks of eight tokens, five of four tokens
    assert scheduler.blocks_held() == {0: 3 + 5}
    held = [scheduler.blocks_held()[0] for _ in range(6) if step(scheduler)]
    # The window frees blocks as with one block size; the other group grows at token 25.
    assert held == [3 + 3, 3 + 3, 3 + 3, 3 + 2, 4 + 3, 4 + 3]


def test_hits_end_at_common_multiples_of_block_sizes() -> None:
    both, prompts = ("0/12", 8), (chat(0, 1), chat(1, 1), chat(2, 1))
    assert hits(engine(kv_cache_groups=both), *prompts) == [0, 24, 24]
    # Two blocks of the window, up to token 24, and two blocks of twelve tokens.
    scheduler = engine(kv_cache_groups=both)
    hits(scheduler, prompts[0])
    assert scheduler.memory.cache
    assert scheduler.memory.cache.cached == 2 + 2
    # Releases 0.22 to 0.28 store the blocks for a hit at each multiple of 12; release 0.21 stores
    # all full blocks.
    for variant, cached in (("0.28.0", 2 + 4), ("0.21.0", 2 + 8)):
        scheduler = engine(kv_cache_groups=both, variant=variant)
        assert hits(scheduler, prompts[0], prompts[1])[1] == 24
        scheduler = engine(kv_cache_groups=both, variant=variant)
        hits(scheduler, prompts[0])
        assert scheduler.memory.cache
        assert scheduler.memory.cache.cached == cached


def test_sequence_longer_than_pool_fits_with_windows_only() -> None:
    scheduler = engine(num_gpu_blocks=12, kv_cache_groups=(8,), max_num_batched_tokens=16)
    scheduler.add(Prompt(0, 63, 1))
    computed = [dict(step(scheduler).scheduled)[0] for _ in range(4)]
    assert computed == [16, 16, 16, 15]


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"variant": "0.20.0"}, "not modelled for vLLM 0.20.0, which crashes"),
        ({"variant": "0.9.2"}, "not modelled for vLLM 0.9.2, only since 0.10"),
        (
            {"variant": "0.11.0", "kv_cache_groups": (0, "mamba")},
            "0.11.0; use full attention together with one window",
        ),
        (
            {"variant": "0.19.0", "kv_cache_groups": (0, 8, 12)},
            "0.19.0; use full attention together with one window",
        ),
        (
            {"variant": "0.19.0", "num_speculative_tokens": 2},
            "not modelled with num_speculative_tokens for vLLM 0.19.0",
        ),
        ({"variant": "0.33.0-skip-blocked"}, "modelled only for models with full attention"),
        ({"kv_cache_groups": (0, 1)}, "a window of at least 2 tokens"),
        ({"kv_cache_groups": ()}, "must have at least one entry"),
        ({"kv_cache_groups": (0, "chunked-")}, "mamba or chunked-8192"),
        ({"kv_cache_groups": (0, "mambo")}, "mamba or chunked-8192"),
        ({"kv_cache_groups": (0, "8/")}, "block size as in 0/32"),
        (
            {"kv_cache_groups": (0, "8/6")},
            r"block sizes \[4, 6\] must be multiples of block_size 4",
        ),
        ({"kv_cache_groups": ("0/8", "8/8")}, "and the smallest must equal it"),
        (
            {"kv_cache_groups": (0, "mamba/8")},
            "for sliding windows only, not with mamba or chunked",
        ),
        ({"kv_cache_groups": ("0/8", "chunked-8")}, "for sliding windows only"),
        ({"kv_cache_groups": (0, "chunked-6")}, "chunked-6 must be a multiple of block_size 4"),
        (
            {"kv_cache_groups": (0, "chunked-8"), "num_speculative_tokens": 2},
            "with eagle vLLM has no separate group for chunked-8",
        ),
        (
            {"variant": "0.28.0", "prefix_cache_retention_interval": 16},
            "prefix_cache_retention_interval: not an option of vLLM 0.28.0, added in 0.29",
        ),
        ({"prefix_cache_retention_interval": 6}, "interval: 6 must be a multiple of 4, the least"),
        (
            {"prefix_cache_retention_interval": 16, "kv_cache_groups": (0,)},
            "interval: 16 has no effect, because .* no sliding window",
        ),
        (
            {
                "prefix_cache_retention_interval": 16,
                "kv_cache_groups": (0, "mamba"),
                "enable_prefix_caching": False,
                "max_model_len": 60,
            },
            "interval: 16 must be a multiple of 60",
        ),
        (
            {
                "prefix_cache_retention_interval": "None",
                "kv_cache_groups": (0, "mamba"),
                "mamba_prefill_checkpoints": True,
                "num_speculative_tokens": 2,
                "num_gpu_blocks": 90,
            },
            "interval: None is not modelled with num_speculative_tokens and mamba_prefill",
        ),
        # The longest sequence needs 16 blocks in the first group and 17 in the window group.
        ({"num_gpu_blocks": 33}, "32 usable blocks, but a sequence .* 64 needs 33"),
    ],
)
def test_rejects_invalid_settings(knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        VllmConfig(**SMALL | knobs)


def test_features_for_one_group_reject_several() -> None:
    config = VllmConfig(**SMALL)
    with pytest.raises(InputError, match="kv_cache_groups"):
        VLLM.build_with_tables(config)
    with pytest.raises(ValueError, match=r"kv_cache_groups: .* with kv_connector; use \[0\]"):
        config.in_role("prefill")
    with pytest.raises(ValueError, match="kv_cache_groups"):
        CustomVllmConfig(**SMALL)
    assert VllmScheduler(config).cache is None  # each request has several block tables


def test_groups_follow_from_layers_of_model() -> None:
    gpt = make_hardware(find_gpu("H100"), find_architecture("gpt-oss-20b"))
    assert kv_groups(gpt) == [0, 128]
    whole, window = gpt.architecture.layers[0], gpt.architecture.layers[1]
    if not getattr(window.attention, "window", 0):
        whole, window = window, whole
    layers = (replace(whole, count=10), replace(window, count=52))
    gemma = replace(gpt, architecture=replace(gpt.architecture, layers=layers))
    assert kv_groups(gemma) == [0, *[128] * 6]  # ten layers per group, as for Gemma 3 27B
    assert kv_groups(make_hardware(find_gpu("H100"), find_architecture("llama-3.1-8b"))) == [0]


def test_random_cases_contain_groups() -> None:
    assert any(make_case("0.33.0", "win-200").config.kv_cache_groups)


@pytest.mark.parametrize(
    ("variant", "held"), [("0.10.2", 10), ("0.11.0", 10), ("0.19.0", 10), ("0.33.0", 10)]
)
def test_each_group_takes_blocks_in_old_releases(variant: str, held: int) -> None:
    scheduler = engine(variant=variant, enable_prefix_caching=False)
    scheduler.add(Prompt(0, 20, 20))
    step(scheduler)
    assert scheduler.blocks_held() == {0: held}  # 20 tokens: five blocks of four in each group


@pytest.mark.parametrize(("variant", "admitted"), [("0.19.0", [0]), ("0.21.0", [0, 1])])
def test_release_0_19_reserves_blocks_that_leave_the_window(
    variant: str, admitted: list[int]
) -> None:
    """The second sequence has 16 blocks in each group; in the group with the window it holds at
    most 9 at a time. The first sequence leaves 28 of 32 blocks.
    """
    knobs = {"enable_prefix_caching": False, "max_num_batched_tokens": 24}
    scheduler = engine(variant=variant, num_gpu_blocks=33, scheduler_reserve_full_isl=True, **knobs)
    scheduler.add(Prompt(0, 8, 2))
    scheduler.add(Prompt(1, 63, 1))
    assert [request for request, _ in step(scheduler).scheduled] == admitted
