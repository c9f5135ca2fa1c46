"""Replays of FastDeploy traces: step lines in lockstep, tick lines of the asynchronous pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import count
from typing import Any

from simkv.conform.lockstep import Emitted, Standstill, arrivals_by_step
from simkv.conform.trace import Line
from simkv.request import Prompt
from simkv.schedulers.fastdeploy import (
    DecodeOnlyPreempt,
    FastDeployConfig,
    FixedReserve,
    Ratio,
    actors,
    build,
)
from simkv.schedulers.fastdeploy_memory import ResourceManager, TokenProcessor
from simkv.schedulers.fastdeploy_worker import EOS, Message, Task, WorkerCrash

#: How the recordings write an output token: its number from this base, or the end of sequence.
TOKEN_BASE = 1000
TOKEN_EOS = 2


def replay(header: Line, at_least: int) -> Iterator[Line]:
    """Decisions of simkv's engine on the workload of ``header`` (see ``simkv.conform.Replay``)."""
    return _ticks(header, at_least) if "delays" in header else _steps(header, at_least)


def _steps(header: Line, at_least: int) -> Iterator[Line]:
    """One line per ``schedule`` call; results of a step are heard before the next."""
    engine = build(_config(header))
    emitted = Emitted(header["requests"])
    arrivals = arrivals_by_step(header["requests"])
    standstill = Standstill()
    alive = {request["id"] for request in header["requests"]}
    step = 0
    while alive:
        for request in arrivals.pop(step, ()):
            engine.add(_prompt(request))
            standstill.progress()
        line: Line = {"step": step, "acked": engine.acked, "ignored": []}
        batch = engine.schedule()
        line |= {
            "scheduled": [list(row) for row in batch.scheduled],
            "kind": batch.kind,
            "preempted": batch.preempted,
            "waiting": engine.waiting_ids(),
            "running": engine.running_ids(),
            "free_blocks": engine.free_blocks,
            "tasks": [_task(task) for task in engine.tasks],
            "stalled": engine.stalled,
            "pending_reschedule": sorted(engine.pending_ids()),
            "blocks_held": {str(i): blocks for i, blocks in engine.blocks_held().items()},
            "active_chunk": engine.active_id(),
            **_reservation(engine.manager),
        }
        completion = engine.complete(batch, emitted.ended(batch))
        emitted.count(completion)
        line["finished"] = completion.finished
        alive -= set(completion.finished)
        if completion.delivered:
            standstill.progress()
        yield line
        if not arrivals and step >= at_least and standstill.repeats(engine.fingerprint()):
            yield _stall(alive)
            return
        step += 1


def _ticks(header: Line, at_least: int) -> Iterator[Line]:
    """One line per tick: hear, decide, perhaps hear in the gap, put, and run one step.

    A message of tick t is readable at t + 1 + ``tp_lag``, in the gap one tick earlier.
    """
    delays = header["delays"]
    lag, gap = delays["tp_lag"], delays["messages_processed_between_schedule_and_put"]
    config = _config(header, idle_worker_sends_ack=delays["idle_worker_sends_ack"])
    manager, worker, processor = actors(config)
    outputs = {request["id"]: request["output_tokens"] for request in header["requests"]}
    arrivals = arrivals_by_step(header["requests"])
    standstill = Standstill()
    queue: deque[tuple[int, Message]] = deque()
    preempted_at: dict[int, int] = {}
    for tick in count():
        line: Line = {"tick": tick, "delivered": [], "events": []}
        while queue and queue[0][0] + 1 + lag <= tick:
            _hear(line, "pre", *queue.popleft(), processor, preempted_at)
        if not arrivals and not manager.alive():
            return
        for request in arrivals.pop(tick, ()):
            manager.add(_prompt(request))
        tasks: list[Task] = []
        if planned := manager.schedule():
            preempted_at |= dict.fromkeys(manager.preempted, tick)
            for _ in range(gap):
                if queue and queue[0][0] + lag <= tick:
                    _hear(line, "gap", *queue.popleft(), processor, preempted_at)
            parcel = manager.put(planned)
            tasks = parcel.tasks
            try:
                worker.take(parcel)
            except WorkerCrash as crash:
                yield {"truncated": True, "ending": "raised", "why": str(crash)}
                return
        line["stalled"] = worker.stalled()
        message = worker.step(lambda i, k: k >= outputs[i])
        if message is not None:
            queue.append((tick, message))
        alive = manager.alive()
        yield line | {
            "tasks": [_task(task, serialised=True) for task in tasks],
            "emitted": None if message is None else [_token(token) for token in message],
            "waiting": [seq.id for seq in manager.waiting],
            "running": [seq.id for seq in manager.running],
            "pending_reschedule": sorted(manager.pending),
            "slots": {str(i): seq.id for i, seq in enumerate(manager.slots) if seq},
            "tokens": {str(s.id): [s.computed, s.need, s.total] for s in alive},
            "free_blocks": manager.pool.free,
        }
        in_flight = tuple((tick - sent, tuple(message)) for sent, message in queue)
        state = manager.fingerprint(), worker.fingerprint(), in_flight
        if not arrivals and tick >= at_least and standstill.repeats(state):
            yield _stall(seq.id for seq in alive)
            return


def _hear(
    line: Line,
    when: str,
    sent: int,
    message: Message,
    processor: TokenProcessor,
    preempted_at: dict[int, int],
) -> None:
    """Deliver the message of tick ``sent``; an ack is early if it is older than the preemption."""
    heard = processor.receive(message)
    line["delivered"].append([sent, when])
    for i in heard.acked:
        truth = "early" if sent < preempted_at[i] else "true"
        line["events"].append(["ack", i, truth, f"msg{sent}"])
    line["events"] += [["finished", i] for i in heard.finished]


def _stall(alive: Iterable[int]) -> Line:
    return {"truncated": True, "ending": "stall", "why": f"nothing can run: {sorted(alive)}"}


def _config(header: Line, **more: Any) -> FastDeployConfig:
    """Knobs as recorded; text in their place only says how the variant goes without."""
    knobs = {field.name for field in fields(FastDeployConfig)}
    recorded = header["config"]
    known = {k: v for k, v in recorded.items() if k in knobs and not isinstance(v, str)}
    return FastDeployConfig(variant=header["variant"], **known, **more)


def _prompt(request: Line) -> Prompt:
    return Prompt(request["id"], request["prompt_tokens"], request["max_tokens"])


def _reservation(manager: ResourceManager) -> Line:
    if isinstance(manager, Ratio) or (isinstance(manager, DecodeOnlyPreempt) and manager.by_ratio):
        return {"ratio": manager.ratio}
    assert isinstance(manager, FixedReserve)
    return {"reserve": [manager.reserve, manager.reserve_exact, manager.relaxed]}


def _task(task: Task, *, serialised: bool = False) -> list[Any]:
    if task.kind == "prefill":
        return [task.kind, task.id, task.start, task.end] + [task.length] * serialised
    return [task.kind, task.id] + [task.blocks] * (serialised and task.kind == "decode")


def _token(token: int) -> int:
    if token == EOS:
        return TOKEN_EOS
    return TOKEN_BASE + token if token > 0 else token
