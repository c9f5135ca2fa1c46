"""Generate docs/accuracy.md: ``python -m dev.accuracy_page docs``.

For each release, the page lists the data on which simkv was evaluated and its errors.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import typer
from jinja2 import Environment, StrictUndefined

from dev.gallery_page import ENGINES
from simkv.conformance.recording_counts import RecordingCounts, packaged_counts
from simkv.core.atomic_files import write_text

HERE = Path(__file__).parent
PAGE = "accuracy.md"
FIGURES = ("ttft", "tpot", "e2e", "throughput", "inside")


def read_results() -> list[dict[str, Any]]:
    """Return the results of the evaluations, with None for metrics that an evaluation does not
    have.
    """
    found = tomllib.loads((HERE / "accuracy_results.toml").read_text(encoding="utf-8"))["result"]
    return [dict.fromkeys(FIGURES) | one for one in found]


def render(counts: RecordingCounts, results: Sequence[Mapping[str, Any]]) -> str:
    """Return the text of the page, newest release first."""
    engines = [
        {
            "name": ENGINES[engine],
            "variants": len(found),
            "recorded": f"{sum(one['recorded'] for one in found.values()):,}",
            "equal": f"{sum(one['equal'] for one in found.values()):,}",
        }
        for engine, found in counts.items()
    ]
    releases = [(key, list(of)) for key, of in groupby(results, lambda one: one["release"])]
    template = Environment(
        autoescape=False, keep_trailing_newline=True, undefined=StrictUndefined
    ).from_string((HERE / "accuracy_page.md.j2").read_text(encoding="utf-8"))
    seen = next(one for one in results if "each configuration excluded" in one["judge"])
    return template.render(engines=engines, releases=releases[::-1], seen=seen)


def write_page(folder: Path) -> None:
    """Write the page to the folder of the documentation."""
    write_text(folder / PAGE, render(packaged_counts(), read_results()))


if __name__ == "__main__":
    typer.run(write_page)
