"""Policy ``vtc``: the bound on unfairness of arXiv 2401.00588 (theorem 4.4), and its queue.

If two clients have waiting requests throughout an interval, their weighted services in it differ by
at most ``2 max(w_p L_input, w_q M)``: L_input is the longest prompt, M the tokens of the KV pool.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.conformance.decision_replay import check_trace
from simkv.conformance.decision_trace import read_trace
from simkv.core.scheduler_protocol import Batch
from simkv.core.virtual_token_counters import OUTPUT_WEIGHT, PROMPT_WEIGHT, VirtualTokenCounters
from simkv.costs.cost_profile import load_profile
from simkv.costs.simulated_executor import SimulatedExecutor
from simkv.metrics.run_metrics import request_rows
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.vllm.config import VllmConfig
from simkv.sim.client_loop import run_clients
from simkv.sim.engine import Engine
from simkv.workload.workload_section import generate_requests
from tests.conformance.test_aborts import recorded
from tests.laws.test_leaping import assert_same, record

POOL = 160  # tokens
VLLM = {"name": "vllm", "block_size": 4, "num_gpu_blocks": POOL // 4 + 1, "max_model_len": 80}
SGLANG = {"name": "sglang", "max_total_num_tokens": POOL}
ENGINES: list[dict[str, Any]] = [
    VLLM,
    {**VLLM, "async_scheduling": False},
    {**VLLM, "variant": "0.17.0", "max_num_batched_tokens": 64, "max_num_seqs": 8},
    {**VLLM, "variant": "0.11.0", "enable_prefix_caching": False},
    SGLANG,
    {**SGLANG, "disable_overlap_schedule": True, "chunked_prefill_size": 16},
    {**SGLANG, "enable_mixed_chunk": True, "schedule_conservativeness": 0.3},
]
NAMES = ["vllm", "vllm sync", "vllm 0.17", "vllm 0.11", "sglang", "sglang sync", "sglang mixed"]


def with_policy(engine: dict[str, Any], policy: str) -> dict[str, Any]:
    knob = "policy" if engine["name"] == "vllm" else "schedule_policy"
    return {**engine, knob: policy}


@dataclass
class Watched:
    """Scheduler whose decisions are counted: service by client, and clients that wait."""

    inner: Any
    clients: dict[int, str]
    prompts: dict[int, int]
    service: Counter[str] = field(default_factory=Counter)
    admitted: list[int] = field(default_factory=list)
    history: list[tuple[set[str], Counter[str]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def schedule(self) -> Batch:
        batch: Batch = self.inner.schedule()
        for i in sorted({*self.inner.running_ids()} - {*self.admitted}):
            self.admitted.append(i)
            self.service[self.clients[i]] += PROMPT_WEIGHT * self.prompts[i]
        waiting = {self.clients[i] for i in self.inner.waiting_ids()}
        self.history.append((waiting, self.service.copy()))
        return batch

    def deliver(self, tokens: list[int]) -> None:
        for i in tokens:
            self.service[self.clients[i]] += OUTPUT_WEIGHT


def scenario_of(engine: dict[str, Any], rows: list[dict[str, Any]]) -> Scenario:
    return Scenario.model_validate(
        {"name": "x", "workload": {"requests": rows}, "engine": engine, "profile": "unit-step"}
    )


def watch(scenario: Scenario) -> Watched:
    requests = generate_requests(scenario.workload, None)
    watched = Watched(
        build_scheduler(scenario.engine),
        {r.id: r.client or "" for r in requests},
        {r.id: r.prompt_tokens for r in requests},
    )
    executor = SimulatedExecutor(load_profile("unit-step"))
    engine = Engine(simpy.Environment(), watched, executor, leaping=False)  # type: ignore[arg-type]
    engine.on_tokens = watched.deliver
    run_clients(engine, requests, 5000.0)
    return watched


def largest_difference(watched: Watched) -> int:
    """Return the largest difference of service over any interval with both clients waiting."""
    largest = 0
    for one, other in combinations(sorted({*watched.clients.values()}), 2):
        low = high = None
        for waiting, service in watched.history:
            if not {one, other} <= waiting:
                low = high = None
                continue
            difference = service[one] - service[other]
            low = difference if low is None else min(low, difference)
            high = difference if high is None else max(high, difference)
            largest = max(largest, high - low)
    return largest


def bound(rows: list[dict[str, Any]]) -> int:
    return 2 * max(PROMPT_WEIGHT * max(r["prompt_tokens"] for r in rows), OUTPUT_WEIGHT * POOL)


def request_lists() -> st.SearchStrategy[list[dict[str, Any]]]:
    row = st.fixed_dictionaries(
        {
            "arrival": st.sampled_from([0.0, 0.0, 0.0, 5.0, 30.0, 90.0]),
            "prompt_tokens": st.integers(1, 40),
            "output_tokens": st.integers(1, 39),
            "client": st.sampled_from(["p", "q", "q", "q", "r"]),
        }
    )
    return st.lists(row, min_size=8, max_size=80)


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
@given(rows=request_lists())
@settings(max_examples=30)
def test_service_of_backlogged_clients_differs_by_the_bound_at_most(
    engine: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    watched = watch(scenario_of(with_policy(engine, "vtc"), rows))
    assert largest_difference(watched) <= bound(rows)


#: A client that sends 200 requests before the 50 of another.
FLOOD = [
    {"prompt_tokens": 10, "output_tokens": 20, "client": "p" if i < 200 else "q"}
    for i in range(250)
]


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_fcfs_exceeds_the_bound(engine: dict[str, Any]) -> None:
    assert largest_difference(watch(scenario_of(with_policy(engine, "fcfs"), FLOOD))) > bound(FLOOD)
    fair = largest_difference(watch(scenario_of(with_policy(engine, "vtc"), FLOOD)))
    assert 0 < fair <= bound(FLOOD)


@pytest.mark.parametrize("engine", ENGINES[:4], ids=NAMES[:4])
@given(rows=request_lists())
@settings(max_examples=20)
def test_leaps_end_before_the_head_of_the_queue_changes(
    engine: dict[str, Any], rows: list[dict[str, Any]]
) -> None:
    scenario = scenario_of(with_policy({**engine, "max_num_seqs": 4}, "vtc"), rows)
    profile = load_profile("unit-step")
    leapt, _ = record(scenario, profile, leaping=True)
    stepped, _ = record(scenario, profile, leaping=False)
    assert_same(request_rows("", leapt), request_rows("", stepped), "requests")
    for i, life in leapt.requests.items():
        assert list(life.causes) == list(stepped.requests[i].causes)


@pytest.mark.parametrize("engine", ENGINES[:4], ids=NAMES[:4])
def test_leap_ends_when_another_client_comes_first(engine: dict[str, Any]) -> None:
    """A large request of p blocks a small one of q until p has received more than q."""
    rows = [
        {"prompt_tokens": 4, "output_tokens": 60, "client": "p"},
        {"prompt_tokens": 30, "output_tokens": 1, "client": "q"},
        {"prompt_tokens": 70, "output_tokens": 1, "client": "p"},
        {"prompt_tokens": 4, "output_tokens": 1, "client": "q", "arrival": 2.5},
    ]
    tight = {"num_gpu_blocks": 20, "max_model_len": 76, "max_num_batched_tokens": 2048}
    scenario = scenario_of(with_policy({**engine, **tight}, "vtc"), rows)
    leapt, leaps = record(scenario, load_profile("unit-step"), leaping=True)
    stepped, _ = record(scenario, load_profile("unit-step"), leaping=False)
    assert leaps >= 2
    assert_same(request_rows("", leapt), request_rows("", stepped), "requests")
    ends = [leapt.requests[i].ended_at or 0.0 for i in range(4)]
    assert ends[0] > 59
    assert ends[2] > 60
    # The service of p, 4 + 2 n, exceeds the 32 of q at n = 15 outputs; a step takes a second.
    assert ends[3] == pytest.approx(17.0, abs=1.0)


@pytest.mark.parametrize("engine", ENGINES, ids=NAMES)
def test_a_recording_states_the_clients(tmp_path: Path, engine: dict[str, Any]) -> None:
    """Without the clients, the order of the queue could not be replayed."""
    rows = [row | {"arrival": 0.0} for row in (*FLOOD[:12], *FLOOD[-4:])]
    path = recorded(tmp_path, with_policy(engine, "vtc"), rows)
    assert check_trace(read_trace(path)).difference is None


@pytest.mark.parametrize("of", [VllmConfig, SglangConfig])
def test_head_is_of_the_client_with_the_least_service(of: Any) -> None:
    """Client q is served next although three requests of p arrived before its own."""
    knob = "policy" if of is VllmConfig else "schedule_policy"
    seats = {"max_num_seqs" if of is VllmConfig else "max_running_requests": 1}
    rows = [
        {"prompt_tokens": 5, "output_tokens": 3, "client": client, "arrival": arrival}
        for client, arrival in [("p", 0.0), ("p", 1.0), ("p", 1.0), ("q", 1.5), (None, 1.6)]
    ]
    served = watch(scenario_of({"name": of.name, knob: "vtc", **seats}, rows))
    assert served.admitted == [0, 3, 4, 1, 2]


def test_returning_client_is_lifted() -> None:
    """A client gains nothing from the time in which it sent nothing."""
    outputs: dict[int, int] = {}
    counters = VirtualTokenCounters(outputs.__getitem__)
    for i in range(3):  # p is served 3 x (10 + 2 x 5) tokens
        outputs[i] = 5
        counters.enter("p")
        counters.charge(i, "p", 10)
        counters.leave("p")
        counters.end(i, "p")
    assert counters.value("p") == 60
    counters.enter("q")  # the queue is empty: as much as the client that left it last
    assert counters.value("q") == 60
    counters.charge(9, "q", 100)
    outputs[9] = 0
    counters.enter("r")  # as much as the least of the waiting clients
    assert counters.value("r") == 160
    counters.charge(9, "q", 100)  # admitted again after a preemption: no second charge
    assert counters.value("q") == 160
