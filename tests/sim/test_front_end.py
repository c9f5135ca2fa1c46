"""Tests that the API server in front of an engine delays requests and tokens, and changes nothing
else.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.core.outcome import Outcome
from simkv.explain.ledger_kinds import LedgerKind
from simkv.explain.wait_ledger import build_ledger, total_by_kind
from simkv.scenario.scenario import Scenario
from simkv.sim.run_record import RunRecord
from simkv.sim.simulation import build_replica_specs, simulate_scenario

ENGINE = {"name": "vllm", "num_gpu_blocks": 60, "max_num_seqs": 4, "max_model_len": 300}
SERVER = {"request_ms": 400, "prompt_token_us": 0, "output_token_us": 0, "latency_ms": 7}


def run(
    requests: list[dict[str, Any]], front_end: Any, leaping: bool = True, **more: Any
) -> RunRecord:
    workload = {"requests": requests, **more}
    tree = {"name": "x", "profile": "unit-step", "engine": ENGINE, "workload": workload}
    scenario = Scenario.model_validate({**tree, "front_end": front_end})
    return simulate_scenario(
        scenario, build_replica_specs(scenario, Path()), leaping=leaping
    ).record


def burst(count: int, **more: Any) -> list[dict[str, Any]]:
    return [{"prompt_tokens": 10, "output_tokens": 3, **more} for _ in range(count)]


def test_requests_enter_one_after_the_other() -> None:
    lives = run(burst(5), SERVER).requests
    assert [lives[i].entered_at for i in range(5)] == pytest.approx(
        [0.4 * (i + 1) + 0.007 for i in range(5)]
    )


def test_tokens_wait_for_all_requests_that_came_before() -> None:
    """Reading 50 requests takes 20 s; the engine computes the first tokens long before that."""
    lives = run(burst(50), SERVER).requests
    assert min(life.first_token or 0 for life in lives.values()) == pytest.approx(20.0)
    assert run(burst(50), "none").requests[0].first_token == 1.0


def test_two_processes_halve_the_work() -> None:
    lives = run(burst(50), {**SERVER, "processes": 2}).requests
    assert min(life.first_token or 0 for life in lives.values()) == pytest.approx(10.0)


def test_rate_of_tokens_is_limited() -> None:
    lives = run(
        burst(4, output_tokens=100), {**SERVER, "request_ms": 0, "output_token_us": 900_000}
    )
    ends = [life.last_token or 0 for life in lives.requests.values()]
    assert max(ends) == pytest.approx(4 * 100 * 0.9, rel=0.02)


def test_client_that_leaves_before_admission_costs_nothing() -> None:
    requests = [*burst(10), *burst(1, timeout=2.0)]
    lives = run(requests, SERVER).requests
    assert lives[10].outcome is Outcome.STARVED
    assert lives[10].received_at is None
    assert all(lives[i].outcome is Outcome.FINISHED for i in range(10))


def test_next_request_of_a_client_follows_the_delivered_answer() -> None:
    record = run(burst(2), {**SERVER, "output_token_us": 1000}, max_concurrency=1)
    first, second = record.requests[0], record.requests[1]
    assert second.request.arrival == first.ended_at == first.last_token


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.fixed_dictionaries(
            {
                "arrival": st.sampled_from([0.0, 0.13, 1.0, 5.0, 7.77]),
                "prompt_tokens": st.integers(1, 60),
                "output_tokens": st.integers(1, 40),
                "timeout": st.sampled_from([None, None, 3.0, 10.0]),
            }
        ),
        min_size=1,
        max_size=8,
    ),
    costs=st.fixed_dictionaries(
        {
            "request_ms": st.sampled_from([0, 30, 1000]),
            "prompt_token_us": st.sampled_from([0, 5000]),
            "output_token_us": st.sampled_from([0, 3000, 90000]),
            "latency_ms": st.sampled_from([0, 50]),
            "processes": st.integers(1, 3),
        }
    ),
)
def test_laws(requests: list[dict[str, Any]], costs: dict[str, float]) -> None:
    requests = [{k: v for k, v in one.items() if v is not None} for one in requests]
    record, stepped = run(requests, costs), run(requests, costs, leaping=False)
    delivered = record.token_times
    assert len(delivered) == len(record.steps)
    assert all(a <= b for a, b in pairwise(delivered))
    assert all(a <= b for a, b in zip(record.steps.end, delivered, strict=True))
    ledger = build_ledger(record)
    for i, life in record.requests.items():
        other = stepped.requests[i]
        names = ("outcome", "ended_at", "first_token", "last_token", "tokens", "entered_at")
        assert [getattr(life, n) for n in names] == [getattr(other, n) for n in names]
        assert life.entered_at is not None
        assert life.ended_at is not None
        own = (
            costs["request_ms"] / 1e3 + costs["prompt_token_us"] / 1e6 * life.request.prompt_tokens
        )
        assert life.entered_at >= life.request.arrival + own - 1e-9
        if life.outcome is Outcome.FINISHED:
            assert life.tokens == life.request.output_tokens
            assert life.last_token == life.ended_at
        total = sum(tile.seconds for tile in ledger[i])
        assert total == pytest.approx(life.ended_at - life.request.arrival, abs=1e-6)


def test_ledger_names_the_api_server() -> None:
    record = run(burst(50), SERVER)
    seconds = total_by_kind(build_ledger(record)[49])
    assert seconds[LedgerKind.FRONT_END] >= 20.0
