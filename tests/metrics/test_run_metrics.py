"""Tests of metrics, compared with values computed by hand, and with numpy from every token."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simpy
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.figure_registry import FIGURE_NAMES, STATISTICS, figure
from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import Batch, Completion, Scheduler
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.metrics.run_metrics import (
    Samples,
    jain_index,
    longest_stall,
    request_rows,
    run_verdict,
    step_rows,
    summarize,
    token_gaps,
    token_rows,
)
from simkv.metrics.scenario_runner import run_file
from simkv.schedulers.engine_registry import build_scheduler
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.sim.run_record import DraftCounts, KvCopyCounts, RequestRecord
from simkv.sim.segments import DECODE, EMITS, PREFILL
from simkv.workload.workload_section import generate_requests
from tests.fakes import Fifo, Seconds, die, simulate
from tests.laws.random_scenarios import scenarios


class Durations(Seconds):
    """An executor whose steps take the given durations in order, and one second after these."""

    def __init__(self, *steps: float) -> None:
        super().__init__()
        self.steps = list(steps)

    def run(self, load: Any) -> float:
        return self.steps.pop(0) if self.steps else 1.0


def ask(
    i: int, out: int = 4, at: float = 0.0, prompt: int = 4, timeout: float | None = None
) -> Request:
    return Request(i, prompt, out, arrival=at, output_tokens=out, timeout=timeout)


def preempt_at(call_: int) -> Fifo:
    """Return a scheduler that preempts request 0 at the given call, in favor of request 1."""

    def decide(call: int, fifo: Fifo) -> Batch | None:
        if call != call_:
            return None
        batch = fifo.batch("prefill", [(1, 4)])
        batch.preempted = [0]
        fifo.waiting, fifo.running = [0], [1]
        return batch

    return Fifo(decide)


# By hand


def test_metrics_match_hand_computation() -> None:
    # steps end at 1 s (both prefilled), 3, 6 (request 0 ends with three tokens) and 10 (request 1
    # ends)
    record = simulate(Fifo(), [ask(0, out=3), ask(1, out=4)], executor=Durations(1, 2, 3, 4))
    found = summarize(record)
    assert found["ttft_ms"] == pytest.approx(dict.fromkeys(STATISTICS, 1000))
    assert found["e2e_ms"]["mean"] == pytest.approx(8000)
    assert found["e2e_ms"]["median"] == pytest.approx(8000)
    assert found["e2e_ms"]["p90"] == pytest.approx(6000 + 0.9 * 4000)
    assert found["tpot_ms"]["mean"] == pytest.approx((2500 + 3000) / 2)
    # gaps: 2, 3 and 2, 3, 4
    assert found["itl_ms"]["mean"] == pytest.approx(14000 / 5)
    assert found["itl_ms"]["median"] == pytest.approx(3000)
    assert found["itl_ms"]["p99"] == pytest.approx(3000 + 0.96 * 1000)
    assert found["longest_stall_s"] == 4
    assert found["makespan_s"] == 10
    assert found["output_throughput"] == pytest.approx(7 / 10)
    assert found["request_throughput"] == pytest.approx(2 / 10)
    assert found["total_token_throughput"] == pytest.approx((7 + 8) / 10)
    assert (found["fastest_e2e_s"], found["slowest_e2e_s"]) == (6, 10)
    assert (found["total_input_tokens"], found["total_output_tokens"]) == (8, 7)
    assert (found["steps"], found["idle_passes"]) == (4, 0)
    assert (found["requests"], found["finished"], found["verdict"]) == (2, 2, "served")


def test_preemption_keeps_ttft_and_its_stall_is_in_itl() -> None:
    record = simulate(preempt_at(2), [ask(0), ask(1, out=1, at=2.0)])
    row = request_rows("v", record)[0]
    assert row["ttft_s"] == 1.0
    assert row["preemptions"] == 1
    # tokens of request 0 at 1, 2, then 4 (prefilled again) and 5
    found = summarize(record)
    assert found["longest_stall_s"] == 2.0
    assert found["itl_ms"]["mean"] == pytest.approx(4000 / 3)
    assert found["preemptions"] == 1
    assert found["recomputed_tokens"] == row["recomputed_tokens"] == 5


def test_latencies_include_finished_requests_only() -> None:
    record = simulate(Fifo(), [ask(0, out=2), ask(1, out=50, timeout=10.5)])
    found = summarize(record)
    assert (found["finished"], found["starved"], found["verdict"]) == (1, 1, "starved")
    assert found["ttft_ms"]["mean"] == 1000
    assert found["e2e_ms"]["mean"] == 2000
    assert found["itl_ms"]["mean"] == 1000
    assert found["total_output_tokens"] == 2
    rows = request_rows("v", record)
    assert rows[1]["ttft_s"] == 1.0  # the row shows the first token although the request failed
    assert rows[1]["e2e_s"] is rows[1]["tpot_s"] is rows[1]["finish_s"] is None


def test_longest_stall_includes_all_requests() -> None:
    def decide(call: int, fifo: Fifo) -> Batch | None:
        if call == 1:  # prefills the new request while request 0 waits
            fifo.waiting = []
            fifo.running = [0, 1]
            return fifo.batch("prefill", [(1, 4)])
        return None

    requests = [ask(0, out=9, timeout=9.5), ask(1, out=2, at=0.5)]
    record = simulate(Fifo(decide), requests, executor=Durations(1, 5))
    assert record.requests[0].outcome is Outcome.STARVED
    assert longest_stall(record) == 6.0
    assert summarize(record)["itl_ms"]["p99"] == 1000  # finished requests only


def test_request_of_one_token_has_no_tpot() -> None:
    record = simulate(Fifo(), [ask(0, out=1)])
    assert request_rows("v", record)[0]["tpot_s"] is None
    found = summarize(record)
    assert found["tpot_ms"] == found["itl_ms"] == dict.fromkeys(STATISTICS, 0.0)
    assert found["longest_stall_s"] == 0.0


def test_makespan_lasts_from_first_arrival_to_last_answer() -> None:
    record = simulate(Fifo(), [ask(0, out=2, at=3.0), ask(1, out=90, at=4.0, timeout=20.0)])
    assert summarize(record)["makespan_s"] == 21.0  # the client left at 24 s
    record = simulate(Fifo(), [ask(0, out=2, at=3.0)], horizon=100.0)
    assert summarize(record)["makespan_s"] == 2.0
    record = simulate(Fifo(), [ask(0, out=200)], horizon=100.0)
    assert summarize(record)["makespan_s"] == 100.0


def test_empty_run_has_figures() -> None:
    found = summarize(simulate(Fifo(), []))
    assert found["makespan_s"] == found["output_throughput"] == found["jain_index"] == 0.0
    assert found["requests"] == 0


def test_unfinished_requests_have_no_speed() -> None:
    record = simulate(Fifo(), [ask(0, out=2), ask(1, out=9, timeout=3.5)])
    record.isolated_s = {0: 2.0, 1: 9.0}
    assert [life.outcome for life in record.requests.values()] == [
        Outcome.FINISHED,
        Outcome.STARVED,
    ]
    assert summarize(record)["jain_index"] == 0.5


def test_gaps_are_between_messages_of_several_tokens() -> None:
    record = simulate(Fifo(), [ask(0, out=6)], executor=Durations(1, 2, 3, 4, 5, 6))
    record.requests[0].tokens_per_chunk = 2
    # Messages with tokens 1, 2 and 3, 4 and 5, and 6 arrive at 1, 6, 15 and 21 s.
    found = summarize(record)
    assert found["itl_ms"]["mean"] == pytest.approx(20_000 / 3)
    assert found["longest_stall_s"] == 9.0


def test_draft_figures_match_hand_computation() -> None:
    record = simulate(Fifo(), [ask(0)])
    record.drafting = DraftCounts(num_drafts=10, num_draft_tokens=30, num_accepted_tokens=12)
    assert summarize(record)["spec_decode"] == {
        "acceptance_rate": 40.0,
        "acceptance_length": 2.2,
        "num_drafts": 10,
        "draft_tokens": 30,
        "accepted_tokens": 12,
    }
    record.drafting = DraftCounts(0, 0, 0)
    found = summarize(record)["spec_decode"]
    assert (found["acceptance_rate"], found["acceptance_length"]) == (0.0, 0.0)


@pytest.mark.parametrize("disk", [False, True])
def test_tier_figures_match_hand_computation(disk: bool) -> None:
    record = simulate(Fifo(), [ask(0, prompt=100), ask(1, prompt=100)])
    # 80 tokens of the first prompt are cached: 30 on the GPU, 20 in host memory, 30 on disk.
    record.requests[0].chunk_rows = array("i", (0, 20, 80))
    record.requests[0].loaded_tokens, record.requests[0].disk_tokens = 50, 30 * disk
    record.copied = KvCopyCounts(64, 96, *((32, 48) if disk else ()))
    found = summarize(record)["kv_tiers"]
    assert (found["gpu_hit_rate"], found["loaded_tokens"], found["stored_tokens"]) == (15, 64, 96)
    assert found["host_hit_rate"] == (10.0 if disk else 25.0)
    names = ("disk_hit_rate", "read_tokens", "written_tokens")
    assert [found.get(name) for name in names] == ([15.0, 32, 48] if disk else [None] * 3)
    nothing = simulate(Fifo(), [])
    nothing.copied = KvCopyCounts(0, 0, 0, 0)
    assert set(summarize(nothing)["kv_tiers"].values()) == {0}


# Verdicts


@pytest.mark.parametrize(
    ("scheduler", "timeout", "horizon", "verdict"),
    [
        (Fifo(), None, None, "served"),
        (Fifo(), 1.5, None, "starved"),
        (Fifo(), None, 1.5, "cut_off"),
        (Fifo(die(1)), None, None, "engine died"),
        # the client left before the engine received the request
        (Fifo(die(1)), 0.5, None, "starved"),
    ],
)
def test_each_ending_has_verdict(
    scheduler: Fifo, timeout: float | None, horizon: float | None, verdict: str
) -> None:
    record = simulate(scheduler, [ask(0, timeout=timeout)], horizon=horizon)
    assert run_verdict(record)[0] == summarize(record)["verdict"] == verdict


def test_verdict_names_at_most_eight_requests() -> None:
    record = simulate(Fifo(), [ask(i, timeout=1.5) for i in range(10)])
    assert run_verdict(record) == (
        "starved",
        "10 of 10: requests 0, 1, 2, 3, 4, 5, 6, 7 and 2 more",
    )
    record = simulate(Fifo(), [ask(0, timeout=1.5)])
    assert run_verdict(record) == ("starved", "1 of 1: request 0")


# Statistics


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.integers(1, 20)), min_size=1, max_size=30, unique_by=id
    )
)
def test_weighted_statistics_match_the_expanded_list(
    samples: list[tuple[float, int]],
) -> None:
    values = np.array([value for value, _ in samples])
    weights = np.array([weight for _, weight in samples])
    expanded = np.repeat(values, weights)
    found = Samples(values, weights).statistics_ms()
    assert found["mean"] == pytest.approx(1000 * expanded.mean())
    assert found["median"] == pytest.approx(1000 * np.median(expanded))
    for name, share in (("p90", 90), ("p95", 95), ("p99", 99)):
        assert found[name] == pytest.approx(1000 * np.percentile(expanded, share))


def test_statistics_of_nothing_are_zero() -> None:
    nothing = Samples(np.zeros(0), np.zeros(0, dtype=np.int64))
    assert nothing.statistics_ms() == dict.fromkeys(STATISTICS, 0.0)


@pytest.mark.parametrize(
    ("values", "index"),
    [
        ([], 0.0),
        ([0, 0], 0.0),
        ([5], 1.0),
        ([1, 1, 1, 1], 1.0),
        ([1, 0, 0, 0], 0.25),
        ([1, 2, 3], 36 / 42),
    ],
)
def test_jain_index(values: list[float], index: float) -> None:
    assert jain_index(np.array(values, dtype=np.float64)) == pytest.approx(index)


def test_jain_index_of_a_run_uses_speeds() -> None:
    record = simulate(Fifo(), [ask(0, out=2), ask(1, out=2, at=1.0)])
    record.isolated_s = {0: 2.0, 1: 2.0}
    # request 0 waits for the prefill of request 1: 3 s, speed 2/3; request 1 runs at full speed
    assert [
        round(life.last_token - life.request.arrival, 9) for life in record.requests.values()
    ] == [
        3.0,
        2.0,
    ]
    x, y = 2 / 3, 1.0
    assert summarize(record)["jain_index"] == pytest.approx((x + y) ** 2 / (2 * (x * x + y * y)))


# Every token


class Spy:
    """An executor that records the time of every token."""

    def __init__(self, scheduler: Scheduler, env: simpy.Environment) -> None:
        self.scheduler = scheduler
        self.env = env
        self.tokens: dict[int, list[float]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.scheduler, name)

    def leap(self, most: int) -> int:
        return 1

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        completion = self.scheduler.complete(batch, ended)
        for i in completion.delivered:
            self.tokens.setdefault(i, []).append(self.env.now)
        return completion


@pytest.mark.parametrize(
    ("engine", "variant"),
    [("mistralrs", "bucketed"), ("mistralrs", "pr2034"), ("sglang", "0.5.23")],
)
@given(data=st.data())
def test_latencies_agree_with_numpy_on_every_token(
    engine: str, variant: str, data: st.DataObject
) -> None:
    scenario = data.draw(scenarios(engine, variant))
    env = simpy.Environment()
    spy = Spy(build_scheduler(scenario.engine), env)
    executor = SimulatedExecutor(load_profile(scenario.profile))
    requests = generate_requests(scenario.workload, scenario.timeout)
    record = run_clients(
        Engine(env, spy, executor, scenario.engine_ready), requests, scenario.horizon
    )
    found = summarize(record)

    tokens = {
        i: times
        for i, times in spy.tokens.items()
        if record.requests[i].outcome is Outcome.FINISHED
    }
    arrival = {request.id: request.arrival for request in requests}
    expected = {
        "ttft_ms": [times[0] - arrival[i] for i, times in tokens.items()],
        "e2e_ms": [times[-1] - arrival[i] for i, times in tokens.items()],
        "tpot_ms": [(t[-1] - t[0]) / (len(t) - 1) for t in tokens.values() if len(t) > 1],
        "itl_ms": [b - a for t in tokens.values() for a, b in pairwise(t)],
    }
    for name, values in expected.items():
        milliseconds = 1000 * np.array(values or [0.0])
        shares = (50, 90, 95, 99)
        want = [milliseconds.mean(), *(np.percentile(milliseconds, s) for s in shares)]
        assert [found[name][s] for s in STATISTICS] == pytest.approx(want, abs=1e-6), name
    assert found["total_output_tokens"] == sum(len(times) for times in tokens.values())
    for i, times in tokens.items():
        life = record.requests[i]
        rows = [row for first, last in token_rows(life) for row in range(first, last + 1)]
        assert [record.steps.end[row] for row in rows] == pytest.approx(times)


@pytest.mark.parametrize(
    ("tokens", "ranges"),
    [
        (0, []),
        (1, [(0, 0)]),
        (3, [(0, 0), (1, 2)]),
        (4, [(0, 0), (1, 3)]),
        (6, [(0, 0), (1, 3), (6, 6), (7, 7)]),
    ],
)
def test_rows_after_the_last_delivered_token_do_not_count(
    tokens: int, ranges: list[tuple[int, int]]
) -> None:
    """The client left, and the engine emitted tokens in further steps."""
    emitted = (PREFILL, 0, 0), (DECODE, 1, 3), (PREFILL, 6, 6), (DECODE, 7, 9)
    data = array("i", [n for kind, first, last in emitted for n in (kind + EMITS, first, last)])
    assert token_rows(RequestRecord(ask(0), tokens=tokens, segment_data=data)) == ranges


# Tables


def test_figures_and_registered_names_match() -> None:
    found = summarize(simulate(Fifo(), [ask(0)]))
    for name in FIGURE_NAMES:
        assert isinstance(figure(found, name), float | int), name
    flat = {
        f"{key}.{s}" if isinstance(value, dict) else key
        for key, value in found.items()
        for s in STATISTICS
        if not isinstance(value, dict) or s in value
    }
    assert flat - set(FIGURE_NAMES) == {"verdict", "verdict_detail"}


def test_requests_without_tokens_have_no_gaps() -> None:
    record = simulate(Fifo(), [ask(0, timeout=0.5)])
    assert len(token_gaps(record, record.requests.values()).values) == 0


def test_request_rows_are_ordered_by_id() -> None:
    rows = request_rows("v", simulate(Fifo(), [ask(2), ask(0, at=1.0), ask(1, at=0.5)]))
    assert [row["id"] for row in rows] == [0, 1, 2]
    assert list(rows[0]) == [
        "variant",
        "id",
        "arrival_s",
        "prompt_tokens",
        "output_tokens",
        "outcome",
        "first_token_s",
        "finish_s",
        "ttft_s",
        "tpot_s",
        "e2e_s",
        "preemptions",
        "recomputed_tokens",
    ]


def test_step_rows_are_numbered() -> None:
    record = simulate(Fifo(), [ask(0, out=3)])
    rows = step_rows("v", record)
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert [row["start_s"] for row in rows] == [0.0, 1.0, 2.0]
    assert [row["kind"] for row in rows] == ["prefill", "decode", "decode"]


def test_prefix_hit_rate_counts_whole_blocks_of_the_previous_turn(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "name: t\nprofile: unit-step\n"
        "workload: {sessions: {num_sessions: 1, turns: 2, request_rate: .inf, "
        "prompt_tokens: 64, output_tokens: 16}}\n"
        "engine: {name: vllm, num_gpu_blocks: 200, startup_check: false}\n"
        "variants: {on: {}, off: {engine: {enable_prefix_caching: false}}}\n"
    )
    found = {
        name: run.summary["prefix_cache"] for name, run in run_file(tmp_path / "s.yaml").items()
    }
    # Turn 1 computes 64 + 15 tokens, which fill 4 whole blocks of 16; turn 2 has 64 + 16 + 64
    # tokens.
    asked = {"queried_tokens": 64 + 144}
    assert found["on"] == {"hit_rate": 100 * 64 / 208, "hit_tokens": 64, **asked}
    assert found["off"] == {"hit_rate": 0.0, "hit_tokens": 0, **asked}
