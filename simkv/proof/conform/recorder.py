"""Writes down what a scheduler decides, as a trace that ``simkv conform`` replays.

    recorder = Recorder(build(config), config)
    serve(Engine(env, recorder, executor, leaping=False), requests, horizon)
    write_trace(path, recorder, requests)

The other way round of the modules beside this one: those read a header and make the scheduler.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Collection, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from simkv.core.files import write_bytes
from simkv.core.request import Request
from simkv.core.scheduler import Batch, Completion, Livelock
from simkv.proof.conform.trace import FORMAT, Line
from simkv.schedulers.registry import variants


class Recorder:
    """A scheduler that notes every decision of the one inside it, made from ``config``.

    ``lines`` has one line per ``schedule`` call, with the fields that all engines have, read when
    the recordings of this engine read them. ``added`` is the call before which each request came;
    ``aborted`` are pairs of (call, request id), for which a trace has no place: one with any
    cannot be replayed. ``ending`` says how the engine died, if it did. Must not leap.
    """

    def __init__(self, inner: Any, config: Any) -> None:
        self.inner = inner
        self.config = config
        self.lines: list[Line] = []
        self.added: dict[int, int] = {}
        self.aborted: list[tuple[int, int]] = []
        self.ending: str | None = None
        self._lost: list[int] = []
        self._open = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def add(self, prompt: Any) -> None:
        self.close()
        self.added[prompt.id] = len(self.lines)
        self.inner.add(prompt)

    def abort(self, request_id: int) -> None:
        self.close()
        self.aborted.append((len(self.lines), request_id))
        self.inner.abort(request_id)

    def schedule(self) -> Batch:
        self.close()
        try:
            batch: Batch = self.inner.schedule()
        except Livelock as livelock:
            self.ending = f"livelock: {livelock.why}"
            raise
        self._lost += batch.lost
        line: Line = {
            "step": len(self.lines),
            "scheduled": [[row.id, row.tokens] for row in batch.rows()],
            "kind": batch.kind,
            "preempted": list(batch.preempted),
            "ignored": list(batch.ignored),
            "finished": [],
        }
        if self._lost:
            line["lost"] = list(self._lost)
        if batch.fatal:
            self.ending = batch.fatal
            if self.config.name != "mistralrs":
                return batch  # these recordings have no line for the batch that kills the engine
            line["crash"] = True
        if self.config.name == "fastdeploy":
            line |= self._queues()
        self.lines.append(line)
        self._open = not batch.fatal
        return batch

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        completion: Completion = self.inner.complete(batch, ended)
        self.lines[-1]["finished"] += completion.finished
        return completion

    def close(self) -> None:
        """Nothing more will happen in the present step: note what it left behind."""
        if self._open and self.config.name != "fastdeploy":
            self.lines[-1] |= self._queues()
        self._open = False

    def until_all_ended(self) -> tuple[list[Line], set[int]]:
        """The lines up to where a recording ends, and who had not ended by then.

        That is the step in which the last request ends; with SGLang's overlap loop the first one
        from there on that launches nothing.
        """
        alive = set(self.added)
        drains = self.config.name == "sglang" and self.inner.pipeline_depth == 2
        for index, line in enumerate(self.lines):
            alive -= {*line["finished"], *line["ignored"], *line.get("lost", ())}
            if not alive and not (drains and line["scheduled"]):
                return self.lines[: index + 1], alive
        return self.lines, alive

    def _queues(self) -> Line:
        inner, running, free = self.inner, self.inner.running_ids, self.inner.free_blocks
        if self.config.name == "sglang":
            running, free = inner.decode_ids, inner.memory.free // inner.memory.page_size
        return {"waiting": inner.waiting_ids(), "running": running(), "free_blocks": free}


def decision_hashes(lines: Iterable[Line]) -> list[str]:
    """Per line a hash of it and of all lines before it: where two runs part, these do too."""
    chain = hashlib.sha256()
    hashes = []
    for line in lines:
        chain.update(json.dumps(line, sort_keys=True).encode())
        hashes.append(chain.hexdigest()[:16])
    return hashes


def write_trace(
    path: Path, recorder: Recorder, requests: Iterable[Request], stopped: str | None = None
) -> None:
    """Write a decision trace to ``path`` (gzip'd JSON Lines), complete or not at all.

    ``stopped`` says why requests were left over, if the engine did not die of itself. The same
    decisions give the same bytes.
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


def _header(recorder: Recorder, requests: Iterable[Request]) -> Line:
    config = recorder.config
    header: Line = {
        "format": FORMAT,
        "engine": config.name,
        "variant": config.variant,
        "source": f"simkv, {variants(config.name)[config.variant].source}",
        "config": _config(config),
        "requests": [
            {
                "id": r.id,
                "arrival_step": recorder.added[r.id],
                "prompt_tokens": r.prompt_tokens,
                "output_tokens": r.output_tokens,
                **_shown(config.name, r),
            }
            for r in requests
        ],
    }
    return header | ({"aborted": recorder.aborted} if recorder.aborted else {})


def _config(config: Any) -> Line:
    """The knobs under the names that the recordings of this engine use."""
    knobs = asdict(config)
    del knobs["name"]
    knobs.pop("startup_check", None)
    if config.name in ("mistralrs", "fastdeploy"):
        del knobs["variant"]
    if config.name == "mistralrs":
        knobs["num_gpu_blocks_arg"] = knobs.pop("num_gpu_blocks")
        knobs["num_blocks"] = knobs["num_gpu_blocks_arg"] - (config.variant != "seed")
    if config.name == "sglang":
        for theirs, own in SGLANG_NAMES.items():
            knobs[theirs] = knobs.pop(own)
        knobs["radix_cache"] = not knobs.pop("disable_radix_cache")
        knobs["overlap"] = not knobs.pop("disable_overlap_schedule")
        if knobs["chunked_prefill_size"] == -1:
            knobs["chunked_prefill_size"] = None
    return knobs


SGLANG_NAMES = {
    "policy": "schedule_policy",
    "init_new_token_ratio_base": "init_new_token_ratio",
    "clip_max_new_tokens": "clip_max_new_tokens_estimation",
    "in_batch_prefix_check_threshold": "in_batch_prefix_caching_check_threshold",
    "in_batch_prefix_deprioritize_threshold": "in_batch_prefix_caching_deprioritize_threshold",
}


def _shown(engine: str, r: Request) -> Line:
    """What else of a request the scheduler of this engine reads."""
    if engine == "mistralrs":
        segments = [list(segment) for segment in r.segments]
        return {"timestamp": r.arrival, "has_images": r.has_images, "segments": segments}
    if engine == "vllm":
        return {
            "max_tokens": r.max_tokens,
            "timestamp": r.arrival,
            "priority": r.priority,
            "prompt_segments": [list(segment) for segment in r.segments],
        }
    if engine == "sglang":
        segments = [[s.stream, s.start, s.end - s.start] for s in r.segments]
        return {
            "max_tokens_requested": r.max_tokens,
            "ignore_eos": r.ignore_eos,
            "segments": segments,
        }
    return {"max_tokens": r.max_tokens}
