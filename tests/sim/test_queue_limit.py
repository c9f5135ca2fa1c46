"""Queue limits of the server in front of an engine. Steps take one second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.core.outcome import Outcome
from simkv.scenario.scenario import Scenario
from simkv.sim.run_record import RequestRecord
from simkv.sim.simulation import build_replica_specs, simulate_scenario

#: Two slots, chunks of at most 8 tokens, and one token per step after the prompt.
ENGINE = {
    "name": "vllm",
    "max_num_seqs": 2,
    "max_num_batched_tokens": 8,
    "max_model_len": 256,
    "async_scheduling": False,
}
Asked = dict[str, Any]


def ask(at: float, prompt: int = 4, out: int = 3, **other: Any) -> Asked:
    return {"arrival": at, "prompt_tokens": prompt, "output_tokens": out, **other}


def lives(asked: list[Asked], fleet: Any = None, **knobs: Any) -> list[RequestRecord]:
    tree: dict[str, Any] = {
        "name": "t",
        "workload": {"requests": asked},
        "engine": {**ENGINE, **knobs},
        "profile": "unit-step",
    }
    scenario = Scenario.model_validate(tree | ({"fleet": fleet} if fleet else {}))
    record = simulate_scenario(scenario, build_replica_specs(scenario, Path())).record
    return [record.requests[i] for i in range(len(asked))]


def turned_away(lives: list[RequestRecord]) -> list[int]:
    for life in lives:
        assert (life.outcome is Outcome.REJECTED) is (life.refusal is not None)
    return [life.request.id for life in lives if life.refusal]


def test_rejects_requests_beyond_limit() -> None:
    asked = [ask(0.0), ask(0.0), ask(0.5), ask(0.75), ask(2.9), ask(3.1, out=1), ask(3.2)]
    found = lives(asked, max_num_queued_reqs=3)
    assert turned_away(found) == [3, 4]  # the first two requests end at 3 s
    away = found[3]
    assert (away.ended_at, away.tokens, away.received_at) == (0.75, 0, None)
    assert away.reason.startswith("max_num_queued_reqs: The engine is currently busy and cannot")


@pytest.mark.parametrize(("at", "let_in"), [(1.9, False), (2.1, True)])
def test_prompt_counts_until_first_token(at: float, let_in: bool) -> None:
    found = lives([ask(0.0, prompt=16), ask(at)], max_num_queued_tokens=16)  # 8 tokens per step
    assert turned_away(found) == ([] if let_in else [1])
    if not let_in:
        assert found[1].reason.startswith("max_num_queued_tokens: The engine has reached its")


def test_admits_request_that_reaches_token_limit() -> None:
    found = lives([ask(0.0, prompt=9), ask(0.0, prompt=200), ask(0.0)], max_num_queued_tokens=10)
    assert turned_away(found) == [2]


def test_client_timeout_frees_capacity() -> None:
    asked = [ask(0.0, out=50, timeout=5.0), ask(4.9), ask(5.1)]
    assert turned_away(lives(asked, max_num_queued_reqs=1)) == [1]


@pytest.mark.parametrize(("lockstep", "away"), [(False, [4]), (True, [2, 3, 4])])
def test_replicas_count_separately_and_ranks_jointly(lockstep: bool, away: list[int]) -> None:
    fleet = {"replicas": 2, "router": "round_robin", "lockstep": lockstep}
    assert turned_away(lives([ask(0.0)] * 5, fleet, max_num_queued_reqs=2)) == away


def test_client_sends_next_request_after_rejection() -> None:
    tree = {
        "name": "t",
        "workload": {
            "burst": {"num_prompts": 6, "prompt_tokens": 4, "output_tokens": 2},
            "max_concurrency": 2,
        },
        "engine": {**ENGINE, "max_num_queued_reqs": 1},
        "profile": "unit-step",
    }
    scenario = Scenario.model_validate(tree)
    record = simulate_scenario(scenario, build_replica_specs(scenario, Path())).record
    assert turned_away(list(record.requests.values())) == [1, 2, 3, 4, 5]


def test_decode_replica_has_queue_limit() -> None:
    fleet = {
        "replicas": [{"count": 1, "role": "prefill"}, {"count": 1, "role": "decode"}],
        "kv_transfer": {"bytes_per_token": 1, "bandwidth": 1000.0},
    }
    found = lives([ask(0.0), ask(0.0), ask(20.0)], fleet, max_num_queued_reqs=1)
    assert turned_away(found) == [1]  # before the prefill
    found = lives([ask(0.0, out=9), ask(2.0, out=9), ask(30.0)], fleet, max_num_queued_reqs=1)
    assert turned_away(found) == [1]  # after the prefill
    assert found[1].tokens == 0
    assert found[2].outcome is Outcome.FINISHED
