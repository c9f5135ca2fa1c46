"""``simkv profile list``: known step costs, by GPU and model."""

from __future__ import annotations

from typing import Annotated

import typer

from simkv.cli.command_support import show
from simkv.core.errors import InputError

#: Maximum number of rows that are shown; others are counted.
MOST = 40


def profile_list(
    words: Annotated[
        list[str] | None,
        typer.Argument(help="Words that a row must contain, such as llama 70b h100."),
    ] = None,
    all_: Annotated[
        bool, typer.Option("--all", help=f"Show all rows, not only the first {MOST}.")
    ] = False,
) -> None:
    """List known step costs: packaged profiles, and models on GPUs.

    To use a model on a GPU in a scenario, write hardware: {gpu: ..., model: ...}; to use a packaged
    profile, write profile: NAME. Costs composed of measured operators need simkv[hardware].
    """
    from simkv.costs.hardware.model_gpu_catalog import architectures, gpus
    from simkv.costs.operators.operator_tables import find_installed_tables
    from simkv.costs.packaged_profiles import find_known_costs
    from simkv.report.adaptive_table import AdaptiveTable, Column

    found = find_known_costs(words or [])
    if not found:
        raise InputError(
            f"no entry contains {' and '.join(words or [])}; GPUs: "
            f"{', '.join(gpu.name for gpu in gpus())}; models: "
            f"{', '.join(model.name for model in architectures())}"
        )
    named = [one for one in found if one.name]
    pairs = [one for one in found if not one.name]
    shown = pairs if all_ or words else []
    rows = [*named, *(shown if all_ else shown[:MOST])]
    least = [str(one.fits or ("" if one.name else "does not fit")) for one in rows]
    columns = [
        Column("profile", [one.name or "hardware" for one in rows], right=False),
        Column("model", [one.model for one in rows], right=False),
        Column("gpu", [one.gpu for one in rows], rank=1, right=False),
        Column("GPUs from", least, rank=2),
        Column("basis", [one.basis for one in rows], rank=4, right=False),
        Column("error of 95 % of steps", [one.error for one in rows], rank=3, right=False),
    ]
    if rows:
        show(AdaptiveTable(columns))
    if not words:
        show(f"models: {', '.join(model.name for model in architectures())}")
        show(f"GPUs: {', '.join(gpu.name for gpu in gpus())}")
        show("combine any model with any GPU it fits on; `simkv profile list WORDS` shows details")
    elif len(shown) > len(rows) - len(named):
        show(f"and {len(shown) - len(rows) + len(named)} more; use --all, or more words")
    if pairs and shown:
        first = next((one for one in pairs if one.fits), pairs[0])
        tp = f", tp: {first.fits}" if first.fits and first.fits > 1 else ""
        show(f"in a scenario: hardware: {{gpu: {first.gpu}, model: {first.model}{tp}}}")
    if find_installed_tables() is None:
        show(
            "measured operators are not installed (pip install 'simkv[hardware]'); costs follow "
            "from data sheets"
        )
