"""Write docs/papers/kv-constraints.md: ``python -m dev.optimum_page PAGE``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from jinja2 import Environment, StrictUndefined

from dev.schedule_optimum import draw_instance, ratios, summary
from simkv.core.atomic_files import write_text

PAGE = Path(__file__).parent / "optimum_page.md.j2"
INSTANCES = 30
#: Published mean ratios of MC-SF to the optimum: all requests at once, and requests over time.
PUBLISHED = {False: 1.005, True: 1.047}
TITLES = {False: "all at once", True: "over time"}


def rows(*, online: bool) -> list[str]:
    """Return the table rows of one kind of instances."""
    found = [ratios(draw_instance(seed, online=online)) for seed in range(INSTANCES)]
    lines = []
    for name in found[0]:
        mean, most, equal = summary([one[name] for one in found])
        theirs = f"{PUBLISHED[online]:.3f}" if name == "MC-SF" else ""
        lines.append(
            f"| {TITLES[online]} | {name} | {theirs} | {mean:.3f} | {most:.3f} | {equal} |"
        )
    return lines


def main(page: Annotated[Path, typer.Argument(help="Page to write.")]) -> None:
    """Simulate and solve the instances, and write the page."""
    template = Environment(
        autoescape=False, keep_trailing_newline=True, undefined=StrictUndefined
    ).from_string(PAGE.read_text())
    lines = [*rows(online=False), *rows(online=True)]
    write_text(page, template.render(rows=lines, instances=INSTANCES))


if __name__ == "__main__":
    typer.run(main)
