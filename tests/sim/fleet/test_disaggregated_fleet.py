"""Tests of fleets with prefill and decode replicas."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simkv.core.errors import InputError
from simkv.core.outcome import Outcome
from simkv.explain.ledger_kinds import KIND_LABELS, LedgerKind
from simkv.metrics.run_metrics import token_rows
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from simkv.schedulers.vllm.transfer_scheduler import VllmTransferScheduler
from simkv.sim.fleet.disaggregated_fleet import DisaggregatedFleet
from tests.laws.ledger_sums import assert_sums
from tests.laws.test_leaping import assert_same

OF_010 = {"variant": "0.10.2"}
HALVES_OF_010 = [{"role": role, "engine": OF_010} for role in ("prefill", "decode")]
ASYNC_011 = {"variant": "0.11.0", "async_scheduling": True}
PRODUCER = {"kv_role": "kv_producer"}
#: The transfer of the KV of a token takes 0.1 s.
SLOW = {"bytes_per_token": 100, "bandwidth": 1000.0}


def split(
    requests: list[dict[str, Any]],
    transfer: dict[str, Any] | None = None,
    *,
    decode: dict[str, Any] | None = None,
    leaping: bool = True,
    section: dict[str, Any] | None = None,
    engine: dict[str, Any] | None = None,
    **more: Any,
) -> RunResult:
    """Simulate a fleet of a prefill and a decode replica; every step takes a second."""
    scenario = {
        "name": "split",
        "workload": {"requests": requests},
        "engine": {
            "name": "vllm",
            "block_size": 4,
            "num_gpu_blocks": 33,
            "max_model_len": 128,
            "async_scheduling": False,
            "enable_prefix_caching": False,
            **(engine or {}),
        },
        "profile": "unit-step",
        "fleet": {
            "replicas": [{"role": "prefill"}, {"role": "decode", "engine": decode or {}}],
            "kv_transfer": transfer or SLOW,
            **(section or {}),
        },
        **more,
    }
    loaded = resolve_variants(YamlDocument(Path("split.yaml"), scenario))["run"]
    return run_scenario(loaded, Path(), leaping=leaping)


def at(*times: float, prompt: int = 10, output: int = 4) -> list[dict[str, Any]]:
    return [{"arrival": t, "prompt_tokens": prompt, "output_tokens": output} for t in times]


def fleet_of(result: RunResult) -> DisaggregatedFleet:
    assert isinstance(result.fleet, DisaggregatedFleet)
    return result.fleet


def check_all_free(result: RunResult) -> None:
    for lifetime in fleet_of(result).lifetimes:
        scheduler = lifetime.engine.scheduler
        assert isinstance(scheduler, VllmTransferScheduler)
        scheduler.pool.check()
        assert scheduler.free_blocks == scheduler.num_blocks, f"replica {lifetime.replica}"


def test_hands_request_from_prefill_to_decode() -> None:
    result = split(at(0.0))
    # Prefill 0-1 s, transfer of 10 tokens of KV 1-2 s, recomputation of the last token 2-3 s, three
    # decodes 3-6 s.
    life = result.record.requests[0]
    assert (life.first_token, life.last_token, life.tokens) == (3.0, 6.0, 4)
    assert life.request.prompt_tokens == 10
    assert result.summary["total_output_tokens"] == 4
    assert result.request_rows("")[0]["replica"] == "0 1"
    assert result.summary["itl_ms"]["mean"] == pytest.approx(1000)
    figures = result.summary["fleet"]
    assert (figures["transfers"], figures["transferred_bytes"]) == (1, 1000)
    assert figures["mean_transfer_ms"] == 1000.0
    check_all_free(result)


def test_latency_adds_to_transfer_time() -> None:
    result = split(at(0.0), {**SLOW, "latency": 0.25})
    assert result.record.requests[0].last_token == 6.25


@pytest.mark.parametrize(("shared", "there"), [(False, [2.0, 2.0]), (True, [2.0, 3.0])])
def test_link_is_shared_or_per_replica(shared: bool, there: list[float]) -> None:
    groups = [{"count": 2, "role": "prefill"}, {"role": "decode"}]
    result = split(at(0.0, 0.0), {**SLOW, "shared_link": shared}, section={"replicas": groups})
    assert [h.arrived_at for h in fleet_of(result).handovers.values()] == there


def test_transfers_over_one_link_are_sequential() -> None:
    result = split(at(0.0, 0.0))
    assert [h.arrived_at for h in fleet_of(result).handovers.values()] == [2.0, 3.0]


def test_full_decode_pool_delays_prefills() -> None:
    # Each replica has capacity for the KV of one request at a time: 12 blocks of 4 tokens.
    small = {"num_gpu_blocks": 13, "max_model_len": 48}
    requests = at(0.0, 0.0, 0.0, prompt=30, output=10)
    result = split(requests, engine=small)
    handovers = fleet_of(result).handovers
    # 3 s for the KV, 10 s to decode. The next request is fetched after this, and only then does the
    # prefill replica have capacity for another request.
    assert [(h.prefilled_at, h.requested_at, h.arrived_at) for h in handovers.values()] == [
        (1.0, 1.0, 4.0),
        (5.0, 14.0, 17.0),
        (18.0, 27.0, 30.0),
    ]
    assert [life.ended_at for life in result.record.requests.values()] == [14.0, 27.0, 40.0]
    assert result.summary["verdict"] == "served"
    check_all_free(result)
    roomy = split(requests, engine=small, decode={"num_gpu_blocks": 100})
    assert [h.prefilled_at for h in fleet_of(roomy).handovers.values()] == [1.0, 5.0, 9.0]


def test_single_token_comes_from_decode_replica() -> None:
    result = split(at(0.0, output=1))
    life = result.record.requests[0]
    assert (life.first_token, life.tokens, life.outcome) == (3.0, 1, Outcome.FINISHED)
    check_all_free(result)


def test_ledger_covers_both_replicas() -> None:
    result = split(at(0.0), {**SLOW, "latency": 2.0})
    tiles = result.diagnosis.ledger[0]
    assert [(tile.kind, tile.start, tile.end) for tile in tiles] == [
        (LedgerKind.PREFILL, 0.0, 1.0),
        (LedgerKind.REMOTE, 1.0, 4.0),
        (LedgerKind.PREFILL, 4.0, 5.0),
        (LedgerKind.DECODE, 5.0, 8.0),
    ]
    assert KIND_LABELS[LedgerKind.REMOTE] == "waiting for KV from another replica"


@pytest.mark.parametrize("gives_up", [0.5, 1.5, 2.5, 4.5])
def test_timeout_during_transfer_frees_blocks(gives_up: float) -> None:
    result = split([{**at(0.0, prompt=20)[0], "timeout": gives_up}])
    life = result.record.requests[0]
    assert (life.outcome, life.ended_at) == (Outcome.TIMED_OUT, gives_up)
    check_all_free(result)


def test_horizon_cuts_off_transfer() -> None:
    result = split(at(0.0), horizon=1.5)
    assert result.record.requests[0].outcome is Outcome.CUT_OFF
    assert result.record.requests[0].tokens == 0


def test_cached_blocks_are_not_sent() -> None:
    shared = [{**row, "prefix_group": "a", "prefix_tokens": 8} for row in at(0.0, 20.0)]
    result = split(shared, engine={"enable_prefix_caching": True})
    assert [h.tokens for h in fleet_of(result).handovers.values()] == [10, 2]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"replicas": [{"role": "prefill"}]}, "either use both roles, prefill and decode"),
        ({"kv_transfer": None}, "kv_transfer: missing"),
        ({"failures": [{"replica": 0, "at": 1.0}]}, "failures: cannot be combined with roles"),
        (
            {"replicas": [{"role": "prefill"}, {"role": "decode", "engine": {"name": "sglang"}}]},
            "roles prefill and decode require engine vllm",
        ),
        (
            {
                "replicas": [
                    {"role": "prefill"},
                    {"role": "decode", "engine": {"block_size": 8}},
                ]
            },
            "must have the same block_size",
        ),
        ({"replicas": HALVES_OF_010}, "roles prefill and decode require engine vllm (0.33.0, "),
        (
            {"replicas": [{"role": "prefill", "engine": ASYNC_011}, {"role": "decode"}]},
            "async_scheduling: not modelled for vLLM 0.11.0 with kv_connector",
        ),
        (
            {"replicas": [{"role": "prefill"}, {"role": "decode", "engine": PRODUCER}]},
            "kv_role: kv_producer does not match the replica's role decode; expected kv_consumer",
        ),
    ],
)
def test_rejects_invalid_roles(section: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError) as error:
        split(at(0.0), section=section)
    assert says in str(error.value)


def test_connector_requires_fleet_with_roles() -> None:
    for knob, value in (("kv_connector", "NixlConnector"), ("kv_role", "kv_both")):
        with pytest.raises(InputError, match=f"{knob} requires replicas with roles prefill"):
            split(at(0.0), engine={knob: value}, section={"replicas": 2, "kv_transfer": None})
    with pytest.raises(InputError, match=r"unknown value .*; expected NixlConnector"):
        split(at(0.0), engine={"kv_connector": "MooncakeConnector"})


def test_discarded_tokens_of_preempted_requests_are_not_counted() -> None:
    # vLLM discards the tokens in flight of preempted requests on replicas that can send KV. The
    # times were observed with the scheduler of vLLM 0.28.0 itself (engine.source).
    asked = ((0.0, 28), (0.3, 28), (0.3, 2), (1.0, 9), (0.3, 8), (0.3, 20))
    requests = [{"arrival": t, "prompt_tokens": n, "output_tokens": 30} for t, n in asked]
    requests[0]["timeout"] = requests[4]["timeout"] = 12.0
    requests[1]["timeout"] = 3.5
    engine = {"variant": "0.28.0", "num_gpu_blocks": 19, "max_model_len": 72, "max_num_seqs": 4}
    engine |= {"async_scheduling": True, "policy": "priority", "kv_role": "kv_both"}
    transfer = {"bytes_per_token": 10, "bandwidth": 1000.0, "shared_link": True}
    result = split(requests, transfer, engine=engine, horizon=9.5)
    life = result.request_rows("")[2]
    assert life["preemptions"] == 3
    assert life["first_token_s"] == pytest.approx(7.28)


whole = st.integers


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    requests = [
        {
            "arrival": draw(st.sampled_from([0.0, 0.0, 0.3, 1.0, 4.0])),
            "prompt_tokens": draw(whole(1, 40)),
            "output_tokens": draw(whole(1, 30)),
            **draw(st.sampled_from([{}, {}, {"timeout": 3.5}, {"timeout": 12.0}])),
            **draw(st.sampled_from([{}, {"prefix_group": "a", "prefix_tokens": 9}])),
        }
        for _ in range(draw(whole(1, 8)))
    ]
    return {
        "requests": requests,
        "transfer": {
            "bytes_per_token": 10,
            "bandwidth": draw(st.sampled_from([50.0, 1000.0])),
            "latency": draw(st.sampled_from([0.0, 0.2])),
            "shared_link": draw(st.booleans()),
        },
        "engine": {
            "num_gpu_blocks": draw(st.sampled_from([19, 40])),
            "max_model_len": 72,
            "max_num_seqs": draw(whole(1, 5)),
            "enable_prefix_caching": draw(st.booleans()),
            "async_scheduling": draw(st.booleans()),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
            "kv_role": draw(st.sampled_from([None, "kv_both"])),
            "variant": draw(st.sampled_from(["0.33.0", "0.27.0", "0.24.0", "0.19.0", "0.12.0"])),
        },
        "section": {
            "replicas": [
                {"count": draw(whole(1, 2)), "role": "prefill"},
                {"count": draw(whole(1, 2)), "role": "decode"},
            ],
            "router": draw(st.sampled_from(["round_robin", "least_loaded"])),
            "refresh_interval": draw(st.sampled_from([0.0, 1.0])),
        },
        "horizon": draw(st.sampled_from([None, None, 9.5])),
    }


@given(cases())
@settings(max_examples=150)
def test_invariants_of_disaggregated_fleets(case: dict[str, Any]) -> None:
    result, stepping = split(**case), split(**case, leaping=False)
    assert_same(result.request_rows(""), stepping.request_rows(""), "requests")
    assert_same(result.step_rows(""), stepping.step_rows(""), "steps")
    assert_same(result.summary, stepping.summary, "summary")
    lives = result.record.requests
    assert len(lives) == len(case["requests"])
    for life in lives.values():
        assert life.outcome in Outcome
        assert sum(last - first + 1 for first, last in token_rows(life)) == life.tokens
        if life.outcome is Outcome.FINISHED:
            wanted = min(life.request.output_tokens, 72 - life.request.prompt_tokens)
            assert life.tokens == wanted
        if life.outcome is Outcome.CUT_OFF:
            assert case["horizon"] is not None
    spent = math.fsum(
        life.ended_at - life.request.arrival for life in lives.values() if life.ended_at is not None
    )
    assert math.isclose(fleet_of(result).in_system_s, spent, rel_tol=1e-9, abs_tol=1e-9)
    if result.summary["verdict"] in ("served", "starved") and case["horizon"] is None:
        check_all_free(result)
    tiles = result.diagnosis.ledger
    assert tiles.keys() == lives.keys()
    for i, life in lives.items():
        assert_sums(life, tiles[i])
