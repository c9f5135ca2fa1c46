"""Scenarios to be served: the workload may be left out, for the clients bring theirs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simkv.scenario.document import read_document
from simkv.scenario.load import resolve
from simkv.scenario.packaged import find
from simkv.scenario.scenario import Scenario
from simkv.workload.lengths import Length

#: In place of a workload that is left out; nobody sends it.
PLACEHOLDER = {"requests": [{"prompt_tokens": 1, "output_tokens": 1}]}


def to_serve(path: Path, overrides: Sequence[str]) -> tuple[Path, dict[str, Scenario]]:
    """A scenario file, or a packaged one by its name, and its variants.

    Raises InputError as ``simkv run`` does.
    """
    path = find(path)
    document = read_document(path)
    if isinstance(document.tree, dict):
        document.tree.setdefault("workload", PLACEHOLDER)
    return path, resolve(document, overrides)


def answer_length(scenario: Scenario) -> Length | None:
    """How long answers are that end by themselves: as those of the workload, if it draws them."""
    arrivals = scenario.workload.arrivals
    return arrivals.output_tokens if arrivals else None
