"""Colours of a report's page, for a light and a dark screen, by the name of their CSS variable.

The hues are those of the pictures, of M. Okabe and K. Ito and of P. Tol, which the colour-blind can
tell apart. Greys and inks change with the background.
"""

from __future__ import annotations

from simkv.report.lanes import BARS
from simkv.report.style import BLUE, BROWN, GREY, PURPLE, RED, SKY, YELLOW
from simkv.why.ledger import Kind

GREEN, ORANGE, OLIVE, ROSE, WINE = "#009E73", "#E69F00", "#999933", "#CC6677", "#882255"
INDIGO, MOSS, MAUVE, SAND, TEAL = "#6F63BB", "#117733", "#AA4499", "#C2B280", "#44AA99"
STEEL, UMBER, SLATE = "#5B7FA6", "#8A5A3C", "#4A5D73"

LIGHT: dict[str, str] = {
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
    f"kind-{Kind.UNSEEN}": "#EDEDED",
    f"kind-{Kind.BLOCKS}": ROSE,
    f"kind-{Kind.RESERVED}": MAUVE,
    f"kind-{Kind.SLOT}": WINE,
    f"kind-{Kind.ADAPTER}": TEAL,
    f"kind-{Kind.KV}": STEEL,
    f"kind-{Kind.DISK}": UMBER,
    f"kind-{Kind.REMOTE}": SLATE,
    f"kind-{Kind.BUDGET}": OLIVE,
    f"kind-{Kind.RULE}": MOSS,
    f"kind-{Kind.BEHIND}": GREY,
    f"kind-{Kind.QUEUED}": SAND,
    f"kind-{Kind.DEFERRED}": INDIGO,
    f"kind-{Kind.RECOMPUTE}": ORANGE,
    f"kind-{Kind.HELD_UP}": GREEN,
    f"kind-{Kind.IN_FLIGHT}": "#B4C0CF",
    f"kind-{Kind.STALLED}": PURPLE,
    **{
        f"owner-{index}": colour
        for index, colour in enumerate(
            (SKY, ORANGE, GREEN, YELLOW, BLUE, RED, "#CC79A7", OLIVE), start=1
        )
    },
}
DARK: dict[str, str] = LIGHT | {
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
    f"kind-{Kind.UNSEEN}": "#30363D",
    f"kind-{Kind.BEHIND}": "#565E68",
    f"kind-{Kind.SLOT}": "#B5487F",
    f"kind-{Kind.RULE}": "#3FA060",
    f"kind-{Kind.DEFERRED}": "#9186DC",
    f"kind-{Kind.IN_FLIGHT}": "#76828F",
    f"kind-{Kind.STALLED}": "#C75C97",
}


def style_sheet() -> str:
    """The variables for both themes; paper is always light."""
    light, dark = (
        "\n".join(f"  --{name}: {colour};" for name, colour in theme.items())
        for theme in (LIGHT, DARK)
    )
    return (
        f":root {{\n{light}\n}}\n"
        f"@media (prefers-color-scheme: dark) {{\n:root:not(.print) {{\n{dark}\n}}\n}}\n"
        f"@media print {{\n:root, :root:not(.print) {{\n{light}\n}}\n}}\n"
    )
