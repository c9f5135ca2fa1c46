"""Tests of branches whose first one to end wins, on engines and fleets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.core.outcome import Outcome
from simkv.metrics.run_metrics import request_rows
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.metrics.session_turns import find_awaited
from simkv.scenario.scenario import Scenario

ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"name": "vllm", "num_gpu_blocks": 40, "block_size": 8, "max_model_len": 256},
    "sglang": {"name": "sglang", "max_total_num_tokens": 400},
    "trtllm": {"name": "trtllm", "max_tokens_in_paged_kv_cache": 320, "tokens_per_block": 8},
}
FLEET = {"replicas": 2, "router": "least_loaded", "refresh_interval": 0.0}


def race(engine: dict[str, Any], leaping: bool = True, **fields: Any) -> RunResult:
    """Run twelve sessions whose turns start two to four branches of one to three turns."""
    sub_agents = {
        "count": {"distribution": "uniform", "low": 2, "high": 4},
        "turns": {"distribution": "uniform", "low": 1, "high": 3},
        "prompt_tokens": {"distribution": "uniform", "low": 4, "high": 30},
        "output_tokens": {"distribution": "uniform", "low": 1, "high": 30},
        "tool_time": {"distribution": "exponential", "mean": 3.0},
        "first_wins": True,
    }
    sessions = {
        "num_sessions": 12,
        "request_rate": 0.2,
        "turns": 3,
        "prompt_tokens": 10,
        "output_tokens": 6,
        "tool_time": 1.0,
        "sub_agents": sub_agents,
    }
    scenario = Scenario.model_validate(
        {
            "name": "race",
            "workload": {"sessions": sessions},
            "engine": engine,
            "profile": "unit-step",
            **fields,
        }
    )
    return run_scenario(scenario, Path(), leaping=leaping)


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("fields", [{}, {"fleet": FLEET}], ids=["engine", "fleet"])
def test_the_first_answer_starts_the_next_turn_and_ends_the_other_branches(
    name: str, fields: dict[str, Any]
) -> None:
    found = race(ENGINES[name], **fields)
    record, clients = found.record, found.run.clients
    lives = record.requests
    joins = {i: one for i, one in clients.after.items() if one.first_wins}
    assert len(joins) == 12 * 2
    assert found.summary["verdict"] == "served"
    assert found.summary["finished"] + found.summary["cancelled"] == len(lives)
    assert found.summary["sessions"]["finished"] == 12
    stopped = 0
    for i, dependency in joins.items():
        winner = find_awaited(record, dependency)
        assert winner.ended_at is not None
        assert clients.arrived[i] == pytest.approx(winner.ended_at + dependency.delay)
        for other in dependency.before:
            life = lives[other]
            if life.outcome is Outcome.CANCELLED and other in clients.sent:
                assert life.ended_at == winner.ended_at
                assert life.tokens < life.request.output_tokens
                stopped += 1
            elif life.outcome is Outcome.CANCELLED:
                assert life.tokens == 0
            else:
                assert life.ended_at == winner.ended_at
    assert stopped > 3
    assert any(i not in clients.sent for i in clients.cancelled)
    for lifetime in found.run.lifetimes:
        assert not dict(lifetime.engine.scheduler.blocks_held())


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("fields", [{}, {"fleet": FLEET}], ids=["engine", "fleet"])
def test_leaping_does_not_change_cancellations(name: str, fields: dict[str, Any]) -> None:
    rows = [
        request_rows("run", race(ENGINES[name], leaping=leaping, **fields).record)
        for leaping in (True, False)
    ]
    assert rows[0] == rows[1]
