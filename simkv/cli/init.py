"""``simkv init``: write a commented scenario file from options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from simkv.cli.command_support import Overwrite, show
from simkv.cli.scenario_flags import add_scenario_flags, find_document, options_of, print_notes
from simkv.core.errors import InputError


def init(
    file: Annotated[
        Path, typer.Argument(help="Scenario file to write (default: scenario.yaml).")
    ] = Path("scenario.yaml"),
    overwrite: Overwrite = False,
    **described: Any,
) -> None:
    """Write a commented scenario file from options.

    The options describe a server (--gpu, --model or --from-command) and its load, as for simkv run.
    The command also writes the JSON schema of scenario files to simkv-schema.json in the same
    directory.
    """
    import json

    from simkv.core.atomic_files import write_text
    from simkv.scenario.scenario_loader import resolve_variants
    from simkv.scenario.scenario_schema import json_schema
    from simkv.scenario.scenario_template import SCHEMA, write_template

    if file.exists() and not overwrite:
        raise InputError(f"{file}: exists already; use --overwrite to replace it")
    document, built = find_document(None, options_of(described))
    assert built is not None
    scenario = resolve_variants(document.copy())["run"]
    print_notes(built)
    schema = file.parent / SCHEMA
    write_text(file, write_template(document, scenario, built.notes, file.parent))
    write_text(schema, json.dumps(json_schema(), indent=1) + "\n")
    show(f"Written to {file} and {schema}; run it with: simkv run {file}")


add_scenario_flags(init)
