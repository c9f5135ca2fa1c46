"""Tests of the mistral.rs scheduler; each rule is tested in a case small enough to follow by hand.

Blocks hold 4 tokens unless stated otherwise. The variant ``seed`` allocates a slot in advance: a
prompt of 4 tokens needs two blocks. The other variants reserve one block of ``num_gpu_blocks`` as a
null block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import Batch, Livelock
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.mistralrs.scheduler import BucketedScheduler
from simkv.schedulers.mistralrs.scheduler_base import MistralrsScheduler, SequenceState
from simkv.schedulers.mistralrs.spec import build
from simkv.schedulers.mistralrs.versions import RULES

KV_VARIANTS = sorted(RULES)
ALL = ["seed", *KV_VARIANTS]


def engine(variant: str, prompts: Iterable[Prompt] = (), **knobs: Any) -> MistralrsScheduler:
    config = MistralrsConfig(
        variant=variant,  # type: ignore[arg-type]
        **{"block_size": 4, "num_gpu_blocks": 101, "max_num_seqs": 16, **knobs},
    )
    scheduler = build(config)
    assert isinstance(scheduler, MistralrsScheduler)
    for prompt in prompts:
        scheduler.add(prompt)
    return scheduler


def ask(i: int, tokens: int, *, image: bool = False, at: float | None = None) -> Prompt:
    return Prompt(i, tokens, 50, arrival=float(i if at is None else at), has_images=image)


def step(scheduler: MistralrsScheduler, ended: Collection[int] = ()) -> Batch:
    batch = scheduler.schedule()
    assert batch.fatal is None
    scheduler.complete(batch, ended)
    return batch


def ids(batch: Batch) -> list[int]:
    return [i for i, _ in batch.scheduled]


def until_evicted(scheduler: MistralrsScheduler, most: int = 200) -> int:
    """Return the number of the first schedule call that preempts or ignores a sequence."""
    for call in range(1, most):
        try:
            batch = scheduler.schedule()
        except Livelock:
            return call
        if batch.preempted or batch.ignored:
            return call
        scheduler.complete(batch, ())
    raise AssertionError("no sequence was evicted")


def stuck(variant: str, head: int = 150, **knobs: Any) -> MistralrsScheduler:
    """Build an engine in which a sequence of 10 tokens runs, and a longer sequence at the head of
    the queue does not fit.

    Blocks hold 100 tokens and two are usable, so the running sequence needs no further block.
    """
    blocks = 2 if variant == "seed" else 3
    scheduler = engine(variant, [ask(0, 10)], block_size=100, num_gpu_blocks=blocks, **knobs)
    step(scheduler)
    scheduler.add(ask(1, head))
    return scheduler


# Admission


@pytest.mark.parametrize("variant", ALL)
def test_seed_runs_one_request_less_than_max_num_seqs(variant: str) -> None:
    scheduler = engine(variant, [ask(i, 4) for i in range(5)], max_num_seqs=3)
    assert ids(step(scheduler)) == ([0, 1] if variant == "seed" else [0, 1, 2])
    assert step(scheduler).kind == "decode"


def test_seed_admits_none_with_max_num_seqs_1() -> None:
    scheduler = engine("seed", [ask(0, 4)], max_num_seqs=1)
    for _ in range(100):
        batch = step(scheduler)
        assert (batch.kind, batch.scheduled, batch.ignored) == ("idle", [], [])
    assert scheduler.waiting_ids() == [0]


@pytest.mark.parametrize(("tokens", "seed", "others"), [(3, 1, 1), (4, 2, 1), (5, 2, 2), (8, 3, 2)])
def test_seed_counts_one_slot_ahead_at_admission(tokens: int, seed: int, others: int) -> None:
    for variant in ALL:
        scheduler = engine(variant, [ask(0, tokens)])
        scheduler.schedule()
        assert scheduler.blocks_held() == {0: seed if variant == "seed" else others}


@pytest.mark.parametrize("variant", ALL)
def test_all_variants_but_seed_keep_null_block(variant: str) -> None:
    scheduler = engine(variant, num_gpu_blocks=11)
    assert scheduler.num_blocks == scheduler.free_blocks == (11 if variant == "seed" else 10)


@pytest.mark.parametrize("variant", ALL)
def test_prefill_precedes_decode(variant: str) -> None:
    scheduler = engine(variant, [ask(0, 4)])
    step(scheduler)
    scheduler.add(ask(1, 4))
    assert ids(step(scheduler)) == [1]


def test_seed_prefills_unequal_prompts_together() -> None:
    scheduler = engine("seed", [ask(0, 8), ask(1, 4), ask(2, 6)])
    assert step(scheduler).scheduled == [(0, 8), (1, 4), (2, 6)]


@pytest.mark.parametrize("variant", ["bucketed", "merged2250", "pr2031", "pr2031a"])
def test_shortest_prompts_run_and_others_are_requeued(variant: str) -> None:
    scheduler = engine(variant, [ask(0, 8), ask(1, 4), ask(2, 8), ask(3, 12), ask(4, 4)])
    batch = step(scheduler)
    assert batch.scheduled == [(1, 4), (4, 4)]
    # order: by group in queue order; in a group, the last first, each to the front of the queue
    assert batch.preempted == [2, 0, 3]
    assert scheduler.waiting_ids() == [3, 0, 2]
    assert set(scheduler.blocks_held()) == {1, 4}


def test_pr2034_runs_prompts_of_oldest_length() -> None:
    scheduler = engine("pr2034", [ask(0, 8, at=5.0), ask(1, 4, at=9.0), ask(2, 8, at=3.0)])
    assert ids(step(scheduler)) == [0, 2]
    scheduler = engine("pr2034", [ask(0, 8, at=5.0), ask(1, 4, at=3.0), ask(2, 8, at=4.0)])
    assert ids(step(scheduler)) == [1]


def test_pr2034july_keeps_blocks_of_prompts_that_do_not_run() -> None:
    scheduler = engine("pr2034july", [ask(0, 8), ask(1, 8), ask(2, 4)])
    batch = step(scheduler)
    assert (batch.scheduled, batch.preempted) == ([(0, 8), (1, 8)], [])
    assert scheduler.waiting_ids() == []
    assert scheduler.running_ids() == [0, 1, 2]
    assert scheduler.blocks_held() == {0: 2, 1: 2, 2: 1}
    scheduler.add(ask(3, 4))
    # admitted prompts run before further admissions
    assert step(scheduler).scheduled == [(2, 4)]
    assert step(scheduler).scheduled == [(3, 4)]


@pytest.mark.parametrize("variant", ["seed", "bucketed", "pr2034"])
def test_prompt_of_other_modality_goes_to_end_of_queue(variant: str) -> None:
    prompts = [ask(0, 4), ask(1, 4, image=True), ask(2, 4), ask(3, 4)]
    scheduler = engine(variant, prompts, max_num_seqs=3)
    batch = step(scheduler)
    assert ids(batch) == ([0, 2] if variant == "seed" else [0, 2, 3])
    assert scheduler.waiting_ids() == ([3, 1] if variant == "seed" else [1])
    assert 1 not in scheduler.blocks_held()


def test_pr2034july_admits_both_modalities_and_runs_oldest() -> None:
    scheduler = engine("pr2034july", [ask(0, 4, image=True), ask(1, 4), ask(2, 4, image=True)])
    assert ids(step(scheduler)) == [0, 2]
    assert ids(step(scheduler)) == [1]


@pytest.mark.parametrize("variant", KV_VARIANTS)
def test_only_pr2034_limits_sequences_of_prefill(variant: str) -> None:
    scheduler = engine(variant, [ask(i, 4) for i in range(12)])
    assert len(ids(step(scheduler))) == (10 if variant == "pr2034" else 12)


def test_pr2034_limits_tokens_of_prefill_except_first_sequence() -> None:
    scheduler = engine("pr2034", [ask(i, 8) for i in range(4)], prefill_batch_max_tokens=16)
    assert ids(step(scheduler)) == [0, 1]
    scheduler = engine("pr2034", [ask(0, 40), ask(1, 8)], prefill_batch_max_tokens=16)
    assert ids(step(scheduler)) == [0]


def test_pr2034_counts_deferred_sequences_against_limit() -> None:
    prompts = [ask(0, 4), ask(1, 4, image=True), ask(2, 4)]
    scheduler = engine("pr2034", prompts, prefill_batch_max_seqs=2)
    assert ids(step(scheduler)) == [0]  # request 1 was deferred, but counts as the second request


# Decode: order, victims, unequal lengths


@pytest.mark.parametrize("variant", ALL)
def test_decodes_run_newest_or_oldest_first(variant: str) -> None:
    scheduler = engine(variant, [ask(i, 4, at=at) for i, at in enumerate([3.0, 1.0, 2.0])])
    step(scheduler)
    newest_first = variant in ("seed", "bucketed", "pr2031", "pr2031a")
    assert ids(step(scheduler)) == ([0, 2, 1] if newest_first else [1, 2, 0])


@pytest.mark.parametrize("variant", ["seed", *(v for v in KV_VARIANTS if v != "pr2034july")])
def test_decode_preempts_last_sequence_in_order(variant: str) -> None:
    # three prompts of 3 tokens in three blocks; each needs a second block after the prefill
    scheduler = engine(
        variant, [ask(i, 3) for i in range(3)], num_gpu_blocks=3 + (variant != "seed")
    )
    step(scheduler)
    batch = step(scheduler)
    oldest_first = variant in ("pr2034", "merged2250")
    assert batch.preempted == ([2, 1] if oldest_first else [0, 1])
    assert ids(batch) == ([0] if oldest_first else [2])
    assert scheduler.waiting_ids() == batch.preempted[::-1]


def test_pr2034july_preempts_newest_sequence() -> None:
    scheduler = engine("pr2034july", [ask(i, 4) for i in range(3)], num_gpu_blocks=5)
    step(scheduler)
    # no slot in advance: requests 0 and 1 get a second block, request 2 gets none
    batch = step(scheduler)
    assert (ids(batch), batch.preempted) == ([0, 1], [2])


@pytest.mark.parametrize("variant", ALL)
def test_sequence_without_other_victim_preempts_itself(variant: str) -> None:
    usable = 1 if variant == "seed" else 2
    scheduler = engine(variant, [ask(0, 3)], num_gpu_blocks=usable)
    step(scheduler)
    if variant == "pr2034july":  # needs the block one token later
        step(scheduler)
    batch = step(scheduler)
    assert (batch.kind, batch.preempted) == ("idle", [0])
    assert scheduler.waiting_ids() == [0]
    assert scheduler.free_blocks == 1


def test_sequence_handled_in_this_call_is_not_preempted() -> None:
    # request 0 is handled first and gets the last block; request 1 can preempt only itself
    scheduler = engine("merged2250", [ask(0, 3), ask(1, 3)], num_gpu_blocks=4)
    step(scheduler)
    batch = step(scheduler)
    assert (ids(batch), batch.preempted) == ([0], [1])


@pytest.mark.parametrize(
    ("variant", "tokens", "held"),
    [("seed", 7, 2), ("seed", 8, 3), ("bucketed", 7, 2), ("bucketed", 8, 3), ("pr2034july", 8, 3)],
)
def test_decode_allocates_one_slot_ahead(variant: str, tokens: int, held: int) -> None:
    scheduler = engine(variant, [ask(0, tokens - 1)])
    step(scheduler)  # the sequence is now ``tokens`` long
    assert scheduler.blocks_held()[0] == 2
    scheduler.schedule()
    july = variant == "pr2034july"
    assert scheduler.blocks_held()[0] == (2 if july else held)
    if july:
        scheduler.complete(scheduler._batch, ())
        scheduler.schedule()  # the sequence has nine tokens now
        assert scheduler.blocks_held()[0] == held


@pytest.mark.parametrize("variant", ["bucketed", "merged2250"])
def test_decodes_of_other_length_are_preempted(variant: str) -> None:
    scheduler = engine(variant, [ask(0, 4)])
    step(scheduler)
    scheduler.add(ask(1, 4))
    step(scheduler)  # requests 0 and 1 have five tokens each
    step(scheduler)
    scheduler.add(ask(2, 9))
    step(scheduler)
    batch = step(scheduler)
    assert sorted(ids(batch)) == [0, 1]
    assert batch.preempted == [2]
    assert 2 not in scheduler.blocks_held()
    # the victim keeps its tokens, prefills all of them and emits the next one
    again = step(scheduler)
    assert (again.kind, again.scheduled, again.context, again.emits) == (
        "prefill",
        [(2, 10)],
        [0],
        [2],
    )


def test_pr2031a_decodes_all_lengths_together() -> None:
    scheduler = engine("pr2031a", [ask(0, 4), ask(1, 6)])
    step(scheduler)
    step(scheduler)
    batch = step(scheduler)
    assert (ids(batch), batch.preempted) == ([1, 0], [])


def test_pr2031_keeps_kv_of_longer_sequences_that_wait() -> None:
    scheduler = engine("pr2031", [ask(0, 4), ask(1, 6)])
    step(scheduler)
    step(scheduler)
    for _ in range(2):
        batch = step(scheduler)
        assert (ids(batch), batch.preempted) == ([0], [])
        assert scheduler.running_ids() == [1, 0]  # the sequence that waits precedes the batch
        assert scheduler.blocks_held()[1] == 2
    assert ids(step(scheduler)) == [1, 0]


def test_pr2031_allocates_blocks_for_sequences_that_wait() -> None:
    scheduler = engine("pr2031", [ask(0, 4), ask(1, 7)])
    step(scheduler)
    step(scheduler)
    assert scheduler.blocks_held() == {0: 1, 1: 2}
    step(scheduler)  # request 1 has eight tokens and allocates for nine, although it does not run
    assert scheduler.blocks_held() == {0: 2, 1: 3}


def test_pr2034july_runs_length_of_oldest_sequence() -> None:
    scheduler = engine("pr2034july", [ask(0, 9), ask(1, 4), ask(2, 9)])
    step(scheduler)
    step(scheduler)
    for _ in range(5):
        batch = step(scheduler)
        assert (ids(batch), batch.preempted) == ([0, 2], [])
        assert scheduler.running_ids() == [0, 2, 1]
        assert scheduler.blocks_held()[1] == 1  # the sequence allocates no block
    step(scheduler, ended=[0, 2])
    assert ids(step(scheduler)) == [1]


@pytest.mark.parametrize("variant", ["bucketed", "merged2250"])
def test_six_unequal_requests_preempt_each_other_until_end(variant: str) -> None:
    scheduler = engine(variant, [ask(i, 20 + 3 * i) for i in range(6)], num_gpu_blocks=1001)
    left = dict.fromkeys(range(6), 50)
    kinds: list[str] = []
    preempted = 0
    while left:
        batch = scheduler.schedule()
        kinds.append(batch.kind)
        # sequences requeued at admission are also listed, but had computed nothing
        preempted += len(batch.preempted) if batch.kind == "decode" else 0
        done = scheduler.complete(batch, [i for i in batch.emits if left[i] == 1])
        for i in done.delivered:
            left[i] -= 1
        for i in done.finished:
            del left[i]
    assert (kinds.count("prefill"), kinds.count("decode")) == (251, 49)
    assert preempted == 245


# Modalities in decode


def both_modalities(variant: str) -> MistralrsScheduler:
    """Run a text, an image and a text sequence until each has five tokens."""
    scheduler = engine(variant, [ask(0, 4), ask(1, 4, image=True), ask(2, 4)])
    step(scheduler)
    step(scheduler)
    if variant not in ("pr2031a", "pr2034", "pr2034july"):
        return scheduler
    while scheduler.waiting:
        step(scheduler)
    return scheduler


@pytest.mark.parametrize("variant", ["seed", "bucketed", "merged2250", "pr2031"])
def test_mixed_modalities_in_decode_cause_livelock(variant: str) -> None:
    scheduler = both_modalities(variant)
    with pytest.raises(Livelock) as raised:
        scheduler.schedule()
    assert raised.value.cycle  # the sequences in the decode loop


def test_pr2031a_ignores_modality_in_decode() -> None:
    assert ids(step(both_modalities("pr2031a"))) == [2, 1, 0]


def test_pr2034_runs_both_modalities_with_first_one_first() -> None:
    assert ids(step(both_modalities("pr2034"))) == [0, 2, 1]


def test_pr2034july_runs_modality_of_oldest() -> None:
    scheduler = both_modalities("pr2034july")
    assert ids(step(scheduler)) == [0, 2]


def test_pr2034july_groups_by_length_and_modality() -> None:
    scheduler = both_modalities("pr2034july")
    for _ in range(3):
        assert ids(step(scheduler)) == [0, 2]
    assert scheduler.running_ids() == [0, 2, 1]


# Waiting timeout of the head


@pytest.mark.parametrize("variant", ALL)
def test_head_evicts_at_65th_failure_and_in_seed_at_66th(variant: str) -> None:
    assert until_evicted(stuck(variant)) == (66 if variant == "seed" else 65)


@pytest.mark.parametrize("variant", ALL)
def test_waiting_timeout_is_number_of_tolerated_failures(variant: str) -> None:
    assert until_evicted(stuck(variant, waiting_timeout=3)) == (5 if variant == "seed" else 4)


@pytest.mark.parametrize("variant", ALL)
def test_failures_are_not_counted_while_max_num_seqs_blocks_queue(variant: str) -> None:
    cap = 2 if variant == "seed" else 1
    scheduler = stuck(variant, waiting_timeout=3, max_num_seqs=cap)
    for _ in range(20):
        assert step(scheduler).kind == "decode"
    assert scheduler.waiting[0].failures == 0


@pytest.mark.parametrize("variant", ALL)
def test_admission_resets_failures_except_in_seed(variant: str) -> None:
    scheduler = stuck(variant)
    for _ in range(5):
        step(scheduler)
    waiting = scheduler.waiting[0]
    assert waiting.failures == 5
    step(scheduler, ended=[0])  # the sixth failure; afterwards, enough blocks are free
    assert ids(step(scheduler)) == [1]
    assert waiting.failures == (6 if variant == "seed" else 0)


def test_seed_pops_victim_instead_of_head_and_livelocks() -> None:
    scheduler = stuck("seed", waiting_timeout=0)
    step(scheduler)
    with pytest.raises(Livelock) as raised:
        scheduler.schedule()
    assert set(raised.value.cycle) >= {1}


def test_seed_leaks_first_block_table_of_head_allocated_twice() -> None:
    # Request 0 holds three of four blocks, and request 1 needs two. After the eviction, request 1
    # is allocated, but the victim is popped, so request 1 is allocated once more.
    scheduler = engine("seed", [ask(0, 250)], block_size=100, num_gpu_blocks=4, waiting_timeout=0)
    step(scheduler)
    scheduler.add(ask(1, 110))
    step(scheduler)
    batch = scheduler.schedule()
    assert ids(batch) == [0, 1]
    assert (scheduler.blocks_held(), scheduler.free_blocks) == ({1: 2}, 0)
    assert batch.fatal is not None
    assert batch.fatal.startswith("panic: sequence 0")


def test_shorter_victim_without_blocks_causes_panic() -> None:
    scheduler = stuck("bucketed", waiting_timeout=0)
    batch = scheduler.schedule()
    assert batch.preempted == [0, 1]  # the victim, then the head, which is longer than the victim
    assert (batch.kind, ids(batch)) == ("decode", [0])
    assert batch.fatal == "panic: sequence 0 is in a completion batch without blocks"


def test_longer_victim_is_requeued_without_error() -> None:
    scheduler = engine(
        "bucketed", [ask(0, 190)], block_size=100, num_gpu_blocks=3, waiting_timeout=0
    )
    step(scheduler)
    scheduler.add(ask(1, 20))
    batch = step(scheduler)
    assert batch.scheduled == [(1, 20)]
    assert batch.preempted == [0, 0]  # evicted, popped instead of the head, and requeued
    assert scheduler.waiting_ids() == [0]


def test_victim_admitted_in_same_call_is_scheduled_twice() -> None:
    prompts = [ask(0, 120), ask(1, 120)]
    scheduler = engine(
        "bucketed", prompts, block_size=100, num_gpu_blocks=4, waiting_timeout=0, max_num_seqs=4
    )
    # request 0 is admitted; request 1 does not fit and evicts request 0
    batch = scheduler.schedule()
    assert ids(batch) == [0, 0, 1]
    assert batch.fatal is not None
    assert batch.fatal.startswith("self-deadlock")


def test_head_that_never_fits_evicts_and_loses_all_running_sequences() -> None:
    prompts = [ask(i, 10) for i in range(3)]
    scheduler = engine("bucketed", prompts, block_size=100, num_gpu_blocks=4, waiting_timeout=2)
    step(scheduler)
    scheduler.add(ask(9, 1000))
    assert step(scheduler).kind == "decode"
    assert step(scheduler).kind == "decode"
    batch = scheduler.schedule()
    assert batch.preempted == [0, 1, 2]
    assert set(batch.ignored) == {9}
    # popped instead of the head; this request is now in no queue
    assert sorted(batch.lost) == [0, 1, 2]
    assert (scheduler.waiting_ids(), scheduler.running_ids()) == ([], [])
    assert scheduler.free_blocks == 3


def test_ignored_head_is_admitted_after_further_evictions() -> None:
    prompts = [ask(0, 10), ask(1, 10)]
    scheduler = engine("bucketed", prompts, block_size=100, num_gpu_blocks=3, waiting_timeout=0)
    step(scheduler)
    scheduler.add(ask(2, 150))
    batch = scheduler.schedule()
    assert batch.ignored == [2]
    assert batch.lost == [1]  # the first victim, popped instead of the ignored head
    # After the second eviction, the head was admitted and requeued.
    assert batch.preempted == [1, 0, 2]
    assert scheduler.waiting[0].state is SequenceState.WAITING


def test_pr2034_evicts_until_head_fits_and_bucketed_only_one() -> None:
    found = {}
    for variant in ("pr2034", "bucketed"):
        prompts = [ask(0, 10), ask(1, 10)]
        scheduler = engine(variant, prompts, block_size=100, num_gpu_blocks=3, waiting_timeout=3)
        step(scheduler)
        scheduler.add(ask(2, 150))
        for _ in range(3):
            step(scheduler)
        found[variant] = scheduler.schedule()
    assert (found["pr2034"].ignored, found["pr2034"].preempted) == ([], [1, 0])
    # the last victim is popped instead of the head and has no blocks
    assert found["pr2034"].fatal == "panic: sequence 0 is in a completion batch without blocks"
    assert found["bucketed"].ignored == [2]


def test_pr2034_ignores_head_when_no_sequence_is_left_to_evict() -> None:
    scheduler = engine("pr2034", [ask(0, 10)], block_size=100, num_gpu_blocks=3, waiting_timeout=0)
    step(scheduler)
    scheduler.add(ask(1, 1000))
    batch = scheduler.schedule()
    assert (batch.preempted, set(batch.ignored), batch.lost) == ([0], {1}, [0])
    assert scheduler.waiting_ids() == []


# Ignored requests


def test_seed_ignores_impossible_prompt_and_breaks_rest_of_call() -> None:
    scheduler = engine("seed", [ask(0, 100), ask(1, 4), ask(2, 4)], num_gpu_blocks=5)
    batch = step(scheduler)
    assert (batch.ignored, batch.scheduled) == ([0], [])
    # The request is in the running queue, but neither allocated nor scheduled.
    assert scheduler.running_ids() == [1, 2]
    assert scheduler.blocks_held() == {}
    assert {q.state for q in scheduler.running} == {SequenceState.WAITING}
    batch = scheduler.schedule()
    assert ids(batch) == [2, 1]
    assert batch.fatal == "panic: sequence 2 is in a completion batch without blocks"


def test_sequence_admitted_before_ignored_one_runs() -> None:
    scheduler = engine("seed", [ask(0, 3), ask(1, 100)], num_gpu_blocks=5)
    batch = step(scheduler)
    assert (batch.scheduled, batch.ignored) == ([(0, 3)], [1])
    assert scheduler.running_ids() == [0]


@pytest.mark.parametrize("variant", KV_VARIANTS)
def test_kv_variants_ignore_impossible_prompt_only_after_timeout(variant: str) -> None:
    scheduler = engine(variant, [ask(0, 100)], num_gpu_blocks=5)
    assert until_evicted(scheduler) == 65
    assert scheduler.waiting_ids() == []


@pytest.mark.parametrize("variant", ALL)
def test_aborted_request_is_still_served(variant: str) -> None:
    scheduler = engine(variant, [ask(0, 4), ask(1, 4)])
    step(scheduler)
    scheduler.abort(0)
    assert sorted(ids(step(scheduler))) == [0, 1]


@pytest.mark.parametrize("variant", ALL)
def test_finished_sequence_frees_all_blocks(variant: str) -> None:
    scheduler = engine(variant, [ask(0, 4), ask(1, 4)])
    step(scheduler)
    scheduler.complete(scheduler.schedule(), [0])
    assert scheduler.running_ids() == [1]
    assert set(scheduler.blocks_held()) == {1}
    scheduler.complete(scheduler.schedule(), [1])
    assert scheduler.free_blocks == scheduler.num_blocks


def test_queued_copy_of_finished_sequence_runs_without_output() -> None:
    # If a request is evicted in the call that admitted it, its queue entries are duplicated. Here,
    # request 3 ends while a copy of it still waits.
    prompts = [2, 5, 18, 3, 1, 1, 1, 1]
    left = dict(enumerate([3, 3, 3, 2, 1, 1, 1, 3]))
    scheduler = engine(
        "bucketed",
        [ask(i, tokens, at=0.0) for i, tokens in enumerate(prompts)],
        block_size=2,
        num_gpu_blocks=20,
        max_num_seqs=5,
        prefix_caching=True,
        waiting_timeout=0,
    )
    finished: list[int] = []
    for _ in range(10):
        batch = step_of(scheduler, left)
        finished += [i for i in batch.emits if left[i] <= 0]
    assert finished.count(3) == 2
    assert left[3] == 0  # the second run delivers no token


def step_of(scheduler: MistralrsScheduler, left: dict[int, int]) -> Batch:
    """Run a step in which the request with each id has the given number of tokens left to emit."""
    batch = scheduler.schedule()
    assert batch.fatal is None
    done = scheduler.complete(batch, [i for i in batch.emits if left[i] == 1])
    for i in done.delivered:
        left[i] -= 1
    scheduler.pool.check()
    return batch


# Prefix cache


def shared(i: int, tokens: int, common: int) -> Prompt:
    segments = (Segment("g", 0, common), Segment(f"u{i}", 0, tokens - common))
    return Prompt(i, tokens, 50, arrival=float(i), segments=segments)


def cached(variant: str, prompts: Iterable[Prompt], **knobs: Any) -> BucketedScheduler:
    scheduler = engine(variant, prompts, prefix_caching=True, **knobs)
    assert isinstance(scheduler, BucketedScheduler)
    return scheduler


@pytest.mark.parametrize("variant", KV_VARIANTS)
def test_next_prompt_reuses_full_blocks_of_finished_prompt(variant: str) -> None:
    scheduler = cached(variant, [shared(0, 11, 10)])
    step(scheduler, ended=[0])
    scheduler.add(shared(1, 14, 10))
    batch = step(scheduler)
    assert (batch.scheduled, batch.context) == ([(1, 14 - 8)], [8])
    scheduler.pool.check()


@pytest.mark.parametrize("variant", KV_VARIANTS)
def test_last_token_of_prompt_is_always_computed(variant: str) -> None:
    scheduler = cached(variant, [shared(0, 9, 8)])
    step(scheduler, ended=[0])
    scheduler.add(shared(1, 8, 8))
    assert step(scheduler).scheduled == [(1, 4)]  # both blocks are cached, but only one is used


def test_seed_has_no_prefix_cache() -> None:
    with pytest.raises(ValueError, match="variant 'seed' has no prefix cache"):
        MistralrsConfig(variant="seed", prefix_caching=True)


@pytest.mark.parametrize("variant", ["bucketed", "merged2250", "pr2031", "pr2031a", "pr2034"])
def test_requeued_prompt_hits_blocks_never_computed(variant: str) -> None:
    first, second = (20, 10) if variant != "pr2034" else (10, 20)
    long, short = (0, 1) if variant != "pr2034" else (1, 0)
    scheduler = cached(variant, [ask(0, first), ask(1, second)])
    assert ids(step(scheduler)) == [short]
    batch = step(scheduler)
    # Four full blocks are hits, although they were never computed.
    assert batch.scheduled == [(long, 4)]
    assert batch.context == [16]


@pytest.mark.parametrize(("variant", "phantoms"), [("pr2034july", 0), ("bucketed", 2)])
def test_pr2034july_caches_computed_blocks_only(variant: str, phantoms: int) -> None:
    # requests 0 and 1 are admitted; request 2 does not fit and evicts request 1, which computed
    # nothing
    prompts = [ask(0, 3), ask(1, 9), ask(2, 9)]
    scheduler = cached(variant, prompts, num_gpu_blocks=6, waiting_timeout=0)
    assert scheduler.schedule().preempted[0] == 1
    assert scheduler.pool.cached >= phantoms
    assert (scheduler.pool.cached == 0) == (phantoms == 0)


def test_hit_on_free_block_removes_it_from_free_queue() -> None:
    scheduler = cached("merged2250", [shared(0, 9, 8)], num_gpu_blocks=5)
    step(scheduler, ended=[0])
    assert scheduler.free_blocks == 4
    # The request needs five blocks, including two cached blocks: one more than available.
    scheduler.add(shared(1, 17, 8))
    assert step(scheduler).scheduled == []
    assert scheduler.free_blocks == 4
    scheduler.waiting.clear()
    scheduler.add(shared(2, 16, 8))
    assert step(scheduler).scheduled == [(2, 8)]
    assert scheduler.free_blocks == 0


# Fingerprints


@pytest.mark.parametrize("variant", ALL)
def test_fingerprint_repeats_when_state_no_longer_changes(variant: str) -> None:
    scheduler = engine(
        variant, [ask(0, 100)], num_gpu_blocks=200, max_num_seqs=1, waiting_timeout=4
    )
    if variant != "seed":
        step(scheduler)
        before = scheduler.fingerprint()
        step(scheduler)
        assert scheduler.fingerprint() != before
        return
    before = scheduler.fingerprint()
    step(scheduler)
    assert scheduler.fingerprint() == before


def test_fingerprint_counts_failures_until_eviction() -> None:
    scheduler = stuck("bucketed", waiting_timeout=50)
    step(scheduler)
    first = scheduler.fingerprint()[0]  # type: ignore[index]
    step(scheduler)
    assert scheduler.fingerprint()[0] != first  # type: ignore[index]
