"""The clients' side of a run: requests come, answers go, until all is over."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol

import simpy

from simkv.core.outcome import Outcome
from simkv.core.request import Request
from simkv.sim.clock import SimProcess
from simkv.sim.run_record import RequestRecord, RunRecord
from simkv.workload.clients import Clients


class SimulatedServer(Protocol):
    """What serves requests: an engine, or a fleet of them."""

    env: simpy.Environment
    ended: Callable[[RequestRecord], None] | None

    def submit(self, request: Request) -> None:
        """A request comes now."""

    def run(self) -> SimProcess:
        """Its work, as a SimPy process."""

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> RunRecord:
        """The run is over: every one of ``requests`` gets its outcome, and the record is closed."""


def run_clients(
    engine: SimulatedServer, sent: Iterable[Request] | Clients, horizon: float | None
) -> RunRecord:
    """Send requests to the engine and run until all is over; every request has one outcome then.

    ``sent`` are requests that come at their arrivals, or clients that wait for answers. All is over
    when nothing more can happen, or at ``horizon`` (s).
    """
    env = engine.env
    clients = sent if isinstance(sent, Clients) else Clients(list(sent))
    env.process(_arrive(engine, clients.requests) if clients.open else _converse(engine, clients))
    env.process(engine.run())
    with _long_lived():
        env.run(until=horizon)
        return engine.conclude(clients.requests, horizon)


def _arrive(engine: SimulatedServer, requests: Iterable[Request]) -> SimProcess:
    """Requests come at their arrivals, whatever becomes of the others."""
    env = engine.env
    for request in sorted(requests, key=lambda request: request.arrival):
        if request.arrival > env.now:
            yield env.timeout(request.arrival - env.now)
        engine.submit(request)


def _converse(engine: SimulatedServer, clients: Clients) -> SimProcess:
    """Clients send when they have the answer that they wait for, and when they may."""
    env = engine.env
    answered = env.event()

    def ended(life: RequestRecord) -> None:
        clients.ended(life.request.id, env.now, life.outcome is Outcome.FINISHED)
        if not answered.triggered:
            answered.succeed()

    engine.ended = ended
    while True:
        while sent := clients.send(env.now):  # who is turned away at once makes room for the next
            for request in sent:
                engine.submit(request)
        following = clients.next_time()
        answered = env.event()
        due = [] if following is None else [env.timeout(max(following - env.now, 0.0))]
        yield env.any_of([answered, *due])


@contextmanager
def _long_lived() -> Iterator[None]:
    """Spare the collector of cycles a record that only grows; there are none to collect."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
