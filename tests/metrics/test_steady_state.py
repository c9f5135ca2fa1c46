"""Tests that the steady-state check distinguishes level, growing and short loads."""

from __future__ import annotations

import pytest

import simkv
from simkv.metrics.steady_state import check_steady_state


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
    scenario = {
        "name": "load",
        "workload": {"arrivals": load},
        "engine": {"name": "vllm", "num_gpu_blocks": 2000, "max_num_seqs": 16},
        "profile": "unit-step",
    }
    found = check_steady_state(simkv.run(scenario).results["run"].record)
    assert (found.steady, words in found.text) == (steady, True), found.text


def test_growth_by_more_arrivals_is_no_overload() -> None:
    times = [0.5 * i for i in range(60)] + [30 + 0.25 * i for i in range(60)]
    rows = [{"arrival": t, "prompt_tokens": 8, "output_tokens": 8} for t in times]
    scenario = {
        "name": "more",
        "workload": {"requests": rows},
        "engine": {"name": "vllm", "num_gpu_blocks": 2000, "max_num_seqs": 64},
        "profile": "unit-step",
    }
    found = check_steady_state(simkv.run(scenario).results["run"].record)
    assert found.steady is False
    assert not found.grows, found.text
    assert "requests do not take longer" in found.text
