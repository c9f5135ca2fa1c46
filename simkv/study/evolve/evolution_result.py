"""Result of a policy search for Python and notebooks."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from simkv.core.atomic_files import make_folder
from simkv.study.evolve.evolution import Evolution
from simkv.study.evolve.evolution_files import candidate_rows, write_evolution
from simkv.study.evolve.evolution_summary import summarize_evolution


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
        """Whether the winner is surely better under all evaluation conditions."""
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
