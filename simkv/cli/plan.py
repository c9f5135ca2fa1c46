"""``simkv plan``: parse, call, print."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from simkv.cli.common import Interrupted, progress, show
from simkv.core.errors import InputError
from simkv.core.files import check_folder

#: By this a folder is known as one that belongs to a plan, or a sweep.
STORE = "points.jsonl"
#: A word of ``--goodput ttft:500 tpot:50``, which may follow the option as in that tool.
_GOOD = re.compile(r"[a-z0-9]+:\S*")


def plan(
    scenario: Annotated[
        list[str],
        typer.Argument(
            metavar="SCENARIO", help="A scenario file (YAML), or the name of a packaged one."
        ),
    ],
    smallest: Annotated[
        str | None,
        typer.Option(
            metavar="PATH=VALUES",
            help="The knob of which as little as possible is wanted, and its candidates: "
            "fleet.replicas=1..20, engine.num_gpu_blocks=256..8192:64; see 'simkv sweep --over'.",
        ),
    ] = None,
    largest: Annotated[
        str | None,
        typer.Option(
            metavar="PATH=VALUES",
            help="The knob of which as much as possible is wanted, as a rate: "
            "workload.rate_scale=0.5..8:0.25.",
        ),
    ] = None,
    slo: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE<=NUMBER",
            help="An objective, as 'ttft_ms.p99<=500' or 'jain_index>=0.5'; in quotes. May be "
            "repeated. That everybody is served is assumed unless something is said about it.",
        ),
    ] = None,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ttft:MS tpot:MS e2el:MS",
            help="Limits per request as in 'vllm bench serve'. Of all requests 99 % must keep to "
            "them unless an objective bounds goodput (per second) or goodput_share.",
        ),
    ] = None,
    survive: Annotated[
        int | None,
        typer.Option(min=0, max=1, help="Also with so many replicas failing when that is worst."),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field; may be repeated."),
    ] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Plan for this variant only; may be repeated.")
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(min=1, help="Seeds; default 6 where the workload is drawn by chance."),
    ] = None,
    profile_error: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.9,
            metavar="SHARE",
            help="Relative error of a step (0.1: a tenth), if the profile tells none or another.",
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Prices of a GPU hour, YAML 'H100: 2.5' or CSV."),
    ] = None,
    gpu: Annotated[str | None, typer.Option(help="Which GPU; default that of the profile.")] = None,
    gpus_per_replica: Annotated[
        int | None, typer.Option(min=1, help="How many GPUs make a replica; default 1.")
    ] = None,
    held_back: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=VALUE",
            help="Check the answer on this other scenario, as workload.start=1200; may be "
            "repeated, all apply together.",
        ),
    ] = None,
    neighbours: Annotated[
        int, typer.Option(min=0, help="So many candidates on both sides of an answer are tried.")
    ] = 2,
    exhaustive: Annotated[bool, typer.Option(help="Try all candidates.")] = False,
    cliff: Annotated[bool, typer.Option(help="Try the answer at other rates too.")] = True,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder; default runs/<scenario>-plan/. What it holds is not redone."),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes at a time; default one per core.")
    ] = None,
    executor: Annotated[
        Literal["local", "ray"], typer.Option(help="Where to run: here, or on a Ray cluster.")
    ] = "local",
    address: Annotated[
        str | None, typer.Option(help="The Ray cluster; default RAY_ADDRESS, or one started here.")
    ] = None,
) -> None:
    """The smallest fleet or cache, or the highest rate, that meets the objectives; what it costs.

    Options that are not given are taken from the scenario's 'plan' section. Exit 1 if no candidate
    meets the objectives. An interrupted plan goes on when the same command is given again.
    """
    from simkv.scenario.packaged import find
    from simkv.search.bench import bench_for
    from simkv.search.jobs import RunsFailed
    from simkv.search.plan.plan import make_plan
    from simkv.search.plan.prepare import prepare
    from simkv.search.plan.request import request_of

    file, limits = _words(scenario, goodput or [])
    asked = {
        "smallest": smallest,
        "largest": largest,
        "objectives": slo,
        "goodput": limits,
        "survive": survive,
        "repeats": repeats,
        "profile_error": profile_error,
        "prices": prices,
        "gpu": gpu,
        "gpus_per_replica": gpus_per_replica,
        "overrides": set_,
        "variants": variant,
        "held_back": held_back,
        "neighbours": neighbours,
        "exhaustive": exhaustive,
        "cliff": cliff,
    }
    prepared = prepare(find(Path(file)), request_of(asked))
    folder = out or Path("runs") / f"{prepared[0].name}-plan"
    check_folder("--out", folder, "plan", lambda there: (there / STORE).is_file())
    try:
        with (
            bench_for(folder / STORE, jobs, executor, address) as bench,
            progress("runs") as advance,
        ):
            plans = [make_plan(one, bench, advance) for one in prepared]
    except KeyboardInterrupt:
        raise Interrupted(folder / STORE) from None
    except RunsFailed as error:
        print(f"simkv: {error}".replace("\n", "\nsimkv: "), file=sys.stderr)
        print(f"simkv: what is done is kept in {folder / STORE}", file=sys.stderr)
        raise typer.Exit(1) from None

    from simkv.report.plan_files import write_plans
    from simkv.search.plan.words import sentences

    written = write_plans(plans, folder)
    for one in plans:
        show(*sentences(one))
    show(f"Written to {folder}: {', '.join(path.name for path in written)}")
    if any(one.answer is None for one in plans):
        raise typer.Exit(1)


def _words(words: list[str], goodput: list[str]) -> tuple[str, tuple[str, ...]]:
    """The scenario and the limits among the words: ``--goodput ttft:500 tpot:50 scenario.yaml``."""
    limits = [word for text in goodput for word in text.split()]
    files = [word for word in words if not (goodput and _GOOD.fullmatch(word))]
    limits += [word for word in words if word not in files]
    if len(files) != 1:
        raise InputError(f"expected one scenario; found {' '.join(files) or 'none'}")
    return files[0], tuple(limits)
