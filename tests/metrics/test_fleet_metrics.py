"""Time of most requests in flight, counted by hand."""

from __future__ import annotations

from typing import Any

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
    # Requests 2 and 4 are on replica 0 then, 3 and 5 on replica 1.
    assert find_peak_load(simkv.run(fleet).results["run"]) == {
        "at_s": 7.6,
        "in_flight": 4,
        "replica": 0,
    }
    # If replica 0 has failed, all are on replica 1.
    fleet["fleet"] = {**fleet["fleet"], "failures": [{"replica": 0, "at": 5.5}]}
    assert find_peak_load(simkv.run(fleet).results["run"]) == {
        "at_s": 7.6,
        "in_flight": 4,
        "replica": 1,
    }
