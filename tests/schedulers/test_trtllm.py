"""Single rules of TensorRT-LLM's scheduler, on the smallest cases that tell them apart."""

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
    """Blocks of 4 tokens without overlap, and the given prompts, of up to ``most`` outputs each."""
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


def test_the_default_reserves_what_a_request_may_still_emit() -> None:
    made = engine([8, 8, 4], most=12)  # 5 blocks each of 10, then 4
    assert step(made).scheduled == [(0, 8), (1, 8)]
    batch = step(made)
    assert batch.held == Held(2, "reserved")  # 4 of 6 free ones are enough, but for others
    assert [i for i, _ in batch.scheduled] == [0, 1]
    step(made, 0)
    assert (2, 4) in step(made).scheduled


def test_the_first_that_does_not_fit_stops_all_behind_it() -> None:
    made = engine([12, 28, 4], most=4)
    assert step(made).scheduled == [(0, 12)]
    assert made.waiting_ids() == [1, 2]


def test_max_utilization_looks_at_this_step_and_pauses_the_last() -> None:
    made = engine([12, 12, 12], most=9, **MAX)
    assert step(made).scheduled == [(0, 12), (1, 12), (2, 12)]  # 9 of 10 blocks
    batch = step(made)  # each needs a block, one is there: 2 makes room
    assert batch.preempted == [2]
    assert batch.causes == [(1, "blocks")]
    assert batch.scheduled == [(0, 1), (1, 1)]
    assert made.waiting_ids() == [2]
    for _ in range(8):
        assert not step(made, *((0, 1) if made.active[0].known == 21 else ())).preempted
        if 0 not in made.active:
            break
    assert (2, 13) in step(made).scheduled  # its prompt and the token that it had


def test_one_that_lacks_blocks_itself_is_paused_when_it_is_the_last() -> None:
    made = engine([16, 20], most=8, max_tokens_in_paged_kv_cache=36, **MAX)
    assert step(made).scheduled == [(0, 16), (1, 20)]
    batch = step(made)
    assert batch.preempted == [1]
    assert batch.causes == [(0, "blocks")]


def test_a_static_batch_lets_nobody_in_while_anybody_decodes() -> None:
    made = engine([4], most=3, **STATIC)
    step(made)
    made.add(Prompt(1, 4, 3))
    batch = step(made)
    assert batch.scheduled == [(0, 1)]
    assert batch.held == Held(1, "rule")
    step(made, 0)
    assert step(made).scheduled == [(1, 4)]


def test_a_prompt_that_is_too_much_ends_the_step_for_decodes_behind_it() -> None:
    made = engine([4, 12, 4], most=9, max_num_tokens=13, **MAX)
    assert step(made).scheduled == [(0, 4)]  # 1 is too much, and 2 would have fitted
    assert step(made).scheduled == [(1, 12), (0, 1)]
    batch = step(made)
    assert batch.scheduled == [(2, 4), (0, 1), (1, 1)]


@pytest.mark.parametrize(
    ("policy", "chunks"),
    [
        ("FIRST_COME_FIRST_SERVED", [(0, 12), (1, 4)]),  # of 17 the first 12, of 5 one block
        ("EQUAL_PROGRESS", [(0, 8), (1, 8)]),
    ],
)
def test_prompts_share_a_step_in_whole_blocks(policy: str, chunks: list[tuple[int, int]]) -> None:
    knobs = {"enable_chunked_prefill": True, "context_chunking_policy": policy}
    made = engine([12, 12], most=2, max_num_tokens=17, **knobs)
    batch = step(made)
    assert sorted(batch.scheduled) == chunks
    assert made.free_blocks == 4  # all blocks of a prompt are taken with its first chunk
    if policy.startswith("FIRST"):
        assert [i for i, _ in batch.scheduled] == [1, 0]  # those that are done come last
        assert batch.emits == [0]


def test_a_paused_request_that_no_step_takes_kills_the_engine() -> None:
    made = engine([8, 8], most=20, max_tokens_in_paged_kv_cache=32, max_num_tokens=10, **MAX)
    batches = [step(made)]
    while not batches[-1].fatal:
        batches.append(step(made))
    assert [i for batch in batches for i in batch.preempted] == [1]
    tokens = 8 + sum(1 in batch.emits for batch in batches)
    assert batches[-1].fatal == (
        f"raised AssertionError: Context tokens ({tokens}) exceeds limit (10)"
    )


def test_a_last_token_that_comes_with_a_pause_is_computed_again() -> None:
    made = engine([4, 3], most=2, max_tokens_in_paged_kv_cache=8, **MAX)
    made.overlap, made.pipeline_depth = True, 2
    first = made.schedule()
    assert first.emits == [0, 1]
    second = made.schedule()  # 0 needs a block: 1, whose token is not known yet, is paused
    assert second.preempted == [1]
    done = made.complete(first, [1])
    assert (done.delivered, done.finished) == ([0], [])
    made.complete(second, [0])
    third = made.schedule()
    assert third.scheduled == [(1, 4)]  # what it was and its last token
    assert made.complete(third, [1]).finished == [1]


def test_with_overlap_a_client_s_limit_is_seen_before_its_last_token_comes() -> None:
    made = engine([4], most=2, disable_overlap_scheduler=False)
    first, second = made.schedule(), made.schedule()
    made.complete(first, [])
    assert [bool(batch) for batch in (first, second, made.schedule())] == [True, True, False]


def test_one_that_ends_by_itself_has_a_step_too_much_with_overlap() -> None:
    made = engine([4], most=9, disable_overlap_scheduler=False)
    first, second = made.schedule(), made.schedule()
    assert made.complete(first, [0]).finished == [0]
    assert made.complete(second, []).delivered == []
    assert made.free_blocks == made.num_blocks


def test_what_the_server_turns_away() -> None:
    made = engine([17], max_num_tokens=16)
    assert made.schedule().refused[0].knob == "max_num_tokens"
    assert made.schedule().refused == {}
    long = engine([12], max_seq_len=12).schedule().refused[0]
    assert long.words == "`default_max_tokens` (0) must be greater than 0"
    assert engine([11], most=90, max_seq_len=12).queue[0].new == 1


def test_a_client_that_left_is_heeded_when_there_are_tokens() -> None:
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
        ({"max_tokens_in_paged_kv_cache": 1, "tokens_per_block": 1}, "use 2 or more"),
        (
            {"enable_chunked_prefill": True, "max_num_tokens": 9},
            "must be at least tokens_per_block",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(knobs: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        TrtllmConfig(**knobs)


def _paused_first(active: Any, cache: KvCache) -> capacity_scheduler.CapacityResult:
    """Pauses the first of those behind in place of the last."""
    found = capacity_scheduler.max_utilization(active, cache)
    started = [r for r in active if r.started and r not in found.fits]
    return found._replace(paused=[(r, None) for r in started[: len(found.paused)]])


def _unstopped(active: Any, cache: KvCache, *, static: bool) -> capacity_scheduler.CapacityResult:
    """Looks behind the first that does not fit."""
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
#: What is changed, and into what: some committed recording must differ.
PLANTED: list[tuple[str, Any, str, Callable[..., Any]]] = [
    ("the first is paused", scheduler, "max_utilization", _paused_first),
    ("nobody stops the queue", scheduler, "no_evict", _unstopped),
    (
        "static is not",
        scheduler,
        "no_evict",
        lambda active, cache, static: capacity_scheduler.no_evict(active, cache, static=False),
    ),
    ("chunks the other way", micro_batch_scheduler, "share", _no_rest),
    (
        "a chunk needs its blocks again",
        KvCache,
        "one_step",
        lambda cache, r: 1 if r.state == "context" else ONE_STEP(cache, r),
    ),
    ("a pause forgets", LlmRequest, "pause", lambda r: setattr(r, "known", r.prompt) or PAUSE(r)),
    (
        "the limit is not foreseen",
        LlmRequest,
        "advance",
        lambda r, overlap: ADVANCE(r, overlap=False),
    ),
]
ONE_STEP, PAUSE, ADVANCE = KvCache.one_step, LlmRequest.pause, LlmRequest.advance


@pytest.mark.parametrize(
    ("owner", "name", "other"), [case[1:] for case in PLANTED], ids=[case[0] for case in PLANTED]
)
def test_a_changed_rule_shows_in_a_committed_recording(
    owner: Any, name: str, other: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, other)
    assert any(_differs(recording) for recording in RECORDINGS)


def _differs(recording: Committed) -> bool:
    try:
        return check_trace(recording.trace()).difference is not None
    except Exception:  # it cannot even be replayed
        return True
