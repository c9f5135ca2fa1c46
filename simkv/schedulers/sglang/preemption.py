"""Preemption of running requests by more urgent ones: PrefillAdder.preempt_to_schedule."""

from __future__ import annotations

from simkv.schedulers.sglang.loop_state import LoopState
from simkv.schedulers.sglang.memory import Req
from simkv.schedulers.sglang.prefill_adder import PrefillAdder


def preempt_for(state: LoopState, adder: PrefillAdder, r: Req) -> list[Req]:
    """Preempt less urgent requests until ``r`` has the memory it lacks; return them sorted by id.

    If that memory cannot be freed, no request is preempted. The least urgent goes first, among
    equals the last queued. The prompt of ``r`` counts with its length when a pass last considered
    ``r``, or 0 if none did; the engine then frees too little to admit it. The engine stores victims
    in an unordered set.
    """
    config, running = state.config, state.running
    lacking = r.looked - r.matched + min(r.max_new, adder.clip) - adder.left
    going: list[Req] = []
    staying = [x for x in running.rows if not x.finished]
    for x in sorted(staying, key=lambda x: (-state.urgency(x), -x.entry)):
        more_urgent = state.urgency(x) - state.urgency(r)
        if more_urgent <= config.priority_scheduling_preemption_threshold:
            break
        going.append(x)
        lacking -= adder.promise(x)
        if lacking <= 0:
            break
    if not going or lacking > 0:
        return []
    left = len(running.rows)
    for x in [x for x in running.rows if x in going]:
        left -= 1
        adder.promised -= adder.promise(x)
        state.release(x)
        state.memory.reclaim(left * config.retract_decode_steps)
    running.rows = [x for x in running.rows if x not in going]  # the batch-full flag is unchanged
    adder.running = running.rows
    return sorted(going, key=lambda x: x.id)
