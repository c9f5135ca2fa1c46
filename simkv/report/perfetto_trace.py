"""Export of a run to the Chrome JSON trace format, for ui.perfetto.dev.

Format: "Trace Event Format" of the Chromium project (J. Duda, N. Duca and others, 2016). Timestamps
are in microseconds.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from simkv.core.atomic_files import atomic_file
from simkv.core.outcome import Outcome
from simkv.core.version import __version__
from simkv.explain.ledger_kinds import NEGLIGIBLE
from simkv.explain.wait_ledger import build_ledger, find_pauses, find_wasted_segments
from simkv.metrics.run_metrics import e2e, ttft
from simkv.report.lanes_plot import Bar, build_lane_states
from simkv.report.plot_style import sort_requests_by_arrival
from simkv.sim.run_record import RequestRecord, RunRecord

Event = dict[str, Any]
STEPS_THREAD = 1  # thread of the engine's steps


def write_perfetto(path: Path, records: Mapping[str, RunRecord], title: str) -> None:
    """Write the variants of a scenario to ``path`` as one trace.

    Each variant has an engine process with steps and counters of blocks and queues. A second
    process has one thread per request. Equal records give equal bytes.
    """
    head = {"displayTimeUnit": "ms", "otherData": {"scenario": title, "simkv": __version__}}
    with atomic_file(path) as new, new.open("w", encoding="utf-8", newline="\n") as file:
        file.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        separator = ""
        for event in events(records):
            file.write(separator + json.dumps(event, allow_nan=False, separators=(",", ":")))
            separator = ",\n"
        file.write("\n]}\n")


def events(records: Mapping[str, RunRecord]) -> Iterator[Event]:
    """Yield the trace events of all variants."""
    arrows = count(1)
    for index, (variant, record) in enumerate(records.items()):
        engine, clients = 2 * index + 1, 2 * index + 2
        yield _name("process", f"{variant}: engine", engine)
        yield _name("process", f"{variant}: requests", clients)
        yield _name("thread", "steps", engine, STEPS_THREAD)
        steps = list(_steps(record, engine))
        yield from steps
        yield from _counters(record, engine)
        paused, tiles = find_pauses(record), build_ledger(record)
        lives: dict[int, Event] = {}
        for place, life in enumerate(sort_requests_by_arrival(record), start=1):
            lane = build_lane_states(tiles[life.request.id]) + build_lane_states(
                find_wasted_segments(record, life, paused)
            )
            if lane:
                slices = list(_request(life, lane, clients, place))
                lives[life.request.id] = next(event for event in slices if event["ph"] == "X")
                yield from slices
        for life in record.requests.values():
            for at, cause in zip(life.preempted_at, life.causes, strict=True):
                source = lives.get(-1 if cause.by is None else cause.by)
                if source is None or not _covers(source, at):
                    source = _step_at(steps, at)
                target = lives.get(life.request.id)
                if source and target and _covers(target, at):
                    yield from _arrow(next(arrows), source, target, at)


def _covers(event: Event, at: float) -> bool:
    return bool(event["ts"] <= _us(at) < event["ts"] + event["dur"])


def _step_at(steps: list[Event], at: float) -> Event | None:
    """Return the step in progress at a time, or else the last step before it."""
    index = bisect_right(steps, _us(at), key=lambda event: float(event["ts"])) - 1
    return steps[index] if index >= 0 else None


def _steps(record: RunRecord, pid: int) -> Iterator[Event]:
    """Yield the engine's steps. Consecutive identical decode steps form one slice."""
    log = record.steps
    first = 0
    while first < len(log):
        last = first
        while last + 1 < len(log) and _goes_on(record, last):
            last += 1
        steps = last - first + 1
        name = log.kind[first] + (f" x {steps}" if steps > 1 else "")
        columns = {
            "steps": steps,
            "prefill_seqs": log.prefill_seqs[first],
            "prefill_tokens": log.prefill_tokens[first],
            "decode_seqs": log.decode_seqs[first],
            "preempted": log.preempted[first],
        }
        yield _slice(name, "step", log.start[first], log.end[last], pid, STEPS_THREAD, columns)
        first = last + 1


def _goes_on(record: RunRecord, row: int) -> bool:
    """Return whether steps ``row`` and ``row + 1`` are equal decode batches without a gap."""
    log, after = record.steps, row + 1
    return (
        not log.prefill_seqs[row]
        and not log.prefill_seqs[after]
        and not log.preempted[after]
        and log.kind[row] == log.kind[after]
        and log.decode_seqs[row] == log.decode_seqs[after]
        and log.start[after] - log.end[row] <= NEGLIGIBLE
    )


def _counters(record: RunRecord, pid: int) -> Iterator[Event]:
    """Yield the counters of blocks and queues whenever they change."""
    log = record.steps
    before: dict[str, dict[str, int]] = {}
    for row, start in enumerate(log.start):
        now = {
            "KV blocks": {"held": record.num_blocks - log.free_blocks[row]},
            "requests": {"waiting": log.waiting[row], "running": log.running[row]},
        }
        for name, values in now.items():
            if before.get(name) != values:
                yield {"ph": "C", "name": name, "pid": pid, "ts": _us(start), "args": values}
        before = now


def _request(life: RequestRecord, lane: list[Bar], pid: int, tid: int) -> Iterator[Event]:
    """Yield the thread of a request: its total time, its states, and its events."""
    request = life.request
    yield _name("thread", f"request {request.id}", pid, tid)
    yield {
        "ph": "M",
        "name": "thread_sort_index",
        "pid": pid,
        "tid": tid,
        "args": {"sort_index": tid},
    }
    about = {
        "outcome": str(life.outcome),
        "reason": life.reason,
        "prompt_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "tokens_received": life.tokens,
        "ttft_s": ttft(life),
        "e2e_s": e2e(life),
        "preemptions": len(life.preempted_at),
        "recomputed_tokens": life.recomputed_tokens,
    }
    name = f"request {request.id}: {life.outcome}"
    yield _slice(name, "request", lane[0].start, lane[-1].end, pid, tid, about)
    for state, start, end in lane:
        after = life.ended_at is not None and start >= life.ended_at
        name = f"{state} after the client left" if after else state
        yield _slice(name, "state", start, end, pid, tid, {})
    moments = [("first token", life.first_token)]
    if life.outcome is not Outcome.FINISHED:
        moments.append((str(life.outcome), life.ended_at))
    for name, at in moments:
        if at is not None:
            yield {"ph": "i", "name": name, "s": "t", "pid": pid, "tid": tid, "ts": _us(at)}


def _arrow(number: int, source: Event, target: Event, at: float) -> Iterator[Event]:
    """Yield an arrow from the beneficiary of a preemption to the victim."""
    flow = {"name": "preemption", "cat": "preemption", "id": number}
    last = source["ts"] + source["dur"] - 0.001
    for phase, end, ts in (("s", source, min(_us(at), last)), ("f", target, _us(at))):
        place = {"pid": end["pid"], "tid": end["tid"], "ts": round(ts, 3)}
        yield {"ph": phase, **({"bp": "e"} if phase == "f" else {}), **flow, **place}


def _slice(
    name: str, category: str, start: float, end: float, pid: int, tid: int, args: dict[str, Any]
) -> Event:
    begin = _ns(start)
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": pid,
        "tid": tid,
        "ts": begin / 1000,
        "dur": (_ns(end) - begin) / 1000,
        "args": args,
    }


def _name(what: str, name: str, pid: int, tid: int = 0) -> Event:
    return {"ph": "M", "name": f"{what}_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _ns(seconds: float) -> int:
    """Convert seconds to integer nanoseconds, so that adjacent slices touch and nested slices
    fit.
    """
    return round(seconds * 1e9)


def _us(seconds: float) -> float:
    return _ns(seconds) / 1000
