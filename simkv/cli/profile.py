"""``simkv profile``: list cost profiles, or build one from published measurements.

simkv profile build llmservingsim FOLDER --model NAME --out mine.json
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import AsJson, print_json, show
from simkv.cli.usage_errors import Commands
from simkv.core.atomic_files import check_file, write_text
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.costs.cost_profile import CostProfile

app = typer.Typer(
    cls=Commands, no_args_is_help=True, help="List cost profiles, or build one from measurements."
)
build = typer.Typer(
    cls=Commands, no_args_is_help=True, help="Build a cost profile from published measurements."
)
app.add_typer(build, name="build")

Out = Annotated[
    Path, typer.Option(metavar="FILE", help="Write the cost profile to this file (JSON).")
]
ModelNameOption = Annotated[str, typer.Option(help="Model name, as on Hugging Face.")]
Tp = Annotated[int, typer.Option(min=1, help="Tensor parallel size.")]
Seqs = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="max_num_seqs of vLLM. It determines the CUDA graph sizes, to which batches are "
        "padded.",
    ),
]


@build.command()
def llmservingsim(
    bundle: Annotated[Path, typer.Argument(help="Directory with meta.yaml and tp<N>/*.csv[.gz].")],
    model: ModelNameOption,
    out: Out,
    tp: Tp = 1,
    ep: Annotated[int, typer.Option(min=1, help="Expert parallel size.")] = 1,
    max_num_seqs: Seqs = None,
    link: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|US,GB/S",
            help="Link between the GPUs: a name such as 'PCIe 5.0, peer-to-peer'. If transfers "
            "pass through the host: latency in microseconds and bandwidth in GB/s, such as "
            "20,16.",
        ),
    ] = None,
) -> None:
    """Build a profile from LLMServingSim's kernel tables."""
    from simkv.costs.hardware.host_links import parse_link
    from simkv.costs.hardware.model_gpu_catalog import find_model, known_model
    from simkv.costs.sources.llmservingsim_profile import Sharding, bundle_model, bundle_profile
    from simkv.schedulers.engine_registry import DEFAULT

    check_file("--out", out)
    found, measured = find_model(model), known_model(bundle_model(bundle))
    if measured and measured != found:
        raise InputError(
            f"{bundle}: was measured with {measured.name}; expected --model {measured.name}, "
            f"got {model}"
        )
    sizes = DEFAULT.graph_sizes(max_num_seqs) if max_num_seqs else None
    layout = Sharding(
        found.layers,
        tp,
        found.hidden,
        found.experts,
        found.experts_per_token,
        ep,
        parse_link(link) if link else None,
    )
    _write(out, bundle_profile(bundle, layout, sizes))


@build.command()
def aiconfigurator(
    folder: Annotated[Path, typer.Argument(help="Directory with the *_perf.parquet tables.")],
    model: ModelNameOption,
    out: Out,
    tp: Tp = 1,
) -> None:
    """Build a profile from aiconfigurator's operator tables."""
    from simkv.costs.hardware.model_gpu_catalog import find_model
    from simkv.costs.sources.aiconfigurator_profile import aiconfigurator_profile

    check_file("--out", out)
    _write(out, aiconfigurator_profile(folder, find_model(model), tp))


@build.command()
def vidur(
    mlp: Annotated[
        Path, typer.Argument(help="Table of all operators except attention (.csv[.gz]).")
    ],
    attention: Annotated[Path, typer.Argument(help="Table of attention operators (.csv[.gz]).")],
    model: ModelNameOption,
    gpu: Annotated[str, typer.Option(help="Name of the measured GPU.")],
    out: Out,
    tp: Tp = 1,
) -> None:
    """Build a profile from Vidur's operator tables."""
    from simkv.costs.hardware.model_gpu_catalog import find_model
    from simkv.costs.sources.vidur_profile import vidur_profile

    check_file("--out", out)
    _write(out, vidur_profile(mlp, attention, find_model(model), gpu, tp))


@build.command("single-request")
def single_request(
    requests: Annotated[
        Path, typer.Argument(help="CSV table with one row per request and times in milliseconds.")
    ],
    model: ModelNameOption,
    gpu: Annotated[
        str,
        typer.Option(
            help="GPU name. If simkv knows the GPU, values missing in the rows are computed from "
            "its data sheet."
        ),
    ],
    out: Out,
    tp: Tp = 1,
    stage: Annotated[
        str,
        typer.Option(
            help="Fit only rows with this value in the column stage, if the table has this column."
        ),
    ] = "sync",
    max_num_batched_tokens: Annotated[
        int, typer.Option(min=1, help="Setting max_num_batched_tokens of the engine.")
    ] = 2048,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per KV block of the engine.")] = 16,
) -> None:
    """Build a profile from requests that ran in isolation.

    The first request of the file is excluded as a warm-up.
    """
    from simkv.costs.hardware.model_gpu_catalog import find_model, known_gpu
    from simkv.costs.sources.single_request import compute_model_traits, read_isolated_requests
    from simkv.costs.sources.single_request_fit import fit_single_request_profile

    check_file("--out", out)
    found = find_model(model)
    shape = compute_model_traits(found, max_num_batched_tokens, block_size, tp)
    alone = read_isolated_requests(requests, stage, block_size)
    name = f"{found.name} on {gpu}, fitted to {requests.name}"
    about = {"name": name, "engine": "as measured", "model": found.name, "on": gpu}
    _write(out, fit_single_request_profile(alone, shape, known_gpu(gpu), **about))


def _write(out: Path, profile: CostProfile) -> None:
    """Write a profile, completely or not at all, and print its accuracy."""
    write_text(out, profile.model_dump_json(exclude_none=True) + "\n")
    print(f"{out}: {profile.name}")
    for feature, (low, high) in profile.range.items():
        print(f"  {feature}: measured range {low:g} to {high:g}")
    for kind, error in profile.fit.held_out.items():
        print(
            f"  held-out {kind} steps: median error {100 * error.median:.2f} %, 95 % within "
            f"{100 * error.p95:.2f} % ({error.points} points)"
        )
    for line in profile.source:
        print(f"  {line}")


#: Maximum number of rows that are shown; others are counted.
MOST = 40


@app.command("list")
def profile_list(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            help="Show only rows that contain all of these words, such as llama 70b h100."
        ),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help=f"Show all rows, not only the first {MOST}.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List packaged profiles, models and GPUs with step costs.

    To use a model on a GPU in a scenario, write hardware: {gpu: ..., model: ...}; to use a packaged
    profile, write profile: NAME. Step times from measured operators require the extra package: pip
    install simkv[hardware].
    """
    from simkv.costs.hardware.model_gpu_catalog import architectures, gpus
    from simkv.costs.operators.operator_tables import find_installed_tables
    from simkv.costs.packaged_profiles import GPU_COUNTS, find_known_costs
    from simkv.report.adaptive_table import AdaptiveTable, Column

    found = find_known_costs(words or [])
    if not found:
        raise InputError(
            f"no entry contains {' and '.join(words or [])}; GPUs: "
            f"{', '.join(gpu.name for gpu in gpus())}; models: "
            f"{', '.join(model.name for model in architectures())}"
        )
    if as_json:
        from simkv.report.json_answers import ProfileRow, ProfilesAnswer

        profiles = [
            ProfileRow(**asdict(one) | {"name": one.name or None, "hardware": one.hardware or None})
            for one in found
        ]
        print_json(ProfilesAnswer(profiles=profiles))
        return
    named = [one for one in found if one.name]
    pairs = [one for one in found if not one.name]
    shown = pairs if all_ or words else []
    rows = [*named, *(shown if all_ else shown[:MOST])]
    least = [str(one.fits or ("" if one.name else f"> {GPU_COUNTS[-1]}")) for one in rows]
    columns = [
        # Without packaged profiles, all rows would say the same.
        *(
            [Column("profile", [one.name or "hardware" for one in rows], right=False)]
            if named
            else []
        ),
        Column("model", [one.model for one in rows], right=False),
        Column("gpu", [one.gpu for one in rows], rank=2, right=False),
        Column("GPUs from", least, rank=3),
        Column("basis", [one.basis for one in rows], rank=1, right=False, width=22),
        Column("error of 95 % of steps", [one.error for one in rows], rank=4, right=False),
    ]
    if rows:
        show(AdaptiveTable(columns, wraps_below=200))
    if not words:
        show(f"models: {', '.join(model.name for model in architectures())}")
        show(f"GPUs: {', '.join(gpu.name for gpu in gpus())}")
        show(
            "you can combine any model with any GPU that can hold it; `simkv profile list "
            "WORDS` shows details"
        )
    elif len(shown) > len(rows) - len(named):
        show(
            f"and {len(shown) - len(rows) + len(named)} more; use --all to show them, or add "
            "words to filter"
        )
    if pairs and shown:
        first = next((one for one in pairs if one.fits), pairs[0])
        section = ", ".join(f"{name}: {value}" for name, value in first.hardware.items())
        show(f"in a scenario: hardware: {{{section}}}")
    if find_installed_tables() is None:
        show(
            "operator tables are not installed, so the step times of models and GPUs without a "
            "packaged profile are computed from data sheets; to install them: pip install "
            "'simkv[hardware]'"
        )
