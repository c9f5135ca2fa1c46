"""Small scenarios with known verdicts."""

from __future__ import annotations

from typing import Any

from simkv.scenario.scenario import Scenario


def scenario(engine: dict[str, Any], requests: list[dict[str, Any]], **fields: Any) -> Scenario:
    """Return a scenario of listed requests with steps of one second."""
    return Scenario.model_validate(
        {
            "name": "case",
            "workload": {"requests": requests},
            "engine": engine,
            "profile": "unit-step",
            **fields,
        }
    )


def overload(timeout: float = 31.0) -> Scenario:
    """Return a scenario with ten simultaneous requests of five steps each on one slot.

    The seventh and later requests starve.
    """
    return scenario(
        {"name": "mistralrs", "variant": "bucketed", "max_num_seqs": 1},
        [{"prompt_tokens": 10, "output_tokens": 5} for _ in range(10)],
        timeout=timeout,
    )


def queue_loop(count: int = 3, **engine: Any) -> Scenario:
    """Return a scenario in which the waiting request evicts the running request after 8 passes, and
    the engine dies.
    """
    return scenario(
        {
            "name": "mistralrs",
            "variant": "bucketed",
            "block_size": 8,
            "num_gpu_blocks": 25,
            "waiting_timeout": 8,
            **engine,
        },
        [
            {"prompt_tokens": 64, "output_tokens": 100},
            {"prompt_tokens": 136, "output_tokens": 10, "arrival": 1},
            {"prompt_tokens": 8, "output_tokens": 2, "arrival": 3.25},
        ][:count],
    )


def six(variant: str = "bucketed", **engine: Any) -> Scenario:
    """Return a scenario with three requests of unequal length, where only one length may decode at
    a time.
    """
    return scenario(
        {"name": "mistralrs", "variant": variant, **engine},
        [{"prompt_tokens": 60 + 4 * i, "output_tokens": 12} for i in range(3)],
    )
