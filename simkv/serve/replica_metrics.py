"""The metrics of a server: counters for each replica, and their export to Prometheus."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.core.engine_spec import EngineConfig
from simkv.metrics.prometheus_metrics import bucket_bounds, list_engine_metrics
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.serve.prometheus_exposition import Exposition
from simkv.serve.replica_counters import ReplicaCounters
from simkv.serve.request_handler import RequestHandler, finish_reason
from simkv.sim.fleet.fleet import Fleet
from simkv.sim.replica_base import Replica
from simkv.sim.run_record import RequestRecord


class ReplicaMetrics:
    """Updates the counters of all replicas behind a request handler.

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

    def _count_tokens(self, replica: Replica, numbers: Sequence[int]) -> None:
        self._counters_of(replica).count_tokens(numbers)

    def _count_end(self, life: RequestRecord) -> None:
        for meter in self._all():
            if meter.replica.record.requests.get(life.request.id) is life:
                meter.count_end(life)
