"""Tests of cycle detection: it finds every cycle and reads few states."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from simkv.sim.cycle_detection import CycleDetector


def first_repeat(watch: CycleDetector, step: Callable[[int], None], most: int) -> int | None:
    """Return the step at which the detector reports a repeated state."""
    for i in range(most):
        step(i)
        if watch.repeats(working=False, now=float(i)):
            return i
    return None


@pytest.mark.parametrize(("tail", "length"), [(0, 1), (3, 2), (40, 7), (5, 100)])
def test_summary_does_not_change_detection(tail: int, length: int) -> None:
    at = [0]

    def step(i: int) -> None:
        at[0] = i if i < tail else tail + (i - tail) % length

    plain = first_repeat(CycleDetector(lambda: at[0]), step, 1000)
    glancing = first_repeat(CycleDetector(lambda: at[0], lambda: at[0] % 3), step, 1000)
    assert plain == glancing is not None


def test_long_stretch_reads_few_states() -> None:
    at, taken = [0], [0]

    def state() -> int:
        taken[0] += 1
        return at[0]

    def step(i: int) -> None:
        at[0] = i

    assert first_repeat(CycleDetector(state, lambda: at[0]), step, 4096) is None
    assert taken[0] <= 13  # one state at each power of two
