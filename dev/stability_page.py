"""Write docs/papers/throughput-optimal.md: ``python -m dev.stability_page PAGE``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, StrictUndefined

from dev.stability import Load, Setup, backlog_growth, served_tokens, setups
from simkv.core.atomic_files import write_text

PAGE = Path(__file__).parent / "stability_page.md.j2"
BUDGET = 64
#: Outputs have 1 to 127 tokens, so that requests that start together do not end together.
LOAD = Load(16, tuple(range(1, 128)))
STEPS = 6000
#: Arrival rates relative to the stability boundary of the paper.
BELOW, ABOVE = 0.95, 1.05


def row(setup: Setup) -> str:
    """Return the table row of an engine."""
    served = served_tokens(setup.engine, LOAD, BUDGET, STEPS // 4) / BUDGET
    growth = [
        backlog_growth(setup.engine, LOAD, share * BUDGET / LOAD.tokens, STEPS)
        for share in (BELOW, ABOVE)
    ]
    cells = " | ".join(f"{100 * one:+.1f} %" for one in growth)
    return f"| {setup.title} | {setup.kind} | {served:.2f} | {cells} |"


def main(page: Annotated[Path, typer.Argument(help="Page to write.")]) -> None:
    """Simulate every engine and write the page."""
    template = Environment(
        autoescape=False, keep_trailing_newline=True, undefined=StrictUndefined
    ).from_string(PAGE.read_text())
    text = template.render(
        rows=[row(setup) for setup in setups(BUDGET)],
        budget=BUDGET,
        load=LOAD,
        steps=f"{STEPS:,}",
        boundary=f"{BUDGET / LOAD.tokens:.2f}",
    )
    write_text(page, text)


if __name__ == "__main__":
    typer.run(main)
