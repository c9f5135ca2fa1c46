"""Tests of the SGLang scheduler; each test fails if the tested rule is inverted."""

import random
from collections.abc import Collection
from itertools import product
from typing import Any

import pytest

from simkv.core.block_keys import TokenContent
from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import Batch, Held
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.memory import Req, SglangMemory
from simkv.schedulers.sglang.scheduler import SglangScheduler


def engine(tokens: int, **knobs: Any) -> SglangScheduler:
    """Build an engine with the normal loop and without prefix cache, unless ``knobs`` set these."""
    plain = {"disable_radix_cache": True, "disable_overlap_schedule": True}
    return SglangScheduler(SglangConfig(max_total_num_tokens=tokens, **{**plain, **knobs}))


def step(scheduler: SglangScheduler, ended: Collection[int] = ()) -> Batch:
    batch = scheduler.schedule()
    scheduler.complete(batch, ended)
    return batch


def steps_until(scheduler: SglangScheduler, attribute: str) -> Batch:
    """Run steps until ``attribute`` of a batch is set; return that batch."""
    for _ in range(100):
        if getattr(batch := step(scheduler), attribute):
            return batch
    raise AssertionError(f"never {attribute}")


def ids(batch: Batch) -> list[int]:
    return [i for i, _ in batch.scheduled]


def shared(i: int, group: str, tokens: int, own: int, max_tokens: int = 1) -> Prompt:
    segments = (Segment(group, 0, tokens), Segment(f"u{i}", 0, own))
    return Prompt(i, tokens + own, max_tokens, segments=segments)


# ---------------------------------------------------------------------- arrival


def test_output_limit_is_clipped_to_pool() -> None:
    scheduler = engine(64, page_size=16)
    scheduler.add(Prompt(0, 20, 1000))
    assert scheduler.state.waiting[0].max_new == 64 - 32 - 16 - 1


@pytest.mark.parametrize(("overlap", "cached"), [(True, 6), (False, 5)])
def test_tokens_of_early_end_are_cached(overlap: bool, cached: int) -> None:
    scheduler = engine(40, disable_radix_cache=False, disable_overlap_schedule=not overlap)
    scheduler.add(Prompt(0, 4, 9))
    batches = [scheduler.schedule()]
    if overlap:
        batches.append(scheduler.schedule())
    scheduler.complete(batches[0], ())
    if not overlap:
        batches.append(scheduler.schedule())
    else:
        scheduler.schedule()
    scheduler.complete(batches[1], {0})  # the second token of this request is its last
    assert scheduler.state.memory.evictable == cached


def test_rejects_option_of_later_release() -> None:
    with pytest.raises(
        ValueError, match=r"^prefill_decode_interval_min_bs: SGLang 0\.5\.22 does not"
    ):
        engine(40, variant="0.5.22", prefill_decode_interval_min_bs=2)


@pytest.mark.parametrize(("variant", "admitted"), [("0.5.23", [1]), ("0.5.22", [])])
def test_finished_requests_leave_before_admission_since_0_5_23(
    variant: str, admitted: list[int]
) -> None:
    scheduler = engine(60, variant=variant, max_running_requests=2)
    for i in (0, 2):
        scheduler.add(Prompt(i, 4, 9))
    step(scheduler)
    scheduler.add(Prompt(1, 4, 9))
    step(scheduler, {0})
    assert [i for i in ids(step(scheduler)) if i == 1] == admitted


# ---------------------------------------------------------------------- admission


@pytest.mark.parametrize(("limit", "admitted"), [(5, [0]), (4, [0, 1])])
def test_candidate_must_leave_one_token_free(limit: int, admitted: list[int]) -> None:
    scheduler = engine(20)
    scheduler.add(Prompt(0, 5, 3))  # reserved: 5 + 3 tokens and a page; 11 remain
    scheduler.add(Prompt(1, 5, limit))  # needs 5 tokens, the limit and a page
    assert ids(step(scheduler)) == admitted


@pytest.mark.parametrize(
    ("ratio", "tokens", "admitted"),
    [(1, 14, False), (1, 13, True), (0.5, 22, False), (0.5, 21, True)],
)
def test_running_requests_reserve_share_of_remaining_output(
    ratio: float, tokens: int, admitted: bool
) -> None:
    scheduler = engine(40, init_new_token_ratio=ratio, min_new_token_ratio_factor=1)
    scheduler.add(Prompt(0, 5, 20))
    for _ in range(4):
        step(scheduler)
    # needs 2 more tokens; 32 are free, and 16 * ratio are reserved
    scheduler.add(Prompt(1, tokens, 1))
    assert ids(step(scheduler)) == [1 if admitted else 0]


@pytest.mark.parametrize(("tokens", "why"), [(14, "reserved"), (33, "blocks")])
def test_head_waits_for_reserved_or_for_used_memory(tokens: int, why: str) -> None:
    scheduler = engine(40, init_new_token_ratio=1, min_new_token_ratio_factor=1)
    scheduler.add(Prompt(0, 5, 20))
    for _ in range(4):
        step(scheduler)
    # 32 tokens are free; 16 of these are reserved for request 0
    scheduler.add(Prompt(1, tokens, 1))
    assert step(scheduler).held == Held(1, why)


def test_no_request_overtakes_blocked_head() -> None:
    scheduler = engine(40)
    scheduler.add(Prompt(0, 10, 5))
    scheduler.add(Prompt(1, 30, 5))
    scheduler.add(Prompt(2, 1, 1))
    assert ids(step(scheduler)) == [0]
    assert scheduler.waiting_ids() == [1, 2]


def test_full_batch_ignores_queue_until_request_leaves() -> None:
    scheduler = engine(40)
    scheduler.add(Prompt(0, 10, 5))
    scheduler.add(Prompt(1, 30, 5))
    step(scheduler)
    step(scheduler)  # the new running batch is marked full again
    scheduler.abort(1)
    scheduler.add(Prompt(2, 1, 1))
    assert ids(step(scheduler, ended=[0])) == [0]
    assert ids(step(scheduler)) == [2]


# ---------------------------------------------------------------------- chunks


def test_unfinished_prompt_continues_before_new_prompts() -> None:
    scheduler = engine(100, chunked_prefill_size=8)
    scheduler.add(Prompt(0, 10, 3))
    scheduler.add(Prompt(1, 7, 3))
    first = step(scheduler)
    assert (first.scheduled, first.emits) == ([(0, 8)], [])
    assert (scheduler.decode_ids(), scheduler.running_ids()) == ([], [0])
    second, third = step(scheduler), step(scheduler)
    assert (second.scheduled, second.context, second.emits) == ([(0, 2), (1, 6)], [8, 0], [0])
    assert third.scheduled == [(1, 1)]
    assert scheduler.running_ids() == [0, 1]


def test_unfinished_prompt_can_exhaust_memory() -> None:
    scheduler = engine(
        40,
        chunked_prefill_size=4,
        enable_mixed_chunk=True,
        schedule_conservativeness=0,
        clip_max_new_tokens_estimation=0,
    )
    scheduler.add(Prompt(0, 2, 30))
    step(scheduler)
    scheduler.add(Prompt(1, 33, 5))
    batch = step(scheduler)
    assert (batch.kind, batch.scheduled) == ("mixed", [(1, 3), (0, 1)])
    batch = steps_until(scheduler, "fatal")
    assert "out of memory" in (batch.fatal or "")
    assert ids(batch) == [1]


def test_mixed_batch_order_becomes_running_order() -> None:
    scheduler = engine(100, chunked_prefill_size=16, enable_mixed_chunk=True)
    scheduler.add(Prompt(0, 4, 9))
    scheduler.add(Prompt(1, 4, 9))
    step(scheduler)
    ratio = scheduler.state.ratio.current
    scheduler.add(Prompt(2, 4, 9))
    assert step(scheduler).kind == "mixed"
    assert scheduler.running_ids() == [2, 0, 1]
    assert scheduler.state.ratio.current == ratio


# ---------------------------------------------------------------------- prefix cache


def test_fully_cached_prompt_computes_one_token() -> None:
    scheduler = engine(100, disable_radix_cache=False)
    scheduler.add(shared(0, "g", 40, 0))
    scheduler.add(Prompt(1, 5, 5))
    step(scheduler)
    scheduler.add(shared(2, "g", 40, 0))
    batch = step(scheduler)
    assert (batch.scheduled, batch.context) == ([(2, 1)], [39])


def test_cached_outputs_can_be_evicted_without_prompt() -> None:
    memory = SglangMemory(100, page_size=1, prefix_cache=True)
    req = Req(
        0, 10, 6, False, TokenContent(Prompt(0, 10, 6)), out=5, end=15
    )  # as after a retraction
    memory.extend([req])
    memory.publish(req, 15)
    memory.release(req)
    assert (memory.free, memory.evictable) == (85, 15)
    assert memory.reclaim(86)
    assert memory.evictable == 10


def test_decode_step_evicts_page_for_every_row() -> None:
    scheduler = engine(36, page_size=4, disable_radix_cache=False)
    scheduler.add(Prompt(0, 16, 1))
    step(scheduler)
    scheduler.add(Prompt(1, 5, 2))
    scheduler.add(Prompt(2, 5, 2))
    step(scheduler)
    assert scheduler.state.memory.evictable == 16
    scheduler.schedule()
    assert scheduler.state.memory.evictable == 0


# ---------------------------------------------------------------------- retraction


def crowded(**knobs: Any) -> SglangScheduler:
    """Build an engine that reserves no output: three requests fit, the fourth waits."""
    scheduler = engine(42, clip_max_new_tokens_estimation=0, retract_decode_steps=2, **knobs)
    for i, tokens in enumerate((10, 12, 10, 30)):
        scheduler.add(Prompt(i, tokens, 20))
    return scheduler


def test_retraction_selects_fewest_outputs_first() -> None:
    scheduler = engine(42, clip_max_new_tokens_estimation=0)
    scheduler.add(Prompt(0, 14, 20))
    step(scheduler)
    step(scheduler)
    scheduler.add(Prompt(1, 10, 20))
    scheduler.add(Prompt(2, 10, 20))
    assert steps_until(scheduler, "preempted").preempted == [2]


def test_retraction_queues_longest_prompt_at_tail_among_equal_outputs() -> None:
    scheduler = crowded()
    assert ids(step(scheduler)) == [0, 1, 2]
    batch = steps_until(scheduler, "preempted")
    assert batch.preempted == [1]
    assert ids(batch) == [0, 2]  # the other requests decode in the same step
    assert scheduler.waiting_ids() == [3, 1]


def test_retraction_selects_last_among_equals_and_keeps_sort_order() -> None:
    scheduler = engine(42, clip_max_new_tokens_estimation=0)
    scheduler.add(Prompt(0, 14, 20))
    scheduler.add(Prompt(1, 10, 20))
    scheduler.add(Prompt(2, 10, 20))
    step(scheduler)
    assert steps_until(scheduler, "preempted").preempted == [0]
    assert scheduler.running_ids() == [1, 2]
    assert steps_until(scheduler, "preempted").preempted == [2]


def test_retraction_derives_ratio_from_remaining_requests() -> None:
    scheduler = crowded()
    ratios = []
    while not step(scheduler).preempted:
        ratios.append(scheduler.state.ratio.current)
    decay = (0.7 - 0.7 * 0.14) / 600
    # the prefill does not decrease the ratio
    assert ratios[:3] == [0.7, 0.7 - decay, 0.7 - decay - decay]
    emitted = len(ratios)  # decreased by each remaining request before this step
    assert scheduler.state.ratio.current == (2 * emitted + 2 * 2) / (2 * 20 + 1)


def test_retracted_request_recomputes_outputs_and_continues() -> None:
    scheduler = crowded()
    steps_until(scheduler, "preempted")
    victim = scheduler.state.waiting[-1]
    out = victim.out
    scheduler.abort(3)
    scheduler.abort(0)
    scheduler.abort(2)
    step(scheduler)
    batch = step(scheduler)
    assert batch.scheduled == [(1, 12 + out)]
    assert victim.out == out + 1


def test_idle_engine_resets_ratio() -> None:
    scheduler = engine(100)
    scheduler.add(Prompt(0, 4, 3))
    for _ in range(3):
        step(scheduler)
    assert scheduler.state.ratio.current < scheduler.state.ratio.init
    assert step(scheduler).kind == "idle"
    assert scheduler.state.ratio.current == scheduler.state.ratio.init


# ---------------------------------------------------------------------- queue order


def test_lpm_sorts_by_cached_prefix() -> None:
    scheduler = engine(400, disable_radix_cache=False, schedule_policy="lpm")
    scheduler.add(shared(0, "g", 40, 1))
    step(scheduler)
    scheduler.add(Prompt(1, 40, 1))
    scheduler.add(shared(2, "g", 40, 5))
    batch = step(scheduler)
    assert (batch.scheduled, batch.context) == ([(2, 5), (1, 40)], [40, 0])


@pytest.mark.parametrize(("tokens", "order"), [(32, [0, 2, 1]), (31, [0, 1, 2])])
def test_lpm_defers_request_with_common_prefix(tokens: int, order: list[int]) -> None:
    scheduler = engine(400, disable_radix_cache=False, schedule_policy="lpm")
    scheduler.add(shared(0, "g", tokens, 9))
    scheduler.add(shared(1, "g", tokens, 9))
    scheduler.add(Prompt(2, 40, 1))
    assert ids(step(scheduler)) == order


@pytest.mark.parametrize(("others", "first"), [(127, 128), (128, 1)])
def test_lpm_does_not_sort_long_queue(others: int, first: int) -> None:
    knobs = {"disable_radix_cache": False, "schedule_policy": "lpm", "prefill_max_requests": 1}
    scheduler = engine(4000, **knobs)
    scheduler.add(shared(0, "g", 40, 1))
    step(scheduler)
    for i in range(1, others + 1):
        scheduler.add(Prompt(i, 5, 1))
    scheduler.add(shared(others + 1, "g", 40, 5))
    assert ids(step(scheduler)) == [first]


def test_hrrn_divides_waiting_time_by_uncached_tokens() -> None:
    knobs = {"disable_radix_cache": False, "schedule_policy": "hrrn", "prefill_max_requests": 1}
    scheduler = engine(400, **knobs)
    for i, tokens in enumerate((20, 30, 5)):
        scheduler.add(Prompt(i, tokens, 1))
    assert [ids(step(scheduler)) for _ in range(3)] == [[0], [2], [1]]


def test_lpm_without_cache_equals_fcfs() -> None:
    scheduler = engine(400, schedule_policy="lpm")
    scheduler.add(shared(0, "g", 40, 1))
    scheduler.add(shared(1, "g", 40, 1))
    scheduler.add(Prompt(2, 40, 1))
    assert ids(step(scheduler)) == [0, 1, 2]


# ---------------------------------------------------------------------- loops


def test_decode_interval_defers_next_prefill() -> None:
    scheduler = engine(100, prefill_decode_interval=2)
    scheduler.add(Prompt(0, 4, 9))
    step(scheduler)
    scheduler.add(Prompt(1, 4, 9))
    assert [step(scheduler).kind for _ in range(4)] == ["decode", "decode", "prefill", "decode"]


def test_overlap_loop_schedules_stopped_request_once_more() -> None:
    scheduler = engine(100, disable_overlap_schedule=False)
    scheduler.add(Prompt(0, 4, 9))
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert scheduler.complete(first, [0]).finished == [0]
    assert ids(second) == [0]
    assert scheduler.schedule().kind == "idle"
    assert scheduler.complete(second, []).delivered == []
    assert scheduler.free_blocks == scheduler.num_blocks


def test_overlap_loop_skips_request_at_its_length_limit() -> None:
    scheduler = engine(100, disable_overlap_schedule=False)
    scheduler.add(Prompt(0, 4, 2))
    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.complete(first, [])
    assert scheduler.schedule().kind == "idle"
    assert scheduler.complete(second, []).finished == [0]


def test_aborted_request_frees_memory_without_output() -> None:
    scheduler = engine(100, chunked_prefill_size=8)
    scheduler.add(Prompt(0, 4, 9))
    scheduler.add(Prompt(1, 10, 9))
    step(scheduler)
    scheduler.abort(1)  # in the middle of its prompt
    assert scheduler.blocks_held() == {0: 4}
    scheduler.abort(0)
    batch = scheduler.schedule()
    assert ids(batch) == [0]
    completion = scheduler.complete(batch, [])
    assert (completion.delivered, completion.finished) == ([], [])
    assert scheduler.free_blocks == scheduler.num_blocks


def test_ignore_eos_request_larger_than_pool_waits_forever() -> None:
    scheduler = engine(80)
    scheduler.add(Prompt(0, 25, 1000, ignore_eos=True))
    scheduler.add(Prompt(1, 1, 1))
    before = scheduler.fingerprint()
    assert step(scheduler).kind == "idle"
    assert scheduler.fingerprint() == before


# ---------------------------------------------------------------------- configuration, invariants


@pytest.mark.parametrize("knob", ["max_total_num_tokens", "chunked_prefill_size"])
def test_rejects_pool_or_chunk_with_partial_page(knob: str) -> None:
    with pytest.raises(ValueError, match=f"{knob}.*must be a multiple of page_size"):
        SglangConfig(**{"max_total_num_tokens": 64, "page_size": 16, knob: 40})


@pytest.mark.parametrize(
    ("page", "no_cache", "no_overlap", "mixed"),
    [*product((1, 4), (False, True), (False, True), (False, True))],
)
def test_every_token_of_pool_has_one_owner(
    page: int, no_cache: bool, no_overlap: bool, mixed: bool
) -> None:
    rng = random.Random(page)
    scheduler = engine(
        160,
        page_size=page,
        disable_radix_cache=no_cache,
        disable_overlap_schedule=no_overlap,
        enable_mixed_chunk=mixed,
        chunked_prefill_size=16,
        schedule_policy="lpm",
        schedule_conservativeness=0,
        clip_max_new_tokens_estimation=8,
        retract_decode_steps=2,
    )
    left = {i: rng.randint(1, 30) for i in range(30)}
    for i in left:
        scheduler.add(shared(i, f"g{i % 3}", rng.randint(1, 30), rng.randint(1, 10), 30))
    before, retracted = Batch(), 0
    while left:
        batch = scheduler.schedule()
        assert batch.fatal is None
        before, done = (batch, batch) if no_overlap else (batch, before)
        completion = scheduler.complete(done, [i for i in done.emits if left.get(i, 0) <= 1])
        for i in completion.delivered:
            left[i] -= 1
        for i in completion.finished:
            assert left.pop(i) == 0
        retracted += len(batch.preempted)
        memory, admitted = scheduler.state.memory, scheduler.state.admitted.values()
        in_tree = sum(node.tokens for node in memory.tree.nodes()) if memory.tree else 0
        held = sum(memory.round_up(r.kv) - r.owned for r in admitted)
        assert memory.free + in_tree + held == 160
    assert retracted


# ---------------------------------------------------------------------- receiving


def _steps_until_received(interval: int, decodes: int, **knobs: Any) -> int:
    """Add a request after ``decodes`` decode steps; return the number of steps that ignore it."""
    scheduler = engine(1000, scheduler_recv_interval=interval, **knobs)
    scheduler.add(Prompt(0, 4, 500))
    passes = 0
    while not step(scheduler):
        passes += 1
    assert passes == interval - 1  # iterations without a batch count 1 each
    for _ in range(decodes):
        assert ids(step(scheduler)) == [0]
    scheduler.add(Prompt(1, 4, 500))
    assert scheduler.waiting_ids() == [1]
    passed = 0
    while ids(batch := step(scheduler)) == [0]:
        assert batch.held is not None
        assert batch.held == (1, "rule")
        passed += 1
    assert (ids(batch), batch.kind) == ([1], "prefill")
    return passed


def test_receive_interval_1_receives_in_every_step() -> None:
    assert [_steps_until_received(1, decodes) for decodes in range(3)] == [0, 0, 0]


def test_loop_receives_after_interval_or_after_prefill() -> None:
    """In recv_skipper.py, the iteration after a prefill has the weight 1000 and receives; a decode
    has the weight 1.
    """
    assert _steps_until_received(10, 0) == 0
    assert _steps_until_received(10, 1) == 9
    assert _steps_until_received(10, 10) == 0
    assert _steps_until_received(10, 14) == 6


def test_abort_waits_for_receive_interval() -> None:
    scheduler = engine(1000, scheduler_recv_interval=5)
    scheduler.add(Prompt(0, 4, 500))
    while not step(scheduler):
        pass
    step(scheduler)
    scheduler.abort(0)
    left = 0
    while ids(step(scheduler)) == [0]:
        left += 1
    assert left == 4 + 1  # four decodes, then the step that receives the abort
    assert scheduler.num_running == 0


def test_leap_ends_when_message_is_received() -> None:
    scheduler = engine(1000, scheduler_recv_interval=10)
    scheduler.add(Prompt(0, 4, 500))
    while not step(scheduler):
        pass
    step(scheduler)
    batch = scheduler.schedule()
    assert scheduler.leap(400) == 400
    scheduler.skip(15)  # receives nothing and restarts the counter
    scheduler.add(Prompt(1, 4, 500))
    assert scheduler.leap(400) - 1 == 10 - (1 + 15) % 10 - 1
    scheduler.skip(3)
    scheduler.complete(batch, ())
    assert ids(step(scheduler)) == [1]


# ---------------------------------------------------------------------- queue limit


def test_full_queue_rejects_new_requests() -> None:
    scheduler = engine(40, max_running_requests=1, max_queued_requests=2)
    for i in range(3):  # before any request is admitted
        scheduler.add(Prompt(i, 4, 4))
    batch = step(scheduler)
    assert list(batch.refused) == [2]
    assert batch.refused[2] == ("max_queued_requests", "The request queue is full.")
    assert scheduler.waiting_ids() == [1]
    scheduler.add(Prompt(3, 4, 4))
    scheduler.add(Prompt(4, 4, 4))
    assert list(step(scheduler).refused) == [4]
    scheduler.abort(4)
    assert not step(scheduler).refused


@pytest.mark.parametrize("overlap", [False, True])
def test_full_queue_rejects_retracted_requests(overlap: bool) -> None:
    scheduler = engine(
        30,
        clip_max_new_tokens_estimation=1,
        init_new_token_ratio=0,
        max_running_requests=2,
        max_queued_requests=2,
        disable_overlap_schedule=not overlap,
    )
    for i in (0, 1):
        scheduler.add(Prompt(i, 8, 20))
    flights = [scheduler.schedule()]
    for i in (2, 3):  # no rows are free for these requests
        scheduler.add(Prompt(i, 8, 20))
    while not flights[-1].refused:
        if len(flights) == scheduler.pipeline_depth:
            scheduler.complete(flights.pop(0), ())
        flights.append(scheduler.schedule())
    away = flights[-1]
    assert (list(away.refused), away.preempted, away.emits) == ([1], [1], [0])
    assert scheduler.waiting_ids() == [2, 3]
    while flights:  # the token in flight of request 1 is discarded
        assert scheduler.complete(flights.pop(0), ()).delivered == [0]
    assert 1 not in scheduler.blocks_held()


# ---------------------------------------------------------------------- priorities


def urgent(variant: str = "0.5.23", **knobs: Any) -> SglangScheduler:
    """Build an engine with one row, where request 0 runs with the lowest priority."""
    scheduler = engine(
        60,
        variant=variant,
        max_running_requests=1,
        enable_priority_scheduling=True,
        priority_scheduling_preemption_threshold=1,
        **knobs,
    )
    scheduler.add(Prompt(0, 4, 30, priority=1))
    step(scheduler)
    return scheduler


@pytest.mark.parametrize(("priority", "preempted"), [(2, []), (3, [0])])
def test_preempts_request_less_urgent_by_more_than_threshold(
    priority: int, preempted: list[int]
) -> None:
    scheduler = urgent()
    scheduler.add(Prompt(1, 4, 4, priority=priority))
    batch = step(scheduler)
    assert batch.preempted == preempted
    assert ids(batch) == ([1] if preempted else [0])


def test_smaller_priority_is_more_urgent_if_configured() -> None:
    scheduler = urgent(schedule_low_priority_values_first=True)
    scheduler.add(Prompt(1, 4, 4, priority=-1))
    assert step(scheduler).preempted == [0]


def test_priority_orders_queue_without_preemption() -> None:
    scheduler = urgent(disable_priority_preemption=True)
    for i, priority in ((1, 5), (2, 9)):
        scheduler.add(Prompt(i, 4, 4, priority=priority))
    assert ids(step(scheduler, ended=[0])) == [0]
    assert ids(step(scheduler)) == [2]


def test_admission_waits_for_minimum_number_of_free_rows() -> None:
    scheduler = engine(100, max_running_requests=3, min_free_slots_delay=2)
    for i in (0, 1):
        scheduler.add(Prompt(i, 4, 30))
    step(scheduler)
    scheduler.add(Prompt(2, 4, 30))
    assert ids(step(scheduler, ended=[0])) == [0, 1]
    assert ids(step(scheduler)) == [2]


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"schedule_policy": "lpm", "enable_priority_scheduling": True}, "use fcfs or lof"),
        ({"retraction_policy": "priority"}, "needs enable_priority_scheduling"),
        ({"variant": "0.5.15", "schedule_policy": "hrrn"}, "0.5.15 does not have 'hrrn'"),
    ],
)
def test_rejects_unsupported_queue_order(knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        engine(40, **knobs)
