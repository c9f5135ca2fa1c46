"""The stability boundary of arXiv 2504.07347 on a small case (see docs/papers)."""

from __future__ import annotations

import pytest

from dev.stability import Load, Setup, backlog_growth, served_tokens, setups

BUDGET, LOAD, STEPS = 12, Load(4, tuple(range(1, 16))), 1500
SETUPS = {setup.title: setup for setup in setups(BUDGET)}
#: Engines whose steps are full as long as requests wait.
OPTIMAL = ["vLLM 0.33.0", "vLLM 0.11.0", "TensorRT-LLM", "FastDeploy"]


@pytest.mark.parametrize("title", OPTIMAL)
def test_mixed_batches_are_stable_up_to_the_boundary(title: str) -> None:
    engine, boundary = SETUPS[title].engine, BUDGET / LOAD.tokens
    assert served_tokens(engine, LOAD, BUDGET, STEPS) == pytest.approx(BUDGET, rel=0.02)
    assert abs(backlog_growth(engine, LOAD, 0.9 * boundary, STEPS)) < 0.03
    assert 0.05 < backlog_growth(engine, LOAD, 1.1 * boundary, STEPS) < 0.14


@pytest.mark.parametrize("title", ["SGLang 0.5.23", "TensorRT-LLM, static batches"])
def test_other_batches_are_unstable_below_the_boundary(title: str) -> None:
    engine, boundary = SETUPS[title].engine, BUDGET / LOAD.tokens
    assert served_tokens(engine, LOAD, BUDGET, STEPS) < 0.9 * BUDGET
    assert backlog_growth(engine, LOAD, 0.95 * boundary, STEPS) > 0.05


def test_no_engine_serves_more_than_the_budget() -> None:
    def served(setup: Setup) -> float:
        return served_tokens(setup.engine, LOAD, BUDGET, 300)

    assert all(served(setup) < 1.05 * BUDGET for setup in SETUPS.values())
