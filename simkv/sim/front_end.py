"""API server in front of an engine. Its work delays requests and their tokens."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from simkv.core.outcome import Outcome
from simkv.costs.front_end_costs import FrontEndCosts
from simkv.sim.run_record import RequestRecord

if TYPE_CHECKING:
    from simkv.sim.engine import Engine


class ApiServer:
    """API server of one engine.

    Requests and tokens are handled one after another. A request reaches the engine, and a token
    reaches its client, when all earlier work is done. ``delivered`` contains the time (s) at which
    the tokens of each step reach their clients.
    """

    # Several processes share the work equally. The entries of ``delivered`` correspond to the rows
    # of the step log.

    def __init__(self, engine: Engine, costs: FrontEndCosts) -> None:
        self.delivered = array("d")
        self._engine, self._costs = engine, costs
        self._free = 0.0
        self._entering: set[int] = set()
        self._delivering: set[int] = set()

    def receive(self, life: RequestRecord) -> None:
        """Receive a request from a client. The engine receives the request later."""
        costs, request, env = self._costs, life.request, self._engine.env
        self._engine.catch_up()
        self._process_rows(env.now)
        begin = max(env.now, self._free)
        work = costs.request_s + costs.prompt_token_s * request.prompt_tokens
        # including the work for its first token
        self._free = begin + (work + costs.output_token_s) / costs.processes
        life.entered_at = begin + work + costs.latency_s
        self._entering.add(request.id)
        entry = env.timeout(life.entered_at - env.now)
        entry.callbacks.append(lambda _: self._enter(life))

    def _enter(self, life: RequestRecord) -> None:
        if life.request.id in self._entering and not self._engine.halted:
            self._entering.remove(life.request.id)
            self._engine.enter(life.request)

    def finish(self, life: RequestRecord) -> bool:
        """Deliver the last token of a request. Return whether the client receives it later."""
        engine = self._engine
        self._process_rows(engine.env.now, inclusive=True)
        at = self.delivered[-1] if self.delivered else 0.0
        if at <= engine.env.now:
            return False
        self._delivering.add(life.request.id)
        engine.timeout_at(at).callbacks.append(lambda _: self._deliver(life))
        return True

    def _deliver(self, life: RequestRecord) -> None:
        if life.request.id in self._delivering and not self._engine.halted:
            self._delivering.remove(life.request.id)
            self._engine.record.end = max(self._engine.record.end, self._engine.env.now)
            self._engine.resolve(life, Outcome.FINISHED)

    def forget(self, i: int) -> bool:
        """Forget a request whose client has left.

        Returns True if the request is not in the engine.
        """
        # The request has not reached the engine or has already left it.
        ours = i in self._entering or i in self._delivering
        self._entering.discard(i)
        self._delivering.discard(i)
        return ours

    def close(self) -> None:
        """Process the remaining steps at the end of the run."""
        self._process_rows(float("inf"))

    def _process_rows(self, until: float, *, inclusive: bool = False) -> None:
        """Add the work for the tokens of all steps that ended before ``until`` (s)."""
        log, done = self._engine.record.steps, self.delivered
        ends, seqs = log.end, log.decode_seqs
        each = self._costs.output_token_s / self._costs.processes
        while len(done) < len(ends):
            end = ends[len(done)]
            if end > until or (end == until and not inclusive):
                return
            self._free = max(self._free, end) + each * seqs[len(done)]
            done.append(self._free)


def attach_api_server(engine: Engine, costs: FrontEndCosts) -> None:
    """Put an API server in front of an engine."""
    engine.front_end = ApiServer(engine, costs)
