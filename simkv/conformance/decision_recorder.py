"""Record a scheduler's decisions as a trace that ``simkv conform`` replays.

    recorder = Recorder(build_scheduler(config), config)
    run_clients(Engine(env, recorder, executor, leaping=False), requests, horizon)
    write_decision_trace(path, recorder, requests)

``per_decision_replay`` is the counterpart: it reads the header of a recording and builds the
scheduler.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from simkv.conformance.decision_trace import FORMAT
from simkv.core.atomic_files import write_bytes
from simkv.core.recording_format import RecordingLine, record_decision
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Batch, Completion, Livelock
from simkv.schedulers.engine_registry import find_engine_spec


class Recorder:
    """A scheduler that forwards all calls to ``inner`` and records its decisions.

    ``lines`` has one line for each call of ``schedule``. ``added`` maps a request id to the index
    of the first call after the arrival. ``aborts`` are tuples (call, phase, request id); phase 1 is
    before the call, and phase 2 is between the call and the delivery of its tokens. ``ending`` is
    the reason why the engine died, or None.

    With ``whole``, lines also have the engine-specific fields. The simulated engine must be built
    with ``leaping=False``, because skipped steps are not recorded.
    """

    def __init__(self, inner: Any, config: Any, *, whole: bool = False) -> None:
        self.inner = inner
        self.config = config
        self.whole = whole
        self.recording = find_engine_spec(config).recording
        self.lines: list[RecordingLine] = []
        self.added: dict[int, int] = {}
        self.aborts: list[tuple[int, int, int]] = []
        self.ending: str | None = None
        self._lost: list[int] = []
        self._leaving: list[int] = []
        self._ended: set[int] = set()
        self._gone: set[int] = set()
        self._open = self._delivered = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def add(self, prompt: Any) -> None:
        self.close()
        self.added[prompt.id] = len(self.lines)
        self.inner.add(prompt)

    def abort(self, request_id: int) -> None:
        if request_id in self._ended or not self.recording.handles_aborts:
            # the client does not know yet that the request has ended, or the engine ignores aborts
            pass
        elif self._open and not self._delivered:
            self.aborts.append((len(self.lines) - 1, 2, request_id))
            self.lines[-1].setdefault("aborted", []).append(request_id)
        else:
            self.close()
            self.aborts.append((len(self.lines), 1, request_id))
            self._leaving.append(request_id)
        if self.recording.handles_aborts:
            self._gone.add(request_id)
        self.inner.abort(request_id)

    def schedule(self) -> Batch:
        self.close()
        try:
            batch, more = (
                self.recording.decide(self.inner) if self.whole else record_decision(self.inner)
            )
        except Livelock as livelock:
            self.ending = f"livelock: {livelock.why}"
            raise
        if batch.fatal:
            self.ending = batch.fatal
            if not self.recording.crash_line:
                return batch
        self._lost += batch.lost
        self._ended.update(batch.lost, batch.ignored, batch.refused)
        line: RecordingLine = {
            "step": len(self.lines),
            "scheduled": [[row.id, row.tokens] for row in batch.rows()],
            "kind": batch.kind,
            "preempted": list(batch.preempted),
            "ignored": [*batch.ignored, *(i for i in batch.refused if i not in self._gone)],
            "finished": [],
            **more,
        }
        if self._lost:
            line["lost"] = list(self._lost)
        if self._leaving:
            line["aborted"], self._leaving = self._leaving, []
        if batch.fatal:
            line["crash"] = True
        if self.recording.reads_queues_early:
            line |= self.recording.queues(self.inner)
        self.lines.append(line)
        self._open, self._delivered = self.whole or not batch.fatal, False
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        completion: Completion = self.inner.complete(batch, ended)
        for field, ids in (("finished", completion.finished), ("ignored", completion.refused)):
            self.lines[-1][field] += [i for i in ids if i not in self._gone]
        self._ended.update(completion.finished, completion.refused)
        self._delivered = True
        return completion

    def close(self) -> None:
        """Record the queues at the end of the current step."""
        if self._open and not self.recording.reads_queues_early:
            self.lines[-1] |= self.recording.queues(self.inner)
        if self._open and self.whole:
            self.lines[-1] |= self.recording.left(self.inner)
        self._open = False

    def until_all_ended(self) -> tuple[list[RecordingLine], set[int]]:
        """Return the lines up to the end of the recording, and the ids of requests unfinished
        there.
        """
        alive = set(self.added)
        for index, line in enumerate(self.lines):
            alive -= ended_requests(line)
            if not alive and not self.drains(line):
                return self.lines[: index + 1], alive
        return self.lines, alive

    def drains(self, line: RecordingLine) -> bool:
        """Return whether the recording continues after ``line`` although all requests have
        ended.
        """
        under_way = self.recording.drains and self.inner.pipeline_depth > 1
        return under_way and bool(line["scheduled"])


def ended_requests(line: RecordingLine) -> set[int]:
    """Return the ids of the requests that finished, were rejected, lost or aborted in a step."""
    left = (line["finished"], line["ignored"], line.get("lost", ()), line.get("aborted", ()))
    return {i for ids in left for i in ids}


def decision_hashes(lines: Iterable[RecordingLine]) -> list[str]:
    """Return one hash for each line, computed from the line and all lines before it."""
    chain = hashlib.sha256()
    hashes = []
    for line in lines:
        chain.update(json.dumps(line, sort_keys=True).encode())
        hashes.append(chain.hexdigest()[:16])
    return hashes


def write_decision_trace(
    path: Path, recorder: Recorder, requests: Iterable[Request], stopped: str | None = None
) -> None:
    """Write the recorded decisions to ``path`` as gzip-compressed JSON Lines.

    ``stopped`` is the reason for unfinished requests if the engine did not die. Equal decisions
    give equal bytes.
    """
    recorder.close()
    by_id = {request.id: request for request in requests}
    came = [by_id[i] for i in recorder.added]
    lines, alive = recorder.until_all_ended()
    text = [json.dumps(line) for line in (_header(recorder, came), *lines)]
    why = recorder.ending or (stopped if alive else None)
    if lines and "lost" in lines[-1] and not recorder.ending:
        why = f"requests left every queue: {lines[-1]['lost']}"
    if why:
        text.append(json.dumps({"truncated": True, "why": why}))
    write_bytes(path, gzip.compress("\n".join([*text, ""]).encode(), mtime=0))


def _header(recorder: Recorder, requests: Iterable[Request]) -> RecordingLine:
    config = recorder.config
    header: RecordingLine = {
        "format": FORMAT,
        "engine": config.name,
        "variant": config.variant,
        "source": f"simkv, {find_engine_spec(config).variant(config.variant).source}",
        "config": recorder.recording.knobs(config),
        "requests": [recorder.recording.request_line(r, recorder.added[r.id]) for r in requests],
    }
    return header | ({"aborts": recorder.aborts} if recorder.aborts else {})
