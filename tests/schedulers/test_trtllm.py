"""Tests of the TensorRT-LLM scheduler; each rule is tested on the smallest case that depends on
it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from simkv.conformance.decision_replay import check_trace
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch, Held
from simkv.schedulers.trtllm import capacity_scheduler, micro_batch_scheduler, scheduler
from simkv.schedulers.trtllm.config import TrtllmConfig
from simkv.schedulers.trtllm.llm_request import LlmRequest
from simkv.schedulers.trtllm.memory import KvCache
from simkv.schedulers.trtllm.scheduler import TrtllmScheduler
from tests.conformance.recordings import Committed, of_kind

RECORDINGS = of_kind("trtllm", "5f480b7a6", "")
MAX = {"capacity_scheduler_policy": "MAX_UTILIZATION"}
STATIC = {"capacity_scheduler_policy": "STATIC_BATCH"}


def engine(prompts: list[int], most: int = 4, **knobs: Any) -> TrtllmScheduler:
    """Build an engine without overlap, with blocks of 4 tokens and up to ``most`` outputs per
    prompt."""
    small: dict[str, Any] = {"tokens_per_block": 4, "max_tokens_in_paged_kv_cache": 40}
    small |= {"disable_overlap_scheduler": True, "max_num_tokens": 64}
    made = TrtllmScheduler(TrtllmConfig(**{**small, **knobs}))
    for i, tokens in enumerate(prompts):
        made.add(Prompt(i, tokens, max_tokens=most))
    return made


def step(made: TrtllmScheduler, *ended: int) -> Batch:
    batch = made.schedule()
    made.complete(batch, ended)
    return batch


def test_default_policy_reserves_remaining_output() -> None:
    # of 10 blocks, the first two requests need 5 each, and the third needs 4
    made = engine([8, 8, 4], most=12)
    assert step(made).scheduled == [(0, 8), (1, 8)]
    batch = step(made)
    assert batch.held == Held(2, "reserved")  # 6 blocks are free, but reserved for other requests
    assert [i for i, _ in batch.scheduled] == [0, 1]
    step(made, 0)
    assert (2, 4) in step(made).scheduled


def test_blocked_head_stops_admission() -> None:
    made = engine([12, 28, 4], most=4)
    assert step(made).scheduled == [(0, 12)]
    assert made.waiting_ids() == [1, 2]


def test_max_utilization_pauses_last_started_request() -> None:
    made = engine([12, 12, 12], most=9, **MAX)
    assert step(made).scheduled == [(0, 12), (1, 12), (2, 12)]  # 9 of 10 blocks are in use
    batch = step(made)  # each request needs a block and one block is free, so request 2 is paused
    assert batch.preempted == [2]
    assert batch.causes == [(1, "blocks")]
    assert batch.scheduled == [(0, 1), (1, 1)]
    assert made.waiting_ids() == [2]
    for _ in range(8):
        assert not step(made, *((0, 1) if made.active[0].known == 21 else ())).preempted
        if 0 not in made.active:
            break
    assert (2, 13) in step(made).scheduled  # the prompt and the emitted token


def test_last_request_without_blocks_pauses_itself() -> None:
    made = engine([16, 20], most=8, max_tokens_in_paged_kv_cache=36, **MAX)
    assert step(made).scheduled == [(0, 16), (1, 20)]
    batch = step(made)
    assert batch.preempted == [1]
    assert batch.causes == [(0, "blocks")]


def test_static_batch_admits_none_while_requests_decode() -> None:
    made = engine([4], most=3, **STATIC)
    step(made)
    made.add(Prompt(1, 4, 3))
    batch = step(made)
    assert batch.scheduled == [(0, 1)]
    assert batch.held == Held(1, "rule")
    step(made, 0)
    assert step(made).scheduled == [(1, 4)]


def test_prompt_over_budget_blocks_decodes_behind_it() -> None:
    made = engine([4, 12, 4], most=9, max_num_tokens=13, **MAX)
    assert step(made).scheduled == [(0, 4)]  # request 1 exceeds the budget; request 2 would fit
    assert step(made).scheduled == [(1, 12), (0, 1)]
    batch = step(made)
    assert batch.scheduled == [(2, 4), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("policy", "chunks"),
    [
        # 12 of 17 tokens, followed by one block of the other 5 tokens
        ("FIRST_COME_FIRST_SERVED", [(0, 12), (1, 4)]),
        ("EQUAL_PROGRESS", [(0, 8), (1, 8)]),
    ],
)
def test_chunks_of_step_are_whole_blocks(policy: str, chunks: list[tuple[int, int]]) -> None:
    knobs = {"enable_chunked_prefill": True, "context_chunking_policy": policy}
    made = engine([12, 12], most=2, max_num_tokens=17, **knobs)
    batch = step(made)
    assert sorted(batch.scheduled) == chunks
    assert made.free_blocks == 4  # a prompt gets all its blocks with its first chunk
    if policy.startswith("FIRST"):
        assert [i for i, _ in batch.scheduled] == [1, 0]  # prompts whose prefill ends come last
        assert batch.emits == [0]


def test_paused_request_over_token_budget_crashes_engine() -> None:
    made = engine([8, 8], most=20, max_tokens_in_paged_kv_cache=32, max_num_tokens=10, **MAX)
    batches = [step(made)]
    while not batches[-1].fatal:
        batches.append(step(made))
    assert [i for batch in batches for i in batch.preempted] == [1]
    tokens = 8 + sum(1 in batch.emits for batch in batches)
    assert batches[-1].fatal == (
        f"raised AssertionError: Context tokens ({tokens}) exceeds limit (10)"
    )


def test_last_token_during_pause_is_recomputed() -> None:
    made = engine([4, 3], most=2, max_tokens_in_paged_kv_cache=8, **MAX)
    made.overlap, made.pipeline_depth = True, 2
    first = made.schedule()
    assert first.emits == [0, 1]
    # request 0 needs a block, so request 1 is paused while its token is in flight
    second = made.schedule()
    assert second.preempted == [1]
    done = made.complete(first, [1])
    assert (done.delivered, done.finished) == ([0], [])
    made.complete(second, [0])
    third = made.schedule()
    assert third.scheduled == [(1, 4)]  # the prompt and the last token
    assert made.complete(third, [1]).finished == [1]


def test_overlap_sees_length_limit_before_last_token() -> None:
    made = engine([4], most=2, disable_overlap_scheduler=False)
    first, second = made.schedule(), made.schedule()
    made.complete(first, [])
    assert [bool(batch) for batch in (first, second, made.schedule())] == [True, True, False]


def test_overlap_computes_one_step_after_stop_token() -> None:
    made = engine([4], most=9, disable_overlap_scheduler=False)
    first, second = made.schedule(), made.schedule()
    assert made.complete(first, [0]).finished == [0]
    assert made.complete(second, []).delivered == []
    assert made.free_blocks == made.num_blocks


def test_server_rejects_too_long_prompts() -> None:
    made = engine([17], max_num_tokens=16)
    assert made.schedule().refused[0].knob == "max_num_tokens"
    assert made.schedule().refused == {}
    long = engine([12], max_seq_len=12).schedule().refused[0]
    assert long.words == "`default_max_tokens` (0) must be greater than 0"
    assert engine([11], most=90, max_seq_len=12).queue[0].new == 1


def test_abort_is_applied_in_next_step_with_tokens() -> None:
    made = engine([4, 36], most=4, max_batch_size=1)
    step(made)
    made.abort(1)
    assert made.num_waiting == 1
    step(made)
    assert made.num_waiting == 0


@pytest.mark.parametrize(
    ("knobs", "word"),
    [
        ({"max_tokens_in_paged_kv_cache": 33}, "must be a multiple of tokens_per_block"),
        ({"max_tokens_in_paged_kv_cache": 1, "tokens_per_block": 1}, "must be at least 2"),
        (
            {"enable_chunked_prefill": True, "max_num_tokens": 9},
            "must be at least tokens_per_block",
        ),
    ],
)
def test_rejects_invalid_combinations(knobs: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        TrtllmConfig(**knobs)


def _paused_first(active: Any, cache: KvCache) -> capacity_scheduler.CapacityResult:
    """Pause the first of the blocked requests instead of the last."""
    found = capacity_scheduler.max_utilization(active, cache)
    started = [r for r in active if r.started and r not in found.fits]
    return found._replace(paused=[(r, None) for r in started[: len(found.paused)]])


def _unstopped(active: Any, cache: KvCache, *, static: bool) -> capacity_scheduler.CapacityResult:
    """Also try requests behind the first request that does not fit."""
    found, left = capacity_scheduler.no_evict(active, cache, static=static), cache.pool.free
    left -= sum(map(cache.blocks_to_completion, found.fits))
    for r in active:
        if r not in found.fits and found.why != "rule" and cache.blocks_to_completion(r) <= left:
            found.fits.append(r)
            left -= cache.blocks_to_completion(r)
    return found


def _no_rest(chunked: Any, left: int, config: TrtllmConfig) -> None:
    other = {"EQUAL_PROGRESS": "FIRST_COME_FIRST_SERVED"}
    policy: Any = other.get(config.context_chunking_policy, "EQUAL_PROGRESS")
    SHARE(chunked, left, replace(config, context_chunking_policy=policy))


SHARE = micro_batch_scheduler.share
#: Changed rules; for each, at least one committed recording must differ.
PLANTED: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("pauses the first request", scheduler, "max_utilization", _paused_first),
    ("blocked head does not stop the queue", scheduler, "no_evict", _unstopped),
    (
        "static batch admits requests",
        scheduler,
        "no_evict",
        lambda active, cache, static: capacity_scheduler.no_evict(active, cache, static=False),
    ),
    ("other chunking policy", micro_batch_scheduler, "share", _no_rest),
    (
        "later chunk needs blocks again",
        KvCache,
        "one_step",
        lambda cache, r: 1 if r.state == "context" else ONE_STEP(cache, r),
    ),
    (
        "pause discards emitted tokens",
        LlmRequest,
        "pause",
        lambda r: setattr(r, "known", r.prompt) or PAUSE(r),
    ),
    (
        "length limit is seen late",
        LlmRequest,
        "advance",
        lambda r, overlap: ADVANCE(r, overlap=False),
    ),
]
ONE_STEP, PAUSE, ADVANCE = KvCache.one_step, LlmRequest.pause, LlmRequest.advance


@pytest.mark.parametrize(
    ("owner", "name", "other"), [case[1:] for case in PLANTED], ids=[case[0] for case in PLANTED]
)
def test_changed_rule_differs_from_recordings(
    owner: Any, name: str, other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, other)
    assert any(_differs(recording) for recording in RECORDINGS)


def _differs(recording: Committed) -> bool:
    try:
        return check_trace(recording.trace()).difference is not None
    except Exception:  # the recording cannot be replayed
        return True
