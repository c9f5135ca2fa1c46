"""``simkv profile``: cost profiles from what others measured.

simkv profile build llmservingsim FOLDER --model NAME --out mine.json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.words import Commands
from simkv.core.errors import InputError
from simkv.core.files import check_file, write_text

if TYPE_CHECKING:
    from simkv.costs.profile import Profile

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Cost profiles: what a step costs on which GPU."
)
build = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Make a profile from published measurements."
)
app.add_typer(build, name="build")

Out = Annotated[Path, typer.Option(metavar="FILE", help="Where to write the profile (JSON).")]
Model = Annotated[str, typer.Option(help="The model's name, as on the model hub.")]
Tp = Annotated[int, typer.Option(min=1, help="GPUs that share the model (tensor parallel).")]
Seqs = Annotated[
    int | None,
    typer.Option(metavar="N", help="vLLM's max_num_seqs: pads steps to its CUDA graphs."),
]


@build.command()
def llmservingsim(
    bundle: Annotated[Path, typer.Argument(help="Folder with meta.yaml and tp<N>/*.csv[.gz].")],
    model: Model,
    out: Out,
    tp: Tp = 1,
    expert_ranks: Annotated[int, typer.Option(min=1, help="GPUs that share the experts.")] = 1,
    max_num_seqs: Seqs = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="What joins the GPUs: a name of links.json, or latency (us) and bandwidth (GB/s) "
            "of the host, as 20,16."
        ),
    ] = None,
) -> None:
    """From a bundle of LLMServingSim's kernel tables."""
    from simkv.costs.hardware.catalog import find_model, known_model
    from simkv.costs.hardware.links import said_link
    from simkv.costs.sources.llmservingsim import Sharding, bundle_model, bundle_profile
    from simkv.schedulers.vllm.setting import graph_sizes

    check_file("--out", out)
    found, measured = find_model(model), known_model(bundle_model(bundle))
    if measured and measured != found:
        raise InputError(f"{bundle}: measured with {measured.name}; --model {model} is another")
    sizes = graph_sizes(max_num_seqs) if max_num_seqs else None
    layout = Sharding(
        found.layers,
        tp,
        found.hidden,
        found.experts,
        found.experts_per_token,
        expert_ranks,
        said_link(link) if link else None,
    )
    _write(out, bundle_profile(bundle, layout, sizes))


@build.command()
def aiconfigurator(
    folder: Annotated[Path, typer.Argument(help="Folder with the *_perf.parquet tables.")],
    model: Model,
    out: Out,
    tp: Tp = 1,
) -> None:
    """From the operator tables of NVIDIA's aiconfigurator."""
    from simkv.costs.hardware.catalog import find_model
    from simkv.costs.sources.aiconfigurator import aiconfigurator_profile

    check_file("--out", out)
    _write(out, aiconfigurator_profile(folder, find_model(model), tp))


@build.command()
def vidur(
    mlp: Annotated[Path, typer.Argument(help="Table of all operators but attention (CSV[.gz]).")],
    attention: Annotated[Path, typer.Argument(help="Table of attention (CSV[.gz]).")],
    model: Model,
    gpu: Annotated[str, typer.Option(help="The GPU that was measured; the tables do not say.")],
    out: Out,
    tp: Tp = 1,
) -> None:
    """From the operator tables of Vidur's profiler."""
    from simkv.costs.hardware.catalog import find_model
    from simkv.costs.sources.vidur import vidur_profile

    check_file("--out", out)
    _write(out, vidur_profile(mlp, attention, find_model(model), gpu, tp))


@build.command()
def sync(
    requests: Annotated[Path, typer.Argument(help="A row per request (CSV), times in ms.")],
    model: Model,
    gpu: Annotated[str, typer.Option(help="The GPU; a known one helps where rows do not.")],
    out: Out,
    tp: Tp = 1,
    stage: Annotated[str, typer.Option(help="Rows to fit to, where there are stages.")] = "sync",
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Of the engine.")] = 2048,
    block_size: Annotated[int, typer.Option(min=1, help="Of the engine, in tokens.")] = 16,
) -> None:
    """From requests that were alone on the engine, the first of the file left out."""
    from simkv.costs.hardware.catalog import find_model, known_gpu
    from simkv.costs.sources.alone import read_alone, traits
    from simkv.costs.sources.sync import sync_profile

    check_file("--out", out)
    found = find_model(model)
    shape = traits(found, max_num_batched_tokens, block_size, tp)
    alone = read_alone(requests, stage, block_size)
    name = f"{found.name} on {gpu}, fitted to {requests.name}"
    about = {"name": name, "engine": "as measured", "model": found.name, "on": gpu}
    _write(out, sync_profile(alone, shape, known_gpu(gpu), **about))


def _write(out: Path, profile: Profile) -> None:
    """Write a profile, as a whole or not at all, and say how good it is."""
    write_text(out, profile.model_dump_json(exclude_none=True) + "\n")
    print(f"{out}: {profile.name}")
    for feature, (low, high) in profile.range.items():
        print(f"  {feature}: measured from {low:g} to {high:g}")
    for kind, error in profile.fit.held_out.items():
        print(
            f"  {kind} steps left out: median error {100 * error.median:.2f} %, 95 of 100 within "
            f"{100 * error.p95:.2f} % ({error.points} points)"
        )
    for line in profile.source:
        print(f"  {line}")
