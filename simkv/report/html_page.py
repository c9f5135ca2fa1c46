"""HTML report of a run: text and tables from this module, plots from the scripts of the page.

write_html(Path("report.html"), {"run": run_scenario(scenario, folder)})
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from simkv.core.atomic_files import write_text
from simkv.core.version import __version__
from simkv.explain.ledger_kinds import LedgerKind
from simkv.metrics.run_result import RunResult
from simkv.report import narrative
from simkv.report.lanes_plot import BARS
from simkv.report.page_data import build_page_data
from simkv.report.page_text import build_page_text, captions
from simkv.report.plot_style import (
    BLUE,
    BROWN,
    GREY,
    PURPLE,
    RED,
    SKY,
    YELLOW,
)

#: File names of the parts that several reports can share.
STYLE, SCRIPT, LIBRARY = "report.css", "report.js", "plotly.min.js"
LIBRARY_FILE = Path(__file__).parent / "vendor" / "plotly-cartesian-4.1.1.min.js"
#: Scripts of the page, in the order of their dependencies.
SCRIPTS = ("model.js", "theme.js", "lanes.js", "figures.js", "inspector.js", "main.js")
#: Plots with a time axis, which are zoomed together.
TIME_AXIS_FIGURES = ("lanes", "sessions", "blocks", "queues")


@dataclass(frozen=True)
class PageSection:
    """Additional section of a page: text, a PNG, and tables as (title, headings, rows)."""

    title: str
    words: str
    picture: bytes
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]

    @property
    def source(self) -> str:
        """The picture as a data URL."""
        return "data:image/png;base64," + base64.b64encode(self.picture).decode()


def write_html(
    path: Path,
    results: Mapping[str, RunResult],
    whatif: Sequence[str] = (),
    *,
    shared: bool = False,
    library_url: str = LIBRARY,
    section: PageSection | None = None,
) -> None:
    """Write a report of ``results``, the results of variants by name, to ``path``.

    ``whatif`` contains sentences about changes that help, the best first. ``section`` is an
    additional section. With ``shared``, the page loads the style sheet and the scripts from its own
    directory (see ``write_shared``), and the plotting library from ``library_url``. By default, the
    page contains them. Equal results give equal bytes.
    """
    text = render_html(results, whatif, shared=shared, library_url=library_url, section=section)
    write_text(path, text)


def write_shared(folder: Path, library_url: str = LIBRARY) -> list[Path]:
    """Write the files that all reports share to ``folder``, and return their paths.

    The files are the style sheet, the scripts and the plotting library. The library is omitted if
    ``library_url`` refers to another location.
    """
    files = {STYLE: style(), SCRIPT: script()}
    if library_url == LIBRARY:
        files[LIBRARY] = library()
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def render_html(
    results: Mapping[str, RunResult],
    whatif: Sequence[str] = (),
    *,
    shared: bool = False,
    library_url: str = LIBRARY,
    section: PageSection | None = None,
) -> str:
    """Return the text of the page that ``write_html`` writes."""
    pair = narrative.select_pair(results)
    page = build_page_data(results, pair)
    return (
        environment()
        .get_template("page.html.j2")
        .render(
            **build_page_text(results, pair),
            whatif=whatif,
            section=section,
            pair=page["pair"],
            timed=TIME_AXIS_FIGURES,
            captions=captions(results, page),
            beside={"style": STYLE, "script": SCRIPT, "library": library_url} if shared else {},
            style=Markup("" if shared else style()),
            script=Markup("" if shared else script()),
            library=Markup("" if shared else packed_library()),
            data=Markup(_json(page)),
            version=__version__,
        )
    )


def _json(page: Mapping[str, Any]) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(page, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def environment() -> Environment:
    """Return the template environment, which escapes text that is not marked as safe."""
    return Environment(
        loader=PackageLoader("simkv.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )


def template(name: str) -> str:
    """Return the contents of a file in ``templates``."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def style() -> str:
    """Return the style sheet."""
    return style_sheet() + template("style.css")


def script() -> str:
    """Return the page's own scripts."""
    return "\n".join(template(name) for name in SCRIPTS)


def library() -> str:
    """Return the plotting library, the cartesian bundle of plotly.js (MIT, see ``vendor``)."""
    return LIBRARY_FILE.read_text(encoding="utf-8").replace("</script", "<\\/script")


@cache
def packed_library() -> str:
    """Return the plotting library, compressed with gzip and encoded in base64."""
    return base64.b64encode(gzip.compress(LIBRARY_FILE.read_bytes(), mtime=0)).decode()


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
    "kind-tools": "#B7D7A8",
    "kind-think": "#E3E8C5",
    f"kind-{LedgerKind.FRONT_END}": "#D8C8E8",
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
    f"kind-{LedgerKind.EVICTED}": "#E5A93B",
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
    "kind-tools": "#3F6B45",
    "kind-think": "#4A5236",
    f"kind-{LedgerKind.FRONT_END}": "#4B3B63",
    f"kind-{LedgerKind.UNSEEN}": "#30363D",
    f"kind-{LedgerKind.BEHIND}": "#565E68",
    f"kind-{LedgerKind.SLOT}": "#B5487F",
    f"kind-{LedgerKind.RULE}": "#3FA060",
    f"kind-{LedgerKind.DEFERRED}": "#9186DC",
    f"kind-{LedgerKind.IN_FLIGHT}": "#76828F",
    f"kind-{LedgerKind.STALLED}": "#C75C97",
}


def style_sheet() -> str:
    """Return the CSS variables of the light and the dark theme. Printed pages use the light
    theme.
    """
    light, dark = (
        "\n".join(f"  --{name}: {colour};" for name, colour in theme.items())
        for theme in (LIGHT_THEME, DARK_THEME)
    )
    return (
        f":root {{\n{light}\n}}\n"
        f"@media (prefers-color-scheme: dark) {{\n:root:not(.print) {{\n{dark}\n}}\n}}\n"
        f"@media print {{\n:root, :root:not(.print) {{\n{light}\n}}\n}}\n"
    )
