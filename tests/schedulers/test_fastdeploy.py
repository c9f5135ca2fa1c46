"""Tests of FastDeploy's schedulers; each rule is tested on the smallest case that depends on it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from pydantic import TypeAdapter

from simkv.conformance.tick_replay import replay_ticks
from simkv.core.request import Prompt
from simkv.schedulers.fastdeploy.config import VARIANTS, FastDeployConfig
from simkv.schedulers.fastdeploy.fixed_reserve import FixedReserve
from simkv.schedulers.fastdeploy.scheduler import FastDeployScheduler, build_actors
from simkv.schedulers.fastdeploy.spec import FASTDEPLOY
from simkv.schedulers.fastdeploy.worker import FastDeployWorker, TaskBatch, WorkerTask


def engine(variant: str, prompts: list[int], **knobs: Any) -> FastDeployScheduler:
    """Build an engine with blocks of 4 tokens, one block per growth, and the given prompts."""
    small = {"block_size": 4, "max_num_batched_tokens": 16, "enc_dec_block_num": 1}
    small |= {"prealloc_dec_block_slot_num_threshold": 0, "max_num_seqs": 4}
    scheduler = FastDeployScheduler(
        TypeAdapter(FastDeployConfig).validate_python({"variant": variant, **small, **knobs})
    )
    for i, tokens in enumerate(prompts):
        scheduler.add(Prompt(i, tokens, max_tokens=100))
    return scheduler


def step(scheduler: FastDeployScheduler, ended: tuple[int, ...] = ()) -> list[tuple[str, int]]:
    """Run one step and return its tasks."""
    scheduler.complete(scheduler.schedule(), ended)
    return [(task.kind, task.id) for task in scheduler.tasks]


NO_RATIO = {"init_new_token_ratio": 0.0, "min_new_token_ratio": 0.0}


@pytest.mark.parametrize(
    ("variant", "victim"),
    [("fixed-reserve", 2), ("fixed-reserve-full-need", 2), ("decode-only-preempt", 1)],
)
def test_victim_is_last_running_request_or_last_decode(variant: str, victim: int) -> None:
    scheduler = engine(variant, [4, 7, 100], num_blocks=5, **NO_RATIO)
    step(scheduler)
    assert scheduler.running_ids() == [0, 1, 2]
    # request 0 needs a block; request 2 is still in its prefill
    assert scheduler.schedule().preempted == [victim]


def test_chunk_without_blocks_preempts_itself_only_in_fixed_reserve() -> None:
    knobs = {"num_blocks": 3, "max_num_batched_tokens": 8}
    fixed = engine("fixed-reserve", [4, 20], **knobs)
    merged = engine("decode-only-preempt", [4, 20], **knobs, **NO_RATIO)
    assert step(fixed) == step(merged) == [("prefill", 0), ("prefill", 1)]
    assert step(fixed) == [("decode", 0), ("preempt", 1)]
    assert step(merged) == [("decode", 0)]


def test_ratio_preempts_fewest_outputs_then_longest_prompt() -> None:
    knobs = {"num_blocks": 4, "clip_max_new_tokens_estimation": 1}
    scheduler = engine("ratio", [8, 4], **knobs)
    step(scheduler)
    assert step(scheduler) == [("decode", 0), ("preempt", 0), ("decode", 1)]


def test_self_preemption_is_never_acknowledged_by_faithful_worker() -> None:
    knobs = {"num_blocks": 4, "clip_max_new_tokens_estimation": 1}
    for variant, pending in (("ratio", []), ("ratio-worker-faithful", [1])):
        scheduler = engine(variant, [4, 8], **knobs)
        step(scheduler)
        assert step(scheduler) == [("decode", 0), ("preempt", 1), ("decode", 1)]
        assert scheduler.pending_ids() == pending
        assert scheduler.blocks_held()[1] == 1


def test_fixed_reserve_requeues_at_head_and_ratio_at_tail() -> None:
    fixed = engine("fixed-reserve", [4, 7, 100], num_blocks=5)
    ratio = engine("ratio", [8, 4], num_blocks=4, clip_max_new_tokens_estimation=1)
    for scheduler, queue in ((fixed, [2, 9]), (ratio, [9, 0])):
        step(scheduler)
        batch = scheduler.schedule()
        scheduler.add(Prompt(9, 1, 1))
        scheduler.complete(batch, ())
        assert scheduler.waiting_ids() == queue


def test_reserve_reaches_zero_after_600_calls_with_tasks() -> None:
    manager = build_actors(FastDeployConfig())[0]
    assert isinstance(manager, FixedReserve)
    assert manager.relaxed  # no reserve until the first preemption
    manager._reset_reserve()
    for _ in range(599):
        manager._decay()
    assert (manager.reserve, manager.relaxed) == (1, False)
    manager._decay()
    assert (manager.reserve, manager.relaxed) == (0, True)


def test_reserve_applies_to_chunk_or_to_whole_prefill() -> None:
    # 4 blocks are free, one request runs; the chunk lacks 2 blocks, the whole prefill 5.
    for variant, reserve, admitted in (
        ("fixed-reserve", 2, True),
        ("fixed-reserve", 3, False),
        ("fixed-reserve-full-need", None, True),  # no reserve before the first preemption
        ("fixed-reserve-full-need", 0, False),
    ):
        scheduler = engine(
            variant, [4], num_blocks=6, max_num_batched_tokens=9, reserve_init=reserve or 0
        )
        step(scheduler)
        scheduler.add(Prompt(1, 20, 100))
        assert isinstance(scheduler.manager, FixedReserve)
        if reserve is not None:
            scheduler.manager._reset_reserve()
        assert step(scheduler) == [("decode", 0)] + [("prefill", 1)] * admitted


def test_ratio_holds_one_unfinished_prefill_outside_running() -> None:
    scheduler = engine("ratio", [20, 20], num_blocks=100, chunked_prefill_size=8)
    for _ in range(2):
        batch = scheduler.schedule()
        assert batch.scheduled == [(0, 8)]
        assert (scheduler.active_id(), scheduler.running_ids()) == (0, [])
        assert scheduler.waiting_ids() == [1]
        scheduler.complete(batch, ())
    assert scheduler.schedule().scheduled == [(0, 4), (1, 4)]
    assert (scheduler.active_id(), scheduler.running_ids()) == (1, [0])


def test_ratio_prefill_blocks_growth_of_decodes_but_not_decodes() -> None:
    scheduler = engine("ratio", [4, 5], num_blocks=100)
    step(scheduler)
    scheduler.add(Prompt(2, 4, 100))
    batch = scheduler.schedule()
    assert [task.kind for task in scheduler.tasks] == ["prefill"]
    assert batch.scheduled == [(2, 4), (1, 1)]
    assert scheduler.stalled == [0]  # at a block boundary
    scheduler.complete(batch, ())
    assert step(scheduler) == [("decode", 0), ("decode", 1), ("decode", 2)]
    assert scheduler.stalled == []


def test_slot_overrun_leaves_request_running_without_slot() -> None:
    # The preemption of request 0 is not acknowledged yet, so this request still holds the only
    # slot.
    config = FastDeployConfig(block_size=4, num_blocks=2, max_num_seqs=1, reserve_init=0)
    manager, _, processor = build_actors(config)
    manager.add(Prompt(0, 4, 100))
    manager.put(manager.schedule())
    processor.receive([1])
    assert [task.kind for task in manager.schedule()] == ["preempt"]
    manager.add(Prompt(1, 4, 100))
    assert manager.schedule() == []
    assert [(seq.id, seq.slot, seq.computed) for seq in manager.running] == [(1, None, 4)]
    assert manager.pool.free == 1


def minimal(variant: str, lag: int) -> list[dict[str, Any]]:
    """Replay the smallest race of PR #5796: the -1 of a chunk arrives after the preemption of the
    request.
    """
    config = {"block_size": 4, "num_blocks": 7, "max_num_seqs": 2, "max_num_batched_tokens": 8}
    config |= {"enc_dec_block_num": 2, "prealloc_dec_block_slot_num_threshold": 2}
    sizes = [(6, 4), (11, 2)]
    names = ("id", "arrival_step", "prompt_tokens", "output_tokens", "max_tokens")
    header = {
        "variant": variant,
        "config": config | {"reserve_init": 0},
        "requests": [
            dict(zip(names, (i, 0, p, n, n), strict=True)) for i, (p, n) in enumerate(sizes)
        ],
        "delays": {
            "tp_lag": lag,
            "messages_processed_between_schedule_and_put": 0,
            "idle_worker_sends_ack": True,
        },
    }
    return list(replay_ticks(FASTDEPLOY, header, 0))


def test_minus1_hangs_at_lag_2_and_sentinel_does_not() -> None:
    *lines, end = minimal("preempt-sync-minus1", 2)
    assert end["ending"] == "stall"
    assert ["ack", 1, "early", "msg1"] in [event for line in lines for event in line["events"]]
    assert lines[-1]["running"] == [1]
    for variant, lag in [
        ("preempt-sync-minus1", 1),
        *(("preempt-sync-sentinel", n) for n in range(5)),
    ]:
        lines = minimal(variant, lag)
        assert "truncated" not in lines[-1]
        assert ["ack", 1, "true", "msg3"] in [event for line in lines for event in line["events"]]


def test_minus1_repeats_a_token_at_lag_3() -> None:
    for variant, times in (("preempt-sync-minus1", 2), ("preempt-sync-sentinel", 1)):
        slot1 = [line["emitted"][1] for line in minimal(variant, 3) if line["emitted"]]
        assert slot1.count(1001) == times


def test_decode_task_after_preempt_task_clears_flag() -> None:
    prefill = WorkerTask("prefill", 7, 0, 0, 4, prompt_tokens=4, length=4, blocks=2)
    preempt, decode = prefill._replace(kind="preempt"), prefill._replace(kind="decode")
    for tasks, message in (([preempt], [-9]), ([preempt, decode], [-1]), ([decode, preempt], [-9])):
        worker = FastDeployWorker(4)
        worker.take(TaskBatch([prefill], 1))
        assert worker.step(lambda *_: False) == [1]
        worker.take(TaskBatch(tasks, 1))
        assert worker.step(lambda *_: False) == message
        assert worker.step(lambda *_: False) is None


def test_stalled_slot_resumes_when_it_gets_block() -> None:
    prefill = WorkerTask("prefill", 7, 0, 0, 4, prompt_tokens=4, length=4, blocks=1)
    worker = FastDeployWorker(4)
    worker.take(TaskBatch([prefill], 1))
    assert worker.step(lambda *_: False) == [1]
    assert worker.stalled() == [7]
    assert worker.step(lambda *_: False) is None
    worker.take(TaskBatch([prefill._replace(kind="decode", blocks=2)], 1))
    assert worker.step(lambda *_: True) == [0]


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_blocks_or_requests_are_lost(variant: str) -> None:
    random_ = random.Random(7)
    for _ in range(20):
        knobs = {"max_num_batched_tokens": 24, "init_new_token_ratio": 0.2, "reserve_init": 1}
        knobs["clip_max_new_tokens_estimation"] = 4
        scheduler = engine(variant, [], num_blocks=random_.randint(8, 14), **knobs)
        left = {i: random_.randint(1, 20) for i in range(8)}
        for i in left:
            scheduler.add(Prompt(i, random_.randint(1, 12), left[i]))
        seen = set()
        while left and (state := scheduler.fingerprint()) not in seen:
            seen.add(state)
            batch = scheduler.schedule()
            done = scheduler.complete(batch, {i for i in batch.emits if left[i] == 1})
            assert sorted(done.delivered) == sorted(batch.emits)
            for i in done.delivered:
                left[i] -= 1
            left = {i: n for i, n in left.items() if i not in done.finished}
            scheduler.manager.pool.check()
            held = sum(scheduler.blocks_held().values())
            assert held + scheduler.free_blocks == scheduler.num_blocks
            assert {seq.id for seq in scheduler.manager.alive()} == set(left)
        if variant != "ratio-worker-faithful":
            assert not left


def test_rejects_token_budget_below_number_of_slots() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens: 4 must be at least"):
        FastDeployConfig(max_num_batched_tokens=4, max_num_seqs=8)
