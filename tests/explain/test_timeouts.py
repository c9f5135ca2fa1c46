"""Tests of starved and timed-out requests in runs computed by hand and in random runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simkv.core.outcome import Outcome
from simkv.costs.cost_profile import load_profile
from simkv.explain import timeouts
from simkv.explain.timeouts import WAITED_KINDS, IsolatedRuns
from simkv.explain.verdicts.unserved_requests import TimedOutRequests
from simkv.metrics.expectation_checks import check_expectations, exit_code
from simkv.metrics.run_metrics import e2e
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.report.run_explanation import explain_request
from simkv.scenario.scenario import Scenario
from simkv.sim.simulation import build_replica_specs, simulate_scenario
from tests.laws.random_scenarios import ENGINES, scenarios

VLLM = {
    "name": "vllm",
    "block_size": 4,
    "enable_prefix_caching": False,
    "async_scheduling": False,
    "max_model_len": 64,
    "max_num_seqs": 1,
}
HERE = Path(__file__).parent


def simulate(requests: list[dict[str, Any]], **fields: Any) -> RunResult:
    """Return a run with steps of one second."""
    data = {
        "name": "x",
        "workload": {"requests": requests},
        "engine": VLLM,
        "profile": "unit-step",
    }
    return run_scenario(Scenario.model_validate(data | fields), HERE)


def outcomes(result: RunResult) -> list[Outcome | None]:
    return [life.outcome for life in result.record.requests.values()]


def ask(output: int, timeout: float | None = None, arrival: float = 0.0) -> dict[str, Any]:
    return {"prompt_tokens": 4, "output_tokens": output, "timeout": timeout, "arrival": arrival}


def test_waiting_request_that_finishes_in_isolation_starved() -> None:
    # latency of 8 s behind the first request, 3 s in isolation
    result = simulate([ask(8), ask(3, timeout=5.0)])
    assert outcomes(result) == [Outcome.FINISHED, Outcome.STARVED]
    assert result.summary["verdict"] == "starved"
    assert (result.summary["starved"], result.summary["timed_out"]) == (1, 0)
    assert not result.record.shortfalls


def test_request_too_long_for_its_timeout_timed_out() -> None:
    # 2 s behind the first request, 9 s in isolation
    result = simulate([ask(2), ask(9, timeout=6.0)])
    assert outcomes(result) == [Outcome.FINISHED, Outcome.TIMED_OUT]
    assert result.summary["verdict"] == "timed_out"
    # four tokens were emitted; in isolation, by 4 s
    assert result.record.shortfalls == {1: (9.0, 5.0, 2.0)}
    (verdict,) = [v for v in result.diagnosis.verdicts if isinstance(v, TimedOutRequests)]
    assert (verdict.all, verdict.alone, verdict.lacked, verdict.company) == ((1,), 9.0, 5.0, 2.0)
    assert verdict.text == (
        "one request timed out; request 1: in isolation it takes 9 s, and its timeout is 6 s; it "
        "needed 5 s more; other requests delayed it by 2 s"
    )
    told = " ".join(explain_request("run", result, 1)).split("Timed out, not starved: ")[1]
    assert told.startswith(
        "in isolation it takes 9 s, and its timeout is 6 s; it needed 5 s more; "
    )


def test_single_request_times_out_without_delay_by_others() -> None:
    result = simulate([ask(9, timeout=6.5, arrival=3.0)])
    assert outcomes(result) == [Outcome.TIMED_OUT]
    assert result.record.shortfalls[0] == pytest.approx((9.0, 2.5, 0.0))


def test_request_delayed_only_by_shared_steps_timed_out() -> None:
    """Both requests start in the same step. A decode of two requests takes longer, but neither
    request waits.
    """
    engine = VLLM | {"max_num_seqs": 2}
    profile = {"profile": "l4-mistralrs-pr2034", "engine": engine}
    alone = simulate([ask(30)], **profile).summary["e2e_ms"]["mean"] / 1000
    both = simulate([ask(30), ask(30)], **profile).summary["e2e_ms"]["mean"] / 1000
    assert both > alone + 0.01
    result = simulate([ask(30), ask(30, timeout=(alone + both) / 2)], **profile)
    assert outcomes(result) == [Outcome.FINISHED, Outcome.TIMED_OUT]
    short = result.record.shortfalls[1]
    assert short.isolated_s == pytest.approx(alone)
    assert short.remaining_s is not None
    assert 0.0 < short.remaining_s < short.delay_s


def test_prompt_larger_than_the_cache_times_out() -> None:
    engine = {"name": "mistralrs", "variant": "pr2034", "num_gpu_blocks": 3}
    requests = [{"prompt_tokens": 200, "output_tokens": 9, "timeout": 20.0}]
    result = simulate(requests, engine=engine, horizon=25.0)
    assert outcomes(result)[0] in (Outcome.TIMED_OUT, Outcome.STALLED, Outcome.REJECTED)
    if short := result.record.shortfalls.get(0):
        assert short.isolated_s is None


def test_many_shapes_are_estimated_from_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    # in isolation, 4, 5, 6 and 7 s
    requests = [ask(4), *(ask(4 + n, timeout=5.5) for n in range(4))]
    expected = [Outcome.FINISHED, *[Outcome.STARVED] * 2, *[Outcome.TIMED_OUT] * 2]
    assert outcomes(simulate(requests)) == expected
    monkeypatch.setattr(timeouts, "MAX_ISOLATED_RUNS", 1)  # the simulation of 6 s is the nearest
    result = simulate(requests)
    assert outcomes(result) == expected
    assert set(result.record.shortfalls) == {3}


def isolated(request: dict[str, Any], **fields: Any) -> tuple[float, float]:
    """Return the simulated and the estimated duration of a request in isolation, in seconds."""
    data = {"name": "x", "workload": {"requests": [request]}, "engine": VLLM} | fields
    scenario = Scenario.model_validate(data)
    replicas = build_replica_specs(scenario, HERE)
    run = simulate_scenario(scenario, replicas)
    world = IsolatedRuns(scenario, replicas)
    shape = world.shape(run, replace(run.record.requests[0].request, timeout=1000.0))
    (alone,) = world.alone(shape).requests.values()
    seconds = e2e(alone)
    assert seconds is not None
    return seconds, world.estimate_seconds(shape)


@pytest.mark.parametrize(("arrival", "seconds"), [(0.0, 13.0), (4.0, 9.0), (20.0, 3.0)])
def test_start_of_the_engine_counts_in_isolation(arrival: float, seconds: float) -> None:
    found = isolated(ask(3, arrival=arrival), engine_ready=10.0, profile="unit-step")
    assert found == pytest.approx((seconds, seconds))


def test_estimate_has_one_prefill_and_decodes_with_mean_context(tmp_path: Path) -> None:
    profile = load_profile("unit-step").model_dump(mode="json")
    prices = {"steps": 0.01, "tokens": 1e-3, "prefill_pairs": 1e-6, "decode_mean": 1e-5}
    profile["terms"] = [{"name": k, "feature": k, "seconds": v} for k, v in prices.items()]
    (tmp_path / "profile.json").write_text(json.dumps(profile))
    request = {"prompt_tokens": 300, "output_tokens": 101}
    engine = VLLM | {"max_model_len": 512, "max_num_batched_tokens": 512}
    simulated, estimated = isolated(request, engine=engine, profile=str(tmp_path / "profile.json"))
    assert estimated == pytest.approx(simulated, rel=1e-3)


@pytest.mark.parametrize("replicas", [2, 3])
def test_isolation_in_a_fleet_uses_one_replica(replicas: int) -> None:
    fleet = {"replicas": replicas}
    requests = [*[ask(8)] * replicas, ask(3, timeout=5.0), ask(9, timeout=6.0)]
    result = simulate(requests, fleet=fleet)
    assert outcomes(result)[replicas:] == [Outcome.STARVED, Outcome.TIMED_OUT]
    inside = [
        lifetime.engine.record.requests[replicas + 1].outcome
        for lifetime in result.run.lifetimes
        if replicas + 1 in lifetime.engine.record.requests
    ]
    assert inside == [Outcome.TIMED_OUT]
    assert "timed_out" in [verdict.name for verdict in result.diagnosis.verdicts]


def test_request_waiting_for_admission_to_a_fleet_starves() -> None:
    fleet = {"replicas": 1, "failures": [{"replica": 0, "at": 1.0}]}
    result = simulate([ask(3, timeout=5.0, arrival=2.0)], fleet=fleet)
    assert outcomes(result) == [Outcome.STARVED]


def test_isolation_with_disaggregation_uses_the_fleet() -> None:
    fleet = {
        "replicas": [{"role": "prefill"}, {"role": "decode"}],
        "kv_transfer": {"bytes_per_token": 1, "bandwidth": 1.0},  # 4 s for the prompt
    }
    result = simulate([ask(3, timeout=6.5)], fleet=fleet)
    assert outcomes(result) == [Outcome.TIMED_OUT]
    short = result.record.shortfalls[0]
    assert short.isolated_s is not None
    assert short.isolated_s > 6.5
    assert short.delay_s == pytest.approx(0.0, abs=1e-9)


def test_expectations_and_exit_code_use_the_outcome() -> None:
    expected = {
        "run": {"verdict": "timed_out", "timed_out": 1, "request": {0: {"outcome": "timed_out"}}}
    }
    result = simulate([ask(9, timeout=6.0)], expect=expected)
    checks = check_expectations({"run": result})
    assert len(checks) == 3
    assert all(found.ok for found in checks)
    assert exit_code([result], []) == 3
    assert result.request_rows("run")[0]["outcome"] == "timed_out"


@pytest.mark.parametrize("engine", ENGINES[::2])
@given(data=st.data())
def test_starved_requests_finish_in_isolation(engine: str, data: st.DataObject) -> None:
    """Starved requests waited, and would have finished in time in isolation; with and without
    leaping.
    """
    name, variant = engine if isinstance(engine, tuple) else (engine, None)
    scenario = data.draw(scenarios(name, variant))
    timeout = data.draw(st.sampled_from([2.2, 6.3, 12.4]))
    scenario = scenario.model_copy(update={"timeout": timeout})
    result = run_scenario(scenario, HERE, intervals=False)
    stepped = run_scenario(scenario, HERE, intervals=False, leaping=False)
    assert outcomes(result) == outcomes(stepped)
    for i, life in result.record.requests.items():
        if life.outcome not in (Outcome.STARVED, Outcome.TIMED_OUT):
            continue
        tiles = result.diagnosis.ledger[i]
        waited = life.received_at is None or any(tile.kind in WAITED_KINDS for tile in tiles)
        request = life.request
        alone = scenario.model_copy(
            update={
                "workload": scenario.workload.model_copy(
                    update={"requests": [scenario.workload.requests[i]]}  # type: ignore[index]
                ),
                "horizon": None,
            }
        )
        end = run_scenario(alone, HERE, intervals=False).record.requests[0].outcome
        if request.arrival + 1e-6 < scenario.engine_ready:
            continue  # equal except for rounding
        starved = waited and end is Outcome.FINISHED
        assert (life.outcome is Outcome.STARVED) == starved
