"""Record the decisions of a released SGLang scheduler (``simkv/native/sglang``)."""

from __future__ import annotations

import contextlib
from collections import deque
from typing import Any

from simkv.conformance.decision_trace import DecisionTrace
from simkv.conformance.record.case_run import CaseRun, record_run
from simkv.conformance.record.recording_case import RecordingCase
from simkv.core.recording_format import RecordingLine
from simkv.native.sglang.sglang_engine import SglangEngine
from simkv.schedulers.sglang.recording import RECORDING
from simkv.schedulers.sglang.versions import VARIANTS


def record(case: RecordingCase, version: str, name: str) -> DecisionTrace:
    """Record the decisions of SGLang's scheduler in a case."""
    variant = case.config.variant
    source = VARIANTS[variant].source if version == variant else f"PyPI sglang=={version}"
    with contextlib.redirect_stdout(None):  # a scheduler that fails prints its prefix tree
        return record_run(SglangRun(case), name, source, RECORDING.knobs(case.config), _dies)


def _dies(error: Exception) -> str | None:
    """Describe an error that kills the engine's loop."""
    return f"raised {str(error).splitlines()[0]}" if isinstance(error, RuntimeError) else None


class SglangRun(CaseRun):
    """The run of SGLang's scheduler on a recorded workload, for as many steps as are needed."""

    idle_limit = 50

    def __init__(self, case: RecordingCase) -> None:
        super().__init__(case)
        self.engine = SglangEngine(case.config, lambda: float(self.step))
        self._in_flight: deque[Any] = deque()
        self._lost: list[int] = []
        self._left = {**self.outputs}
        self._emitted = 0

    def arrive(self, request: RecordingLine) -> None:
        self.engine.unread.append(request)

    def abort(self, number: int) -> None:
        self.engine.left_early.add(number)
        self.engine.unread.append(number)

    def lost(self) -> list[int]:
        return self._lost

    def is_busy(self) -> bool:
        return bool(self._in_flight)

    def iterate(self, gone: list[int]) -> tuple[RecordingLine, int]:  # noqa: ARG002
        engine = self.engine
        scheduler, overlap = engine.scheduler, engine.overlap
        self._emitted = 0
        engine.begin()
        engine.receive()
        batch, last = engine.next_batch(), scheduler.last_batch
        line = self._launched(batch)
        found = engine.lost(self.alive)
        line["preempted"] = [*found, *line["preempted"]]
        self._lost += found
        line |= {"lost": [*self._lost]} if self._lost else {}
        if batch:
            self._in_flight.append(batch.copy() if overlap else batch)
        ended: list[int] = []
        if self._in_flight and (last if overlap else batch):
            over = engine.process(self._in_flight.popleft(), self._ends)
            ended = [i for i in (int(r.rid) for r in over) if i in self.alive]
            line["ignored"] += [i for i in ended if i in engine.refused]
        elif (not batch and not overlap) or not (batch or last):
            engine.rest()
        scheduler.last_batch = batch
        line |= {"finished": [i for i in ended if i not in engine.refused], **self._after(batch)}
        return line, self._emitted

    def _launched(self, batch: Any) -> RecordingLine:
        launched, chunked = self.engine.rows(batch), self.engine.scheduler.chunked_req
        return {
            "scheduled": [[*row] for row in launched.rows],
            "kind": launched.kind,
            "preempted": [*self.engine.retracted],
            "ignored": [*self.engine.ignored],
            "chunked": None if chunked is None else int(chunked.rid),
            "prefix_lens": launched.contexts,
        }

    def _ends(self, i: int) -> bool:
        """Count a token of a request and return whether it is the last."""
        self._emitted += 1
        self._left[i] -= 1
        return not self._left[i]

    def _after(self, batch: Any) -> RecordingLine:
        scheduler, memory = self.engine.scheduler, self.engine.memory
        rows = list(scheduler.running_batch.reqs)
        if batch and not batch.forward_mode.is_decode():
            rows += [r for r in batch.reqs if r is not batch.chunked_req]
        line = {
            "waiting": [int(r.rid) for r in scheduler.waiting_queue],
            "running": [int(r.rid) for r in rows if not r.finished()],
            "free_blocks": memory.allocator.available_size() // self.config.page_size,
            "new_token_ratio": scheduler.new_token_ratio_tracker.current,
            "batch_is_full": bool(scheduler.running_batch.batch_is_full),
            "processed_tokens": scheduler.processed_tokens_counter,
        }
        if not self.config.disable_radix_cache:
            line["evictable"] = memory.tree.evictable_size()
        return line
