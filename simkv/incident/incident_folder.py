"""The directory of a diagnosis: each stage writes files that the user can read and edit.

The first stage, reading, writes ``evidence.json`` (settings and notes) and the tables of the
inputs: ``requests.csv``, ``arrivals.csv``, ``access.csv``, ``observed.csv`` and ``iterations.csv``.
The second stage, rebuilding, writes ``workload.csv`` and ``scenario.yaml``. The third stage,
calibration, writes ``profile.json``. If several workloads are sampled, the third stage also writes
their metrics (``ensemble.csv``), and their requests and profiles (``ensemble-SEED.csv``,
``ensemble-SEED.json``). The fourth stage, explanation, writes ``diagnosis.md``, ``compared.csv``,
``observed.png`` and ``report.html``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from simkv.core.atomic_files import check_folder, make_folder, translate_disk_errors, write_text
from simkv.core.errors import InputError
from simkv.incident.evidence import Evidence, StatedSetting

if TYPE_CHECKING:
    from simkv.incident.server_setup import ServerSetup

EVIDENCE, WORKLOAD, SCENARIO = "evidence.json", "workload.csv", "scenario.yaml"
PROFILE, DIAGNOSIS, REPORT = "profile.json", "diagnosis.md", "report.html"
PICTURE, COMPARED, ENSEMBLE = "observed.png", "compared.csv", "ensemble.csv"
#: The tables of an Evidence, with the file of each.
TABLES = {
    "requests": "requests.csv",
    "arrivals": "arrivals.csv",
    "access": "access.csv",
    "series": "observed.csv",
    "steps": "iterations.csv",
}
#: Files of an incident directory, other than tables.
INCIDENT_FILES = (
    EVIDENCE,
    WORKLOAD,
    SCENARIO,
    PROFILE,
    DIAGNOSIS,
    REPORT,
    PICTURE,
    COMPARED,
    ENSEMBLE,
)


def is_incident(folder: Path) -> bool:
    """Return whether a diagnosis has written evidence to the directory."""
    return (folder / EVIDENCE).is_file()


def check_incident_folder(folder: Path) -> None:
    """Raise InputError if ``folder`` is not writable or contains unrelated files."""
    check_folder("--out", folder, "earlier diagnosis", is_incident)


def write_evidence(folder: Path, evidence: Evidence) -> None:
    """Write the evidence, and remove the files of an earlier diagnosis."""
    make_folder(folder)
    for name in (*INCIDENT_FILES, *TABLES.values()):
        (folder / name).unlink(missing_ok=True)
    for member in folder.glob("ensemble-*"):
        member.unlink()
    told = {
        "sources": evidence.source,
        "wall_clock": evidence.wall,
        "engine": evidence.engine,
        "settings": {
            name: {"value": _plain(known.value), "where": known.where}
            for name, known in evidence.settings.items()
        },
        "died": evidence.died,
        "histograms": evidence.histograms,
        "notes": list(evidence.notes),
        "lacks": list(evidence.lacks),
    }
    for name, file in TABLES.items():
        table = getattr(evidence, name)
        if table is not None:
            with translate_disk_errors(folder / file, "written"):
                table.to_csv(folder / file, index=False, lineterminator="\n")
    write_text(folder / EVIDENCE, json.dumps(told, indent=1) + "\n")


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def read_evidence(folder: Path) -> Evidence:
    """Return the evidence that an earlier `simkv diagnose` wrote.

    Raises InputError if a file cannot be read.
    """
    path = folder / EVIDENCE
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        settings = {
            name: StatedSetting(one["value"], one["where"])
            for name, one in told["settings"].items()
        }
        tables = {
            name: pd.read_csv(folder / file) if (folder / file).is_file() else None
            for name, file in TABLES.items()
        }
        return Evidence(
            source=told["sources"],
            wall=told["wall_clock"],
            engine=told["engine"],
            settings=settings,
            histograms=told["histograms"],
            died=told["died"],
            notes=tuple(told["notes"]),
            lacks=tuple(told["lacks"]),
            **tables,
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: is not an evidence file of `simkv diagnose`: {error}") from error


def write_scenario(folder: Path, setup: ServerSetup, profile: str, notes: tuple[str, ...]) -> None:
    """Write ``scenario.yaml``, with the source of each setting as a comment."""
    tree = {
        "name": _name(folder),
        "summary": "Rebuilt from what a server wrote.",
        "workload": {"trace": WORKLOAD},
        "engine": dict(setup.engine),
        **({"fleet": setup.fleet} if setup.fleet else {}),
        "profile": profile,
        "provenance": {
            "given": [
                f"{name}: {source}"
                for name, source in setup.sources.items()
                if name in setup.engine
            ],
            "assumed": [*setup.assumed, *notes],
        },
    }
    # imported here because it is slow to import and not needed for a triage
    from ruamel.yaml import YAML

    path = folder / SCENARIO
    yaml = YAML()
    yaml.width = 1000
    with translate_disk_errors(path, "written"), path.open("w", encoding="utf-8") as text:
        yaml.dump(tree, text)


def _name(folder: Path) -> str:
    kept = "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.resolve().name)
    return kept.strip("-.") or "incident"
