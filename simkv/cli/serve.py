"""``simkv serve``: parse, call, print."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from simkv.cli.common import complain
from simkv.core.errors import InputError, nearest
from simkv.core.files import check_file

#: What the server is made of, and the extra does not come without.
NEEDS = ("fastapi", "uvicorn", "httptools", "prometheus_client")


def serve(
    scenario: Annotated[
        Path, typer.Argument(help="A scenario file (YAML), or the name of a packaged one.")
    ],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    speed: Annotated[float, typer.Option(help="How many times as fast as real time.")] = 1.0,
    variant: Annotated[str | None, typer.Option(help="A variant of the scenario.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field; may be repeated."),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SIMKV_API_KEY", help="The key that clients must have.")
    ] = None,
    model_name: Annotated[
        str | None, typer.Option(help="What the model is called; default the scenario's.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tokenizer.json, for prompts as text.")
    ] = None,
    record: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write what came as a trace, at the end.")
    ] = None,
    grace: Annotated[
        float, typer.Option(help="Seconds for answers under way when told to end.")
    ] = 30.0,
    seed: Annotated[int, typer.Option(min=0, help="Of how long answers are.")] = 0,
    kv_events: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Publish what the prefix cache holds (ZMQ), as vLLM."),
    ] = None,
    kv_replay: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Where those ask who missed some of it.")
    ] = None,
) -> None:
    """Serve a scenario's engine over HTTP: clients take it for the real one, and it says why.

    The clients are the workload. GET /explain/ID tells what a request waited for, GET /scenario is
    a file to run it all again. SIGTERM ends it when the answers under way are complete.
    """
    lacking = [name for name in NEEDS if find_spec(name) is None]
    if lacking:
        raise InputError(
            f"simkv serve: {', '.join(lacking)} cannot be found; install what it needs with: "
            "pip install 'simkv[serve]'"
        )
    if not 0 < speed <= 1e6:
        raise InputError(f"--speed {speed:g}: expected a number above 0")
    if record:
        check_file("--record", record)
    from simkv.serve.house import House, Options
    from simkv.serve.scenario import to_serve

    path, variants = to_serve(scenario, set_ or [])
    if variant is not None and variant not in variants:
        raise InputError(
            f"--variant {variant}: there is no such variant{nearest(variant, variants)}; expected "
            f"one of {', '.join(variants)}"
        )
    chosen = variants[variant or next(iter(variants))]
    options = Options(host, port, speed, api_key, model_name, tokenizer, grace, seed)
    options = replace(options, kv_events=kv_events, kv_replay=kv_replay)
    house = House(chosen, path.parent, options, complain)
    print(house.banner, flush=True)
    house.serve()
    if record:
        count = house.write(record)
        print(f"Written {record}: {count} requests")
