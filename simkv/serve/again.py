"""What came, as a scenario and as a trace that can be run again, and explained.

A run of what came makes the decisions that were made, at the times at which they were made, so it
is also where explanations come from: in a process of its own, since it must not hold up the clock.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from simkv.core.files import writing
from simkv.core.request import Request
from simkv.measure.result import Result
from simkv.measure.simulate import run_scenario
from simkv.report.explain import story, story_of
from simkv.scenario.scenario import Scenario
from simkv.why.ledger import WORDS
from simkv.workload.forms import Listed, acceptance_fields
from simkv.workload.rows import Pieces, Rows, piece_of
from simkv.workload.selection import Selection
from simkv.workload.source import Source
from simkv.workload.traces.own import used_columns, write_file
from simkv.workload.workload import Workload


def scenario_of(
    scenario: Scenario, requests: Sequence[Request], until: float | None = None
) -> Scenario:
    """The scenario with these requests for a workload, cut off at ``until`` (s)."""
    listed = [
        Listed(
            arrival=request.arrival,
            prompt_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
            max_tokens=request.max_tokens,
            priority=request.priority,
            ignore_eos=request.ignore_eos,
            lora=request.lora,
            routing_key=request.routing_key,
            logprobs_from=request.logprobs_from,
            timeout=request.timeout,
            **acceptance_fields(request),
            segments=list(request.segments) or None,
        )
        for request in requests
    ]
    changes = {"workload": Workload(requests=listed), "horizon": until}
    return scenario.model_copy(update=changes)


def write_trace(path: Path, requests: Sequence[Request]) -> None:
    """Write what came as a trace of ours, complete or not at all. Raises InputError."""
    with writing(path) as new:
        source = Source(path, Selection())
        rows = _rows(requests, source)
        write_file(new, [rows], used_columns(rows, ["arrival"]), source)


def _rows(requests: Sequence[Request], source: Source) -> Rows:
    pieces = [[piece_of(s, source.streams) for s in _shared(request)] for request in requests]
    return Rows(
        arrival=np.array([r.arrival for r in requests], np.float64),
        prompt_tokens=np.array([r.prompt_tokens for r in requests], np.int64),
        output_tokens=np.array([r.output_tokens for r in requests], np.int64),
        max_tokens=np.array([r.max_tokens for r in requests], np.int64),
        priority=np.array([r.priority for r in requests], np.int64),
        timeout=np.array([r.timeout or np.nan for r in requests], np.float64),
        ignore_eos=np.array([r.ignore_eos for r in requests], np.bool_),
        acceptance=np.array([_chance(r) for r in requests], np.float64),
        lora=np.array([-1 if r.lora is None else source.loras.number(r.lora) for r in requests]),
        pieces=Pieces.of(pieces),
    )


def _chance(request: Request) -> float:
    """How many drafts are accepted, as far as a trace can tell; its draws are those of a trace."""
    rates = request.acceptance.rates if request.acceptance else np.nan
    return np.nan if isinstance(rates, tuple) else rates


def _shared(request: Request) -> Iterator[Any]:
    """The segments of a prompt before its own tokens, which a trace does not name."""
    return (segment for segment in request.segments if segment.stream != f"u{request.id}")


@dataclass(frozen=True)
class Explained:
    """What is said of a run, or of some of its requests: ``text``, and what it is made of."""

    text: str
    data: dict[str, Any]


def nothing_came(until: float, dead: str) -> Explained:
    """What is said ``until`` a first request comes (s), of an engine that may be ``dead``."""
    text = "No request has come yet."
    verdicts = []
    if dead:
        text += f" The engine is dead: {dead}"
        verdicts.append({"name": "engine died", "text": dead, "requests": []})
    return Explained(text, {"until_s": until, "verdicts": verdicts})


def explain(scenario: Scenario, folder: Path, numbers: Sequence[int]) -> Explained:
    """Run a scenario and say why it went as it did, or what the requests ``numbers`` waited for."""
    result = run_scenario(scenario, folder, intervals=False)
    if numbers:
        lines = [story_of(scenario.name, result, number) for number in numbers]
        text = "\n\n".join("\n".join(story) for story in lines)
        return Explained(text, {"requests": [_waited(result, number) for number in numbers]})
    verdicts = [
        {"name": verdict.name, "text": verdict.text, "requests": list(verdict.requests)}
        for verdict in result.diagnosis.verdicts
    ]
    text = "\n".join(story(scenario.name, result, "curl …/explain/"))
    return Explained(text, {"until_s": scenario.horizon, "verdicts": verdicts})


def _waited(result: Result, number: int) -> dict[str, Any]:
    """What one request waited for, and for whom."""
    life, found = result.record.lives[number], result.diagnosis
    tiles = found.ledger[number]
    return {
        "request": number,
        "outcome": life.outcome.value if life.outcome else None,
        "arrival_s": life.request.arrival,
        "e2e_s": (life.ended_at or result.record.end) - life.request.arrival,
        "intervals": [
            {
                "what": tile.kind.value,
                "words": WORDS[tile.kind],
                "start_s": tile.start,
                "seconds": tile.seconds,
            }
            for tile in tiles
        ],
        "blockers": [{"request": b.id, "seconds": b.seconds} for b in found.blockers_of(number)],
    }


def _end_with_parent() -> None:
    """Let this process end when the server does, however that ends."""
    server = parent_process()
    assert server is not None

    def watch() -> None:
        server.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


class Explainer:
    """Explains in a process of its own, which is started with the first question."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario, self._folder = scenario, folder
        self._pool: ProcessPoolExecutor | None = None

    async def explain(
        self, requests: Sequence[Request], until: float, numbers: Sequence[int]
    ) -> Explained:
        """Why it went as it did ``until`` then (s), or what requests ``numbers`` waited for."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, get_context("spawn"), _end_with_parent)
        came = scenario_of(self._scenario, requests, until)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, explain, came, self._folder, list(numbers))

    def close(self) -> None:
        """Nobody asks any more; who still explains is stopped.

        Not waiting for the pool's thread would leave it to Python's end, which may find the pipe to
        it closed by then and print a traceback.
        """
        if self._pool is not None:
            for child in active_children():
                child.terminate()
            self._pool.shutdown(wait=True, cancel_futures=True)
