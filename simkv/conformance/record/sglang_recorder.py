"""Record the unmodified scheduler of a released SGLang package on small workloads, step by step.

The driver and its stubs are in ``simkv/native/sglang``. Releases 0.5.15, 0.5.20, 0.5.22 and 0.5.23
are supported. Only the decisions are kept.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from simkv.conformance.decision_trace import FORMAT, DecisionTrace
from simkv.conformance.record.recording_case import RecordingCase
from simkv.core.recording_format import RecordingLine
from simkv.native.sglang.sglang_engine import SglangEngine
from simkv.schedulers.sglang.recording import RECORDING
from simkv.schedulers.sglang.versions import VARIANTS

#: Number of consecutive steps without a launch after which the case counts as stalled.
MAX_IDLE_STEPS = 50


def record(case: RecordingCase, version: str, name: str) -> DecisionTrace:
    """Record the decisions of SGLang's scheduler in a case."""
    header = {
        "format": FORMAT,
        "engine": "sglang",
        "variant": case.config.variant,
        "source": VARIANTS[case.config.variant].source,
        "case": name,
        "config": RECORDING.knobs(case.config),
        "requests": case.requests,
    }
    header |= {"aborts": case.aborts} if case.aborts else {}
    if version != case.config.variant:
        header["source"] = f"PyPI sglang=={version}"
    lines: list[RecordingLine] = []
    try:
        with contextlib.redirect_stdout(None):  # a failing scheduler prints its tree
            for line in SglangDriver(case).lines():
                lines.append(line)  # keeps the lines before an error
    except RuntimeError as error:
        closing: RecordingLine = {"truncated": True, "why": f"raised {str(error).splitlines()[0]}"}
        return DecisionTrace(name, header, lines, closing)
    truncated = lines.pop() if "truncated" in lines[-1] else None
    return DecisionTrace(name, header, lines, truncated)


class SglangDriver:
    """Runs SGLang's scheduler with a fake model through a case, for the required number of
    steps.
    """

    def __init__(self, case: RecordingCase) -> None:
        self.config, self.requests, self.aborts = case.config, case.requests, case.aborts
        self.step = 0
        self.engine = SglangEngine(case.config, lambda: float(self.step))
        self.left = {r["id"]: r["output_tokens"] for r in case.requests}

    def lines(self) -> Iterator[RecordingLine]:
        """Yield one line per step, and a closing line if the run ends with unfinished requests."""
        arriving: dict[int, list[RecordingLine]] = {}
        for request in self.requests:
            arriving.setdefault(request["arrival_step"], []).append(request)
        alive = {r["id"] for r in self.requests}
        engine, under_way = self.engine, deque[Any]()
        scheduler, overlap = engine.scheduler, engine.overlap
        still = 0
        lost: list[int] = []
        while alive or under_way:
            engine.begin()
            gone = self._leave(0, alive)
            engine.unread += arriving.pop(self.step, ())
            gone += self._leave(1, alive)
            alive -= set(gone)
            engine.receive()
            batch, last = engine.next_batch(), scheduler.last_batch
            line = {"step": self.step, **self._launched(batch)}
            line |= {"aborted": gone} if gone else {}
            found = engine.lost(alive)
            line["preempted"] = [*found, *line["preempted"]]
            lost += found
            line |= {"lost": [*lost]} if lost else {}
            if batch:
                under_way.append(batch.copy() if overlap else batch)
            finished: list[int] = []
            if under_way and (last if overlap else batch):
                ended = [
                    r
                    for r in engine.process(under_way.popleft(), self._ends)
                    if int(r.rid) in alive
                ]
                finished = [int(r.rid) for r in ended if int(r.rid) not in engine.refused]
                line["ignored"] += [int(r.rid) for r in ended if int(r.rid) in engine.refused]
            elif (not batch and not overlap) or not (batch or last):
                engine.rest()
            scheduler.last_batch = batch
            line |= {"finished": finished, **self._left(batch)}
            yield line
            alive -= {*finished, *line["ignored"], *lost}
            leaving = any(at > self.step for at, _, _ in self.aborts)
            still = 0 if batch or arriving or leaving else still + 1
            if still > MAX_IDLE_STEPS:
                yield {"truncated": True, "why": f"no progress: {sorted(alive)}"}
                return
            self.step += 1
        if lost:
            yield {"truncated": True, "why": f"requests left every queue: {lost}"}

    def _leave(self, phase: int, alive: set[int]) -> list[int]:
        """Submit the aborts of this phase; return the ids of the requests that had arrived."""
        ids = [i for at, when, i in self.aborts if (at, when) == (self.step, phase)]
        came = {r["id"] for r in self.requests if r["arrival_step"] < self.step + phase}
        there = [i for i in dict.fromkeys(ids) if i in alive & came]
        self.engine.left_early.update(there)
        self.engine.unread += there
        return there

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
        self.left[i] -= 1
        return not self.left[i]

    def _left(self, batch: Any) -> RecordingLine:
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
