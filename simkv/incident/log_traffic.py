"""Convert the requests of a server's log to a trace for planning, and read the server's settings.

Unlike a diagnosis, which examines the worst part of a log, this module reads the whole log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simkv.core.atomic_files import make_folder, translate_disk_errors
from simkv.core.errors import InputError
from simkv.incident.ensemble_fit import write_rebuilt
from simkv.incident.server_setup import UserSettings, infer_setup
from simkv.incident.source_reader import read_source
from simkv.incident.workload_rebuild import rebuild
from simkv.schedulers.engine_registry import ENGINES
from simkv.workload.formats.format_detection import detect_format
from simkv.workload.trace_source import TraceSource

#: Name of the file with the requests.
TRAFFIC = "traffic.csv"


@dataclass(frozen=True)
class LogTraffic:
    """Requests of a log, written to the file ``trace``, and the configuration of the server.

    ``settings`` contains the fields of the engine's config that the log states, except the size of
    the KV cache. ``notes`` are sentences about assumptions.
    """

    trace: Path
    engine: str
    version: str
    model: str | None
    tp: int
    settings: Mapping[str, Any]
    notes: tuple[str, ...]


def is_trace(path: Path) -> bool:
    """Return whether a file is a trace in a supported format."""
    try:
        detect_format(path)
    except InputError:
        return False
    return True


def read_log_traffic(path: Path, folder: Path, asked: UserSettings) -> LogTraffic:
    """Rebuild the requests of a log and write them to ``folder``.

    ``asked`` contains the user's settings. Raises InputError if the log cannot be read or does not
    determine its requests.
    """
    evidence = read_source(path)
    setup = infer_setup(evidence, asked)
    spec = ENGINES[setup.engine["name"]]
    make_folder(folder)
    source = TraceSource(folder / TRAFFIC)
    rebuilt = rebuild(evidence, source, setup)
    with translate_disk_errors(folder / TRAFFIC, "written"):
        write_rebuilt(folder / TRAFFIC, rebuilt, source)
    skipped = {"name", "variant", spec.memory, "startup_check", spec.groups, spec.block}
    stated = {
        name: setup.engine[name]
        for name, where in setup.sources.items()
        if name not in skipped and name in setup.engine and where.startswith(f"{path.name}:")
    }
    # The user's GPU determines the values that the other assumptions concern.
    notes = [note for note in setup.assumed if str(setup.engine["variant"]) in note]
    if cache := evidence.settings.get("kv_tokens"):
        notes.append(
            f"the KV cache of {int(cache.value):,} tokens in the log is not used; to use it: "
            f"--set engine.{spec.memory}={setup.engine[spec.memory]}"
        )
    return LogTraffic(
        folder / TRAFFIC,
        spec.name,
        str(setup.engine["variant"]),
        setup.model,
        setup.tp,
        stated,
        (*rebuilt.notes, *notes),
    )
