"""Launch of SGLang's batches and processing of their results."""

from __future__ import annotations

from collections.abc import Collection

from simkv.core.scheduler_protocol import Batch, Completion
from simkv.schedulers.sglang.loop_state import LaunchedBatch, LoopState, ScheduleBatch
from simkv.schedulers.sglang.memory import Req


def launch(state: LoopState, chosen: ScheduleBatch, batch: Batch) -> None:
    """Copy the work of ``chosen`` into ``batch``.

    Tokens that the batch will emit are counted as pending.
    """
    # SGLang counts the prefill tokens of a batch as processed at every launch. If a running batch
    # began as a prefill, each of its decode steps therefore counts them again. This engine quirk
    # affects the queue order hrrn.
    state.processed_tokens += chosen.extend_tokens
    batch.kind = chosen.kind
    prefills = 0 if chosen.kind == "decode" else chosen.prefills
    flight = LaunchedBatch(batch, [], chosen.rows[prefills:])
    for r in chosen.rows[:prefills]:
        batch.scheduled.append((r.id, r.end - r.prefix))
        batch.context.append(r.prefix)
        if r is not chosen.chunked:
            flight.prefills.append(r)
    for r in flight.decodes:
        batch.scheduled.append((r.id, 1))
        batch.context.append(r.kv - 1)
    for r in (*flight.prefills, *flight.decodes):
        batch.emits.append(r.id)
        r.pending += 1
    state.flights.append(flight)


def complete(state: LoopState, batch: Batch, ended: Collection[int]) -> Completion:
    """Process the results of the oldest launched batch."""
    done = Completion([], [])
    if batch.fatal or not batch.scheduled:
        return done
    flight = state.flights.popleft()
    assert flight.batch is batch, "batches are completed in the order of their launch"
    for r in flight.prefills:
        if _emit(state, r, ended, done):
            state.memory.publish(r, r.end)
    for r in flight.decodes:
        _emit(state, r, ended, done)
    return done


def _emit(state: LoopState, r: Req, ended: Collection[int], done: Completion) -> bool:
    """Count an emitted token of ``r``. Return whether ``r`` continues."""
    # A request without a pending token has ended since the launch.
    if not r.pending:
        return False
    r.pending -= 1
    r.out += 1
    if not (r.aborted or r.refused):
        done.delivered.append(r.id)
    if not (r.aborted or r.refused or r.id in ended or r.out >= r.max_new):
        return True
    # With overlap scheduling, this includes the KV of the last token if the request ended early.
    state.memory.publish(r, r.kv, ended=True)
    state.end(r)
    if not r.aborted:
        (done.refused if r.refused else done.finished).append(r.id)
    return False
