"""Tests of speculative decoding in vLLM: verification, rejected drafts and their blocks."""

from __future__ import annotations

from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.spec import VLLM
from simkv.schedulers.vllm.state_memory import StateTable

ALIKE = (Segment("g0", 0, 8),)


def engine(drafts: int = 3, **knobs: Any) -> VllmScheduler:
    config = {
        "block_size": 4,
        "num_gpu_blocks": 65,
        "max_model_len": 64,
        "max_num_seqs": 4,
    }
    config |= {"async_scheduling": False, "num_speculative_tokens": drafts}
    return VllmScheduler(VllmConfig(**config | knobs))  # type: ignore[arg-type]


def verified(batch: Batch) -> dict[int, int]:
    assert batch.drafted is not None
    return batch.drafted.tokens


def step(scheduler: VllmScheduler, accepted: int = 0) -> Batch:
    """Run a step in which each request accepts ``accepted`` of its draft tokens."""
    batch = scheduler.schedule()
    for i in verified(batch):
        batch.drafted.accepted[i] = accepted  # type: ignore[union-attr]
    scheduler.complete(batch, ())
    return batch


def test_decode_verifies_drafts_and_keeps_accepted_tokens() -> None:
    scheduler = engine()
    scheduler.add(Prompt(0, 8, 20))
    assert verified(step(scheduler)) == {}
    rows = [step(scheduler, accepted).rows()[0] for accepted in (2, 0, 3, 0)]
    assert [row.tokens for row in rows] == [4, 4, 4, 4]
    assert [row.context for row in rows] == [8, 11, 12, 16]
    assert scheduler.leap(100) == 1


def test_preempted_request_returns_its_whole_budget() -> None:
    """The drafter needs 3 tokens per request in addition to the scheduled tokens."""
    budget = ScheduleStep(tokens=100, threshold=0, hold=False, inputs=40, slots=3)
    assert budget.budget == 37
    budget.spend(10)
    budget.spend(5)
    assert budget.budget == 37 - 13 - 8
    budget.restore(5)
    budget.restore(10)
    assert budget.budget == 37
    budget.spend(4, requests=4)  # four decodes
    assert budget.budget == 37 - 4 - 4 * 3


def test_running_prompt_waits_for_budget_that_drafts_use() -> None:
    scheduler = engine(max_num_batched_tokens=8)
    for i, tokens in enumerate((1, 1, 20)):
        scheduler.add(Prompt(i, tokens, 20))
    first, second = step(scheduler), step(scheduler)
    assert first.scheduled == [(0, 1), (1, 1), (2, 6)]
    assert second.scheduled == [(0, 4), (1, 4)]
    assert second.aside == {2: "budget"}


def test_blocks_for_drafts_and_lookahead_stay_after_rejection() -> None:
    held = {}
    for method in ("eagle", "mtp", "ngram"):
        scheduler = engine(speculative_method=method)
        scheduler.add(Prompt(0, 8, 20))
        held[method] = []
        for _ in range(3):
            step(scheduler)
            held[method].append(scheduler.blocks_held()[0])
    assert held == {"eagle": [3, 4, 4], "mtp": [3, 4, 4], "ngram": [2, 3, 4]}


def test_groups_have_lookahead_slots_and_windows_free_accepted_tokens() -> None:
    scheduler = engine(kv_cache_groups=(0, 8), enable_prefix_caching=False)
    scheduler.add(Prompt(0, 20, 20))
    step(scheduler)
    assert scheduler.blocks_held() == {0: 2 * 6}  # 20 tokens and 3 slots in each group
    step(scheduler, 3)
    # 24 tokens and 3 slots; the window of token 21 starts at token 14
    assert scheduler.blocks_held() == {0: 7 + 7 - 3}
    step(scheduler, 0)
    # 28 tokens and 3 slots; the window of token 25 contains tokens 18 to 25
    assert scheduler.blocks_held() == {0: 8 + 8 - 4}
    step(scheduler, 0)
    assert scheduler.blocks_held() == {0: 8 + 8 - 4}


def test_state_group_has_one_more_block_per_draft() -> None:
    knobs = {"kv_cache_groups": ("mamba",), "speculative_method": "ngram"}
    held = {}
    for cached in (False, True):
        scheduler = engine(enable_prefix_caching=cached, **knobs)
        scheduler.add(Prompt(0, 21, 20))
        steps = [step(scheduler, 1) for _ in range(2)]
        held[cached] = [dict(one.scheduled)[0] for one in steps], scheduler.blocks_held()[0]
    assert held[False] == ([21, 4], 1 + 3)
    assert held[True] == ([20, 1], 2 + 3)  # including the state after 20 tokens


def test_spare_states_move_behind_newest_state() -> None:
    table = StateTable(0, spare=2)
    assert table.reach(1, 0) == ([], 3)
    assert table.places == [0, 1, 2]
    assert table.lacks(2, 0) == 1
    assert table.reach(3, 0) == ([1], 1)  # the block moves from position 1 to position 3
    assert table.places == [0, 2, 3, 4]
    assert (table.older, table.lacks(2, 0)) == (0, -1)
    assert table.reach(2, 0) == ([], 0)
    assert table.behind(3, gaps=True) == [[0], []]


def test_drafts_are_limited_by_budget_and_max_model_len() -> None:
    scheduler = engine(max_num_batched_tokens=10)
    for i in range(3):
        scheduler.add(Prompt(i, 3, 20))
    step(scheduler)
    assert verified(step(scheduler)) == {0: 3, 1: 3, 2: 1}
    scheduler = engine(max_model_len=12)
    scheduler.add(Prompt(0, 8, 20))
    step(scheduler)
    assert verified(step(scheduler)) == {0: 2}  # position 11 is the last computed position


def test_asynchronous_scheduler_removes_rejected_drafts_one_step_later() -> None:
    scheduler = engine(async_scheduling=True)
    scheduler.add(Prompt(0, 8, 20))
    batches = [scheduler.schedule(), scheduler.schedule()]
    assert [batch.context for batch in batches] == [[0], [8]]
    scheduler.complete(batches[0], ())
    third = scheduler.schedule()
    assert third.context == [12]  # as if all drafts were accepted
    batches[1].drafted.accepted[0] = 1  # type: ignore[union-attr]
    scheduler.complete(batches[1], ())
    assert scheduler.schedule().context == [14]


def test_no_step_after_last_token_with_drafts_in_flight() -> None:
    scheduler = engine(async_scheduling=True)
    scheduler.add(Prompt(0, 8, 2))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.complete(first, ())
    assert not scheduler.schedule()  # the second batch contains the last token in any case
    second.drafted.accepted[0] = 3  # type: ignore[union-attr]
    assert scheduler.complete(second, ()).finished == [0]
    assert second.drafted.accepted == {0: 0}  # type: ignore[union-attr]


@pytest.mark.parametrize(("variant", "hit"), [("0.32.0", 4), ("0.33.0", 8)])
def test_eagle_shortens_hit_by_one_block_before_0_33(variant: str, hit: int) -> None:
    scheduler = engine(variant=variant, enable_prefix_caching=True)
    for i in (0, 1):
        scheduler.add(Prompt(i, 12, 1, segments=(*ALIKE, Segment(f"u{i}", 0, 4))))
    first = step(scheduler)
    scheduler.add(Prompt(2, 12, 1, segments=(*ALIKE, Segment("u0", 0, 4))))
    assert first.context == [0, 4]
    assert step(scheduler).context == [hit]


def test_request_with_one_token_is_padded_to_draft_slots() -> None:
    for variant, tokens in (("0.24.0", 1), ("0.25.0", 4)):
        scheduler = engine(variant=variant, block_size=1, speculative_method="ngram")
        scheduler.add(Prompt(0, 8, 9, segments=ALIKE))
        step(scheduler)
        scheduler.add(Prompt(1, 8, 9, segments=ALIKE))
        batch = step(scheduler)
        assert batch.rows()[-1].tokens == tokens
        assert batch.drafted is not None
        assert batch.drafted.padding == ({1} if tokens > 1 else set())


def test_draft_model_uses_tokens_of_budget() -> None:
    tokens = {}
    for variant in ("0.16.0", "0.27.0", "0.28.0"):
        scheduler = engine(
            variant=variant, speculative_method="draft_model", max_num_batched_tokens=20
        )
        for i in range(2):
            scheduler.add(Prompt(i, 30, 9))
        tokens[variant] = [row.tokens for row in scheduler.schedule().rows()]
    assert tokens == {"0.16.0": [20], "0.27.0": [16], "0.28.0": [19]}


def test_preempted_request_loses_drafts() -> None:
    scheduler = engine(num_gpu_blocks=8, max_model_len=28, scheduler_reserve_full_isl=False)
    scheduler.add(Prompt(0, 8, 20))
    scheduler.add(Prompt(1, 8, 20))
    batches = [step(scheduler, accepted=3) for _ in range(3)]
    assert [batch.preempted for batch in batches] == [[], [1], []]
    assert verified(batches[1]) == {0: 3}


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"variant": "0.11.0"}, r"not modelled for vLLM 0\.11\.0, only since 0\.12"),
        (
            {"variant": "0.14.0", "speculative_method": "draft_model"},
            "expected eagle or mtp or ngram",
        ),
        (
            {
                "variant": "0.32.0",
                "speculative_method": "ngram",
                "async_scheduling": True,
            },
            "only with the draft methods eagle or mtp or draft_model, not with ngram",
        ),
        (
            {
                "kv_cache_groups": (0, "mamba"),
                "variant": "0.32.0",
                "mamba_prefill_checkpoints": True,
            },
            r"mamba_prefill_checkpoints is not modelled with eagle .*, or vLLM 0\.33 or later",
        ),
        (
            {"kv_cache_groups": (0, "mamba"), "variant": "0.25", "speculative_method": "ngram"},
            r"mamba is not modelled with ngram for vLLM 0\.25.*, or vLLM 0\.26 or later",
        ),
        (
            {"kv_cache_groups": ("0/8", 8), "variant": "0.32.0"},
            r"a second block size is not modelled with eagle for vLLM 0\.32\.0",
        ),
        (
            {
                "kv_cache_groups": (0, "mamba"),
                "variant": "0.31",
                "speculative_method": "ngram",
                "mamba_cache_mode": "all",
            },
            "all is not modelled with num_speculative_tokens",
        ),
        ({"rule": "admit = 1"}, "custom policies are not supported"),
        (
            {"long_prefill_token_threshold": 3},
            "must be 0 or above num_speculative_tokens 3",
        ),
        (
            {"variant": "0.27.0", "speculative_method": "draft_model"}
            | {"max_num_batched_tokens": 4},
            "must exceed the 4 tokens reserved",
        ),
        (
            {"variant": "0.27.0", "speculative_method": "draft_model"}
            | {"max_num_batched_tokens": 9, "max_num_scheduled_tokens": 6},
            r"max_num_scheduled_tokens: .* allows at most 5 .*9 minus 4 tokens for the draft model",
        ),
    ],
)
def test_rejects_invalid_settings_by_name(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        engine(**knobs)


def test_kv_connector_and_gpu_runner_reject_drafts() -> None:
    config = VllmConfig(num_speculative_tokens=2)
    with pytest.raises(ValueError, match="2 is not modelled with kv_connector; use 0"):
        config.in_role("decode")
    with pytest.raises(InputError, match="the GPU runner does not support drafts"):
        VLLM.build_with_tables(config)


def test_scheduler_is_asynchronous_by_default_if_method_allows() -> None:
    depths = [
        VllmConfig(variant=variant, num_speculative_tokens=2, speculative_method="ngram").depth
        for variant in ("0.32.0", "0.33.0")
    ]
    assert depths == [1, 2]
