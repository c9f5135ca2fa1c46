"""What a search leaves: a table of all that was tried, the winner as a scenario, the answer."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from simkv.core.files import write_bytes, write_text
from simkv.core.table import write_rows
from simkv.scenario.fields import profiles, sources
from simkv.scenario.saving import to_yaml
from simkv.search.evolve.contest import SHIPPED, Entry
from simkv.search.evolve.evolve import Evolution
from simkv.search.evolve.words import told


def write_evolution(found: Evolution, folder: Path) -> list[str]:
    """Write ``candidates.csv``, ``evolve.md`` and ``winner.yaml``; returns their names.

    The last has what is shipped and the winner as variants, on the first trial; profiles and
    schedulers that are files are copied beside it.
    """
    front = {one.candidate.key for one in found.front}
    rows = [_row(number, one, found, front) for number, one in enumerate(found.standings)]
    write_rows(folder / "candidates.csv", rows)
    write_text(folder / "evolve.md", "\n".join(told(found)) + "\n")
    trial = found.ground.train[0]
    both = {"shipped": SHIPPED.of(trial), "evolved": found.winner.candidate.of(trial)}
    text = to_yaml(both)
    for scenario in both.values():
        for path in profiles(scenario).values():
            if path.endswith(".json"):
                write_bytes(folder / Path(path).name, (trial.folder / path).read_bytes())
        for source in sources(scenario).values():
            write_bytes(folder / Path(source.path).name, source.code)
    write_text(folder / "winner.yaml", text)
    return ["candidates.csv", "evolve.md", "winner.yaml"]


def _row(number: int, one: Entry, found: Evolution, front: Collection[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"number": number}
    for goal, loss in zip(found.goals, one.loss, strict=True):
        values = [value[goal.figure] for value in one.values]
        known = [value for value in values if value is not None]
        row[goal.figure] = sum(known) / len(known) if known else None
        row[f"gain.{goal.figure}"] = -loss
    row |= {
        "unserved": one.unserved,
        "parts": one.candidate.parts,
        "score": one.score,
        "front": one.candidate.key in front,
        "why": one.why,
    }
    said = dict(one.candidate.change)
    row["candidate"] = json.dumps(said) if said else "shipped"
    return row
