"""Write the results of a search: a table of candidates, the winner as a scenario, and a summary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from simkv.core.atomic_files import write_bytes, write_text
from simkv.core.csv_writer import write_rows
from simkv.scenario.run_fields import find_custom_sources, find_profiles
from simkv.scenario.scenario_writer import to_yaml
from simkv.study.evolve.evolution import Evolution
from simkv.study.evolve.evolution_summary import summarize_evolution
from simkv.study.evolve.tournament import SHIPPED, CandidateScore


def write_evolution(found: Evolution, folder: Path) -> list[str]:
    """Write ``candidates.csv``, ``evolve.md`` and ``winner.yaml``; return their names.

    ``winner.yaml`` has the shipped scheduler and the winner as variants of the first trial;
    profiles and schedulers that are files are copied beside it.
    """
    write_rows(folder / "candidates.csv", candidate_rows(found))
    write_text(folder / "evolve.md", "\n".join(summarize_evolution(found)) + "\n")
    trial = found.split.train[0]
    both = {"shipped": SHIPPED.apply_to(trial), "evolved": found.winner.candidate.apply_to(trial)}
    text = to_yaml(both)
    for scenario in both.values():
        for path in find_profiles(scenario).values():
            if path.endswith(".json"):
                write_bytes(folder / Path(path).name, (trial.folder / path).read_bytes())
        for source in find_custom_sources(scenario).values():
            write_bytes(folder / Path(source.path).name, source.code)
    write_text(folder / "winner.yaml", text)
    return ["candidates.csv", "evolve.md", "winner.yaml"]


def candidate_rows(found: Evolution) -> list[dict[str, Any]]:
    """Return a row per candidate, the shipped one first; ``final`` is the score in the final round.

    Candidates that ran only in the final, such as the pruned winner, have their figures from there.
    """
    final = {one.candidate.key: one for one in found.final}
    tried = final | {one.candidate.key: one for one in found.standings}
    front = {one.candidate.key for one in found.front}
    keys = dict.fromkeys((*(one.candidate.key for one in found.standings), *final))
    rows = []
    for number, key in enumerate(keys):
        row = {"number": number, **_row(tried[key], found), "front": key in front}
        rows.append(row | {"final": final[key].score if key in final else None})
    return rows


def _row(one: CandidateScore, found: Evolution) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for goal, loss in zip(found.goals, one.loss, strict=True):
        values = [value[goal.figure] for value in one.values]
        known = [value for value in values if value is not None]
        row[goal.figure] = sum(known) / len(known) if known else None
        row[f"gain.{goal.figure}"] = -loss
    row |= {
        "unserved": one.unserved,
        "parts": one.candidate.parts,
        "score": one.score,
        "why": one.why,
    }
    said = dict(one.candidate.change)
    row["candidate"] = json.dumps(said) if said else "shipped"
    return row
