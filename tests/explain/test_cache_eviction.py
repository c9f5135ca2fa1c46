"""Tests of prefixes that are evicted between turns: wait ledger, evicting requests and the verdict
``cache-thrash``.
"""

from __future__ import annotations

from math import fsum
from pathlib import Path
from typing import Any

import pytest

from simkv.explain.cache_eviction import find_evictors, find_lost_prefixes
from simkv.explain.diagnosis import ReplicaVerdict
from simkv.explain.ledger_kinds import LedgerKind
from simkv.explain.verdicts.cache_thrash import CacheThrash
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario

ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"num_gpu_blocks": 13, "block_size": 4, "enable_prefix_caching": True},
    "sglang": {"max_total_num_tokens": 48, "page_size": 4},
}


def play(engine: dict[str, Any], leaping: bool = True, **sessions: Any) -> RunResult:
    """Run three sessions of two turns; each turn adds 8 prompt tokens and emits 12 tokens."""
    shape = {"num_sessions": 3, "request_rate": 0.05, "burstiness": float("inf"), "turns": 2}
    lengths = {"prompt_tokens": 8, "output_tokens": 12, "think_time": 60.0}
    data = {
        "name": "x",
        "profile": "unit-step",
        "workload": {"sessions": shape | lengths | sessions},
        "engine": {"max_model_len": 40} | engine if engine["name"] == "vllm" else engine,
    }
    return run_scenario(Scenario.model_validate(data), Path(), leaping=leaping)


@pytest.mark.parametrize("name", ENGINES)
def test_evicted_prefixes_have_a_ledger_kind_evictors_and_a_verdict(name: str) -> None:
    result = play({"name": name} | ENGINES[name])
    lost = find_lost_prefixes(result.record)
    tax = result.summary["sessions"]["resume_tax_tokens"]
    assert sum(prefix.tokens for prefix in lost) == tax > 0
    evictors = find_evictors(result.record, lost)
    assert fsum(tokens for _, tokens in evictors) == pytest.approx(tax)
    for prefix in lost:
        kinds = {tile.kind for tile in result.diagnosis.ledger[prefix.request]}
        mostly = 2 * prefix.tokens > result.record.requests[prefix.request].chunks[0].tokens
        assert (LedgerKind.EVICTED in kinds) == mostly
        assert prefix.request not in dict(find_evictors(result.record, [prefix]))
    assert result.diagnosis.totals[LedgerKind.EVICTED] > 0
    (verdict,) = [v for v in result.diagnosis.verdicts if isinstance(v, CacheThrash)]
    assert verdict.tokens == tax
    assert verdict.turns == len(lost)
    assert verdict.idle_blocks * 4 > 20 * 2
    assert verdict.hit_rate == pytest.approx(result.summary["prefix_cache"]["hit_rate"])


def test_sole_evictor_gets_all_tokens() -> None:
    # Request 1 is the first turn of the other session; no other request runs between the turns of
    # session 0.
    result = play({"name": "vllm"} | ENGINES["vllm"] | {"num_gpu_blocks": 11}, num_sessions=2)
    by_request = {prefix.request: prefix for prefix in find_lost_prefixes(result.record)}
    first = min(by_request.values(), key=lambda prefix: prefix.before)
    between = [
        i
        for i, life in result.record.requests.items()
        if i != first.request
        and any(first.before < s.last and s.first <= first.after for s in life.segments)
    ]
    assert len(between) == 1
    assert find_evictors(result.record, [first]) == [
        (between[0], pytest.approx(float(first.tokens)))
    ]


@pytest.mark.parametrize(
    "engine",
    [
        {"name": "vllm"} | ENGINES["vllm"] | {"num_gpu_blocks": 60},
        {"name": "vllm"} | ENGINES["vllm"] | {"enable_prefix_caching": False},
        {"name": "sglang"} | ENGINES["sglang"] | {"max_total_num_tokens": 400},
    ],
)
def test_no_eviction_with_a_large_cache_or_without_cache(engine: dict[str, Any]) -> None:
    result = play(engine)
    assert find_lost_prefixes(result.record) == []
    assert LedgerKind.EVICTED not in result.diagnosis.totals
    assert not any(isinstance(v, CacheThrash) for v in result.diagnosis.verdicts)


def test_leaps_do_not_change_evictors() -> None:
    engine = {"name": "vllm"} | ENGINES["vllm"]
    leapt, stepped = play(engine), play(engine, leaping=False)
    assert leapt.diagnosis.ledger == stepped.diagnosis.ledger
    assert leapt.diagnosis.verdicts == stepped.diagnosis.verdicts


def on_replicas(router: str, **engine: Any) -> RunResult:
    """Run ten sessions of four turns on two replicas."""
    sessions = {"num_sessions": 10, "request_rate": 0.3, "burstiness": 1.0, "turns": 4}
    sessions |= {"prompt_tokens": 8, "output_tokens": 12, "think_time": 9.0}
    data = {
        "name": "x",
        "profile": "unit-step",
        "workload": {"sessions": sessions},
        "engine": {"name": "vllm", "max_model_len": 96, "block_size": 4, "num_gpu_blocks": 400}
        | {"enable_prefix_caching": True}
        | engine,
        "fleet": {"replicas": 2, "router": router},
    }
    return run_scenario(Scenario.model_validate(data), Path())


def test_prefixes_on_another_replica_are_part_of_the_verdict() -> None:
    result = on_replicas("least_loaded")
    found = [v.found for v in result.diagnosis.verdicts if isinstance(v, ReplicaVerdict)]
    verdicts = [v for v in found if isinstance(v, CacheThrash)]
    assert [v.tokens for v in verdicts] == [0, 0]  # no prefix is evicted
    assert all(v.moved_turns > 1 for v in verdicts)
    assert all("another replica" in v.text and "evicted" not in v.text for v in verdicts)
    # Without evictions, the estimate is exact: the router ``session`` reaches this hit rate.
    asked = sum(life.request.prompt_tokens for life in result.record.requests.values())
    moved = 100.0 * sum(v.moved for v in verdicts) / asked
    kept = on_replicas("session").summary["prefix_cache"]["hit_rate"]
    assert kept == pytest.approx(result.summary["prefix_cache"]["hit_rate"] + moved)


def test_session_router_and_single_servers_have_no_moved_prefixes() -> None:
    assert not on_replicas("session").diagnosis.verdicts
    result = play({"name": "vllm"} | ENGINES["vllm"])
    (verdict,) = [v for v in result.diagnosis.verdicts if isinstance(v, CacheThrash)]
    assert verdict.moved == 0
    assert verdict.affinity_hit_rate is None
    assert "replica" not in verdict.text


def test_evictions_and_moved_prefixes_are_told_apart() -> None:
    result = on_replicas("least_loaded", num_gpu_blocks=30)
    found = [v.found for v in result.diagnosis.verdicts if isinstance(v, ReplicaVerdict)]
    verdicts = [v for v in found if isinstance(v, CacheThrash)]
    assert len(verdicts) == 2
    assert all(v.tokens and v.moved for v in verdicts)
    resumed, records = result.record.resumed, result.record.requests
    lost = sum(
        max(prefix.tokens - records[i].chunks[0].context, 0) for i, prefix in resumed.items()
    )
    assert sum(v.tokens + v.moved for v in verdicts) == lost
