"""``simkv serve``: serve a simulated engine over HTTP."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import (
    Overrides,
    Source,
    Trust,
    VariantOption,
    check_variant,
    print_error,
)
from simkv.core.atomic_files import check_file
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.scenario.scenario import Scenario

#: Packages of the ``serve`` extra that the server requires.
NEEDS = ("fastapi", "uvicorn", "httptools", "msgspec", "prometheus_client")


def serve(
    scenario: Annotated[
        Path | None,
        typer.Argument(help="Scenario file (YAML), or the name of a packaged scenario."),
    ] = None,
    engine: Annotated[
        str | None, typer.Option(metavar="NAME", help="Engine to simulate, if SCENARIO is omitted.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Model name, with --engine.")
    ] = "llama-3.1-8b",
    gpu: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="GPU name, with --engine (`simkv profile list` shows them)."
        ),
    ] = "H100-SXM",
    list_: Annotated[
        bool, typer.Option("--list", help="List the packaged scenarios and exit.")
    ] = False,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 selects a free port.")] = 8000,
    port_per_replica: Annotated[
        bool,
        typer.Option(
            "--port-per-replica",
            help="Serve each replica of the fleet on its own port. The first replica uses --port.",
        ),
    ] = False,
    speed: Annotated[
        float,
        typer.Option(
            metavar="FACTOR",
            help="Simulated seconds per real second; 2 simulates at twice the real speed.",
        ),
    ] = 1.0,
    variant: VariantOption = None,
    set_: Overrides = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SIMKV_API_KEY", help="API key that clients must send (default: none)."
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Model name that the API accepts (default: the model of the scenario).",
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Count the tokens of text prompts with this tokenizer file (tokenizer.json).",
        ),
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Append each received request to this trace file."),
    ] = None,
    max_history: Annotated[
        int,
        typer.Option(
            metavar="REQUESTS",
            help="Maximum number of requests in the history for /explain. The history is deleted "
            "when more requests arrive.",
        ),
    ] = 200_000,
    grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="Seconds to wait on shutdown for running requests to finish.",
        ),
    ] = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed for sampled output lengths.")] = 0,
    kv_events: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="ZMQ address on which to publish KV cache events, in vLLM's format.",
        ),
    ] = None,
    kv_replay: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="ZMQ address on which subscribers can request missed KV cache events.",
        ),
    ] = None,
    _source: Source = None,
    _trusted: Trust = False,
) -> None:
    """Serve a simulated engine with an OpenAI-compatible API.

    GET /explain/ID reports what a request waited for. GET /scenario returns a scenario file that
    contains all received requests. On SIGTERM, the server finishes the running requests and exits.
    """
    if list_:
        from simkv.serve.served_scenario import list_scenarios

        print("\n".join(list_scenarios()))
        return
    lacking = [name for name in NEEDS if find_spec(name) is None]
    if lacking:
        raise InputError(
            f"simkv serve: missing packages: {', '.join(lacking)}; run: pip install 'simkv[serve]'"
        )
    if os.environ.get("SIMKV_API_KEY") == "":  # click ignores empty variables
        raise InputError("SIMKV_API_KEY: must not be empty; set a key, or unset the variable")
    if record:
        check_file("--record", record)
    from simkv.serve.server_assembly import Deployment, ServerOptions

    options = ServerOptions(host, port, speed, api_key, served_model_name, tokenizer, grace, seed)
    options = replace(options, kv_events=kv_events, kv_replay=kv_replay, record=record)
    options = replace(options, max_history=max_history)
    chosen, folder = _chosen(scenario, engine, (model, gpu), variant, set_ or [])
    deployment = Deployment(chosen, folder, options, print_error, apart=port_per_replica)

    def ready() -> None:
        for server in deployment.servers:
            print(server.banner, flush=True)

    deployment.serve(ready)
    for server in deployment.servers:
        if path := server.options.record:
            print(f"{server.write(path)} requests written to {path}")


def _chosen(
    path: Path | None,
    engine: str | None,
    hardware: tuple[str, str],
    variant: str | None,
    overrides: list[str],
) -> tuple[Scenario, Path]:
    """Return the scenario to serve, and the base directory of its relative file names."""
    from simkv.serve.served_scenario import build_scenario, load_served_scenario

    if (path is None) == (engine is None):
        raise InputError(
            "expected a scenario or --engine; `simkv serve --list` lists packaged scenarios"
        )
    if path is None:
        return build_scenario(engine or "", *hardware, overrides), Path()
    path, variants = load_served_scenario(path, overrides)
    check_variant(variant, variants)
    return variants[variant or next(iter(variants))], path.parent
