"""Explain the run while the server is running, in a separate process.

All received requests are simulated again, with the same decisions at the same times as on the
server. The duration grows with the number of requests, so only one simulation runs at a time. Its
result is used again for requests that had already ended.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, ParamSpec, TypeVar

from simkv.core.child_processes import starting_children
from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.report.json_answers import explain_request_data, list_verdicts
from simkv.report.run_explanation import explain_request, explain_run
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_writer import to_yaml
from simkv.serve.error_responses import RequestError
from simkv.serve.live_simulation import LiveSimulation
from simkv.serve.recorded_workload import recorded_scenario

#: Niceness of the explaining process, which gives the server precedence (see ``os.nice``).
NICE = 10
#: Maximum number of requests sent to the process at a time, because packing them blocks the server.
MAX_BATCH = 200
#: Outcomes that later requests cannot change.
SETTLED = {Outcome.FINISHED, Outcome.STARVED, Outcome.TIMED_OUT, Outcome.REJECTED}

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class LiveExplanation:
    """Explanation of a run or of some of its requests, as ``text`` and as JSON ``data``."""

    text: str
    data: dict[str, Any]


def explain_no_requests(until: float, dead: str) -> LiveExplanation:
    """Return the explanation for a server that has received no requests until ``until`` (s).

    ``dead`` is the reason why the engine is dead, or "".
    """
    text = "No requests received yet."
    verdicts = []
    if dead:
        text += f" The engine is dead: {dead}"
        verdicts.append({"name": "engine died", "text": dead, "requests": []})
    return LiveExplanation(text, {"until_s": until, "verdicts": verdicts})


class ExplainedRun:
    """The received requests and their last simulation. ``runs`` counts the simulations."""

    def __init__(self, scenario: Scenario, folder: Path) -> None:
        self._scenario, self._folder = scenario, folder
        self._requests: dict[int, Request] = {}
        self._result: RunResult | None = None
        self._until = 0.0
        self._changed = False
        self.runs = 0

    def add_requests(self, requests: Sequence[Request]) -> None:
        """Add received requests. A request whose client has left replaces its earlier version."""
        self._requests.update((request.id, request) for request in requests)
        self._changed = True

    def explain(self, numbers: Sequence[int], asked: float, until: float) -> LiveExplanation:
        """Explain the whole run, or the waiting time of the requests ``numbers``.

        ``asked`` is the time of the question (s). The requests are simulated again until ``until``
        (s) if the last simulation ends before ``asked`` and may give another answer.
        """
        result = self._result
        if result is None or (self._until < asked and not self._settled(result, numbers)):
            came = recorded_scenario(self._scenario, list(self._requests.values()), until)
            result = self._result = run_scenario(came, self._folder, intervals=False)
            self._until, self._changed = until, False
            self.runs += 1
        return _of_some(result, numbers) if numbers else _of_all(result)

    def _settled(self, result: RunResult, numbers: Sequence[int]) -> bool:
        """Return whether the result can no longer change for the requests ``numbers``, or for all
        requests.
        """
        lives = result.record.requests
        if not numbers and self._changed:
            return False
        return all(i in lives and lives[i].outcome in SETTLED for i in numbers or lives)

    def scenario(self) -> str:
        """Return the text of a scenario file with the received requests."""
        return to_yaml({"run": recorded_scenario(self._scenario, list(self._requests.values()))})


def _of_all(result: RunResult) -> LiveExplanation:
    scenario = result.scenario
    verdicts = [one.model_dump() for one in list_verdicts(result)]
    text = "\n".join(explain_run(scenario.name, result, "curl …/explain/{}".format))
    return LiveExplanation(text, {"until_s": scenario.horizon, "verdicts": verdicts})


def _of_some(result: RunResult, numbers: Sequence[int]) -> LiveExplanation:
    lines = [explain_request(result.scenario.name, result, number) for number in numbers]
    text = "\n\n".join("\n".join(story) for story in lines)
    waited = [explain_request_data(result, number).model_dump() for number in numbers]
    return LiveExplanation(text, {"requests": waited})


#: State of the explaining process.
_kept: ExplainedRun


def _begin(scenario: Scenario, folder: Path) -> None:
    """Initialize the explaining process. It exits when the server's process ends."""
    global _kept
    _kept = ExplainedRun(scenario, folder)
    os.nice(NICE)
    server = parent_process()
    assert server is not None

    def watch() -> None:
        server.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _add_requests(requests: Sequence[Request]) -> None:
    _kept.add_requests(requests)


def _explain(numbers: Sequence[int], asked: float, until: float) -> LiveExplanation:
    return _kept.explain(numbers, asked, until)


def _scenario() -> str:
    return _kept.scenario()


class Explainer:
    """Explanation of requests in a separate process, which starts at the first question."""

    def __init__(self, live: LiveSimulation, scenario: Scenario, folder: Path) -> None:
        self._live, self._init_args = live, (scenario, folder)
        self._pool: ProcessPoolExecutor | None = None
        self._sent = 0
        self._turn = asyncio.Lock()

    async def explain(self, numbers: Sequence[int]) -> LiveExplanation:
        """Explain the run so far, or the waiting time of the requests ``numbers``.

        Raises RequestError if the process was killed, or if the history of requests was dropped.
        """
        self._check_history()
        asked = self._live.now
        async with self._turn:
            await self._send_changes()
            return await self._do(_explain, list(numbers), asked, self._live.now)

    async def scenario(self) -> str:
        """Return the text of a scenario file with the requests so far.

        Raises RequestError if the process was killed, or if the history of requests was dropped.
        """
        self._check_history()
        async with self._turn:
            await self._send_changes()
            return await self._do(_scenario)

    def _check_history(self) -> None:
        if self._live.history_ended:
            self.close()
            raise RequestError(
                503,
                f"more than {self._live.max_history} requests were received (--max-history), so "
                "the history was dropped; record requests with --record, and run simkv explain "
                "on the trace",
            )

    async def _send_changes(self) -> None:
        """Send all new requests to the process."""
        while news := self._live.changes[self._sent : self._sent + MAX_BATCH]:
            await self._do(_add_requests, news)
            self._sent += len(news)

    async def _do(self, what: Callable[P, T], *given: P.args, **_: P.kwargs) -> T:
        try:
            with starting_children():  # the first call starts the process
                if self._pool is None:
                    self._pool = ProcessPoolExecutor(
                        1, get_context("spawn"), _begin, self._init_args
                    )
                answer = asyncio.get_running_loop().run_in_executor(self._pool, what, *given)
            return await answer
        except BrokenProcessPool:
            self._pool, self._sent = None, 0
            raise RequestError(503, "the explaining process was killed; try again") from None

    def close(self) -> None:
        """Stop the explaining process and reject further questions."""
        if self._pool is not None:
            for child in active_children():
                child.terminate()
            # At interpreter exit, the pool's pipe may already be closed; joining its thread then
            # would print a traceback.
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
