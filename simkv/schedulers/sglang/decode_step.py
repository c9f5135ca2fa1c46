"""SGLang's decode step, and the retraction of requests when memory runs out."""

from __future__ import annotations

from simkv.core.scheduler_protocol import Batch
from simkv.schedulers.sglang.loop_state import LoopState, ScheduleBatch
from simkv.schedulers.sglang.memory import Req


def decode_step(state: LoopState, batch: Batch) -> ScheduleBatch | None:
    """Allocate a slot for the next token of each running request. Return the running batch.

    Returns None if no request can decode in this step.
    """
    # Either no request remains, or the memory of finished requests is freed only after this step.
    # Retracted requests are recorded in ``batch``.
    running = state.running
    some_end = drop_ending_rows(state)
    if not running.rows:
        return None
    if state.memory.fits(running.rows):
        state.ratio.decay_step()
    elif some_end:
        return None  # the memory of ended requests is freed at the end of this step
    else:
        _retract(state, batch)
        if not running.rows:
            return None
    state.memory.grow(running.rows)
    running.kind = "decode"
    return running


def drop_ending_rows(state: LoopState) -> bool:
    """Remove finished requests from the running batch. Return whether a request is about to finish.

    A request is about to finish if the token in flight is the last one that its output limit
    allows. Such a request is removed, too.
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

    The request with the fewest emitted tokens is retracted first. Ties are broken by the longest
    prompt. With ``retraction_policy: priority``, the least urgent request is retracted first.
    Retracted requests join the tail of the queue and keep their output tokens.
    """
    # The last tie-breaker is the last position in running order. The running requests stay in the
    # sort order of this choice.
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
