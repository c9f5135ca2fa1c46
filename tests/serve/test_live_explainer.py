"""Tests that explanations are as cheap as possible: the number of simulations is checked, not their
duration.
"""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simkv.core.request import Request
from simkv.scenario.scenario import Scenario
from simkv.serve import live_explainer
from simkv.serve.error_responses import RequestError
from simkv.serve.live_explainer import MAX_BATCH, ExplainedRun, Explainer
from simkv.serve.live_simulation import ClientRequest, LiveSimulation
from simkv.serve.served_scenario import load_served_scenario
from simkv.sim.simulation import build_replica_specs
from tests.serve.running_server import COSTS, inside, scenario


def loaded(folder: Path) -> Scenario:
    (folder / "served.yaml").write_text(scenario())
    shutil.copy(COSTS, folder)
    return next(iter(load_served_scenario(folder / "served.yaml", [])[1].values()))


def came(number: int, arrival: float, tokens: int = 4) -> Request:
    return Request(
        id=number,
        prompt_tokens=10,
        max_tokens=tokens,
        arrival=arrival,
        output_tokens=tokens,
    )


def test_simulates_only_if_needed(tmp_path: Path) -> None:
    kept = ExplainedRun(loaded(tmp_path), tmp_path)
    kept.add_requests([came(0, 1.0), came(1, 2.0, tokens=1000)])
    first = kept.explain([0], asked=5.0, until=5.0)
    assert kept.runs == 1
    assert first.data["requests"][0]["outcome"] == "finished"
    assert kept.explain([0], asked=50.0, until=50.0) == first  # the request had ended
    assert kept.explain([1], asked=4.0, until=6.0).data["requests"][0]["outcome"] == "cut_off"
    assert kept.runs == 1  # this run also answers questions from before the run
    assert kept.explain([1], asked=50.0, until=50.0).data["requests"][0]["outcome"] == "finished"
    assert kept.runs == 2
    kept.explain([], asked=60.0, until=60.0)
    assert kept.runs == 2  # all requests had ended, and no request was received since
    kept.add_requests([came(2, 61.0)])
    kept.explain([], asked=62.0, until=62.0)
    assert kept.runs == 3


def test_disconnected_client_updates_explanation(tmp_path: Path) -> None:
    kept = ExplainedRun(loaded(tmp_path), tmp_path)
    request = came(0, 1.0, tokens=1000)
    kept.add_requests([request])
    assert kept.explain([0], 2.0, 2.0).data["requests"][0]["outcome"] == "cut_off"
    kept.add_requests([replace(request, timeout=2.0)])
    told = kept.explain([0], 4.0, 4.0).data["requests"][0]
    assert (told["outcome"], told["e2e_s"], told["lasted_s"]) == ("timed_out", None, 2.0)


def test_concurrent_questions_share_two_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = loaded(tmp_path)
    kept = ExplainedRun(served, tmp_path)
    portions = []

    async def do(_: Explainer, what: Any, *given: Any) -> Any:
        """Act like the explaining process, but in this process, while other callers ask."""
        await asyncio.sleep(0)
        if what is live_explainer._add_requests:
            portions.append(len(given[0]))
        return getattr(kept, what.__name__.removeprefix("_"))(*given)

    monkeypatch.setattr(Explainer, "_do", do)

    async def ask() -> None:
        live = LiveSimulation(
            served, build_replica_specs(served, tmp_path), speed=1e-3
        )  # no request ends during this time
        live.start()
        asked = Explainer(live, served, tmp_path)
        for _ in range(2 * MAX_BATCH + 1):
            await live.submit(ClientRequest(10, 4, 4, lambda _: []))
        first = asyncio.create_task(asked.explain([3]))
        await asyncio.sleep(0)
        await asyncio.gather(first, *(asked.explain([number]) for number in range(50)))
        assert kept.runs <= 2
        assert portions == [MAX_BATCH, MAX_BATCH, 1]
        assert "requests:" in await asked.scenario()
        live.cut_off()

    asyncio.run(ask())


def test_killed_process_is_reported_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = []

    class Killed:
        def __init__(self, *_: Any) -> None:
            begun.append(self)

        def submit(self, *_: Any) -> None:
            raise BrokenProcessPool

    monkeypatch.setattr(live_explainer, "ProcessPoolExecutor", Killed)
    served = loaded(tmp_path)

    async def ask() -> None:
        live = LiveSimulation(served, build_replica_specs(served, tmp_path))
        live.start()
        asked = Explainer(live, served, tmp_path)
        for _ in range(2):
            with pytest.raises(RequestError, match="try again"):
                await asked.explain([])

    asyncio.run(ask())
    assert len(begun) == 2


def test_explanations_leave_out_the_api_server(tmp_path: Path) -> None:
    async def visit() -> str:
        text = scenario() + "front_end: {request_ms: 500, latency_ms: 500}\n"
        async with inside(tmp_path, text, speed=1000) as (_, client):
            await client.post("/v1/completions", json={"prompt": "x", "max_tokens": 5})
            return str((await client.get("/explain/0")).text)

    text = asyncio.run(visit())
    assert "decode" in text
    assert "API server" not in text
