"""Run an engine's own scheduler with a fake model through a case, and record its decisions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Any

from simkv.conformance.decision_recorder import ended_requests
from simkv.conformance.decision_trace import FORMAT, DecisionTrace
from simkv.conformance.record.recording_case import RecordingCase
from simkv.core.recording_format import RecordingLine
from simkv.native.source_worker import CpuLimitExceeded, cpu_limit

#: Minimum number of consecutive steps without a new token after which a case counts as stalled. The
#: number of tokens of the longest sequence is used if it is larger, because a step may compute a
#: single token.
MAX_BARREN_STEPS = 400
#: CPU time (s) after which a step counts as a livelock, because schedulers may loop forever.
STEP_SECONDS = 2.0


class CaseRun(ABC):
    """The run of a workload until no request remains or makes progress.

    ``idle_limit`` is the number of steps in a row without scheduled requests that ends the run.
    """

    idle_limit = MAX_BARREN_STEPS

    def __init__(self, case: RecordingCase) -> None:
        self.case, self.config = case, case.config
        self.step = 0
        self.alive = {request["id"] for request in case.requests}
        self.outputs = {request["id"]: request["output_tokens"] for request in case.requests}
        self._arrived: set[int] = set()
        longest = max(r["prompt_tokens"] + r["output_tokens"] for r in case.requests)
        self._barren_limit = max(MAX_BARREN_STEPS, longest)

    @abstractmethod
    def arrive(self, request: RecordingLine) -> None:
        """Add a request to the engine."""

    @abstractmethod
    def abort(self, number: int) -> None:
        """Report to the engine that the client of a request has left."""

    @abstractmethod
    def iterate(self, gone: list[int]) -> tuple[RecordingLine, int]:
        """Run a step; return its line and the number of requests with tokens; extend ``gone``."""

    def lost(self) -> list[int]:
        """Return the unfinished requests that are in no queue."""
        return []

    def is_busy(self) -> bool:
        """Whether the run continues although all requests have ended."""
        return False

    def leave(self, phase: int) -> list[int]:
        """Abort the requests whose clients leave in the phase, and return their ids."""
        ids = [i for at, when, i in self.case.aborts if (at, when) == (self.step, phase)]
        there = [i for i in dict.fromkeys(ids) if i in self.alive & self._arrived]
        self.alive.difference_update(there)
        for i in there:
            self.abort(i)
        return there

    def lines(self) -> Iterator[RecordingLine]:
        """Yield one line per step, and a closing line if requests are unfinished at the end."""
        arriving: dict[int, list[RecordingLine]] = {}
        for request in self.case.requests:
            arriving.setdefault(request["arrival_step"], []).append(request)
        idle = barren = 0
        while self.alive or self.is_busy():
            gone = self.leave(0)
            came = arriving.pop(self.step, ())
            for request in came:
                self._arrived.add(request["id"])
                self.arrive(request)
            gone += self.leave(1)
            try:
                with cpu_limit(STEP_SECONDS):
                    line, tokens = self.iterate(gone)
            except CpuLimitExceeded:
                why = f"livelock: a step used more than {STEP_SECONDS:g} s of CPU time"
                yield {"truncated": True, "why": why}
                return
            line = {"step": self.step, **line} | ({"aborted": gone} if gone else {})
            self.alive -= ended_requests(line)
            yield line
            expected = came or arriving or any(at > self.step for at, _, _ in self.case.aborts)
            idle = 0 if expected or line["scheduled"] else idle + 1
            barren = 0 if came or gone else barren
            barren = 0 if tokens else barren + line.get("delivered", 1)
            if idle > self.idle_limit or (barren >= self._barren_limit and not arriving):
                yield {"truncated": True, "why": f"no progress: {sorted(self.alive)}"}
                return
            self.step += 1
        if lost := self.lost():
            yield {"truncated": True, "why": f"requests left every queue: {lost}"}


def record_run(
    run: CaseRun,
    name: str,
    source: str,
    knobs: RecordingLine,
    reason: Callable[[Exception], str | None],
) -> DecisionTrace:
    """Return the recording; ``reason`` describes an error that kills the engine, or is None."""
    case = run.case
    header: RecordingLine = {
        "format": FORMAT,
        "engine": case.config.name,
        "variant": case.config.variant,
        "source": source,
        "case": name,
        "config": knobs,
        "requests": case.requests,
    }
    header |= {"aborts": case.aborts} if case.aborts else {}
    header |= case.header_fields
    lines: list[dict[str, Any]] = []
    try:
        for line in run.lines():
            lines.append(line)  # keeps the lines before an error
    except Exception as error:
        if (why := reason(error)) is None:
            raise
        lines.append({"truncated": True, "why": why})
    closing = lines.pop() if "truncated" in lines[-1] else None
    return DecisionTrace(name, header, lines, closing)
