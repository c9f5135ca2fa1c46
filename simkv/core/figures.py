"""The figures of a run: what they are called."""

from __future__ import annotations

from typing import Any

from simkv.core.outcome import Outcome

STATISTICS = ("mean", "median", "p90", "p95", "p99")


#: Names of the figures of a variant that are numbers, as a scenario may refer to them.
FIGURES = (
    "requests",
    *(outcome.value for outcome in Outcome),
    "makespan_s",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "total_input_tokens",
    "total_output_tokens",
    "preemptions",
    "bounces",
    "recomputed_tokens",
    "longest_stall_s",
    "jain_index",
    "fastest_e2e_s",
    "slowest_e2e_s",
    *(f"{name}.{s}" for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms") for s in STATISTICS),
    "steps",
    "idle_passes",
)


def figure(figures: dict[str, Any], name: str) -> Any:
    """The figure of a summary by a name with dots, as in ``e2e_ms.mean``."""
    value: Any = figures
    for key in name.split("."):
        value = value[key]
    return value
