"""The registry of figures: what the numbers of ``summary.json`` are called and how they are said.

REGISTRY["ttft_ms.p99"].heading      # 'P99 TTFT (ms)'
REGISTRY["ttft_ms.p99"].said(420.0)  # '0.42 s'
figure(summary, "ttft_ms.p99")       # None if no request finished

A name means the same figure wherever it is shown or compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simkv.core.outcome import Outcome

STATISTICS = ("mean", "median", "p90", "p95", "p99")
#: Latencies, each a group of STATISTICS in milliseconds: short, and as a title.
LATENCIES = {
    "ttft_ms": ("TTFT", "Time to First Token"),
    "tpot_ms": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl_ms": ("ITL", "Inter-token Latency"),
    "e2e_ms": ("E2E", "End-to-end Latency"),
}
#: The same latencies over all requests, by the group of the latency over finished ones.
OVER_ALL = {"ttft_ms": "ttft_all_ms", "e2e_ms": "e2e_all_ms"}
#: Their title in a report.
OVER_ALL_TITLE = "Latency of All Requests"


@dataclass(frozen=True)
class Metric:
    """A figure: its name in ``summary.json``, how it is called in a sentence, and its unit there.

    The unit of a count is "". Of those that are neither good nor bad less is better, too.
    ``description`` says what the label leaves open.
    """

    key: str
    label: str
    unit: str = ""
    more_is_better: bool = False
    description: str = ""

    @property
    def heading(self) -> str:
        """At the head of a column or a line: ``Mean TTFT (ms)``."""
        return _heading(self.label, self.unit)

    @property
    def heading_in_seconds(self) -> str:
        """The same for values in seconds where it is a time: ``Mean TTFT (s)``."""
        return _heading(self.label, "s" if self.per_second else self.unit)

    @property
    def per_second(self) -> float | None:
        """How many of its units are a second; None if it is no time."""
        return {"s": 1.0, "ms": 1000.0}.get(self.unit)

    def to_seconds(self, value: float) -> float:
        """The value, in seconds if it is a time."""
        return value if self.unit != "ms" else value / 1000.0

    def said(self, value: float) -> str:
        """The value in a sentence: ``0.42 s``, ``16 ms``, ``1,234 tok/s``, ``12``."""
        if self.per_second:
            return format_seconds(self.to_seconds(value))
        return f"{format_number(value)} {self.unit}".rstrip()


def _heading(label: str, unit: str) -> str:
    return f"{label[0].upper()}{label[1:]}" + (f" ({unit})" if unit else "")


def _over_all(group: str, event: str) -> tuple[Metric, ...]:
    """Figures of a latency over all requests; a request without the ``event`` is censored."""
    short, key = LATENCIES[group][0], OVER_ALL[group]
    population = (
        f"over all requests that were sent and not rejected; one without {event} counts as long "
        "as it waited"
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
            description=f"number of requests in {key} that count as long as they waited",
        ),
    )


#: All numbers of a variant, by name; a scenario may refer to them.
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
                description="over the requests that finished",
            )
            for key, (short, _) in LATENCIES.items()
            for name in STATISTICS
        ),
        *_over_all("ttft_ms", "a first token"),
        *_over_all("e2e_ms", "a complete answer"),
        Metric("steps", "steps"),
        Metric("idle_passes", "idle passes"),
    )
}
FIGURE_NAMES = tuple(METRICS)
#: Those that only a run with a fleet has.
FLEET_METRICS: Mapping[str, Metric] = {
    "fleet.mean_in_system": Metric("fleet.mean_in_system", "mean requests in the fleet"),
    "fleet.imbalance": Metric("fleet.imbalance", "imbalance (busiest / mean)"),
}
#: Those that only a run with speculative decoding has, as ``vllm bench serve`` names them.
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
#: Those that only a run with KV in host memory has. Of the prompt tokens of requests as they are
#: first taken in, the shares whose KV is on the GPU, is loaded from host memory, and was read from
#: a disk before that, where there is one.
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
#: Those that not every run has, and which has them.
OPTIONAL_METRICS = (
    dict.fromkeys(FLEET_METRICS, "fleets")
    | dict.fromkeys(SPEC_DECODE_METRICS, "engines that draft")
    | dict.fromkeys(KV_TIER_METRICS, "engines with KV in host memory")
)


#: Figures of finished requests that are no latency group.
_OF_FINISHED = ("fastest_e2e_s", "slowest_e2e_s")


def figure(figures: Mapping[str, Any], name: str) -> Any:
    """The figure of a summary by a name with dots, as in ``e2e_ms.mean``.

    None for a latency without a sample, which ``summary.json`` gives as 0, as ``vllm bench serve``
    does: 0 would be the best of all.
    """
    group, _, statistic = name.partition(".")
    if group.endswith("_ms") and statistic in STATISTICS and not figures[group]["mean"]:
        return None
    if name in _OF_FINISHED and not figures["finished"]:
        return None
    value: Any = figures
    for key in name.split("."):
        value = value[key]
    return value


def is_lower_bound(figures: Mapping[str, Any], name: str) -> bool:
    """Whether the figure is at least its value, as some requests were not waited for to the end."""
    group, _, statistic = name.partition(".")
    return group in OVER_ALL.values() and statistic in figures[group]["at_least"]


def heading(name: str) -> str:
    """What a figure is called in a table or a picture; of one that is worked out, its name."""
    metric = next(
        (
            m
            for some in (METRICS, FLEET_METRICS, SPEC_DECODE_METRICS, KV_TIER_METRICS)
            if (m := some.get(name))
        ),
        None,
    )
    return metric.heading if metric else name


def format_seconds(value: float) -> str:
    """``0.42 s``, ``12.3 s``, ``1,234 s``; below a tenth in milliseconds."""
    if 0.0 < abs(value) < 0.1:
        return f"{1000.0 * value:.3g} ms"
    return f"{format_number(value)} s"


def format_number(value: float) -> str:
    """A number with three digits, or all before the point."""
    if isinstance(value, int) or value == int(value):
        return f"{int(value):,}"
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
    return f"{value:,.{digits}f}"
