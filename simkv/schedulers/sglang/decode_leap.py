"""Computation of several decode-only steps of SGLang at once."""

from __future__ import annotations

from collections import deque

from simkv.schedulers.sglang.loop_state import LoopState
from simkv.schedulers.sglang.request_intake import Receiver


def leap(state: LoopState, receiver: Receiver, ahead: int, most: int) -> int:
    """Return the number of steps, at most ``most``, in which the same requests decode.

    The scheduler removes a request from the batch ``ahead`` steps before its last token is
    processed.
    """
    # In these steps, no request is admitted or reaches its output limit, and nothing is evicted.
    rows, memory = state.running.rows, state.memory
    if state.last is not state.running or state.running.kind != "decode" or state.chunked:
        return 1
    if state.waiting and (state.config.preempts or not state.running.full):
        return 1
    most = receiver.quiet(most)
    for r in rows:
        most = min(most, 1 if r.aborted else r.max_new - r.out - ahead)
    steps, free, reserve = 1, memory.free, memory.page_size * len(rows)
    for taken in memory.growth(rows, most - 1):
        if free < reserve:
            break
        free -= taken
        steps += 1
    return steps


def skip(state: LoopState, steps: int) -> list[int]:
    """Simulate ``steps`` decode steps. Return the number of available pages after each step."""
    memory, free = state.memory, []
    for taken in memory.growth(state.running.rows, steps):
        memory.free -= taken
        free.append(memory.room // memory.page_size)
        state.ratio.decay_step()
        state.processed_tokens += state.running.extend_tokens
    for r in state.running.rows:
        r.kv += steps
        r.out += steps
    state.flights = deque([state.flights[-1]] * len(state.flights))
    return free
