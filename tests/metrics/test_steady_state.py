"""Tests that the steady-state check distinguishes level, growing and short loads."""

from __future__ import annotations

from typing import Any

import pytest

import simkv
from simkv.metrics.steady_state import SteadyState, check_steady_state


def check(workload: dict[str, Any], seats: int) -> SteadyState:
    """Return the steady state of a run with ``seats`` slots and steps of one second."""
    scenario = {
        "name": "load",
        "workload": workload,
        "engine": {"name": "vllm", "num_gpu_blocks": 2000, "max_num_seqs": seats},
        "profile": "unit-step",
    }
    return check_steady_state(simkv.run(scenario).results["run"].record)


@pytest.mark.parametrize(
    ("rate", "prompts", "steady", "words"),
    [
        (0.05, 600, True, "reached"),
        (0.5, 1000, False, "exceeds the capacity"),
        (1.0, 3, False, "use more requests"),
        (float("inf"), 50, None, "at once"),
    ],
)
def test_steady_state(rate: float, prompts: int, steady: bool | None, words: str) -> None:
    load = {"num_prompts": prompts, "request_rate": rate, "prompt_tokens": 64, "output_tokens": 64}
    found = check({"arrivals": load}, 16)
    assert (found.steady, words in found.text) == (steady, True), found.text


def test_growth_by_more_arrivals_is_no_overload() -> None:
    times = [0.5 * i for i in range(60)] + [30 + 0.25 * i for i in range(60)]
    rows = [{"arrival": t, "prompt_tokens": 8, "output_tokens": 8} for t in times]
    found = check({"requests": rows}, 64)
    assert found.steady is False
    assert not found.grows, found.text
    assert "the arrivals vary" in found.text


def test_overload_of_equal_arrivals_is_not_varying_arrivals() -> None:
    """Long requests share steps, so that requests at all times take equally long."""
    scenario = {
        "name": "shared",
        "hardware": {"gpu": "A100", "model": "llama-3.1-8b"},
        "workload": {
            "arrivals": {
                "num_prompts": 400,
                "request_rate": 20,
                "burstiness": 1000,
                "prompt_tokens": 1000,
                "output_tokens": 300,
                "seed": 1,
            }
        },
        "engine": {"name": "vllm", "max_model_len": 8192},
    }
    found = check_steady_state(simkv.run(scenario).results["run"].record)
    assert found.grows, found.text
    assert "the arrivals vary" not in found.text
