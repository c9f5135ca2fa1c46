"""A fleet in which some replicas prefill and others decode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

import simpy

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.core.scheduler import KvConnector
from simkv.loop.clock import Moment, Process
from simkv.loop.fleet.fleet import Fleet, Maker, Ways
from simkv.loop.fleet.merge import whole
from simkv.loop.fleet.routers import Router
from simkv.loop.fleet.signals import LoadBoard
from simkv.loop.fleet.stint import Stint
from simkv.loop.fleet.transfers import Handover, Links, prompt_alone
from simkv.loop.record import Life, Record
from simkv.loop.replica import Replica
from simkv.scenario.fleet import FleetRules


class SplitFleet(Fleet):
    """Replicas with the ``roles`` of prefill and decode; see ``KvConnector``.

    A replica that prefills is asked for one token, which is thrown away, as vLLM's proxy does. Then
    the request goes to a replica that decodes at once, and waits there for blocks: until its KV has
    been fetched, its blocks on the other side are not free. So a full decode pool holds up the
    prefills. ``handovers`` are all that happened between the two.
    """

    def __init__(
        self,
        env: simpy.Environment,
        makers: Sequence[Maker],
        router: Router,
        decode_router: Router,
        roles: Sequence[str],
        rules: FleetRules,
        resolved: Callable[[], None] | None = None,
    ) -> None:
        assert rules.kv_transfer is not None
        self.handovers: dict[int, Handover] = {}
        self._decoding: list[Stint] = []
        self._requests: dict[int, Request] = {}
        self._roles = roles
        self._links = Links(rules.kv_transfer)
        self._decode_router = decode_router
        self._decode_board = LoadBoard(self._decoders, decode_router, rules.refresh_interval)
        super().__init__(env, makers, router, rules, resolved)

    def _decoders(self) -> list[tuple[int, Replica]]:
        return [(stint.replica, stint.engine) for stint in self._decoding]

    def decodes(self, stint: Stint) -> bool:
        """Whether a replica decodes what others have prefilled."""
        return self._roles[stint.replica] == "decode"

    def _serve(self, stint: Stint) -> None:
        if self.decodes(stint):
            self._decoding.append(stint)
            stint.engine.loads = partial(self._fetch, stint)
        else:
            super()._serve(stint)

    def run(self) -> Process:
        """Start all that goes on by itself, as a SimPy process."""
        yield from super().run()
        if interval := self._decode_board.interval:
            self.env.process(self._ticks.every(interval, self._decode_board.refresh))

    def _send(self, request: Request) -> None:
        """Its prompt goes to a replica that prefills."""
        self._requests[request.id] = request
        asked = prompt_alone(request)
        stint = self._choose(self._serving, self.router, self._board, asked)
        self._scheduler(stint).keep(request.id)
        stint.engine.submit(asked)

    def _over(self, stint: Stint, life: Life) -> None:
        i = life.request.id
        if self.decodes(stint):
            self._release_unless_fetched(i)
        elif life.outcome is Outcome.FINISHED:
            stint.in_flight -= 1
            request, self.ways[i] = self._requests[i], []
            target = self._choose(self._decoding, self._decode_router, self._decode_board, request)
            self.handovers[i] = Handover(request, stint.place, target.place, self.env.now)
            self._scheduler(target).fetch(i)
            target.engine.submit(request)
            return
        else:  # nobody will read what it may still compute
            stint.engine.tell(partial(self._scheduler(stint).sent, i))
        super()._over(stint, life)

    def _release_unless_fetched(self, i: int) -> None:
        """Nobody will read the KV of a request that has ended, unless that is under way."""
        handover = self.handovers[i]
        if handover.asked is None:
            handover.there = self.env.now
            self._release(handover)

    def _fetch(self, target: Stint, loads: Sequence[tuple[int, int]]) -> None:
        """A replica has blocks for the KV of some requests."""
        for i, tokens in loads:
            handover = self.handovers[i]
            if handover.there is not None:
                continue  # its client has left, and the other side knows
            handover.asked, handover.tokens = self.env.now, tokens
            source = self.stints[handover.source].replica
            handover.there = self._links.send(source, tokens, self.env.now)
            self.env.process(self._carry(target, handover))

    def _carry(self, target: Stint, handover: Handover) -> Process:
        assert handover.there is not None
        yield Moment(self.env, handover.there, Moment.BEFORE)
        i = handover.request.id
        self._release(handover)
        target.engine.tell(partial(self._scheduler(target).loaded, i))

    def _release(self, handover: Handover) -> None:
        source = self.stints[handover.source]
        source.engine.tell(partial(self._scheduler(source).sent, handover.request.id))

    @staticmethod
    def _scheduler(stint: Stint) -> KvConnector:
        return cast("KvConnector", stint.engine.scheduler)

    def _whole(self, records: list[Record], lives: Ways, end: float, in_vain: Ways) -> Record:
        unsent = {i: way[0][1].request for i, way in lives.items()}
        return whole(records, lives, end, {**unsent, **self._requests}, in_vain)
