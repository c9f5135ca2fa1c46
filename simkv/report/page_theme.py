"""Colors of a report page for light and dark screens, by name of their CSS variable.

The hues are the same as in the plots, from the color-blind safe palettes of M. Okabe and K. Ito and
of P. Tol. Greys and text colors depend on the background.
"""

from __future__ import annotations

from simkv.explain.wait_ledger import LedgerKind
from simkv.report.lanes_plot import BARS
from simkv.report.plot_style import (
    BLUE,
    BROWN,
    GREY,
    PURPLE,
    RED,
    SKY,
    YELLOW,
)

GREEN, ORANGE, OLIVE, ROSE, WINE = "#009E73", "#E69F00", "#999933", "#CC6677", "#882255"
INDIGO, MOSS, MAUVE, SAND, TEAL = "#6F63BB", "#117733", "#AA4499", "#C2B280", "#44AA99"
STEEL, UMBER, SLATE = "#5B7FA6", "#8A5A3C", "#4A5D73"

LIGHT_THEME: dict[str, str] = {
    "paper": "#FFFFFF",
    "card": "#F6F7F9",
    "ink": "#1B1F24",
    "muted": "#57606A",
    "line": "#C9CFD6",
    "grid": "#E9ECEF",
    "link": "#005A8C",
    "good": "#00664A",
    "bad": "#A84300",
    "warn": "#7A5900",
    "blue": BLUE,
    "sky": SKY,
    "red": RED,
    "purple": PURPLE,
    "brown": BROWN,
    "green": GREEN,
    "orange": ORANGE,
    **{f"kind-{kind}": colour for kind, (_, colour) in BARS.items()},
    f"kind-{LedgerKind.UNSEEN}": "#EDEDED",
    f"kind-{LedgerKind.BLOCKS}": ROSE,
    f"kind-{LedgerKind.RESERVED}": MAUVE,
    f"kind-{LedgerKind.SLOT}": WINE,
    f"kind-{LedgerKind.ADAPTER}": TEAL,
    f"kind-{LedgerKind.KV}": STEEL,
    f"kind-{LedgerKind.DISK}": UMBER,
    f"kind-{LedgerKind.REMOTE}": SLATE,
    f"kind-{LedgerKind.BUDGET}": OLIVE,
    f"kind-{LedgerKind.RULE}": MOSS,
    f"kind-{LedgerKind.BEHIND}": GREY,
    f"kind-{LedgerKind.QUEUED}": SAND,
    f"kind-{LedgerKind.DEFERRED}": INDIGO,
    f"kind-{LedgerKind.RECOMPUTE}": ORANGE,
    f"kind-{LedgerKind.HELD_UP}": GREEN,
    f"kind-{LedgerKind.IN_FLIGHT}": "#B4C0CF",
    f"kind-{LedgerKind.STALLED}": PURPLE,
    **{
        f"owner-{index}": colour
        for index, colour in enumerate(
            (SKY, ORANGE, GREEN, YELLOW, BLUE, RED, "#CC79A7", OLIVE), start=1
        )
    },
}
DARK_THEME: dict[str, str] = LIGHT_THEME | {
    "paper": "#14171B",
    "card": "#1D2227",
    "ink": "#E8EBEE",
    "muted": "#A2ABB5",
    "line": "#454D56",
    "grid": "#2A3036",
    "link": "#7CC4F2",
    "good": "#4FD1A5",
    "bad": "#FF9A57",
    "warn": "#E8C547",
    "blue": "#3D9BD9",
    "purple": "#D06AA0",
    "brown": "#C9833A",
    "kind-waiting": "#565E68",
    "kind-prefill": "#1C82BF",
    "kind-gone": "#23282E",
    "kind-failed": "#C75C97",
    "kind-timed_out": "#C9833A",
    f"kind-{LedgerKind.UNSEEN}": "#30363D",
    f"kind-{LedgerKind.BEHIND}": "#565E68",
    f"kind-{LedgerKind.SLOT}": "#B5487F",
    f"kind-{LedgerKind.RULE}": "#3FA060",
    f"kind-{LedgerKind.DEFERRED}": "#9186DC",
    f"kind-{LedgerKind.IN_FLIGHT}": "#76828F",
    f"kind-{LedgerKind.STALLED}": "#C75C97",
}


def style_sheet() -> str:
    """Return the variables for both themes; printed pages are always light."""
    light, dark = (
        "\n".join(f"  --{name}: {colour};" for name, colour in theme.items())
        for theme in (LIGHT_THEME, DARK_THEME)
    )
    return (
        f":root {{\n{light}\n}}\n"
        f"@media (prefers-color-scheme: dark) {{\n:root:not(.print) {{\n{dark}\n}}\n}}\n"
        f"@media print {{\n:root, :root:not(.print) {{\n{light}\n}}\n}}\n"
    )
