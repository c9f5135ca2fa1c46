"""SGLang's decode step, and the retraction of requests when memory runs out."""

from __future__ import annotations

from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.sglang.loop_state import LoopState, ScheduleBatch
from simkv.schedulers.sglang.memory import Req


def decode_step(state: LoopState, batch: Batch) -> ScheduleBatch | None:
    """Return the running batch with a slot for each row's next token; note victims in ``batch``.

    Return None if no request is left, or if none can decode before ending requests free their
    memory.
    """
    running = state.running
    some_end = drop_ending_rows(state)
    if not running.rows:
        return None
    if state.memory.fits(running.rows):
        state.ratio.decay_step()
    elif some_end:
        return None  # their memory is freed at the end of this step
    else:
        _retract(state, batch)
        if not running.rows:
            return None
    state.memory.grow(running.rows)
    running.kind = "decode"
    return running


def drop_ending_rows(state: LoopState) -> bool:
    """Drop requests whose in-flight token is their last by length; return whether there were any.

    Finished requests that are still in the batch are dropped as well.
    """
    rows = state.running.rows
    going_on = rows
    if state.rules.foresees_ends:
        going_on = [r for r in rows if not (r.pending and r.out + 1 >= r.max_new)]
    some_end = len(going_on) < len(rows)
    state.running.keep([r for r in going_on if not r.finished])
    return some_end


def _retract(state: LoopState, batch: Batch) -> None:
    """Retract running requests until the others can decode.

    The request with the fewest emitted tokens goes first, then the longest prompt, then the last in
    running order. With ``retraction_policy: priority`` the least urgent goes before all of these.
    The sort order of this choice becomes the running order. Victims keep their outputs and are
    queued at the tail.
    """
    memory, steps = state.memory, state.config.retract_decode_steps
    keep = sorted(state.running.rows, key=lambda r: (r.out, -r.prompt_tokens), reverse=True)
    if state.config.retraction_policy == "priority":
        keep.sort(key=state.urgency)
    victims: list[Req] = []
    while len(keep) > 1 and not (victims and memory.fits(keep)):
        victims.append(keep.pop())
        state.release(victims[-1])
        memory.reclaim(len(keep) * steps)
    if len(keep) == 1 and not memory.fits(keep):
        alone = keep.pop()
        state.end(alone)
        batch.ignored.append(alone.id)
    state.running.keep(keep)
    state.ratio.retracted(keep)
    for r in victims:
        state.queue(r)
        batch.preempt(r.id, None)
