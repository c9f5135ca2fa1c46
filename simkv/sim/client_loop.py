# mypyc: compile
"""Client side of a run: send requests until no simulation event is left."""

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
    """Interface of a simulated engine or fleet."""

    env: simpy.Environment
    on_request_end: Callable[[RequestRecord], None] | None

    def submit(self, request: Request) -> None:
        """Receive a request from a client."""

    def disconnect(self, request_id: int, outcome: Outcome = Outcome.STARVED) -> None:
        """Record that the client of a request has left. The request ends with ``outcome``."""

    def run(self) -> SimProcess:
        """Return the server's SimPy process."""

    def conclude(self, requests: Iterable[Request], horizon: float | None) -> RunRecord:
        """End the run. Assign an outcome to every request and close the record."""


def run_clients(
    engine: SimulatedServer, sent: Iterable[Request] | Clients, horizon: float | None
) -> RunRecord:
    """Send requests to the server, simulate the run and return its record.

    ``sent`` contains requests with fixed arrival times, or clients that wait for answers. The run
    ends when no event is left, or at ``horizon`` (s).
    """
    # Every request in the record has an outcome.
    env = engine.env
    clients = sent if isinstance(sent, Clients) else Clients(list(sent))
    env.process(_arrive(engine, clients.requests) if clients.open else _converse(engine, clients))
    env.process(engine.run())
    with _long_lived():
        env.run(until=horizon)
        record = engine.conclude(clients.requests, horizon)
    for number in clients.cancelled - clients.sent.keys():
        life = record.requests[number]
        life.outcome, life.reason = Outcome.CANCELLED, "another branch ended before it was sent"
    return record


def _arrive(engine: SimulatedServer, requests: Iterable[Request]) -> SimProcess:
    """SimPy process: submit requests at their arrival times, without waiting for answers."""
    env = engine.env
    for request in sorted(requests, key=lambda request: request.arrival):
        if request.arrival > env.now:
            yield env.timeout(request.arrival - env.now)
        engine.submit(request)


def _converse(engine: SimulatedServer, clients: Clients) -> SimProcess:
    """SimPy process: submit each request as soon as ``clients`` may send it."""
    env = engine.env
    answered = env.event()

    def ended(life: RequestRecord) -> None:
        clients.ended(life.request.id, env.now, life.outcome is Outcome.FINISHED)
        if not answered.triggered:
            answered.succeed()

    engine.on_request_end = ended
    while True:
        for number in clients.take_cancelled():
            engine.disconnect(number, Outcome.CANCELLED)
        while sent := clients.send(env.now):  # a rejection can allow the next request at once
            for request in sent:
                engine.submit(request)
        following = clients.next_time()
        answered = env.event()
        due = [] if following is None else [env.timeout(max(following - env.now, 0.0))]
        yield env.any_of([answered, *due])


@contextmanager
def _long_lived() -> Iterator[None]:
    """Disable cyclic garbage collection, because the record only grows and contains no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
