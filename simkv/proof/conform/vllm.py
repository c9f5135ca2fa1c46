"""Replays of vLLM traces: one line per ``schedule`` call."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import fields

from simkv.core.request import Prompt, Segment
from simkv.core.scheduler import Batch, Completion
from simkv.proof.conform.lockstep import Emitted, Standstill, arrivals_by_step
from simkv.proof.conform.trace import Line
from simkv.schedulers.vllm.scheduler import VllmConfig, VllmScheduler


def replay(header: Line, at_least: int) -> Iterator[Line]:
    """Decisions of simkv's scheduler on the workload of ``header`` (see ``conform.Replay``).

    An iteration schedules a step and then, once ``pipeline_depth`` batches are under way, delivers
    the oldest.
    """
    scheduler = VllmScheduler(_config(header))
    emitted = Emitted(header["requests"])
    arrivals = arrivals_by_step(header["requests"])
    standstill = Standstill()
    alive = {request["id"] for request in header["requests"]}
    under_way: deque[Batch] = deque()
    decoding: deque[list[int]] = deque()
    step = 0
    while alive:
        for request in arrivals.pop(step, ()):
            scheduler.add(_prompt(request))
            standstill.progress()
        batch, line, members = _schedule(scheduler)
        under_way.append(batch)
        decoding.append(members)
        completion = Completion([], [])
        line["step"] = step
        line["delivered"] = int(len(under_way) == scheduler.pipeline_depth)
        if line["delivered"]:
            oldest, members = under_way.popleft(), decoding.popleft()
            completion = scheduler.complete(oldest, emitted.ended(oldest, members))
            emitted.count(completion, members)
        if completion.delivered or (line["delivered"] and oldest.decodes):
            standstill.progress()
        alive -= {*completion.finished, *batch.ignored}
        line["finished"] = completion.finished
        line["waiting"] = scheduler.waiting_ids()
        line["running"] = scheduler.running_ids()
        line["free_blocks"] = scheduler.free_blocks
        yield line
        if not arrivals and step >= at_least and standstill.repeats(scheduler.fingerprint()):
            yield {"truncated": True, "ending": "stall", "why": f"no progress: {sorted(alive)}"}
            return
        step += 1


def _schedule(scheduler: VllmScheduler) -> tuple[Batch, Line, list[int]]:
    """One ``schedule`` call, what can be seen of it right after, and the decode group's ids."""
    running, held = set(scheduler.running_ids()), scheduler.blocks_held()
    batch = scheduler.schedule()
    tables = scheduler.cache.tables if scheduler.cache else {}
    rows = batch.rows()
    new_blocks = [[row.id, tables.get(row.id, [])[held.get(row.id, 0) :]] for row in rows]
    line = {
        "scheduled": [[row.id, row.tokens] for row in rows],
        "kind": batch.kind,
        "preempted": batch.preempted,
        "ignored": batch.ignored,
        "hits": [[row.id, row.context] for row in rows if row.id not in running],
        "new_blocks": [[i, blocks] for i, blocks in new_blocks if blocks],
        "running_after_schedule": scheduler.running_ids(),
        "free_blocks_after_schedule": scheduler.free_blocks,
    }
    if scheduler.cache:
        line["cached_blocks_after_schedule"] = scheduler.cache.cached
    explicit = {i for i, _ in batch.scheduled}
    return batch, line, [row.id for row in rows if row.id not in explicit]


def _config(header: Line) -> VllmConfig:
    """Knobs as recorded; the recorder drove the scheduler alone, past the check at start-up."""
    ours = {"name", "variant", "startup_check"}
    knobs = {knob.name for knob in fields(VllmConfig)} - ours
    recorded = header["config"]
    variant = recorded.get("variant", "0.33.0")
    recorded = {"num_cpu_blocks": 0, **recorded}  # not known to the engine itself
    given = {knob: recorded[knob] for knob in knobs}
    return VllmConfig(startup_check=False, variant=variant, **given)


def _prompt(request: Line) -> Prompt:
    return Prompt(
        id=request["id"],
        prompt_tokens=request["prompt_tokens"],
        max_tokens=request["max_tokens"],
        arrival=request["timestamp"],
        priority=request["priority"],
        segments=tuple(Segment(*segment) for segment in request.get("prompt_segments", ())),
    )
