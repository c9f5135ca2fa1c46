"""Tests of routers that read the prefix caches of replicas, at once or by delayed events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from simkv.sim.fleet.cache_views import CacheView, DelayedCacheView, PrefixMatch
from simkv.sim.simulation import ScenarioRun, build_replica_specs, simulate_scenario

ENGINE: dict[str, Any] = {
    "name": "vllm",
    "num_gpu_blocks": 13,
    "block_size": 4,
    "max_model_len": 48,
    "max_num_seqs": 4,
    "async_scheduling": False,
}


def request(arrival: float, prefix: str, tokens: int = 24, output: int = 2) -> dict[str, Any]:
    prompt = {"prompt_tokens": tokens + 4, "prefix_group": prefix, "prefix_tokens": tokens}
    return {"arrival": arrival, "output_tokens": output, **prompt}


def build(requests: list[dict[str, Any]], router: dict[str, Any], **more: Any) -> Scenario:
    tree = {
        "name": "knowledge",
        "workload": {"requests": requests},
        "engine": ENGINE,
        "profile": "unit-step",
        "fleet": {"replicas": 2, "router": router},
        **more,
    }
    return resolve_variants(YamlDocument(Path("fleet.yaml"), tree))["run"]


def run(scenario: Scenario, *, leaping: bool = True) -> ScenarioRun:
    return simulate_scenario(scenario, build_replica_specs(scenario, Path()), leaping=leaping)


def where(requests: list[dict[str, Any]], name: str, **knobs: Any) -> list[str]:
    """Return the replica of each request. Every step takes a second."""
    return list(routes(run(build(requests, {"name": name, **knobs}))).values())


def routes(result: ScenarioRun) -> dict[int, str]:
    assert result.fleet
    return dict(sorted(result.fleet.routes.items()))


#: Each replica has 12 blocks. Request 0 caches prefix ``a`` on replica 0, and request 2 evicts it
#: there at 20 s, because replica 1 has more cached blocks.
EVICTION = [
    request(0.0, "a", 24),
    request(10.0, "b", 36),
    request(20.0, "c", 40),
    request(25.0, "a", 24),
]
EXACT = {"prefix_knowledge": "exact"}


def events(delay: float) -> dict[str, Any]:
    return {"prefix_knowledge": "events", "event_delay": delay}


def test_exact_router_knows_evictions() -> None:
    approximate = run(build(EVICTION, {"name": "cache_aware"}))
    assert list(routes(approximate).values()) == ["0", "1", "0", "0"]
    chunk = approximate.record.requests[3].chunks[0]
    assert (chunk.tokens, chunk.context) == (28, 0), "the prefix was evicted"
    assert where(EVICTION, "cache_aware", **EXACT) == ["0", "1", "0", "1"]


def test_exact_weighted_router_prefers_cached_prefix() -> None:
    # Request 4 finds prefix ``a`` only on replica 1, but both replicas have received it.
    weights = {"queue_weight": 0.0, "kv_weight": 0.0, "block_size": 4}
    requests = [*EVICTION, request(35.0, "a", 24)]
    chosen = [where(requests, "weighted", seed=3, **weights, **k)[3:] for k in ({}, EXACT)]
    assert chosen == [["0", "0"], ["1", "1"]]


def test_router_is_wrong_within_the_delay() -> None:
    assert where(EVICTION, "cache_aware", **events(4.0)) == ["0", "1", "0", "1"]
    assert where(EVICTION, "cache_aware", **events(5.0)) == ["0", "1", "0", "1"]
    assert where(EVICTION, "cache_aware", **events(5.5)) == ["0", "1", "0", "0"]
    # Insertions are late, too: request 1 does not see the blocks of request 0.
    assert where(EVICTION, "cache_aware", **events(10.5))[:2] == ["0", "0"]


def many(count: int = 60) -> list[dict[str, Any]]:
    """Return requests with shared prefixes, whose blocks evict each other during long decodes."""
    sizes = [(8, 30), (16, 9), (20, 21), (12, 14)]
    return [
        request(3.7 * i, "abcdefg"[i * i % 7], sizes[i % 4][0], sizes[i % 4][1])
        for i in range(count)
    ]


def large(*, pipelined: bool = False, **knobs: Any) -> Scenario:
    engine = {**ENGINE, "num_gpu_blocks": 40, "max_model_len": 100, "async_scheduling": pipelined}
    return build(
        many(), {"name": "cache_aware", "balance_abs_threshold": 3.0, **knobs}, engine=engine
    )


def test_events_without_delay_equal_exact() -> None:
    exact = routes(run(large(**EXACT)))
    assert routes(run(large(**events(0.0)))) == exact
    assert routes(run(large(**events(9.0)))) != exact
    assert routes(run(large())) != exact


@pytest.mark.parametrize("knobs", [EXACT, events(0.0), events(2.5)])
@pytest.mark.parametrize("pipelined", [False, True])
def test_leaps_change_nothing(
    knobs: dict[str, Any], pipelined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[tuple[Any, ...]] = []
    record = DelayedCacheView._record

    def spy(self: DelayedCacheView, now: float) -> None:
        before = len(self._events)
        record(self, now)
        found.extend((self._engine.rank, *e) for e in list(self._events)[before:])

    find = CacheView.find

    def spy_find(self: CacheView, prompt: Prompt) -> PrefixMatch:
        match = find(self, prompt)
        looked_up.append((self._engine.rank, self._engine.env.now, match))
        return match

    looked_up: list[tuple[int, float, PrefixMatch]] = []
    monkeypatch.setattr(DelayedCacheView, "_record", spy)
    monkeypatch.setattr(CacheView, "find", spy_find)
    leaping = run(large(pipelined=pipelined, **knobs))
    with_leaps, found = sorted(found), []
    looked_up_with_leaps, looked_up = looked_up, []
    stepwise = run(large(pipelined=pipelined, **knobs), leaping=False)
    assert leaping.fleet
    assert sum(lifetime.engine.leaps for lifetime in leaping.lifetimes) > 20
    assert with_leaps == sorted(found)
    assert looked_up_with_leaps == looked_up
    assert bool(found) == (knobs != EXACT)
    assert routes(leaping) == routes(stepwise)
    ends = [[x.ended_at for x in r.record.requests.values()] for r in (leaping, stepwise)]
    assert ends[0] == ends[1]


def test_failed_replica_returns_with_an_empty_cache() -> None:
    outage = {"replicas": 2, "router": {"name": "cache_aware", **events(1.0)}}
    outage |= {"failures": [{"replica": 0, "at": 5.0, "back_at": 6.0}]}
    requests = [request(0.0, "a", 24), request(10.0, "b", 24), request(20.0, "a", 24)]
    result = run(build(requests, {}, fleet=outage))
    assert list(routes(result).values()) == ["0", "0", "1"]


@pytest.mark.parametrize(
    "engine",
    [
        {"name": "sglang", "max_total_num_tokens": 400},
        {**ENGINE, "enable_prefix_caching": False},
        {**ENGINE, "kv_cache_groups": [0, 24], "num_gpu_blocks": 200},
    ],
)
def test_engine_that_does_not_report_its_cache_is_refused(engine: dict[str, Any]) -> None:
    scenario = build(EVICTION, {"name": "weighted", **EXACT}, engine=engine)
    with pytest.raises(InputError, match=r"^fleet.router.prefix_knowledge: exact requires"):
        build_replica_specs(scenario, Path())


def test_delay_requires_events() -> None:
    with pytest.raises(InputError, match="event_delay: requires prefix_knowledge: events"):
        build(EVICTION, {"name": "weighted", "event_delay": 1.0})
