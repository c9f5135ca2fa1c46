"""Table of the statistics of a trace."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table


def figures_table(file: str, format: str, figures: dict[str, Any]) -> Table:
    """Return a table of the statistics of a trace. Missing values are left out."""
    table = Table(
        box=box.SIMPLE, show_header=False, title=f"{file} ({format})", title_justify="left"
    )
    for name, value in format_figures(figures):
        table.add_row(name, value)
    return table


def format_figures(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the table as (label, value)."""
    told = [("Requests", f"{figures['requests']:,}")]
    if figures["sessions"]:
        told.append(("Sessions or clients", f"{figures['sessions']:,}"))
    told += _arrivals(figures)
    for name in ("prompt_tokens", "output_tokens"):
        of = figures[name]
        shown = ", ".join(f"{key.upper()} {of[key]:,.0f}" for key in ("p50", "p90", "p99"))
        what = name.replace("_", " ").capitalize()
        told.append((what, f"mean {of['mean']:,.1f}, {shown}, max {of['max']:,.0f}"))
    told.append(("Tokens in all", f"{figures['total_tokens']:,}"))
    told += _sharing(figures)
    if figures["peak_blocks"]:
        size = figures["block_size"]
        memory = f", {figures['peak_gib']:,.1f} GiB" if "peak_gib" in figures else ""
        told.append(
            (
                "Peak KV in flight",
                f"{figures['peak_blocks']:,} blocks of {size} tokens{memory}, in "
                f"{figures['peak_requests']:,} requests at once",
            )
        )
        told.append(("  assuming", figures["assuming"]))
    return told


def _arrivals(figures: dict[str, Any]) -> list[tuple[str, str]]:
    if figures["rate"] is None:
        return [("Arrivals", "none: lengths only, or all at once")]
    most = [
        f"{figures[key]:,.0f} in {span}"
        for key, span in (("most_in_1_s", "1 s"), ("most_in_64_s", "64 s"))
        if figures[key] is not None
    ]
    return [
        ("Span", f"{figures['span_s']:,.1f} s"),
        ("Rate", f"{figures['rate']:,.3f} requests/s, at most {', '.join(most)}"),
        (
            "Gaps",
            f"CV {figures['gap_cv']:.2f} (Poisson: 1), longest {figures['longest_gap_s']:,.1f} s",
        ),
    ]


def _sharing(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Return lines about the hit rate of a prefix cache of unlimited size."""
    if figures["prefix_hit_rate"] is None:
        return [("Shared prefixes", "not recorded in this trace")]
    told = [("Shared prefixes", f"{figures['prefix_hit_rate']:.1%} of the prompt tokens at most")]
    if figures["hash_blocks"]:
        hits, blocks = figures["hash_block_hits"], figures["hash_blocks"]
        told.append(("  in its own blocks", f"{hits:,} of {blocks:,} ({hits / blocks:.1%})"))
    hits, blocks = figures["full_block_hits"], figures["full_blocks"]
    share = f" ({hits / blocks:.1%})" if blocks else ""
    told.append(
        (f"  of {figures['block_size']} tokens", f"{hits:,} of {blocks:,} full blocks{share}")
    )
    return told
