"""The registry of metrics in ``summary.json``: names, units and labels.

METRICS["ttft_ms.p99"].heading      # 'P99 TTFT (ms)'
METRICS["ttft_ms.p99"].format(420.0)  # '0.42 s'
figure(summary, "ttft_ms.p99")      # None if no request finished

A name means the same metric wherever it is shown or compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from simkv.core.outcome import Outcome

STATISTICS = ("mean", "median", "p90", "p95", "p99")
#: Latencies; each is a group of STATISTICS in milliseconds, with a short name and a title.
LATENCIES = {
    "ttft_ms": ("TTFT", "Time to First Token"),
    "tpot_ms": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl_ms": ("ITL", "Inter-token Latency"),
    "e2e_ms": ("E2E", "End-to-end Latency"),
}
#: Key of the latency over all requests, by the key of the latency over finished requests.
OVER_ALL = {"ttft_ms": "ttft_all_ms", "e2e_ms": "e2e_all_ms"}
#: Title of the latencies over all requests in a report.
OVER_ALL_TITLE = "Latency of All Requests"


@dataclass(frozen=True)
class Metric:
    """Name, label and unit of a metric in ``summary.json``.

    A count has the unit "".
    """

    # ``more_is_better`` is False for metrics where lower is better and for metrics that are neither
    # good nor bad. ``description`` adds facts that the label does not state.

    key: str
    label: str
    unit: str = ""
    more_is_better: bool = False
    description: str = ""

    @property
    def heading(self) -> str:
        """Heading of a table column, such as ``Mean TTFT (ms)``."""
        return _heading(self.label, self.unit)

    @property
    def heading_in_seconds(self) -> str:
        """Heading for values in seconds, such as ``Mean TTFT (s)``."""
        # Equal to ``heading`` if the metric is not a time.
        return _heading(self.label, "s" if self.per_second else self.unit)

    @property
    def per_second(self) -> float | None:
        """Number of units in a second, such as 1,000 for ms.

        None if the metric is not a time.
        """
        return {"s": 1.0, "ms": 1000.0}.get(self.unit)

    def to_seconds(self, value: float) -> float:
        """Convert a time to seconds. Other values stay unchanged."""
        return value if self.unit != "ms" else value / 1000.0

    def format(self, value: float) -> str:
        """Format a value with its unit, such as ``0.42 s`` or ``1,234 tok/s``."""
        if self.per_second:
            return format_seconds(self.to_seconds(value))
        return f"{format_number(value)} {self.unit}".rstrip()

    def format_like(self, other: float) -> Callable[[float], str]:
        """Return a function that formats values of the metric in the unit that suits ``other``."""
        seconds = self.to_seconds(other) if self.per_second else 0.0
        if not 0.0 < abs(seconds) < 0.1:
            return self._format_large
        return lambda value: f"{format_number(1000.0 * self.to_seconds(value))} ms"

    def _format_large(self, value: float) -> str:
        if self.per_second:
            return f"{format_number(self.to_seconds(value))} s"
        return self.format(value)


def _heading(label: str, unit: str) -> str:
    return f"{label[0].upper()}{label[1:]}" + (f" ({unit})" if unit else "")


def _over_all(group: str, event: str) -> tuple[Metric, ...]:
    """Return the metrics of a latency over all requests.

    Requests without ``event`` count with a censored latency.
    """
    short, key = LATENCIES[group][0], OVER_ALL[group]
    population = (
        "all requests that were sent, and neither rejected nor cancelled; for a request without "
        f"{event}, the time that it waited"
    )
    return (
        *(
            Metric(
                f"{key}.{name}",
                f"{name.replace('p', 'P')} {short} of all requests",
                "ms",
                description=population,
            )
            for name in STATISTICS
        ),
        Metric(
            f"{key}.censored",
            f"requests without {event}",
            description=f"number of requests for which {key} contains the time that they waited",
        ),
    )


#: Metrics of the prefix cache, in all memory tiers, at the first admission of each request.
PREFIX_CACHE_METRICS = (
    Metric("prefix_cache.hit_rate", "prefix cache hit rate", "%", True),
    Metric("prefix_cache.hit_tokens", "prompt tokens from the prefix cache", "", True),
    Metric("prefix_cache.queried_tokens", "prompt tokens of admitted requests"),
)
#: All metrics of a variant by name; a scenario may refer to them.
METRICS: Mapping[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("requests", "requests"),
        *(Metric(o.value, o.word, more_is_better=o is Outcome.FINISHED) for o in Outcome),
        Metric("makespan_s", "makespan", "s"),
        Metric("request_throughput", "request throughput", "req/s", True),
        Metric("output_throughput", "output token throughput", "tok/s", True),
        Metric("total_token_throughput", "total token throughput", "tok/s", True),
        Metric("total_input_tokens", "total input tokens", "", True),
        Metric("total_output_tokens", "total generated tokens", "", True),
        Metric("preemptions", "preemptions"),
        Metric("bounces", "bounces"),
        Metric("recomputed_tokens", "recomputed tokens"),
        Metric("longest_stall_s", "longest stall", "s"),
        Metric("jain_index", "Jain index of speed", "", True),
        Metric("fastest_e2e_s", "fastest E2E", "s"),
        Metric("slowest_e2e_s", "slowest E2E", "s"),
        *(
            Metric(
                f"{key}.{name}",
                f"{name.replace('p', 'P')} {short}",
                "ms",
                description="finished requests only",
            )
            for key, (short, _) in LATENCIES.items()
            for name in STATISTICS
        ),
        *_over_all("ttft_ms", "a first token"),
        *_over_all("e2e_ms", "a complete answer"),
        Metric("steps", "steps"),
        Metric("idle_passes", "idle passes"),
        *PREFIX_CACHE_METRICS,
    )
}
FIGURE_NAMES = tuple(METRICS)
#: Metrics that exist only in runs with a fleet.
FLEET_METRICS: Mapping[str, Metric] = {
    "fleet.mean_in_system": Metric("fleet.mean_in_system", "mean requests in the fleet"),
    "fleet.imbalance": Metric("fleet.imbalance", "imbalance (busiest / mean)"),
}
#: Metrics that exist only in runs with speculative decoding, named as in ``vllm bench serve``.
SPEC_DECODE_METRICS: Mapping[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("spec_decode.acceptance_rate", "acceptance rate", "%", True),
        Metric("spec_decode.acceptance_length", "acceptance length", "", True),
        Metric("spec_decode.num_drafts", "drafts"),
        Metric("spec_decode.draft_tokens", "draft tokens"),
        Metric("spec_decode.accepted_tokens", "accepted tokens", "", True),
    )
}
#: Metrics that exist only in runs with KV in host memory. The hit rates are the percentages of
#: prompt tokens, at the first admission of each request, whose KV was found on the GPU, in host
#: memory or on disk.
KV_TIER_METRICS: Mapping[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("kv_tiers.gpu_hit_rate", "prompt tokens hit on the GPU", "%", True),
        Metric("kv_tiers.host_hit_rate", "prompt tokens hit in host memory", "%", True),
        Metric("kv_tiers.disk_hit_rate", "prompt tokens hit on disk", "%", True),
        Metric("kv_tiers.loaded_tokens", "tokens loaded from host memory", "", True),
        Metric("kv_tiers.stored_tokens", "tokens stored in host memory"),
        Metric("kv_tiers.read_tokens", "tokens read from disk", "", True),
        Metric("kv_tiers.written_tokens", "tokens written to disk"),
    )
}
#: Latencies of sessions, each a group of STATISTICS in milliseconds.
_SESSION_LATENCIES = {
    "sessions.start_wait_ms": "wait of sessions for their start",
    "sessions.makespan_ms": "session makespan",
    "sessions.turn_ms": "turn latency",
}
#: Metrics that exist only in runs in which requests wait for answers.
SESSION_METRICS: Mapping[str, Metric] = {
    metric.key: metric
    for metric in (
        Metric("sessions.finished", "finished sessions", "", True),
        Metric("sessions.met_deadline_share", "sessions within the deadline", "%", True),
        *(
            Metric(f"{key}.{name}", f"{name.replace('p', 'P')} {label}", "ms")
            for key, label in _SESSION_LATENCIES.items()
            for name in STATISTICS
        ),
        *(
            Metric(f"sessions.shares.{name}", f"session time: {label}", "%")
            for name, label in (
                ("waiting", "waiting"),
                ("model", "model"),
                ("tools", "tool calls"),
                ("think", "think time"),
            )
        ),
        Metric("sessions.resume_tax", "resume tax", "%"),
        Metric("sessions.resume_tax_tokens", "resume tax in tokens"),
    )
}
#: Metrics that exist only in some runs, with a description of these runs.
OPTIONAL_METRICS = (
    dict.fromkeys(FLEET_METRICS, "fleets")
    | dict.fromkeys(SPEC_DECODE_METRICS, "engines with speculative decoding")
    | dict.fromkeys(KV_TIER_METRICS, "engines with KV in host memory")
    | dict.fromkeys(SESSION_METRICS, "workloads with sessions")
)


#: Metrics of finished requests outside the latency groups.
_OF_FINISHED = ("fastest_e2e_s", "slowest_e2e_s")


def figure(figures: Mapping[str, Any], name: str) -> Any:
    """Return the value of a metric in a summary, such as ``e2e_ms.mean``.

    Returns None for latencies without samples, and for session metrics if there are no sessions.
    """
    # ``summary.json`` reports a latency without samples as 0, as ``vllm bench serve`` does, but 0
    # would rank as the best value.
    if name in _OF_FINISHED and not figures["finished"]:
        return None
    *groups, last = name.split(".")
    group: Any = figures
    for key in groups:
        if name in SESSION_METRICS and key not in group:
            return None
        group = group[key]
    latency = bool(groups) and groups[-1].endswith("_ms") and groups[-1] != "start_wait_ms"
    if latency and last in STATISTICS and not group["mean"]:
        return None
    return group.get(last) if name in SESSION_METRICS else group[last]


def is_lower_bound(figures: Mapping[str, Any], name: str) -> bool:
    """Return whether the value of a metric is only a lower bound.

    This is the case if some requests have not ended.
    """
    group, _, statistic = name.partition(".")
    return group in OVER_ALL.values() and statistic in figures[group]["at_least"]


def heading(name: str) -> str:
    """Return the heading of a metric in a table or plot."""
    # The heading of a derived metric is its name.
    metric = next(
        (
            m
            for some in (
                METRICS,
                FLEET_METRICS,
                SPEC_DECODE_METRICS,
                KV_TIER_METRICS,
                SESSION_METRICS,
            )
            if (m := some.get(name))
        ),
        None,
    )
    return metric.heading if metric else name


def format_seconds(value: float) -> str:
    """Format a duration in seconds, such as ``0.42 s``, ``1,234 s`` or ``12 ms``."""
    # Durations below 0.1 s are in milliseconds.
    if 0.0 < abs(value) < 0.1:
        return f"{1000.0 * value:.3g} ms"
    return f"{format_number(value)} s"


def format_number(value: float) -> str:
    """Format a number with at least three significant digits.

    All digits before the decimal point are kept.
    """
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
