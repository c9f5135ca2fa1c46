"""Goodput: the rate of requests served within latency limits.

As defined by ``vllm bench serve --goodput ttft:500 tpot:50`` (vLLM 0.33,
``vllm/benchmarks/serve_throughput.py``, ``calculate_metrics``), a request is good if it finished
and no latency exceeds its limit (ms). The TPOT of a request with one output token counts as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from simkv.core.outcome import Outcome
from simkv.metrics.run_metrics import (
    e2e,
    makespan,
    tpot,
    ttft,
)
from simkv.sim.run_record import RequestRecord, RunRecord

#: Functions that return a latency in seconds, by the name of the latency in vLLM.
LATENCY_FUNCTIONS: dict[str, Callable[[RequestRecord], float | None]] = {
    "ttft": ttft,
    "tpot": tpot,
    "e2el": e2e,
}


def is_good(life: RequestRecord, limits_ms: Mapping[str, float]) -> bool:
    """Return whether a request finished within the limits.

    ``limits_ms`` contains the limits in ms, by name of the latency as in ``LATENCY_FUNCTIONS``.
    """
    if life.outcome is not Outcome.FINISHED:
        return False
    return all(
        (LATENCY_FUNCTIONS[name](life) or 0.0) <= limit / 1000.0
        for name, limit in limits_ms.items()
    )


def goodput(record: RunRecord, limits_ms: Mapping[str, float]) -> dict[str, Any]:
    """Return the number of ``good`` requests, the ``goodput`` (1/s) and the ``goodput_share``.

    The goodput is the number of good requests divided by the makespan. The share is the fraction of
    good requests among all requests that were not cancelled.
    """
    every = record.requests.values()
    lives = [life for life in every if life.outcome is not Outcome.CANCELLED]
    good = sum(is_good(life, limits_ms) for life in lives)
    seconds = makespan(lives)
    return {
        "good": good,
        "goodput": good / seconds if seconds > 0 else 0.0,
        "goodput_share": good / len(lives) if lives else 0.0,
    }
