"""Tests of the vLLM scheduler; each rule is tested in a case small enough to follow by hand.

Blocks hold 4 tokens. Unless stated otherwise, 8 blocks are usable, a sequence has at most 32
tokens, and prefix caching and asynchronous scheduling are off.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import pytest

from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import Batch, Completion
from simkv.schedulers.vllm.admission import BACKLOG, BUSY, build_admission_check
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.scheduler import VllmScheduler

PLAIN: dict[str, Any] = {
    "block_size": 4,
    "num_gpu_blocks": 9,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 32,
    "enable_prefix_caching": False,
    "async_scheduling": False,
}


class Listing(VllmScheduler):
    """A scheduler whose batches list all rows, including the rows of the decode group."""

    def schedule(self) -> Batch:
        batch = super().schedule()
        rows = batch.rows()
        members = [row.id for row in rows if row.id not in dict(batch.scheduled)]
        shown = replace(
            batch,
            scheduled=[(row.id, row.tokens) for row in rows],
            context=[row.context for row in rows],
            emits=[row.id for row in rows if row.id in (*members, *batch.emits)],
        )
        self.__dict__.setdefault("shown", []).append((shown, batch))
        return shown

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        decided = next(real for shown, real in self.__dict__["shown"] if shown is batch)
        members = [i for i in batch.emits if i not in decided.emits and i in self._live]
        completion = super().complete(decided, ended)
        return Completion([*completion.delivered, *members], completion.finished)


def engine(prompts: Iterable[Prompt] = (), **knobs: Any) -> VllmScheduler:
    scheduler = Listing(VllmConfig(**PLAIN | knobs))
    for prompt in prompts:
        scheduler.add(prompt)
    return scheduler


def ask(i: int, tokens: int, max_tokens: int = 20, priority: int = 0, at: float = 0.0) -> Prompt:
    return Prompt(i, tokens, max_tokens, arrival=at, priority=priority)


def shared(i: int, tokens: int, common: int) -> Prompt:
    """Return a prompt whose first ``common`` tokens equal those of other such prompts."""
    own = Segment(f"u{i}", 0, tokens - common)
    return Prompt(i, tokens, 8, segments=(Segment("g", 0, common), own))


def step(scheduler: VllmScheduler, ended: Collection[int] = ()) -> Batch:
    """Schedule a step and process its results at once."""
    batch = scheduler.schedule()
    scheduler.complete(batch, ended)
    scheduler.pool.check()
    return batch


def steps(scheduler: VllmScheduler, count: int) -> list[Batch]:
    return [step(scheduler) for _ in range(count)]


# Limits


def test_null_block_is_not_usable() -> None:
    assert engine().num_blocks == engine().free_blocks == 8
    with pytest.raises(ValueError, match="hold 32 tokens"):
        engine(max_model_len=33)


@pytest.mark.parametrize(
    "knobs",
    [
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 31, "enable_chunked_prefill": False},
        {"long_prefill_token_threshold": 33},
        {"max_num_active_seqs": 9},
    ],
)
def test_rejects_settings_that_vllm_rejects_at_start(knobs: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"must be at (least|most)"):
        engine(**knobs)


def test_prompt_without_room_for_output_is_ignored() -> None:
    scheduler = engine([ask(0, 32), ask(1, 31)])
    batch = step(scheduler)
    assert batch.ignored == [0]
    assert batch.scheduled == [(1, 31)]
    # the request ended with its first token, at max_model_len tokens
    assert scheduler.running_ids() == []
    assert step(scheduler).ignored == []


def test_request_ends_at_max_tokens_or_stop_token() -> None:
    scheduler = engine([ask(0, 4, max_tokens=2), ask(1, 4)])
    assert scheduler.complete(scheduler.schedule(), {1}) == Completion([0, 1], [1])
    assert scheduler.complete(scheduler.schedule(), ()) == Completion([0], [0])
    assert scheduler.free_blocks == 8


def test_step_kind_is_decode_for_emitted_tokens_only() -> None:
    scheduler = engine([ask(0, 1)])
    assert [b.kind for b in steps(scheduler, 2)] == ["prefill", "decode"]
    scheduler.add(ask(1, 1))
    assert step(scheduler).kind == "mixed"
    scheduler.abort(0)
    scheduler.abort(1)
    assert step(scheduler).kind == "idle"


def test_each_queue_limit_applies_without_the_other() -> None:
    assert build_admission_check(VllmConfig(**PLAIN)) is None
    requests = build_admission_check(VllmConfig(**PLAIN, max_num_queued_reqs=3))
    tokens = build_admission_check(VllmConfig(**PLAIN, max_num_queued_tokens=10))
    assert requests is not None
    assert tokens is not None
    assert [requests(unfinished, 99) for unfinished in (2, 3)] == [None, BUSY]
    assert [tokens(99, in_prefill) for in_prefill in (9, 10)] == [None, BACKLOG]


# Preemption


def test_fcfs_preempts_last_request_and_admits_none_in_that_step() -> None:
    scheduler = engine([ask(0, 16), ask(1, 16, priority=-1), ask(2, 4)])
    assert step(scheduler).scheduled == [(0, 16), (1, 16)]
    preempting = step(scheduler)
    assert preempting.preempted == [1]
    assert preempting.scheduled == [(0, 1)]
    assert scheduler.waiting_ids() == [1, 2]  # back at the front of the queue
    assert scheduler.free_blocks == 3  # enough blocks for request 2, which is behind the head
    assert step(scheduler).scheduled == [(0, 1)]


def test_victims_keep_their_order() -> None:
    scheduler = engine(
        [ask(0, 24), *(ask(i, 4) for i in (1, 2, 3, 4))],
        long_prefill_token_threshold=12,
        scheduler_reserve_full_isl=False,
    )
    step(scheduler)  # request 0 holds 3 blocks, and the others hold one each
    assert step(scheduler).preempted == [4, 3, 2]  # two blocks for the chunk, one for request 1
    assert scheduler.waiting_ids() == [2, 3, 4]


def test_preempted_request_recomputes_its_outputs() -> None:
    scheduler = engine([ask(0, 12), ask(1, 12)], long_prefill_token_threshold=12)
    while not (batch := step(scheduler)).preempted:
        pass
    assert batch.preempted == [1]
    assert scheduler.waiting.head().length == 17  # the prompt and 5 outputs
    assert scheduler.free_blocks == 3
    for _ in range(3):
        assert step(scheduler).scheduled == [(0, 1)]  # 12 tokens would fit, 17 do not
    scheduler.abort(0)
    batch = step(scheduler)
    assert (batch.scheduled, batch.kind, batch.emits) == ([(1, 17)], "prefill", [1])
    assert step(scheduler).scheduled == [(1, 1)]


@pytest.mark.parametrize(
    ("usable", "scheduled"),
    [
        # Request 2 is preempted for request 1; its token returns to the budget before request 2 is
        # scheduled.
        (7, [(1, 1), (2, 7)]),
        # preempted for request 2, whose chunk was already cut and is not extended
        (8, [(1, 1), (2, 6)]),
    ],
)
def test_priority_preempts_least_urgent_request_even_if_scheduled(
    usable: int, scheduled: list[tuple[int, int]]
) -> None:
    scheduler = engine(
        policy="priority",
        num_gpu_blocks=usable + 1,
        max_model_len=28,
        max_num_batched_tokens=8,
        scheduler_reserve_full_isl=False,
    )
    for prompt in (ask(0, 6, priority=9), ask(1, 7), ask(2, 24, priority=1)):
        scheduler.add(prompt)
        step(scheduler)
    batch = step(scheduler)
    assert batch.preempted == [0]
    assert batch.scheduled == scheduled
    assert scheduler.waiting_ids() == [0]


def test_priority_tie_preempts_first_in_running_order() -> None:
    prompts = [ask(0, 12, at=1.0), ask(1, 8, at=1.0), ask(2, 12, at=0.5)]
    scheduler = engine(prompts, policy="priority")
    assert step(scheduler).scheduled == [(2, 12), (0, 12), (1, 8)]
    assert step(scheduler).preempted == [0]


def test_step_continues_after_self_preemption() -> None:
    scheduler = engine(policy="priority")
    for prompt in (ask(0, 14, priority=1), ask(1, 15)):
        scheduler.add(prompt)
        step(scheduler)
    step(scheduler)  # both requests have filled 4 blocks
    batch = step(scheduler)
    assert (batch.preempted, batch.scheduled) == ([0], [(1, 1)])


def test_urgent_request_waits_at_head_without_preempting() -> None:
    scheduler = engine([ask(0, 16, priority=5), ask(1, 8, priority=5)], policy="priority")
    step(scheduler)
    waiting = (
        ask(2, 8, priority=1, at=1.0),
        ask(3, 12, priority=0, at=3.0),
        ask(4, 8, priority=1, at=1.0),
    )
    for prompt in waiting:
        scheduler.add(prompt)
    batch = step(scheduler)
    assert (batch.preempted, len(batch.scheduled)) == ([], 2)
    assert scheduler.waiting_ids() == [3, 2, 4]
    scheduler.abort(2)
    assert scheduler.waiting_ids() == [3, 4]


# Admission


def test_reserve_full_isl_requires_whole_sequence_to_fit() -> None:
    prompts = [ask(0, 16, max_tokens=1), ask(1, 20)]
    reserving = engine(prompts, max_num_batched_tokens=20)
    assert step(reserving).scheduled == [(0, 16)]
    eager = engine(prompts, max_num_batched_tokens=20, scheduler_reserve_full_isl=False)
    assert step(eager).scheduled == [(0, 16), (1, 4)]


def test_no_request_overtakes_blocked_head() -> None:
    scheduler = engine([ask(0, 16), ask(1, 20), ask(2, 4)])
    assert step(scheduler).scheduled == [(0, 16)]
    assert scheduler.waiting_ids() == [1, 2]


def test_prompt_waits_for_budget_without_chunked_prefill() -> None:
    prompts = [ask(0, 20), ask(1, 14)]
    knobs: dict[str, Any] = {"max_num_batched_tokens": 32, "num_gpu_blocks": 20}
    assert step(engine(prompts, **knobs)).scheduled == [(0, 20), (1, 12)]
    assert step(engine(prompts, enable_chunked_prefill=False, **knobs)).scheduled == [(0, 20)]
    prompts = [ask(0, 20), ask(1, 20)]
    capped = engine(prompts, enable_chunked_prefill=False, long_prefill_token_threshold=16, **knobs)
    assert step(capped).scheduled == [(0, 16), (1, 16)]  # only the capped 16 tokens must fit


def test_threshold_does_not_apply_to_only_request() -> None:
    knobs = {"long_prefill_token_threshold": 8}
    assert step(engine([ask(0, 20)], **knobs)).scheduled == [(0, 20)]
    scheduler = engine([ask(0, 20), ask(1, 4)], **knobs)
    assert step(scheduler).scheduled == [(0, 8), (1, 4)]
    assert step(scheduler).scheduled == [(0, 8), (1, 1)]


def test_adaptive_threshold_is_at_least_equal_share() -> None:
    knobs: dict[str, Any] = {
        "long_prefill_token_threshold": 4,
        "long_prefill_token_threshold_adaptive": True,
        "max_num_batched_tokens": 20,
        "max_num_seqs": 2,
    }
    assert step(engine([ask(0, 20), ask(1, 8)], **knobs)).scheduled == [(0, 10), (1, 8)]


def test_watermark_counts_all_blocks_and_ignores_idle_engine() -> None:
    # 2 of 10 blocks, although 9 are usable
    knobs: dict[str, Any] = {"num_gpu_blocks": 10, "watermark": 0.2}
    assert step(engine([ask(0, 31)], **knobs, max_num_seqs=1)).scheduled == [(0, 31)]
    assert step(engine([ask(0, 16), ask(1, 12)], **knobs)).scheduled == [(0, 16), (1, 12)]
    assert step(engine([ask(0, 20), ask(1, 12)], **knobs)).scheduled == [(0, 20)]


def test_max_num_active_seqs_limits_running_requests() -> None:
    prompts = [ask(i, 4) for i in range(4)]
    assert len(step(engine(prompts, max_num_seqs=3)).scheduled) == 3
    assert len(step(engine(prompts, max_num_seqs=3, max_num_active_seqs=2)).scheduled) == 2


def test_last_requests_get_no_tokens_with_small_budget() -> None:
    scheduler = engine([ask(0, 4), ask(1, 4)], max_num_scheduled_tokens=4)
    assert [b.scheduled for b in steps(scheduler, 3)] == [
        [(0, 4)],
        [(0, 1), (1, 3)],
        [(0, 1), (1, 1)],
    ]
    narrow = engine([ask(0, 1), ask(1, 1)], max_num_scheduled_tokens=1)
    assert [b.scheduled for b in steps(narrow, 3)] == [[(0, 1)]] * 3


def test_prefill_interval_delays_prefills_while_requests_decode() -> None:
    scheduler = engine([ask(0, 4)], prefill_schedule_interval=3)
    step(scheduler)
    scheduler.add(ask(1, 6))
    batches = steps(scheduler, 3)
    assert [b.kind for b in batches] == ["decode", "decode", "mixed"]
    scheduler.add(ask(2, 1))  # a single token does not count as a prefill
    assert step(scheduler).scheduled == [(0, 1), (1, 1), (2, 1)]


def test_prefill_interval_delays_chunks() -> None:
    scheduler = engine(
        [ask(0, 4), ask(1, 20)], max_num_batched_tokens=8, prefill_schedule_interval=3
    )
    batches = steps(scheduler, 7)
    assert [b.scheduled for b in batches] == [
        [(0, 4), (1, 4)],
        [(0, 1)],
        [(0, 1)],
        [(0, 1), (1, 7)],
        [(0, 1)],
        [(0, 1)],
        [(0, 1), (1, 7)],
    ]
    assert [b.aside for b in batches[:4]] == [{}, {1: "rule"}, {1: "rule"}, {}]
    alone = engine([ask(0, 20)], max_num_batched_tokens=8, prefill_schedule_interval=3)
    assert [b.scheduled for b in steps(alone, 3)] == [[(0, 8)], [(0, 8)], [(0, 4)]]


def test_backlog_suspends_prefill_interval() -> None:
    scheduler = engine(
        [ask(0, 6), ask(1, 4)],
        enable_chunked_prefill=False,
        max_model_len=8,
        max_num_batched_tokens=8,
        prefill_schedule_interval=5,
    )
    assert step(scheduler).scheduled == [(0, 6)]
    assert step(scheduler).scheduled == [(0, 1), (1, 4)]


@pytest.mark.parametrize("leaps", [False, True])
def test_former_backlog_does_not_suspend_prefill_interval(leaps: bool) -> None:
    scheduler = engine([ask(0, 12), ask(1, 24)], prefill_schedule_interval=6)
    steps(scheduler, 2)  # too few blocks for the second request
    batch = scheduler.schedule()
    scheduler.abort(1)
    for _ in range(2):
        if leaps:
            scheduler.skip(1)
        else:
            scheduler.complete(batch, ())
            batch = scheduler.schedule()
    scheduler.complete(batch, ())
    scheduler.add(ask(2, 6))
    assert step(scheduler).scheduled == [(0, 1)]
    assert step(scheduler).scheduled == [(0, 1), (2, 6)]


@pytest.mark.parametrize("overlap", [False, True])
def test_leap_begins_after_first_decode(overlap: bool) -> None:
    scheduler = engine([ask(0, 4), ask(1, 5)], async_scheduling=overlap)
    batches = [scheduler.schedule(), scheduler.schedule()]
    scheduler.complete(batches[0], ())
    if not overlap:
        scheduler.complete(batches[1], ())
    assert batches[1].kind == "decode"
    assert scheduler.leap(9) == 9


# Prefix cache


def test_blocks_are_hits_in_step_that_computes_them() -> None:
    scheduler = engine([shared(0, 10, 8), shared(1, 11, 8)], enable_prefix_caching=True)
    batch = step(scheduler)
    assert batch.scheduled == [(0, 10), (1, 3)]
    assert batch.context == [0, 8]
    assert scheduler.blocks_held() == {0: 3, 1: 3}
    assert scheduler.free_blocks == 4  # two blocks are shared


def test_fully_cached_prompt_recomputes_last_block() -> None:
    scheduler = engine([shared(0, 8, 8)], enable_prefix_caching=True)
    step(scheduler, ended={0})
    scheduler.add(shared(1, 8, 8))
    assert step(scheduler).scheduled == [(1, 4)]


def test_hits_on_free_blocks_count_as_allocated() -> None:
    """Request 2 needs six blocks. Two of these are cached and free, and the rest of the prompt must
    fit, too.
    """
    knobs: dict[str, Any] = {"enable_prefix_caching": True, "scheduler_reserve_full_isl": False}
    scheduler = engine([shared(0, 9, 8)], **knobs)
    step(scheduler, ended={0})
    scheduler.add(ask(1, 12))
    step(scheduler)
    scheduler.add(shared(2, 24, 8))
    assert step(scheduler).scheduled == [(1, 1)]
    scheduler.abort(1)
    assert step(scheduler).scheduled == [(2, 16)]


def test_uncached_blocks_are_reused_first_and_tails_evicted_before_heads() -> None:
    scheduler = engine([shared(0, 14, 12)], enable_prefix_caching=True)
    step(scheduler, ended={0})
    scheduler.add(ask(1, 23))
    step(scheduler)
    assert list(scheduler.pool.tables[1]) == [
        4,
        5,
        6,
        7,
        8,
        3,
    ]
    scheduler.add(shared(2, 14, 12))
    scheduler.abort(1)
    assert step(scheduler).context == [8]


def test_output_blocks_are_cached_when_computed() -> None:
    scheduler = engine([ask(0, 6)], enable_prefix_caching=True)
    cached = []
    for _ in range(4):
        batch = scheduler.schedule()
        cached.append(scheduler.pool.cached)
        scheduler.complete(batch, ())
    assert cached == [1, 1, 2, 2]  # token 8 is emitted by step 1 and computed in step 2


def test_resumed_request_hits_its_remaining_blocks() -> None:
    scheduler = engine([ask(0, 12), ask(1, 12)], enable_prefix_caching=True)
    while not step(scheduler).preempted:
        pass
    scheduler.abort(0)  # request 0 had taken the last of the 4 blocks
    batch = step(scheduler)
    assert (batch.scheduled, batch.context) == ([(1, 5)], [12])
    assert scheduler.pool.cached == 7  # 3 hits, the 4th block recomputed, and 3 blocks of request 0


# Asynchronous scheduling


def test_async_skips_request_whose_last_token_is_in_flight() -> None:
    scheduler = engine([ask(0, 4, max_tokens=2), ask(1, 30, max_tokens=9)], async_scheduling=True)
    assert scheduler.pipeline_depth == 2
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert (first.scheduled, second.scheduled, third.scheduled) == ([(0, 4)], [(0, 1)], [])
    scheduler.complete(first, ())
    assert scheduler.complete(second, ()) == Completion([0], [0])


def test_async_delivers_token_in_flight_to_preempted_request() -> None:
    scheduler = engine([ask(0, 16), ask(1, 16, max_tokens=1)], async_scheduling=True)
    in_flight = scheduler.schedule()
    batch = scheduler.schedule()
    assert batch.preempted == [1]
    # Request 1 ends while it waits.
    assert scheduler.complete(in_flight, ()) == Completion([0, 1], [1])
    assert scheduler.waiting_ids() == []

    scheduler = engine([ask(0, 16), ask(1, 16), ask(2, 4)], async_scheduling=True)
    in_flight = scheduler.schedule()
    assert scheduler.schedule().preempted == [1]
    scheduler.abort(0)
    late = scheduler.schedule()
    # request 1 waits for its outdated token; request 2 is admitted
    assert late.scheduled == [(2, 4)]
    assert scheduler.waiting_ids() == [1]
    scheduler.complete(in_flight, ())
    again = scheduler.schedule()
    assert (again.scheduled, again.emits) == ([(2, 1), (1, 17)], [2, 1])
    assert scheduler.schedule().scheduled == [(2, 1), (1, 1)]


def test_async_drops_tokens_in_flight_of_ended_or_aborted_request() -> None:
    scheduler = engine([ask(0, 4), ask(1, 4)], async_scheduling=True)
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.abort(1)
    assert scheduler.free_blocks == 6
    assert scheduler.complete(first, {0}) == Completion([0], [0])
    assert scheduler.complete(second, ()) == Completion([], [])
    assert scheduler.free_blocks == 8


def test_async_caches_computed_blocks_of_ending_request() -> None:
    scheduler = engine([ask(0, 6, max_tokens=3)], enable_prefix_caching=True, async_scheduling=True)
    in_flight = [scheduler.schedule() for _ in range(2)]
    cached = []
    for _ in range(3):
        scheduler.complete(in_flight.pop(0), ())
        cached.append(scheduler.pool.cached)
        in_flight.append(scheduler.schedule())
    assert scheduler.running_ids() == []
    assert cached == [1, 1, 2]  # token 8 was computed, but no later step allocates a block for it


# Fingerprints


def test_fingerprint_repeats_only_if_engine_is_stalled() -> None:
    scheduler = engine([ask(0, 31)], max_num_scheduled_tokens=1)
    prints = []
    for _ in range(4):
        step(scheduler)
        prints.append(scheduler.fingerprint())
    assert len(set(prints)) == 4
    idle = engine(num_gpu_blocks=10)
    idle.pool.take(99, 9)  # these blocks are never freed
    idle.add(ask(1, 8))
    step(idle)
    before = idle.fingerprint()
    step(idle)
    assert idle.fingerprint() == before


# Kinds of steps


def test_recomputed_outputs_count_as_prefill() -> None:
    """With a threshold of 1, each step computes one token; only the newest token counts as a
    decode.
    """
    scheduler = engine([ask(0, 4), ask(1, 4)], long_prefill_token_threshold=1, max_num_seqs=2)
    while not (batch := step(scheduler)).preempted:
        pass
    assert batch.preempted == [1]
    step(scheduler, ended=[0])
    scheduler.add(ask(2, 20))
    kinds = []
    while not (batch := step(scheduler)).emits:
        kinds.append((batch.scheduled, batch.context[0] >= 4, batch.kind))
    both = [(1, 1), (2, 1)]
    assert (both, False, "prefill") in kinds
    assert {kind for scheduled, again, kind in kinds if again} == {"prefill"}
    assert (batch.scheduled[0], batch.kind) == (
        (1, 1),
        "decode" if len(batch.rows()) == 1 else "mixed",
    )
