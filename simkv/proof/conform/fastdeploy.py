"""Replays of FastDeploy traces: step lines in lockstep, tick lines of the asynchronous pipeline."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import fields
from itertools import count
from typing import Any

import simpy

from simkv.core.request import Prompt, Request
from simkv.costs.profile import load_profile
from simkv.costs.simulated import SimulatedExecutor
from simkv.loop.clock import Process
from simkv.loop.pipeline import Pipeline
from simkv.proof.conform.lockstep import Emitted, Standstill, arrivals_by_step
from simkv.proof.conform.trace import Line
from simkv.scenario.pacing import Pacing
from simkv.schedulers.fastdeploy.memory import Heard, Planned, ResourceManager
from simkv.schedulers.fastdeploy.scheduler import (
    DecodeOnlyPreempt,
    FastDeploy,
    FastDeployConfig,
    FixedReserve,
    Ratio,
)
from simkv.schedulers.fastdeploy.worker import EOS, Message, Parcel, Task

#: How the recordings write an output token: its number from this base, or the end of sequence.
TOKEN_BASE = 1000
TOKEN_EOS = 2


def replay(header: Line, at_least: int) -> Iterator[Line]:
    """Decisions of simkv's engine on the workload of ``header`` (see ``conform.Replay``)."""
    return _ticks(header, at_least) if "delays" in header else _steps(header, at_least)


def _steps(header: Line, at_least: int) -> Iterator[Line]:
    """One line per ``schedule`` call; results of a step are heard before the next."""
    engine = FastDeploy(_config(header))
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
        if batch.fatal:
            yield {"truncated": True, "ending": "raised", "why": batch.fatal}
            return
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
    """One line per tick of the pipeline: hear, decide, perhaps hear in the gap, put, and step."""
    delays = header["delays"]
    config = _config(header, idle_worker_sends_ack=delays["idle_worker_sends_ack"])
    gap = delays["messages_processed_between_schedule_and_put"] > 0
    pipeline = _Watched(config, one_step_a_tick(delays["tp_lag"], gap))
    env, tick_s = pipeline.env, pipeline.tick_s
    env.process(_clients(pipeline, header["requests"]))
    env.process(pipeline.run())
    for tick in count():
        env.run(until=tick * tick_s + MARGIN)  # engine and token processor have had their turn
        arrivals = len(pipeline.record.lives) < len(header["requests"])
        if not arrivals and not pipeline.manager.alive():
            return
        line = pipeline.heard("pre", {"delivered": [], "events": []}) | pipeline.queues()
        in_gap = pipeline.in_gap
        env.run(until=(tick + 1) * tick_s - MARGIN)  # and so has the worker
        if in_gap:
            line = pipeline.heard("gap", line) | pipeline.queues()
        if pipeline.dead:
            assert pipeline.record.standstill is not None
            yield {"truncated": True, "ending": "raised", "why": pipeline.record.standstill.why}
            return
        yield line | pipeline.worked() | {"tick": tick}
        if not arrivals and tick >= at_least and pipeline.record.standstill:
            yield _stall(seq.id for seq in pipeline.manager.alive())
            return


#: Everything in a tick happens further than this (s) from the moments at which it is looked at.
MARGIN = 0.125


def one_step_a_tick(lag: int, gap: bool) -> Pacing:
    """Delays with which all three threads keep the beat of the recordings: one turn each a tick.

    A step takes a second and a tick half a second more if there is a ``gap``, for that is then the
    time from decision to put. A message of tick t is heard before the decision of t + 1 + ``lag``,
    or with a ``gap`` (and a ``lag``) before the put of tick t + ``lag``, if there is one.
    """
    wait = 0.5 if gap else 0.0
    tick = 1.0 + wait
    early = tick - wait / 2 if gap and lag else 0.0
    return Pacing(
        schedule_interval=tick,
        queue_interval=1.0,
        put_gap=wait,
        step_gap=wait,
        token_processor_lag=lag * tick - early,
        max_prefill_num=None,
    )


class _Watched(Pipeline):
    """A pipeline that takes down what a tick line says of it."""

    def __init__(self, config: FastDeployConfig, pacing: Pacing) -> None:
        executor = SimulatedExecutor(load_profile("unit-step"))
        super().__init__(simpy.Environment(), FastDeploy(config), executor, pacing)
        self.tick_s = pacing.schedule_interval
        self.in_gap = False
        self._sent_at: deque[int] = deque()
        self._preempted_at: dict[int, int] = {}
        self._hearings: list[tuple[int, Heard]] = []
        self._step: Line = {}

    @property
    def tick(self) -> int:
        return int(self.env.now // self.tick_s)

    def goes_round(self) -> bool:
        super().goes_round()
        return False  # a recording may go round for as long as it likes

    def decide(self) -> list[Planned]:
        planned = super().decide()
        self.in_gap = bool(planned)
        self._preempted_at |= dict.fromkeys(self.manager.preempted, self.tick)
        return planned

    def put(self, planned: list[Planned]) -> Parcel:
        parcel = super().put(planned)
        self.in_gap = False
        self._step["tasks"] = [_task(task, serialised=True) for task in parcel.tasks]
        return parcel

    def step(self) -> Message | None:
        self._step["stalled"] = self.worker.stalled()
        message = super().step()
        if message is not None:
            self._sent_at.append(self.tick)
            self._step["emitted"] = [_token(token) for token in message]
        return message

    def hear(self, message: Message) -> Heard:
        heard = super().hear(message)
        self._hearings.append((self._sent_at.popleft(), heard))
        return heard

    def worked(self) -> Line:
        """What was put and computed since it was asked for last."""
        idle = {"tasks": [], "emitted": None, "stalled": self.worker.stalled()}
        line, self._step = idle | self._step, {}
        return line

    def heard(self, when: str, line: Line) -> Line:
        """``line`` with what was heard since; an ack is early if older than the preemption."""
        for sent, heard in self._hearings:
            line["delivered"].append([sent, when])
            for i in heard.acked:
                truth = "early" if sent < self._preempted_at[i] else "true"
                line["events"].append(["ack", i, truth, f"msg{sent}"])
            line["events"] += [["finished", i] for i in heard.finished]
        self._hearings.clear()
        return line

    def queues(self) -> Line:
        """What the engine's memory holds now."""
        manager = self.manager
        return {
            "waiting": [seq.id for seq in manager.waiting],
            "running": [seq.id for seq in manager.running],
            "pending_reschedule": sorted(manager.pending),
            "slots": {str(i): seq.id for i, seq in enumerate(manager.slots) if seq},
            "tokens": {str(s.id): [s.computed, s.need, s.total] for s in manager.alive()},
            "free_blocks": manager.pool.free,
        }


def _clients(pipeline: _Watched, requests: list[Line]) -> Process:
    for step, arrivals in sorted(arrivals_by_step(requests).items()):
        yield pipeline.env.timeout(step * pipeline.tick_s - pipeline.env.now)
        for request in arrivals:
            sizes = request["prompt_tokens"], request["max_tokens"]
            pipeline.submit(Request(request["id"], *sizes, output_tokens=request["output_tokens"]))


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
