"""Record the decisions of TensorRT-LLM's Python scheduler (``simkv/native/trtllm``)."""

from __future__ import annotations

from simkv.conformance.decision_trace import DecisionTrace
from simkv.conformance.record.case_run import CaseRun, record_run
from simkv.conformance.record.recording_case import RecordingCase
from simkv.core.recording_format import RecordingLine
from simkv.native.trtllm.trtllm_engine import LaunchedIteration, TrtllmEngine
from simkv.schedulers.trtllm.config import VARIANTS
from simkv.schedulers.trtllm.recording import RECORDING


def record(case: RecordingCase, _: str, name: str) -> DecisionTrace:
    """Record the decisions of TensorRT-LLM's scheduler in a case."""
    source = VARIANTS[case.config.variant].source
    return record_run(TrtllmRun(case), name, source, RECORDING.knobs(case.config), _dies)


def _dies(error: Exception) -> str | None:
    """Describe a failed assertion, which kills the engine's loop."""
    return f"raised AssertionError: {error}" if isinstance(error, AssertionError) else None


class TrtllmRun(CaseRun):
    """The run of TensorRT-LLM's scheduler on a recorded workload."""

    idle_limit = 100

    def __init__(self, case: RecordingCase) -> None:
        super().__init__(case)
        self.engine = TrtllmEngine(case.config)
        self._left_early: set[int] = set()

    def arrive(self, request: RecordingLine) -> None:
        self.engine.add(RECORDING.prompt(request), request["output_tokens"])

    def abort(self, number: int) -> None:
        self._left_early.add(number)
        self.engine.heard.add(number)

    def iterate(self, gone: list[int]) -> tuple[RecordingLine, int]:
        engine = self.engine
        line = _launched(engine.launch())
        gone += self.leave(2)
        full = len(engine.in_flight) == 1 + engine.overlap
        done = engine.deliver() if full else None
        engine.settle()
        finished = [i for i in done.finished if i not in self._left_early] if done else []
        line |= {"delivered": int(full), "finished": finished}
        line |= {"waiting": engine.waiting_ids(), "running": engine.running_ids()}
        return line | {"free_blocks": engine.cache.free}, len(done.emitted) if done else 0


def _launched(launched: LaunchedIteration) -> RecordingLine:
    rows = [[r.request_id, r.context_chunk_size] for r in launched.contexts]
    return {
        "scheduled": rows + [[r.request_id, 1] for r in launched.generations],
        "kind": launched.kind,
        "preempted": [r.request_id for r in launched.paused],
        "ignored": [],
    }
