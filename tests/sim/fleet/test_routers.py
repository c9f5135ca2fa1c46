"""Tests of the routers' choices."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from pydantic import TypeAdapter

from simkv.core.request import Prompt, Segment
from simkv.scenario.fleet_section import AnyRouter
from simkv.sim.fleet.routers import LoadSignal, Router, build_router


def router(name: str, **knobs: Any) -> Router:
    config = TypeAdapter(AnyRouter).validate_python({"name": name, **knobs})
    return build_router(config, lambda prompt: prompt.priority)


def loads(*waiting: int) -> list[LoadSignal]:
    return [LoadSignal(i, count, waiting=count) for i, count in enumerate(waiting)]


PROMPT = Prompt(0, 10, 10)


def shared(i: int, stream: str, tokens: int, own: int = 0) -> Prompt:
    segments = [Segment(stream, 0, tokens)]
    if own:
        segments.append(Segment(f"u{i}", 0, own))
    return Prompt(i, tokens + own, 1, segments=tuple(segments))


def test_round_robin_skips_missing_replicas() -> None:
    chosen = router("round_robin")
    three = loads(5, 0, 0)
    assert [chosen.choose(PROMPT, three) for _ in range(4)] == [0, 1, 2, 0]
    without_the_second = [three[0], three[2]]
    assert [chosen.choose(PROMPT, without_the_second) for _ in range(3)] == [2, 0, 2]


def test_random_is_uniform_and_seeded() -> None:
    def draws(seed: int) -> list[int]:
        chosen = router("random", seed=seed)
        return [chosen.choose(PROMPT, loads(9, 0, 0, 0)) for _ in range(4000)]

    assert draws(1) == draws(1) != draws(2)
    assert all(900 < count < 1100 for count in Counter(draws(1)).values())


def test_least_loaded_weights_waiting_four_times() -> None:
    chosen = router("least_loaded")
    signals = [LoadSignal(0, 9, waiting=1, running=0), LoadSignal(1, 0, waiting=0, running=3)]
    assert chosen.choose(PROMPT, signals) == 1
    signals[1] = signals[1]._replace(running=4)
    assert chosen.choose(PROMPT, signals) == 0, "of equals the first"
    assert chosen.choose(PROMPT, [signals[0]._replace(waiting=2), signals[1]]) == 1


def test_weights_select_signals() -> None:
    signals = [LoadSignal(0, 3, waiting=0, running=1, kv_usage=0.9), LoadSignal(1, 2, 9, 9, 0.8)]
    none: dict[str, float] = {"waiting_weight": 0.0, "running_weight": 0.0}
    in_flight = router("least_loaded", **none, in_flight_weight=1.0)
    blocks = router("least_loaded", **none, kv_weight=1.0)
    assert in_flight.choose(PROMPT, signals) == 1
    assert blocks.choose(PROMPT, signals) == 1
    assert not in_flight.reads_load
    assert blocks.reads_kv
    assert router("least_loaded").choose(PROMPT, signals) == 0


def test_power_of_two_takes_better_of_two() -> None:
    chosen = router("power_of_two")
    found = Counter(chosen.choose(PROMPT, loads(0, 1, 2, 3)) for _ in range(6000))
    # Of the 6 pairs of replicas, the best replica is chosen in 3, the second best in 2, and the
    # third in 1.
    assert 3 not in found
    for replica, share in ((0, 3 / 6), (1, 2 / 6), (2, 1 / 6)):
        assert found[replica] / 6000 == pytest.approx(share, abs=0.025)
    assert chosen.choose(PROMPT, loads(7)) == 0


def test_session_stays_unless_replica_is_overloaded() -> None:
    chosen = router("session", balance_abs_threshold=2.0)
    homes = [chosen.choose(Prompt(i, 1, 1, priority=i), loads(0, 0, 0, 0)) for i in range(400)]
    assert homes == [
        chosen.choose(Prompt(i, 1, 1, priority=i), loads(1, 1, 2, 2)) for i in range(400)
    ]
    assert all(count > 40 for count in Counter(homes).values())
    full = [LoadSignal(i, 9 if i == homes[0] else 3) for i in range(4)]
    escaped = chosen.choose(Prompt(0, 1, 1, priority=0), full)
    assert escaped == min(i for i in range(4) if i != homes[0])
    # With one replica fewer, only the sessions of this replica move.
    left = [signal for signal in loads(0, 0, 0, 0) if signal.replica != 3]
    moved = [chosen.choose(Prompt(i, 1, 1, priority=i), left) for i in range(400)]
    assert all(a == b for a, b in zip(homes, moved, strict=True) if a != 3)


def test_cache_aware_follows_longest_prefix() -> None:
    chosen = router("cache_aware", block_size=4, balance_abs_threshold=5.0)
    idle = loads(0, 0)
    assert chosen.choose(shared(0, "a", 16), idle) == 0
    assert chosen.choose(shared(1, "b", 16), idle) == 1, "nothing known: where least was sent"
    assert chosen.choose(shared(2, "b", 12, 4), idle) == 1
    assert chosen.choose(shared(3, "a", 8, 8), idle) == 0
    # Replica 0 knows only 4 of 16 tokens, which is not more than 0.3, so the replica with the
    # fewest sent tokens is chosen.
    assert chosen.choose(shared(4, "a", 4, 12), idle) == 1
    assert chosen.choose(shared(5, "a", 16), [LoadSignal(0, 9), LoadSignal(1, 3)]) == 1, "escapes"
    assert chosen.choose(shared(6, "a", 16), [LoadSignal(0, 8), LoadSignal(1, 6)]) == 0, (
        "in balance"
    )


def test_full_replica_spills_to_the_next_on_the_ring() -> None:
    chosen = router("session", max_in_flight=5, balance_abs_threshold=1e9)
    prompts = [Prompt(i, 1, 1, priority=i) for i in range(300)]
    homes = [chosen.choose(prompt, loads(0, 0, 0, 4)) for prompt in prompts]
    spilled = [chosen.choose(prompt, loads(0, 0, 0, 5)) for prompt in prompts]
    assert all(a == b for a, b in zip(homes, spilled, strict=True) if a != 3)
    moved = Counter(b for a, b in zip(homes, spilled, strict=True) if a == 3)
    assert set(moved) == {0, 1, 2}, "the sessions of the full replica go to several others"
    assert [chosen.choose(prompt, loads(9, 9, 9, 9)) for prompt in prompts] == homes


def test_weighted_scores_queue_kv_and_prefix() -> None:
    signals = [
        LoadSignal(0, 0, waiting=4, kv_usage=0.0),
        LoadSignal(1, 0, waiting=1, kv_usage=0.5),
        LoadSignal(2, 0, waiting=0, kv_usage=0.9),
    ]
    weights = {"queue_weight": 0, "kv_weight": 0, "prefix_weight": 0}

    def first(signals: list[LoadSignal], **fields: float) -> int:
        return router("weighted", **(weights | fields)).choose(PROMPT, signals)

    assert first(signals, queue_weight=1) == 2
    assert first(signals, kv_weight=1) == 0
    # Scores: queue 0, 0.75, 1; KV 1, 0.5, 0.1.
    assert first(signals, queue_weight=1, kv_weight=1) == 1
    assert first(signals, queue_weight=1, kv_weight=0.25) == 2


def test_weighted_follows_the_longest_prefix() -> None:
    chosen = router("weighted", block_size=4, queue_weight=1, kv_weight=0, prefix_weight=1)
    home = chosen.choose(shared(0, "a", 16), loads(0, 0))
    other = 1 - home
    busy = [LoadSignal(home, 0, waiting=5), LoadSignal(other, 0, waiting=0)]
    # Prefix 1 against queue 1: a tie. With three of four blocks, the queue decides.
    assert chosen.choose(shared(1, "a", 12, 4), sorted(busy)) == other
    idle = router("weighted", block_size=4)
    home = idle.choose(shared(0, "a", 16), loads(0, 0))
    assert [idle.choose(shared(i, "a", 16), loads(0, 0)) for i in range(1, 9)] == [home] * 8

    def returns(seed: int) -> bool:
        some = router("weighted", block_size=4, seed=seed)
        home = some.choose(shared(0, "a", 16), loads(0, 0))
        some.forget(home)
        return some.choose(shared(1, "a", 16), loads(0, 0)) == home

    assert 5 < sum(map(returns, range(40))) < 35, "a lost cache attracts no request"


def test_weighted_breaks_ties_at_random() -> None:
    chosen = router("weighted", prefix_weight=0)
    counts = Counter(chosen.choose(PROMPT, loads(3, 3, 3)) for _ in range(3000))
    assert all(900 < count < 1100 for count in counts.values())
