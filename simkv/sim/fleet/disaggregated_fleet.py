"""Fleet in which some replicas prefill and others decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import simpy

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler_protocol import KvConnector
from simkv.scenario.fleet_section import FleetSettings, KvTransfer
from simkv.sim.clock import ExactTimeout, SimProcess
from simkv.sim.fleet.fleet import Fleet, RecordsByRequest, ReplicaFactory
from simkv.sim.fleet.fleet_record import merge_records
from simkv.sim.fleet.load_signals import LoadBoard
from simkv.sim.fleet.replica_lifetime import ReplicaLifetime
from simkv.sim.fleet.routers import Router
from simkv.sim.replica_base import Replica
from simkv.sim.run_record import RequestRecord, RunRecord


@dataclass
class Handover:
    """Transfer of a request from a prefill replica to a decode replica. Times are in seconds.

    - ``source``, ``target``: lifetimes of the two replicas, as indices.
    - ``prefilled_at``: end of the prefill.
    - ``requested_at``: time at which the decode replica requested the KV.
    - ``arrived_at``: arrival of the KV.
    - ``tokens``: number of tokens whose KV is transferred.
    """

    request: Request
    source: int
    target: int
    prefilled_at: float
    requested_at: float | None = None
    arrived_at: float | None = None
    tokens: int = 0


class TransferLinks:
    """Links that copy KV between replicas. A link has one transfer at a time.

    Each prefill replica has its own link. With ``shared_link``, all replicas share one.
    """

    def __init__(self, rule: KvTransfer) -> None:
        self.rule = rule
        self._free_at: dict[int, float] = {}

    def send(self, source: int, tokens: int, now: float) -> float:
        """Start a transfer of the KV of ``tokens`` tokens at ``now`` (s).

        Returns the time (s) at which the KV arrives.
        """
        link = -1 if self.rule.shared_link else source
        start = max(now, self._free_at.get(link, 0.0))
        end = start + tokens * self.rule.bytes_per_token / self.rule.bandwidth
        self._free_at[link] = end
        return end + self.rule.latency


def prefill_request(request: Request) -> Request:
    """Return a copy of the request that has one output token, for the prefill replica."""
    return replace(request, output_tokens=1, max_tokens=1)


class DisaggregatedFleet(Fleet):
    """Fleet in which some replicas prefill and others decode.

    ``roles`` contains the role of each replica. ``handovers`` contains the transfer of each
    prefilled request. The prefill replica frees the blocks of a request when the decode replica has
    fetched the KV.
    """

    # A prefill replica generates one token, which is discarded, as vLLM's proxy does. The request
    # then goes to a decode replica and waits there for blocks. A full KV cache on decode replicas
    # therefore delays prefills.

    def __init__(
        self,
        env: simpy.Environment,
        makers: Sequence[ReplicaFactory],
        router: Router,
        decode_router: Router,
        roles: Sequence[str],
        rules: FleetSettings,
        resolved: Callable[[], None] | None = None,
    ) -> None:
        assert rules.kv_transfer is not None
        self.handovers: dict[int, Handover] = {}
        self._decoding: list[ReplicaLifetime] = []
        self._requests: dict[int, Request] = {}
        self._roles = roles
        self._links = TransferLinks(rules.kv_transfer)
        self._decode_router = decode_router
        self._decode_board = LoadBoard(self._decoders, decode_router, rules.refresh_interval)
        super().__init__(env, makers, router, rules, resolved)

    def _decoders(self) -> list[tuple[int, Replica]]:
        return [(lifetime.replica, lifetime.engine) for lifetime in self._decoding]

    def decodes(self, lifetime: ReplicaLifetime) -> bool:
        """Return whether a replica decodes requests that other replicas have prefilled."""
        return self._roles[lifetime.replica] == "decode"

    def _serve(self, lifetime: ReplicaLifetime) -> None:
        if self.decodes(lifetime):
            self._decoding.append(lifetime)
            lifetime.engine.on_kv_loads = partial(self._fetch, lifetime)
        else:
            super()._serve(lifetime)

    def run(self) -> SimProcess:
        """SimPy process: run the fleet."""
        # The loads of the decode replicas are refreshed, too.
        yield from super().run()
        if interval := self._decode_board.interval:
            self.env.process(self._ticks.every(interval, self._decode_board.refresh))

    def _send(self, request: Request) -> None:
        """Send the prompt of a request to a prefill replica."""
        self._requests[request.id] = request
        asked = prefill_request(request)
        lifetime = self._choose(self._serving, self.router, self._board, asked)
        self._scheduler(lifetime).keep(request.id)
        lifetime.engine.submit(asked)

    def _request_ended(self, lifetime: ReplicaLifetime, life: RequestRecord) -> None:
        i = life.request.id
        if self.decodes(lifetime):
            self._release_unless_fetched(i)
        elif life.outcome is Outcome.FINISHED:
            lifetime.in_flight -= 1
            request, self.served_by[i] = self._requests[i], []
            target = self._choose(self._decoding, self._decode_router, self._decode_board, request)
            self.handovers[i] = Handover(request, lifetime.index, target.index, self.env.now)
            self._scheduler(target).fetch(i)
            target.engine.submit(request)
            return
        else:  # KV that the prefill replica may still compute is not needed
            lifetime.engine.call_soon(partial(self._scheduler(lifetime).sent, i))
        super()._request_ended(lifetime, life)

    def _release_unless_fetched(self, i: int) -> None:
        """Free the KV of an ended request on its prefill replica, unless the transfer has begun."""
        handover = self.handovers[i]
        if handover.requested_at is None:
            handover.arrived_at = self.env.now
            self._release(handover)

    def _fetch(self, target: ReplicaLifetime, loads: Sequence[tuple[int, int]]) -> None:
        """Start the KV transfers that a decode replica requests.

        ``loads`` contains pairs of request id and number of tokens.
        """
        for i, tokens in loads:
            handover = self.handovers[i]
            if handover.arrived_at is not None:
                continue  # the client has left, and the prefill replica has been informed
            handover.requested_at, handover.tokens = self.env.now, tokens
            source = self.lifetimes[handover.source].replica
            handover.arrived_at = self._links.send(source, tokens, self.env.now)
            self.env.process(self._carry(target, handover))

    def _carry(self, target: ReplicaLifetime, handover: Handover) -> SimProcess:
        assert handover.arrived_at is not None
        yield ExactTimeout(self.env, handover.arrived_at, ExactTimeout.BEFORE)
        i = handover.request.id
        self._release(handover)
        target.engine.call_soon(partial(self._scheduler(target).loaded, i))

    def _release(self, handover: Handover) -> None:
        source = self.lifetimes[handover.source]
        source.engine.call_soon(partial(self._scheduler(source).sent, handover.request.id))

    @staticmethod
    def _scheduler(lifetime: ReplicaLifetime) -> KvConnector:
        return cast("KvConnector", lifetime.engine.scheduler)

    def _merge(
        self,
        records: list[RunRecord],
        lives: RecordsByRequest,
        end: float,
        unobserved: RecordsByRequest,
    ) -> RunRecord:
        unsent = {i: way[0][1].request for i, way in lives.items()}
        return merge_records(records, lives, end, {**unsent, **self._requests}, unobserved)
