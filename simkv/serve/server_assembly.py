"""Build a server from a scenario and options, and run it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from simkv.core.engine_spec import EngineConfig, EngineSpec
from simkv.core.errors import InputError
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_writer import to_yaml
from simkv.schedulers.engine_registry import find_engine_spec
from simkv.serve.http_app import application
from simkv.serve.live_explainer import Explainer
from simkv.serve.live_simulation import LiveSimulation
from simkv.serve.prometheus_exposition import ReplicaMetrics
from simkv.serve.recorded_workload import GrowingTrace, write_recorded_trace
from simkv.serve.request_guard import Guard
from simkv.serve.request_handler import RequestHandler, ServedModel
from simkv.serve.served_scenario import answer_lengths, replicas_of
from simkv.serve.server_process import ServedApp, ShutdownFlag, bind, serve_until_shutdown
from simkv.serve.text_tokenizers import load_tokenizer
from simkv.sim.simulation import ReplicaSpec, build_replica_specs, check_lora

if TYPE_CHECKING:
    from simkv.serve.kv_events import KvEventPublisher


#: Limits of ``--speed``; between them, timers and clocks have finite values.
SLOWEST, FASTEST = 1e-6, 1e6
#: Maximum of ``--grace`` in seconds.
LONGEST_GRACE = 1e6


@dataclass(frozen=True)
class ServerOptions:
    """Options of ``simkv serve``, described in its ``--help``.

    Raises InputError for invalid values.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    speed: float = 1.0
    api_key: str | None = None
    model: str | None = None
    tokenizer: Path | None = None
    grace: float = 30.0
    seed: int = 0
    kv_events: str | None = None
    kv_replay: str | None = None
    rank: int = 0
    record: Path | None = None
    max_history: int = 200_000

    def __post_init__(self) -> None:
        if not SLOWEST <= self.speed <= FASTEST:
            raise InputError(
                f"--speed {self.speed:g}: expected a number from {SLOWEST:g} to {FASTEST:g}"
            )
        if not 0 <= self.grace <= LONGEST_GRACE:
            raise InputError(
                f"--grace {self.grace:g}: expected seconds from 0 to {LONGEST_GRACE:g}"
            )
        if self.kv_replay is not None and self.kv_events is None:
            raise InputError("--kv-replay: requires --kv-events")
        if self.max_history < 1:
            raise InputError(f"--max-history {self.max_history}: expected at least 1")
        for name, value in (("host", self.host), ("served-model-name", self.model)):
            if value is not None and not (value.strip() and value.isprintable()):
                raise InputError(f"--{name} {value!r}: expected printable characters")
        # An HTTP header cannot contain other characters, so no client could send such a key.
        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise InputError(
                "--api-key: expected printable ASCII characters without spaces; omit the option to "
                "serve without a key"
            )


class HttpServer:
    """A scenario served on a port.

    ``warn`` receives messages for the operator. ``ending`` is set when the server shuts down.
    Raises InputError for scenarios that cannot be served.
    """

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        options: ServerOptions,
        warn: Callable[[str], None],
        ending: ShutdownFlag,
    ) -> None:
        self.options = options
        # Real clients decide when to leave, and the simulation must not end before they do.
        # They wait for a real HTTP server, so the time of a simulated one would count twice.
        self.scenario = scenario.model_copy(
            update={"timeout": None, "horizon": None, "front_end": "none"}
        )
        replicas = build_replica_specs(self.scenario, folder)
        path = options.record
        self._trace: GrowingTrace | None = None
        self._grows = (
            path is not None and path.suffix != ".gz" and (path.is_file() or not path.exists())
        )
        # A file that is written at the end needs the whole history.
        most = options.max_history if self._grows or path is None else None
        self.live = LiveSimulation(self.scenario, replicas, options.speed, most)
        self.live.warn = warn
        engine = scenario.engine
        spec = find_engine_spec(engine)
        self.served = ServedModel(
            engine=engine.name,
            variant=engine.variant,
            model=options.model
            or (scenario.hardware.model if scenario.hardware else scenario.name),
            texts=load_tokenizer(options.tokenizer),
            longest=spec.length_limit(engine),
            lengths=answer_lengths(scenario),
            seed=options.seed,
            by_priority=spec.in_priority_order(engine),
            loras=_loras(scenario, replicas),
            lora_by_model=spec.lora_by_model,
        )
        self.handler = RequestHandler(self.live, self.served)
        self.metrics = ReplicaMetrics(self.handler, engine)
        self.kv_publisher = self._kv_publisher(spec, engine)
        self.explainer = Explainer(self.live, self.scenario, folder)
        self._ending = ending
        self._socket = bind(options.host, options.port)

    def _kv_publisher(self, spec: EngineSpec, engine: EngineConfig) -> KvEventPublisher | None:
        options = self.options
        if options.kv_events is None:
            return None
        from simkv.serve.kv_events import KvEventPublisher

        where = options.kv_events, options.kv_replay, options.rank
        size, loras = spec.block_size(engine), self.served.loras
        return KvEventPublisher(
            self.live, where, size, self.handler.tokens, loras, spec.published_cache
        )

    @property
    def address(self) -> str:
        """URL at which the server listens."""
        host, port = self._socket.getsockname()[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}"

    @property
    def banner(self) -> str:
        """Message at the start: the scenario, its address and the speed."""
        front = self.served
        times = (
            "real time" if self.options.speed == 1 else f"{self.options.speed:g} times real time"
        )
        return (
            f"Serving {self.scenario.name} ({front.engine} {front.variant}, model "
            f"{front.model}) on {self.address} at {times}\n"
            f"Token counts: {front.texts.rule}. "
            f"To explain a slow reply: curl {self.address}/explain/ID"
        )

    @property
    def served_app(self) -> ServedApp:
        """The application with its simulation and its socket."""
        app = application(self.handler, self.explainer, self.describe, self.metrics.text)
        guard = Guard(app, self.options.speed, self.options.api_key, refuse=self._ending.reason)
        return ServedApp(guard, app, self.live, self._socket, lambda: self.handler.in_flight)

    def close(self) -> None:
        """Stop the explaining process and the event publisher."""
        self.explainer.close()
        if self.kv_publisher:
            self.kv_publisher.close()

    def begin_trace(self) -> GrowingTrace | None:
        """Create the file of ``--record``, or return None if its format can only be written at the
        end.
        """
        path = self.options.record
        if path is None or not self._grows:
            return None
        self._trace = GrowingTrace(path, self.live.warn)
        self.live.on_change.append(self._trace.add)
        return self._trace

    async def describe(self) -> str:
        """Return the text of a scenario file with the configuration and all requests so far."""
        about = [
            f"Requests received so far by simkv serve at --speed {self.options.speed:g}.",
            f"Token counts: {self.served.texts.rule}.",
        ]
        lines = "".join(f"# {line}\n" for line in about)
        if not self.live.received:
            return (
                f"{lines}# No requests received yet; the workload is the scenario's own.\n"
                + to_yaml({"run": self.scenario})
            )
        return lines + await self.explainer.scenario()

    def write(self, path: Path) -> int:
        """Write the received requests as a trace and return their number."""
        if self.live.history_ended and self._trace:
            self._trace.save()
        else:
            write_recorded_trace(path, self.live.journal)
        return self.live.received


class Deployment:
    """Servers of a scenario: one server or, if ``apart`` is true, one server per replica.

    Several servers have consecutive ports. Raises InputError for scenarios that cannot be served.
    """

    def __init__(
        self,
        scenario: Scenario,
        folder: Path,
        options: ServerOptions,
        warn: Callable[[str], None],
        *,
        apart: bool = False,
    ) -> None:
        self._grace, self._ending = options.grace, ShutdownFlag()
        self.servers: list[HttpServer] = []
        for rank, one in enumerate(replicas_of(scenario) if apart else [scenario]):
            port = options.port + rank if options.port else 0
            record = options.record
            if record and apart:
                record = record.with_stem(f"{record.stem}-{rank}")
            own = replace(options, port=port, rank=rank, record=record)
            self.servers.append(HttpServer(one, folder, own, warn, self._ending))

    def serve(self, ready: Callable[[], None]) -> None:
        """Serve until a signal arrives and the calls in flight have ended.

        ``ready`` is called once, when clients can connect.
        """
        beside = [server.kv_publisher.replay() for server in self.servers if server.kv_publisher]
        traces = [server.begin_trace() for server in self.servers]
        beside += [trace.grow() for trace in traces if trace]
        sites = [server.served_app for server in self.servers]
        try:
            asyncio.run(serve_until_shutdown(sites, self._ending, self._grace, ready, beside))
        finally:
            for server in self.servers:
                server.close()


def _loras(scenario: Scenario, replicas: Sequence[ReplicaSpec]) -> Sequence[str]:
    """Return the LoRA adapters to serve. Raises InputError if an engine does not support
    adapters.
    """
    for name in scenario.lora.modules:
        check_lora("lora.modules: lists", name, replicas)
    return scenario.lora.modules
