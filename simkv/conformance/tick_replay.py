"""Replay recordings of an engine with concurrent threads, which have one line per tick."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

import simpy

from simkv.conformance.per_decision_replay import arrivals_by_step, closing_line
from simkv.core.actor_protocol import Message, MessageEffects, Threads
from simkv.core.engine_spec import EngineSpec
from simkv.core.recording_format import RecordingFormat, RecordingLine, TickFormat
from simkv.core.request import Request
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.scenario.thread_pacing import Pacing
from simkv.sim.actor_pipeline import AsyncPipeline
from simkv.sim.clock import SimProcess


def replay_ticks(
    engine: EngineSpec, header: RecordingLine, at_least: int
) -> Iterator[RecordingLine]:
    """Yield one line for each tick of simkv's pipeline on the workload of ``header``.

    A last line follows if the engine dies, or if it stalls and ``at_least`` lines were yielded.
    """
    delays, recording = header["delays"], engine.recording
    gap = delays["messages_processed_between_schedule_and_put"] > 0
    actors = engine.build(recording.config(header))
    assert isinstance(actors, Threads)
    assert recording.ticks is not None
    pipeline = _Watched(actors, one_step_per_tick(delays["tp_lag"], gap), recording.ticks)
    env, tick_s = pipeline.env, pipeline.tick_s
    env.process(_clients(pipeline, recording, header["requests"]))
    env.process(pipeline.run())
    proved: int | None = None
    for tick in count():
        env.run(
            until=tick * tick_s + TICK_MARGIN_S
        )  # after the turns of the engine and the token processor
        arrivals = len(pipeline.record.requests) < len(header["requests"])
        if not arrivals and not pipeline.manager.alive():
            return
        line = pipeline.heard("pre", {"delivered": [], "events": []}) | pipeline.queues()
        in_gap = pipeline.in_gap
        env.run(until=(tick + 1) * tick_s - TICK_MARGIN_S)  # after the worker's turn
        if in_gap:
            line = pipeline.heard("gap", line) | pipeline.queues()
        if pipeline.dead:
            assert pipeline.record.engine_halt is not None
            yield closing_line("raised", pipeline.record.engine_halt.why)
            return
        yield line | pipeline.worked() | {"tick": tick}
        if proved is None and not arrivals and pipeline.record.engine_halt:
            proved = tick
        if proved is not None and tick >= at_least:
            alive = sorted(seq.id for seq in pipeline.manager.alive())
            yield closing_line("stall", f"nothing can run: {alive}", proved)
            return


#: Minimum distance (s) between any event of a tick and the time at which the tick is observed.
TICK_MARGIN_S = 0.125


def one_step_per_tick(lag: int, gap: bool) -> Pacing:
    """Return delays that make scheduler, worker and token processor run once per tick.

    A step takes one second. A tick takes one second, or 1.5 seconds with ``gap``. ``lag`` is the
    number of additional ticks until a message is received.
    """
    wait = 0.5 if gap else 0.0
    tick = 1.0 + wait
    # With ``gap`` and a lag, a message of tick t arrives after the decision of tick t + ``lag``,
    # and before the tasks of that tick are put into the queue.
    early = tick - wait / 2 if gap and lag else 0.0
    return Pacing(
        schedule_interval=tick,
        queue_interval=1.0,
        put_gap=wait,
        step_gap=wait,
        token_processor_lag=lag * tick - early,
        max_prefill_num=None,
    )


class _Watched(AsyncPipeline):
    """A pipeline that records the events of each tick."""

    def __init__(self, actors: Threads, pacing: Pacing, lines: TickFormat) -> None:
        executor = SimulatedExecutor(load_profile("unit-step"))
        super().__init__(simpy.Environment(), actors, executor, pacing)
        self.lines = lines
        self.tick_s = pacing.schedule_interval
        self.in_gap = False
        self._sent_at: deque[int] = deque()
        self._preempted_at: dict[int, int] = {}
        self._hearings: list[tuple[int, MessageEffects]] = []
        self._step: RecordingLine = {}

    @property
    def tick(self) -> int:
        return int(self.env.now // self.tick_s)

    def state_repeats(self) -> bool:
        super().state_repeats()
        return False  # a recording may repeat without limit

    def die(self, kind: str, why: str, requests: Iterable[int]) -> None:
        if kind == "livelock":  # see ``state_repeats``
            self._stop(kind, why)
        else:
            super().die(kind, why, requests)

    def decide(self) -> list[Any]:
        planned = super().decide()
        self.in_gap = bool(planned)
        self._preempted_at |= dict.fromkeys(self.manager.preempted, self.tick)
        return planned

    def put(self, planned: list[Any]) -> Any:
        parcel = super().put(planned)
        self.in_gap = False
        self._step["tasks"] = [self.lines.task(task) for task in parcel.tasks]
        return parcel

    def step(self) -> Message | None:
        self._step["stalled"] = self.worker.stalled()
        message = super().step()
        if message is not None:
            self._sent_at.append(self.tick)
            self._step["emitted"] = [self.lines.token(token) for token in message]
        return message

    def receive(self, message: Message) -> MessageEffects:
        heard = super().receive(message)
        self._hearings.append((self._sent_at.popleft(), heard))
        return heard

    def worked(self) -> RecordingLine:
        """Return the queued tasks and the computed tokens since the last call."""
        idle = {"tasks": [], "emitted": None, "stalled": self.worker.stalled()}
        line, self._step = idle | self._step, {}
        return line

    def heard(self, when: str, line: RecordingLine) -> RecordingLine:
        """Add the messages received since the last call to ``line``, labeled with ``when``.

        An acknowledgment is early if its message was sent before the preemption that it confirms.
        """
        for sent, heard in self._hearings:
            line["delivered"].append([sent, when])
            for i in heard.acked:
                truth = "early" if sent < self._preempted_at[i] else "true"
                line["events"].append(["ack", i, truth, f"msg{sent}"])
            line["events"] += [["finished", i] for i in heard.finished]
        self._hearings.clear()
        return line

    def queues(self) -> RecordingLine:
        """Return the recorded fields for the engine's queues and memory."""
        return self.lines.queues(self.manager)


def _clients(
    pipeline: _Watched, recording: RecordingFormat, requests: list[RecordingLine]
) -> SimProcess:
    for step, arrivals in sorted(arrivals_by_step(requests).items()):
        yield pipeline.env.timeout(step * pipeline.tick_s - pipeline.env.now)
        for request in arrivals:
            prompt = recording.prompt(request)
            sizes = prompt.prompt_tokens, prompt.max_tokens
            pipeline.submit(Request(prompt.id, *sizes, output_tokens=request["output_tokens"]))
