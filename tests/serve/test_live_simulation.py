"""Tests that the live simulation equals a simulation of the received requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simkv.core.outcome import Outcome
from simkv.core.request import Segment
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.serve.live_simulation import ClientRequest, LiveSimulation, ServerStoppedError
from simkv.serve.recorded_workload import recorded_scenario, write_recorded_trace
from simkv.sim.run_record import RunRecord
from simkv.sim.simulation import build_replica_specs, simulate_scenario
from simkv.sim.step_log import COLUMNS
from simkv.workload.workload_section import generate_requests
from tests.serve.running_server import COSTS, PATIENCE, scenario

VLLM = scenario(66, 1024)
FLEET = "fleet: {replicas: 2, router: least_loaded}\n"
SPLIT = """\
fleet:
  replicas: [{count: 1, role: prefill}, {count: 2, role: decode}]
  kv_transfer: {bytes_per_token: 131072, bandwidth: 25.0e+9, latency: 0.001}
"""
FAILING = """\
fleet: {replicas: 2, on_failure: retry, failures: [{replica: 0, at: 2, back_at: 3}]}
"""
OTHER = "name: served\nprofile: assumed-costs.json\nengine: "
SERVED = {
    "vllm": VLLM,
    "fleet": VLLM + FLEET,
    "split": VLLM + SPLIT,
    "failing": VLLM + FAILING,
    "sglang": OTHER + "{name: sglang, max_total_num_tokens: 1200}\n",
    "mistralrs": OTHER + "{name: mistralrs, num_gpu_blocks: 40, block_size: 32}\n",
    "trtllm": OTHER + "{name: trtllm, max_tokens_in_paged_kv_cache: 1280}\n",
    "pipeline": OTHER + "{name: fastdeploy, num_blocks: 40}\npipeline: {}\n",
}
WORKLOAD = "workload: {requests: [{prompt_tokens: 1, output_tokens: 1}]}\n"


class Jumping(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer, so that tests do not sleep."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        plain = self._selector.select

        def select(timeout: float | None = None) -> list[Any]:
            self._now += max(timeout or 0.0, 1e-4)  # an iteration of the loop also takes time
            return plain(0)

        self._selector.select = select

    def time(self) -> float:
        return self._now


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.Runner]:
    """Yield a runner that executes a coroutine in simulated wall-clock time."""
    with asyncio.Runner(loop_factory=Jumping) as found:
        clock = found.get_loop().time
        monkeypatch.setattr(
            "simkv.serve.live_simulation.time", SimpleNamespace(monotonic=clock, time=clock)
        )
        yield found


def loaded(tmp_path: Path, text: str = VLLM) -> Scenario:
    path = tmp_path / "served.yaml"
    path.write_text(text + WORKLOAD)
    (tmp_path / COSTS.name).write_text(COSTS.read_text())
    return load(path)["run"]


async def visit(live: LiveSimulation, seed: int) -> list[int]:
    """Connect and disconnect clients at random; return the number of tokens received by each
    client.
    """
    luck = random.Random(seed)
    live.start()
    got = []

    async def client(number: int) -> None:
        await asyncio.sleep(luck.random() * 0.2)
        prompt, limit = luck.randint(1, 400), luck.randint(1, 300)
        shared = min(prompt, luck.choice([0, 64, 128]))

        def segments(own: int) -> list[Segment]:
            pieces = [Segment("common", 0, shared), Segment(f"u{own}", 0, prompt - shared)]
            return [piece for piece in pieces if piece.end] if shared else []

        answer = await live.submit(ClientRequest(prompt, limit, luck.randint(1, limit), segments))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(luck.choice([3.0, luck.random() * 0.3])):
                while not answer.ended:
                    await answer.wait_for_tokens(answer.tokens)
        left = asyncio.Event()
        live.disconnect(answer, left.set)
        await left.wait()
        got.append((answer.request.id, answer.tokens))

    await asyncio.gather(*(client(number) for number in range(45)))
    return [tokens for _, tokens in sorted(got)]


def columns(record: RunRecord) -> dict[str, list[object]]:
    log = record.steps
    return {name: list(getattr(log, name)) for name in COLUMNS}


@pytest.mark.parametrize("kind", SERVED)
@pytest.mark.parametrize("late", [False, True])
def test_rerun_makes_same_decisions(
    tmp_path: Path, kind: str, late: bool, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation equals the live simulation step by step, and clients received its tokens.

    If the live simulation is late, clients connect and disconnect while earlier events are due.
    """
    if late:
        monkeypatch.setattr("simkv.serve.live_simulation.SLICE_S", -1.0)  # one event at a time
    served = loaded(tmp_path, SERVED[kind])
    live = LiveSimulation(served, build_replica_specs(served, tmp_path), speed=10)
    got = runner.run(visit(live, 7))
    again = recorded_scenario(served, live.journal)
    run = simulate_scenario(again, build_replica_specs(again, tmp_path))
    outcomes = {life.outcome for life in run.record.requests.values()}
    assert Outcome.STARVED in outcomes
    assert len(outcomes) > 1
    if kind in ("vllm", "fleet"):
        assert any(life.preempted_at for life in run.record.requests.values())
    steps = 0
    for lifetime, replica in zip(run.lifetimes, live.replicas, strict=True):
        there, here = lifetime.engine.record, replica.record
        ours, theirs = columns(here), columns(there)
        steps += len(theirs["end"])
        for name in ("kind", "prefill_tokens", "decode_seqs", "preempted", "running"):
            assert ours[name] == theirs[name], name
        assert ours["end"] == pytest.approx(theirs["end"], rel=1e-9)
    assert steps > 30
    lives = [life for life in run.record.requests.values() if life.outcome is not Outcome.STALLED]
    sent_again = {i for i in range(len(got)) if run.fleet and len(run.fleet.sent[i]) > 1}
    for life in lives:
        number = life.request.id
        if kind == "failing" and number in sent_again:  # tokens in transit still reach the client
            assert got[number] >= life.tokens
        else:
            assert got[number] == life.tokens


def test_arrival_waits_for_earlier_events(
    tmp_path: Path, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A late simulation serves other tasks while a new request waits for earlier events."""
    monkeypatch.setattr("simkv.serve.live_simulation.SLICE_S", -1.0)
    served = loaded(tmp_path)
    live = LiveSimulation(served, build_replica_specs(served, tmp_path), speed=1e5)

    async def visit() -> int:
        live.start()
        first = await live.submit(ClientRequest(10, 300, 300, lambda _: []))
        arriving = live.submit(ClientRequest(10, 4, 4, lambda _: []))
        turns = 0
        while not arriving.done():
            assert live.now < 1e9
            assert len(live.journal) == 1
            await asyncio.sleep(0)
            turns += 1
        assert first.tokens > 0
        return turns

    assert runner.run(visit()) > 100


def test_stop_ends_waiting_arrivals(tmp_path: Path, runner: asyncio.Runner) -> None:
    served = loaded(tmp_path)
    live = LiveSimulation(served, build_replica_specs(served, tmp_path), speed=1e5)

    async def visit() -> None:
        live.start()
        arriving = live.submit(ClientRequest(10, 4, 4, lambda _: []))
        live.cut_off()
        with pytest.raises(ServerStoppedError, match="shutting down"):
            await arriving
        assert live.journal == []

    runner.run(visit())


def test_recorded_trace_is_lossless(tmp_path: Path, runner: asyncio.Runner) -> None:
    served = loaded(tmp_path)
    live = LiveSimulation(served, build_replica_specs(served, tmp_path), speed=10)
    runner.run(visit(live, 8))
    write_recorded_trace(tmp_path / "came.csv", live.journal)
    path = tmp_path / "again.yaml"
    path.write_text(scenario(66, 1024) + "workload: {trace: came.csv}\n")
    again = load(path)["run"]
    assert generate_requests(again.workload, None) == live.journal


def test_internal_error_ends_all_replies(tmp_path: Path) -> None:
    served = loaded(tmp_path)
    live = LiveSimulation(served, build_replica_specs(served, tmp_path), speed=10)

    def broken() -> None:
        raise RuntimeError("a bug")

    async def client() -> Outcome | None:
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)
        live.start()
        await asyncio.sleep(0.05)
        live.replicas[0].scheduler.schedule = broken  # type: ignore[method-assign,assignment]
        reply = await live.submit(ClientRequest(5, 5, 5, lambda _: []))
        await asyncio.wait_for(reply.wait_for_tokens(0), PATIENCE)
        return reply.outcome

    assert asyncio.run(client()) is Outcome.STALLED
    assert "a bug" in live.dead
