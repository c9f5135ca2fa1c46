"""Replays of mistral.rs traces: one line per iteration of the engine's loop."""

from __future__ import annotations

from collections.abc import Iterator

from simkv.core.request import Prompt, Segment
from simkv.core.scheduler import Livelock
from simkv.proof.conform.lockstep import Emitted, Standstill, arrivals_by_step
from simkv.proof.conform.trace import Line
from simkv.schedulers.mistralrs.scheduler import MistralrsConfig, build


def replay(header: Line, at_least: int) -> Iterator[Line]:
    """Decisions of simkv's scheduler on the workload of ``header`` (see ``conform.Replay``).

    Recorded timestamps are milliseconds and only their order counts.
    """
    scheduler = build(_config(header))
    emitted = Emitted(header["requests"])
    arrivals = arrivals_by_step(header["requests"])
    standstill = Standstill()
    alive = {request["id"] for request in header["requests"]}
    lost: list[int] = []
    step = 0
    while alive:
        for request in arrivals.pop(step, ()):
            scheduler.add(_prompt(request))
            standstill.progress()
        try:
            batch = scheduler.schedule()
        except Livelock as livelock:
            yield {"truncated": True, "ending": "livelock", "why": livelock.why}
            return
        line: Line = {
            "step": step,
            "scheduled": [list(row) for row in batch.scheduled],
            "kind": batch.kind,
            "preempted": batch.preempted,
            "ignored": batch.ignored,
            "finished": [],
            "free_blocks_sched": scheduler.free_blocks,
        }
        lost += batch.lost
        if lost:
            line["lost"] = lost
        if batch.fatal:
            line["crash"] = True
        else:
            completion = scheduler.complete(batch, emitted.ended(batch))
            emitted.count(completion)
            line["finished"] = completion.finished
            alive -= {*completion.finished, *batch.ignored, *batch.lost}
            if completion.delivered:
                standstill.progress()
        line["waiting"] = scheduler.waiting_ids()
        line["running"] = scheduler.running_ids()
        line["free_blocks"] = scheduler.free_blocks
        yield line
        if batch.fatal:
            yield {"truncated": True, "ending": batch.fatal.split(":")[0], "why": batch.fatal}
            return
        if not arrivals and step >= at_least and standstill.repeats(scheduler.fingerprint()):
            yield {"truncated": True, "ending": "stall", "why": f"nothing can run: {sorted(alive)}"}
            return
        step += 1
    if lost:
        yield {"truncated": True, "ending": "lost", "why": f"requests left every queue: {lost}"}


def _config(header: Line) -> MistralrsConfig:
    recorded = dict(header["config"])
    recorded["num_gpu_blocks"] = recorded.pop("num_gpu_blocks_arg")
    del recorded["num_blocks"]
    return MistralrsConfig(variant=header["variant"].removesuffix("_wtinf"), **recorded)


def _prompt(request: Line) -> Prompt:
    tokens, shared = request["prompt_tokens"], request.get("prefix_len", 0)
    segments = tuple(Segment(*segment) for segment in request.get("segments", ()))
    if shared:
        own = Segment(f"u{request['id']}", 0, tokens - shared)
        segments = (Segment(f"g{request['prefix_group']}", 0, shared), own)
    return Prompt(
        id=request["id"],
        prompt_tokens=tokens,
        max_tokens=request["output_tokens"],
        arrival=request["timestamp"],
        has_images=request["has_images"],
        segments=segments,
    )
