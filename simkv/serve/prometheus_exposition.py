"""Export Prometheus metrics under the names, types, labels and buckets of the served engine.

``metrics/prometheus_metrics.py`` lists the metrics of each engine, with the measured quantities of
``replica_counters``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from simkv.core.engine_spec import EngineConfig
from simkv.metrics.prometheus_metrics import (
    EngineMetric,
    LoraInfo,
    bucket_bounds,
    config_info_metric,
    list_engine_metrics,
    lora_info,
)
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.serve.live_simulation import LiveSimulation
from simkv.serve.replica_counters import BucketHistogram, MeasuredValue, ReplicaCounters
from simkv.serve.request_handler import RequestHandler, finish_reason
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.replica_base import Replica
from simkv.sim.run_record import RequestRecord

#: Labels that identify the replica.
REPLICA = ("engine", "dp_rank")
#: Bucket bounds for the lateness of tokens (s of wall-clock time).
LAGS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5)


class Exposition:
    """Prometheus collector that exports the counters of all replicas."""

    def __init__(
        self,
        rows: Sequence[EngineMetric],
        meters: Callable[[], Sequence[ReplicaCounters]],
        constant: Mapping[str, str],
        live: LiveSimulation,
        config: EngineConfig,
    ) -> None:
        self._rows, self._meters, self._constant = rows, meters, constant
        self._live, self._config = live, config
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.lag = Histogram(
            "simkv:clock_lag_seconds",
            "delay of written tokens in seconds, relative to the simulated time",
            buckets=LAGS,
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return bytes(generate_latest(self.registry))

    def describe(self) -> list[Metric]:
        """Return no metrics, so that the registration does not call ``collect``."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine and the speed of the simulation."""
        speed = GaugeMetricFamily("simkv:speed", "simulated seconds per real second")
        speed.add_metric([], self._live.speed)
        yield speed
        present = [(str(i), meter, meter.now()) for i, meter in enumerate(self._meters())]
        for row in self._rows:
            family = _FAMILIES[row.kind](row.name, row.help, labels=row.labels)
            found: dict[tuple[str, ...], float | BucketHistogram] = {}
            for index, meter, now in present:
                given = [
                    index if label in REPLICA else self._constant.get(label, "0")
                    for label in row.labels[: len(row.labels) - len(row.extra)]
                ]
                for own, value in _values(row, meter, now):
                    labels = (*given, *own)
                    found[labels] = _sum(found[labels], value) if labels in found else value
            for labels, value in found.items():
                _add(family, labels, value)
            yield family
        if told := config_info_metric(self._config.name):
            name, knobs = told
            values = [str(getattr(self._config, knob)) for knob in knobs]
            family = GaugeMetricFamily(name, "engine settings", labels=["engine", *knobs])
            for index, *_ in present:
                family.add_metric([index, *values], 1)
            yield family
        if asked := lora_info(self._config):
            yield self._adapters(asked, [meter for _, meter, _ in present])

    def _adapters(self, asked: LoraInfo, meters: Sequence[ReplicaCounters]) -> Metric:
        """Return a gauge with the time at which each set of adapters was last in use."""
        family = GaugeMetricFamily(asked.name, "LoRA adapters in use", labels=asked.labels)
        told: dict[str, float] = {}
        for meter in meters:
            for names, at in meter.adapters.last_used().items():
                told[names] = max(at, told.get(names, 0.0))
        for names, at in told.items():
            family.add_metric([asked.most, names, names], self._live.wall_clock(at))
        return family


_FAMILIES: dict[str, Any] = {
    "gauge": GaugeMetricFamily,
    "counter": CounterMetricFamily,
    "histogram": HistogramMetricFamily,
}


def _values(
    row: EngineMetric, meter: ReplicaCounters, now: Mapping[str, MeasuredValue]
) -> Iterator[tuple[list[str], float | BucketHistogram]]:
    """Yield each value of a metric with its additional labels."""
    if row.measure in now:
        yield from _labelled(now[row.measure])
        return
    if "is_streaming" in row.extra:
        for streaming, tally in meter.tallies.items():
            spread = tally.histograms.get(row.measure)
            value = tally.counts[row.measure] if spread is None else spread
            yield [str(streaming).lower()], value
        return
    streamed, whole = meter.tallies[True], meter.tallies[False]
    if row.kind == "histogram":
        yield [], streamed.histograms[row.measure].combine(whole.histograms[row.measure])
    elif row.extra:
        ours, theirs = streamed.by_label[row.measure], whole.by_label[row.measure]
        yield from _labelled({label: count + theirs[label] for label, count in ours.items()})
    else:
        yield [], streamed.counts[row.measure] + whole.counts[row.measure]


def _labelled(value: MeasuredValue) -> Iterator[tuple[list[str], float]]:
    if isinstance(value, Mapping):
        yield from (([label], number) for label, number in value.items())
    else:
        yield [], value


def _sum(one: float | BucketHistogram, other: float | BucketHistogram) -> float | BucketHistogram:
    """Add the values of two replicas that have the same labels."""
    if isinstance(one, BucketHistogram) and isinstance(other, BucketHistogram):
        return one.combine(other)
    assert not isinstance(one, BucketHistogram)
    assert not isinstance(other, BucketHistogram)
    return one + other


def _add(family: Any, labels: Sequence[str], value: float | BucketHistogram) -> None:
    if not isinstance(value, BucketHistogram):
        family.add_metric(labels, value)
        return
    below, buckets = 0, []
    for bound, count in zip([*map(float, value.bounds), float("inf")], value.counts, strict=True):
        below += count
        buckets.append(("+Inf" if bound == float("inf") else str(bound), below))
    family.add_metric(labels, buckets, value.total)


class ReplicaMetrics:
    """Counters of all replicas of a request handler, as Prometheus metrics.

    A request that was sent to several replicas is counted at the last one.
    """

    def __init__(self, handler: RequestHandler, config: EngineConfig) -> None:
        self._handler = handler
        self._meters: dict[int, ReplicaCounters] = {}
        rows = list_engine_metrics(
            config.name, config, several=isinstance(handler.live.server, Fleet)
        )
        self._config = config
        self._block_size = find_engine_spec(config).block_size(config)
        self._bounds = bucket_bounds(rows, handler.served.longest or 1_000_000)
        constant = {"model_name": handler.served.model, "engine_type": "unified"}
        self._exposition = Exposition(rows, self._all, constant, handler.live, config)
        handler.on_token_delay = self._exposition.lag.observe
        handler.live.on_tokens.append(self._count_tokens)
        handler.live.before_forgetting.append(self._count_steps)
        handler.live.on_request_end = self._count_end

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        return self._exposition.text()

    def _all(self) -> list[ReplicaCounters]:
        return [self._counters_of(replica) for replica in self._handler.live.replicas]

    def _counters_of(self, replica: Replica) -> ReplicaCounters:
        if found := self._meters.get(id(replica)):
            return found
        streamed = self._handler.streamed.__contains__
        meter = ReplicaCounters(replica, self._block_size, self._bounds, streamed, self._reason)
        spec = find_engine_spec(self._config)
        meter.lora_slots = spec.lora_capacity(self._config)
        meter.accepted = [0] * spec.drafted_tokens(self._config)
        self._meters[id(replica)] = meter
        return meter

    def _reason(self, life: RequestRecord, tokens: int) -> str:
        return finish_reason(life.request, tokens, self._handler.served.longest)

    def _count_steps(self) -> None:
        for meter in self._all():
            meter.count_steps()

    def _count_tokens(self, replica: Replica, numbers: Sequence[int]) -> None:
        self._counters_of(replica).count_tokens(numbers)

    def _count_end(self, life: RequestRecord) -> None:
        for meter in self._all():
            if meter.replica.record.requests.get(life.request.id) is life:
                meter.count_end(life)
