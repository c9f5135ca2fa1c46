"""The figures of a server: a meter for each of its replicas, and what Prometheus gets of them."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.core.engine import EngineConfig
from simkv.loop.fleet.fleet import Fleet
from simkv.loop.record import Life
from simkv.loop.replica import Replica
from simkv.measure.registered import bounds, registered
from simkv.schedulers.registry import spec_of
from simkv.serve.exposition import Exposition
from simkv.serve.generation import Desk, finish_reason
from simkv.serve.meters import Meter


class Meters:
    """Lets the meters of all replicas know what happens behind a desk.

    Meters of a request that went to several replicas count at the last.
    """

    def __init__(self, desk: Desk, config: EngineConfig) -> None:
        self._desk = desk
        self._meters: dict[int, Meter] = {}
        rows = registered(config.name, config, several=isinstance(desk.live.server, Fleet))
        self._config = config
        self._block_size = spec_of(config).block_size(config)
        self._bounds = bounds(rows, desk.front.longest or 1_000_000)
        constant = {"model_name": desk.front.model, "engine_type": "unified"}
        self._exposition = Exposition(rows, self._all, constant, desk.live, config)
        desk.late = self._exposition.lag.observe
        desk.live.told.append(self._told)
        desk.live.over = self._over

    def text(self) -> bytes:
        """All figures in the text format of Prometheus."""
        return self._exposition.text()

    def _all(self) -> list[Meter]:
        return [self._of(replica) for replica in self._desk.live.replicas]

    def _of(self, replica: Replica) -> Meter:
        if found := self._meters.get(id(replica)):
            return found
        streamed = self._desk.streamed.__contains__
        meter = Meter(replica, self._block_size, self._bounds, streamed, self._reason)
        spec = spec_of(self._config)
        meter.lora_slots = spec.lora_capacity(self._config)
        meter.accepted = [0] * spec.drafted_tokens(self._config)
        self._meters[id(replica)] = meter
        return meter

    def _reason(self, life: Life, tokens: int) -> str:
        return finish_reason(life.request, tokens, self._desk.front.longest)

    def _told(self, replica: Replica, numbers: Sequence[int]) -> None:
        self._of(replica).told(numbers)

    def _over(self, life: Life) -> None:
        for meter in self._all():
            if meter.replica.record.lives.get(life.request.id) is life:
                meter.over(life)
