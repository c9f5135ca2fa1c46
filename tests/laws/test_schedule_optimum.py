"""The optimum of small instances (docs/papers/kv-constraints.md), and MC-SF beside it."""

from __future__ import annotations

from itertools import product

import pytest

from dev.schedule_optimum import Instance, draw_instance, engines, optimum, ratios, total_latency


def enumerated_optimum(instance: Instance, longest: int) -> int:
    """Return the least total latency over all starts that wait at most ``longest`` steps."""
    best = None
    for waits in product(range(longest + 1), repeat=len(instance.requests)):
        held: dict[int, int] = {}
        for wait, (arrival, prompt, output) in zip(waits, instance.requests, strict=True):
            for step in range(output):
                at = arrival + wait + step
                held[at] = held.get(at, 0) + prompt + step + 1
        if max(held.values()) <= instance.memory:
            total = sum(waits) + sum(output for _, _, output in instance.requests)
            best = total if best is None else min(best, total)
    assert best is not None
    return best


@pytest.mark.parametrize(
    "instance",
    [
        Instance(8, ((0, 2, 4), (0, 1, 2), (0, 3, 3), (0, 1, 5))),
        Instance(7, ((0, 2, 4), (1, 1, 2), (1, 3, 1), (2, 1, 4))),
    ],
)
def test_integer_program_finds_the_optimum(instance: Instance) -> None:
    known = total_latency(instance, engines(instance.memory)["MC-SF"])
    best = enumerated_optimum(instance, 9)
    assert optimum(instance, known) == best
    assert best <= known


@pytest.mark.parametrize("online", [False, True])
def test_policy_is_close_to_the_optimum(online: bool) -> None:
    found = [ratios(draw_instance(seed, online=online))["MC-SF"] for seed in (2, 3)]
    assert all(1 <= ratio < 1.25 for ratio in found)


def test_shortest_request_is_served_first() -> None:
    """Only one request fits at a time: 2 + 5 + 9 steps from arrival are the least latencies."""
    instance = Instance(6, ((0, 2, 4), (0, 4, 2), (0, 3, 3)))
    assert total_latency(instance, engines(6)["MC-SF"]) == 2 + 5 + 9
