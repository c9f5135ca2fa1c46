"""Tests that the size-bucketed queue makes the same decisions as a plain queue, with fewer
attempts.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from typing import Any

import pytest

from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.memory import CacheHits
from simkv.schedulers.vllm.request_state import FcfsQueue, PriorityQueue, RequestState
from simkv.schedulers.vllm.scheduler import VllmScheduler
from simkv.schedulers.vllm.size_bucketed_queue import SizeBucketedQueue

SKIP = "0.33.0-skip-blocked"


class Counting(VllmScheduler):
    """A scheduler that counts its attempts to admit a request."""

    looks = 0

    def _fits(self, r: RequestState, hits: CacheHits, end: int) -> bool:
        self.looks += 1
        return super()._fits(r, hits, end)


def looks(burst: int) -> int:
    """Return the number of attempts to admit a request until a burst of requests is served."""
    scheduler = Counting(VllmConfig(variant=SKIP, num_gpu_blocks=100, max_model_len=1000))
    for i in range(burst):
        scheduler.add(Prompt(i, 40 + 16 * (i % 30), 3))
    while scheduler.num_waiting or scheduler.num_running:
        scheduler.complete(scheduler.schedule(), ())
    return scheduler.looks


def test_number_of_tries_grows_linearly_with_burst() -> None:
    assert looks(2000) < 15 * looks(200)


def prompt(draw: random.Random, i: int, others: str) -> Prompt:
    """Return a prompt that shares a prefix with some prompts, and contains streams of other
    prompts.
    """
    own, shared = draw.randint(1, 60), (0, 8, 8)[i % 3]
    segments: list[Segment] = [Segment(f"g{i % 3}", 0, shared)] if shared else []
    if others and i > 2:
        segments.append(Segment(f"{others}{i - 3}", 0, draw.randint(8, 30)))
    if segments:
        segments.append(Segment(f"u{i}", 0, own))
    tokens = sum(s.end - s.start for s in segments) or own
    urgency = draw.randint(0, 2)
    return Prompt(i, tokens, draw.randint(1, 40), 0.1 * i, urgency, segments=tuple(segments))


def decisions(scheduler: VllmScheduler, seed: int, others: str) -> list[Any]:
    """Return the decisions for random arrivals, ends and aborts of requests."""
    draw, said, flights = random.Random(seed), [], deque[tuple[Batch, list[int]]]()
    for step in range(300):
        if step < 150:
            scheduler.add(prompt(draw, step, others))
        if draw.random() < 0.1:
            scheduler.abort(draw.randrange(step + 1))
        batch = scheduler.schedule()
        said.append((batch.scheduled, batch.preempted, batch.held, scheduler.waiting_ids()))
        partial = {i for i, _ in batch.scheduled} - set(batch.emits)
        flights.append((batch, [row.id for row in batch.rows() if row.id not in partial]))
        if len(flights) == scheduler.pipeline_depth:
            oldest, emitting = flights.popleft()
            scheduler.complete(oldest, [i for i in emitting if draw.random() < 0.05])
    return said


@pytest.mark.parametrize("others", ["", "u", "o"])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", range(6))
def test_decisions_equal_plain_queue(policy: str, seed: int, others: str) -> None:
    draw = random.Random(seed)
    config = VllmConfig(
        variant=SKIP,
        policy=policy,  # type: ignore[arg-type]
        block_size=4,
        num_gpu_blocks=40,
        max_model_len=150,
        max_num_batched_tokens=draw.choice([16, 64, 512]),
        max_num_seqs=draw.choice([4, 16]),
        enable_prefix_caching=draw.random() < 0.7,
        scheduler_reserve_full_isl=draw.random() < 0.5,
        async_scheduling=draw.random() < 0.5,
        long_prefill_token_threshold=draw.choice([0, 8]),
    )
    bucketed, plain = VllmScheduler(config), VllmScheduler(config)
    assert isinstance(bucketed.waiting, SizeBucketedQueue)
    plain.waiting = PriorityQueue() if policy == "priority" else FcfsQueue()
    assert decisions(bucketed, seed, others) == decisions(plain, seed, others)


def test_bucketed_queue_is_used_only_if_blocks_alone_limit_admission() -> None:
    config = VllmConfig(variant=SKIP, num_gpu_blocks=700, max_model_len=10_000)
    assert isinstance(VllmScheduler(config).waiting, SizeBucketedQueue)
    held = replace(config, prefill_schedule_interval=2)
    assert not isinstance(VllmScheduler(held).waiting, SizeBucketedQueue)


def test_request_with_cached_tokens_of_others_is_not_skipped() -> None:
    config = VllmConfig(
        variant=SKIP,
        block_size=4,
        num_gpu_blocks=16,
        max_model_len=60,
        enable_prefix_caching=True,
        async_scheduling=False,
    )
    scheduler = VllmScheduler(config)
    scheduler.add(Prompt(0, 21, 1))  # six of fifteen blocks, for one step
    scheduler.add(Prompt(1, 40, 4, segments=(Segment("u1", 0, 40),)))  # ten blocks
    half = (Segment("u1", 0, 32), Segment("u2", 0, 1))
    scheduler.add(Prompt(2, 33, 4, segments=half))  # nine blocks, eight of them with tokens of 1
    first = scheduler.schedule()
    assert [i for i, _ in first.scheduled] == [0, 2]
    scheduler.complete(first, ())
    assert scheduler.free_blocks == 6
    assert scheduler.schedule().scheduled[-1] == (1, 40 - 32)


def test_request_with_step_in_flight_is_tried_without_enough_blocks() -> None:
    config = VllmConfig(
        variant=SKIP,
        block_size=4,
        num_gpu_blocks=16,
        max_model_len=60,
        enable_prefix_caching=False,
        async_scheduling=True,
    )
    scheduler, flights = VllmScheduler(config), deque[Batch]()
    for i in range(3):
        scheduler.add(Prompt(i, 20, 30))
    while not (batch := scheduler.schedule()).preempted:
        flights.append(batch)
        if len(flights) == 2:
            scheduler.complete(flights.popleft(), ())
    assert batch.preempted == [2]
    held = scheduler.schedule().held
    assert held is not None
    assert (held.id, held.why) == (2, "rule")
    assert scheduler.free_blocks == 3  # the request needs five blocks
    assert scheduler.leap(10) == 1  # the request is tried when that step ends
