"""Tests of metrics of fleets and replicas, and of the time with most requests in flight, counted by
hand.
"""

from __future__ import annotations

from typing import Any

import pytest

import simkv
from simkv.metrics.fleet_metrics import find_peak_load

#: Steps of 1 s: request 0 runs from 0 to 5 s, 1 from 2 to 5 s, 2 from 6 to 8 s, 3 from 7 to 11 s.
CONTENTS: dict[str, Any] = {
    "name": "four",
    "workload": {
        "requests": [
            {"arrival": 0.0, "prompt_tokens": 16, "output_tokens": 5},
            {"arrival": 2.0, "prompt_tokens": 16, "output_tokens": 3},
            {"arrival": 6.0, "prompt_tokens": 16, "output_tokens": 2},
            {"arrival": 7.0, "prompt_tokens": 16, "output_tokens": 4},
        ]
    },
    "engine": {"name": "vllm", "num_gpu_blocks": 128, "max_model_len": 1000},
    "profile": "unit-step",
}


def test_returns_first_of_equal_times() -> None:
    assert find_peak_load(simkv.run(CONTENTS).results["run"]) == {
        "at_s": 2.0,
        "in_flight": 2,
        "replica": 0,
    }


def test_returns_replica_with_most_requests() -> None:
    more = [{"arrival": at, "prompt_tokens": 9, "output_tokens": 9} for at in (7.5, 7.6)]
    fleet = {**CONTENTS, "fleet": {"replicas": 2, "router": "round_robin"}}
    fleet["workload"] = {"requests": [*CONTENTS["workload"]["requests"], *more]}
    # At this time, requests 2 and 4 are on replica 0, and requests 3 and 5 on replica 1.
    assert find_peak_load(simkv.run(fleet).results["run"]) == {
        "at_s": 7.6,
        "in_flight": 4,
        "replica": 0,
    }
    # If replica 0 has failed, all requests are on replica 1.
    fleet["fleet"] = {**fleet["fleet"], "failures": [{"replica": 0, "at": 5.5}]}
    assert find_peak_load(simkv.run(fleet).results["run"]) == {
        "at_s": 7.6,
        "in_flight": 4,
        "replica": 1,
    }


def test_records_equal_records_of_the_replicas() -> None:
    alone = simkv.run(CONTENTS).results["run"]
    assert alone.parts == {"": alone.record}
    parts = simkv.run({**CONTENTS, "fleet": {"replicas": 2}}).results["run"].parts
    assert list(parts) == ["replica 0", "replica 1"]
    assert sum(len(record.requests) for record in parts.values()) == 4


def test_replicas_apart_have_their_own_figures() -> None:
    alone = simkv.run(CONTENTS).results["run"]
    assert alone.apart() == {"": alone}
    fleet = {"replicas": 2, "router": "round_robin"}
    parts = simkv.run({**CONTENTS, "fleet": fleet}).results["run"].apart()
    outputs = {name: part.summary["total_output_tokens"] for name, part in parts.items()}
    assert outputs == {"replica 0": 5 + 2, "replica 1": 3 + 4}


def run_fleet(**section: Any) -> dict[str, Any]:
    """Return the metrics of a fleet with the four requests and another request from 12 to 15 s."""
    more = {"arrival": 12.0, "prompt_tokens": 16, "output_tokens": 3}
    contents = {**CONTENTS, "fleet": {"router": "round_robin", **section}}
    contents["workload"] = {"requests": [*CONTENTS["workload"]["requests"], more]}
    figures: dict[str, Any] = simkv.run(contents).results["run"].summary["fleet"]
    return figures


def test_replica_figures_match_hand_computation() -> None:
    found = run_fleet(replicas=2)
    first, second = found["by_replica"]
    assert [first[k] for k in ("requests", "finished", "output_tokens")] == [3, 3, 10]
    assert (first["busy_s"], first["there_s"], first["utilisation"]) == (10.0, 15.0, 10 / 15)
    assert (second["busy_s"], second["there_s"], second["utilisation"]) == (7.0, 15.0, 7 / 15)
    assert first["mean_ttft_ms"] == second["mean_ttft_ms"] == 1000.0
    assert found["mean_in_system"] == pytest.approx((5 + 3 + 2 + 4 + 3) / 15)
    assert found["imbalance"] == pytest.approx(10 / 8.5)
    assert found["replica_s"] == 30.0


def test_time_after_a_failure_is_not_busy() -> None:
    """Replica 0 fails after its engine has scheduled the steps from 3 to 4 s and from 4 to 5 s."""
    found = run_fleet(replicas=2, failures=[{"replica": 0, "at": 3.5}])
    first = found["by_replica"][0]
    assert (first["busy_s"], first["there_s"], first["utilisation"]) == (3.5, 3.5, 1.0)
    assert (first["requests"], first["finished"], found["retries"]) == (1, 0, 1)
    assert found["replica_s"] == 3.5 + 15.0


def test_replica_that_never_started_has_no_utilisation() -> None:
    rule = {"target": 100.0, "max_replicas": 2}
    first, second = run_fleet(replicas=1, router="least_loaded", autoscale=rule)["by_replica"]
    assert (first["requests"], first["there_s"]) == (5, 15.0)
    assert (second["requests"], second["there_s"], second["utilisation"]) == (0, 0.0, 0.0)
    assert second["mean_ttft_ms"] == second["hit_rate"] == 0.0


@pytest.mark.parametrize(
    ("prompts", "horizon", "figures"),
    [
        ([10], None, (1, 1000, 0.0, 1000.0)),
        # The decode replica has blocks for one request: 3 s for the transfer of its KV, and 10 s of
        # decodes. The second request is prefilled at 5 s and waits until 14 s.
        ([30, 30], None, (2, 6000, 4500.0, 3000.0)),
        ([10], 0.5, (0, 0, 0.0, 0.0)),
    ],
)
def test_transfers_have_a_wait_for_blocks_and_a_duration(
    prompts: list[int], horizon: float | None, figures: tuple[float, ...]
) -> None:
    contents = {
        **CONTENTS,
        "workload": {"requests": [{"prompt_tokens": n, "output_tokens": 10} for n in prompts]},
        "engine": {"name": "vllm", "block_size": 4, "num_gpu_blocks": 13, "max_model_len": 48},
        "horizon": horizon,
        "fleet": {
            "replicas": [{"role": "prefill"}, {"role": "decode"}],
            "kv_transfer": {"bytes_per_token": 100, "bandwidth": 1000.0},
        },
    }
    contents["engine"] |= {"async_scheduling": False, "enable_prefix_caching": False}
    found = simkv.run(contents).results["run"].summary["fleet"]
    names = ("transfers", "transferred_bytes", "mean_wait_for_blocks_ms", "mean_transfer_ms")
    assert tuple(found[name] for name in names) == figures
