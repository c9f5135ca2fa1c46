"""Result of a policy search for Python and notebooks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.atomic_files import make_folder, write_bytes, write_text
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
    """Return a row per candidate, the shipped one first.

    ``final`` is the score in the final round. The metrics come from the search, or from the final
    round if the candidate ran only there.
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


@dataclass(frozen=True)
class EvolutionResult:
    """Result of a search for a better scheduler; its text is the output of ``simkv evolve``."""

    evolution: Evolution

    @property
    def winner(self) -> dict[str, Any]:
        """Fields that the winner changes, with their values; empty if nothing is better."""
        return dict(self.evolution.winner.candidate.change)

    @property
    def holds(self) -> bool:
        """Whether the winner is significantly better under all evaluation conditions."""
        return self.evolution.holds

    @cached_property
    def candidates(self) -> pd.DataFrame:
        """A row per candidate, as in candidates.csv."""
        return pd.DataFrame(candidate_rows(self.evolution))

    def __str__(self) -> str:
        return "\n".join(summarize_evolution(self.evolution))

    def __repr__(self) -> str:
        return f"Evolved({self.winner or 'nothing better'}, holds={self.holds})"

    def _repr_html_(self) -> str:
        """Return the summary as HTML."""
        return f"<pre>{escape(str(self))}</pre>"

    def write(self, folder: str | Path) -> list[Path]:
        """Write candidates.csv, evolve.md and winner.yaml into a folder."""
        make_folder(Path(folder))
        return [Path(folder) / name for name in write_evolution(self.evolution, Path(folder))]
