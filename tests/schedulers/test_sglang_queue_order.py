"""Tests of SGLang: queue orders, prefill delayer, truncated and rejected prompts, log
probabilities.
"""

from typing import Any

import pytest

from simkv.core.block_keys import TokenContent
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.sglang.queue_order import QueueOrder
from simkv.schedulers.sglang.scheduler import SglangScheduler
from tests.schedulers.test_sglang import engine, ids, shared, step


def cached(policy: str, **knobs: Any) -> SglangScheduler:
    """Build an engine whose cache holds 8 tokens of stream ``a``, and 4 and 12 tokens of stream
    ``b``.
    """
    knobs = {"prefill_max_requests": 1, "disable_radix_cache": False, **knobs}
    scheduler = engine(200, schedule_policy=policy, **knobs)
    for i, (group, tokens) in enumerate([("a", 8), ("b", 4), ("b", 12)]):
        scheduler.add(shared(90 + i, group, tokens, 1))
        step(scheduler)
    return scheduler


def taken(scheduler: SglangScheduler, prompts: list[Prompt]) -> list[int]:
    for prompt in prompts:
        scheduler.add(prompt)
    return [i for _ in prompts for i in ids(step(scheduler))]


def test_dfs_weight_visits_heaviest_branch_and_children_first() -> None:
    prompts = [shared(0, "a", 8, 3), shared(1, "b", 4, 3), shared(2, "b", 12, 3), Prompt(3, 5, 1)]
    scheduler = cached("dfs-weight", prefill_max_requests=None)
    for prompt in prompts:
        scheduler.add(prompt)
    assert ids(step(scheduler)) == [2, 1, 0, 3]


def test_shortest_prefill_first_sorts_by_uncached_tokens() -> None:
    prompts = [Prompt(0, 7, 1), shared(1, "b", 12, 5), shared(2, "a", 8, 9), Prompt(3, 6, 1)]
    assert taken(cached("shortest-prefill-first"), prompts) == [1, 3, 0, 2]


def test_shortest_prefill_first_shares_chunk_with_shorter_prompts() -> None:
    scheduler = engine(
        200,
        schedule_policy="shortest-prefill-first",
        chunked_prefill_size=16,
        disable_radix_cache=False,
    )
    scheduler.add(Prompt(0, 60, 1))
    assert step(scheduler).scheduled == [(0, 16)]
    scheduler.add(Prompt(1, 5, 1))
    assert step(scheduler).scheduled == [(0, 11), (1, 5)]
    assert step(scheduler).scheduled == [(0, 16)]


def test_most_frequent_routing_key_goes_first() -> None:
    scheduler = engine(200, schedule_policy="routing-key", max_running_requests=4)
    for i, key in enumerate(["x", "y", "y"]):
        scheduler.add(Prompt(i, 4, 30, routing_key=key))
    step(scheduler)
    for i, key in ((3, None), (4, "x"), (5, "y"), (6, "z")):
        scheduler.add(Prompt(i, 4, 30, routing_key=key))
    assert ids(step(scheduler)) == [5]
    assert scheduler.waiting_ids() == [4, 3, 6]


def test_prefixes_of_unsorted_queue_are_refreshed_in_every_32nd_pass() -> None:
    scheduler = cached("fcfs")
    scheduler.add(shared(0, "a", 8, 3))
    tree, order, refreshed = scheduler.state.memory.tree, QueueOrder(scheduler.state), []
    assert tree is not None
    for turn in range(70):
        tree.match(TokenContent(shared(9, "b", 12, 1)), 12)  # now used more recently than "a"
        before = tree.fingerprint()
        order.sort()
        if tree.fingerprint() != before:
            refreshed.append(turn)
    assert refreshed == [0, 32, 64]


# ---------------------------------------------------------------------- prefill delayer


@pytest.mark.parametrize(("variant", "passes"), [("0.5.23", 3), ("0.5.20", 3), ("0.5.15", 20)])
def test_prompt_waits_for_as_many_free_rows_as_recent_prefill(variant: str, passes: int) -> None:
    scheduler = engine(
        400,
        variant=variant,
        max_running_requests=3,
        disable_overlap_schedule=False,
        enable_prefill_delayer=True,
        prefill_delayer_max_delay_passes=4,
    )
    # request 2 is admitted: the first prefill is not delayed
    coming = {0: [(0, 90), (1, 90)], 1: [(2, 1)], 5: [(3, 30)]}
    flights: list[Batch] = []
    waits = 0
    for turn in range(25):
        for i, limit in coming.get(turn, ()):
            scheduler.add(Prompt(i, 4, limit))
        flights.append(scheduler.schedule())
        held = flights[-1].held
        waits += held is not None and held.why == "rule"
        if len(flights) > 1:
            scheduler.complete(flights.pop(0), ())
    assert waits == passes


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        (
            {"schedule_policy": "random"},
            "are unknown outside SGLang's process; expected one of fcfs",
        ),
        ({"schedule_policy": "shortest-prefill-first"}, "needs the radix cache"),
        ({"enable_prefill_delayer": True}, "needs the overlap schedule"),
        ({"max_queued_requests": 0, "enable_priority_scheduling": True}, "crashes at the first"),
        ({"max_total_num_tokens": 6, "allow_auto_truncate": True}, "must be at least 7"),
        (
            {"variant": "0.5.20", "schedule_policy": "shortest-prefill-first"},
            "radix cache|does not",
        ),
    ],
)
def test_rejects_invalid_settings(knobs: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        engine(knobs.pop("max_total_num_tokens", 40), **knobs)


# ---------------------------------------------------------------------- truncation and rejection


def test_too_long_prompt_is_rejected_after_one_token() -> None:
    scheduler = engine(40)
    for i, tokens in ((0, 34), (1, 33)):
        scheduler.add(Prompt(i, tokens, 1))
    batch = scheduler.schedule()
    assert batch.scheduled == [(0, 1), (1, 33)]
    done = scheduler.complete(batch, [])
    assert (done.delivered, done.finished, done.refused) == ([1], [1], [0])


def test_truncated_prompt_has_no_output_left() -> None:
    scheduler = engine(40, allow_auto_truncate=True)
    scheduler.add(shared(0, "a", 30, 30, max_tokens=9))
    batch = scheduler.schedule()
    assert batch.scheduled == [(0, 34)]
    assert scheduler.complete(batch, []).finished == [0]


def test_tokens_with_log_probabilities_are_computed() -> None:
    for since, tokens in ((None, 1), (-1, 1), (0, 9), (4, 5)):
        scheduler = engine(100, disable_radix_cache=False)
        scheduler.add(shared(0, "a", 9, 1))
        step(scheduler)
        prompt = shared(1, "a", 9, 0)
        scheduler.add(Prompt(1, 9, 4, segments=prompt.segments, logprobs_from=since))
        assert step(scheduler).scheduled == [(1, tokens)]


def test_rejects_log_probabilities_from_beyond_prompt() -> None:
    scheduler = engine(100)
    scheduler.add(Prompt(0, 9, 4, logprobs_from=10))
    assert scheduler.complete(scheduler.schedule(), []).refused == [0]


@pytest.mark.parametrize("asking", [0, 1])
def test_request_with_log_probabilities_is_not_mixed(asking: int) -> None:
    scheduler = engine(100, enable_mixed_chunk=True)
    for i in (0, 1):
        scheduler.add(Prompt(i, 4, 30, logprobs_from=-1 if i == asking else None))
        kind = step(scheduler).kind
    assert kind == "prefill"


def test_full_queue_rejects_least_urgent_request() -> None:
    scheduler = engine(
        40, max_running_requests=1, max_queued_requests=2, enable_priority_scheduling=True
    )
    for i, priority in enumerate([5, 5, 5, 6, 5]):
        scheduler.add(Prompt(i, 4, 4, priority=priority))
    refused = step(scheduler).refused
    assert list(refused) == [2, 1, 4]
    assert refused[1].words == "The request is aborted by a higher priority request."
    assert refused[4].words == "The request queue is full."
