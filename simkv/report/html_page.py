"""A run as one HTML page: words and tables from here, figures drawn by the page itself.

write_html(Path("report.html"), run_file(Path("scenario.yaml")))
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from simkv.core.atomic_files import write_text
from simkv.core.version import __version__
from simkv.metrics.run_result import RunResult
from simkv.report import narrative
from simkv.report.page_data import build_page_data
from simkv.report.page_text import build_page_text, captions
from simkv.report.page_theme import style_sheet

#: Names of what reports have in common, where they share it.
STYLE, SCRIPT, LIBRARY = "report.css", "report.js", "plotly.min.js"
#: The page's own scripts, in the order in which they build on each other.
SCRIPTS = ("model.js", "theme.js", "lanes.js", "figures.js", "main.js")
#: Figures with a time axis, which zoom together.
TIME_AXIS_FIGURES = ("lanes", "blocks", "queues")


@dataclass(frozen=True)
class PageSection:
    """A part of a page beside what all have: words, a PNG, and tables by title, head and rows."""

    title: str
    words: str
    picture: bytes
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]

    @property
    def source(self) -> str:
        """The picture as the page has it."""
        return "data:image/png;base64," + base64.b64encode(self.picture).decode()


def write_html(
    path: Path,
    results: Mapping[str, RunResult],
    whatif: Sequence[str] = (),
    *,
    shared: bool = False,
    section: PageSection | None = None,
) -> None:
    """Write the report of ``results``, variants by name, to ``path``.

    ``whatif`` are sentences on changes that help, the best first; a ``section`` follows them. What
    all reports have in common becomes part of the page, or with ``shared`` lies beside it (see
    ``write_shared``). The same results give the same bytes.
    """
    write_text(path, render_html(results, whatif, shared=shared, section=section))


def write_shared(folder: Path) -> list[Path]:
    """Write what all reports have in common to ``folder``: style, scripts, the plotting library."""
    files = {STYLE: style(), SCRIPT: script(), LIBRARY: library()}
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def render_html(
    results: Mapping[str, RunResult],
    whatif: Sequence[str] = (),
    *,
    shared: bool = False,
    section: PageSection | None = None,
) -> str:
    """The page that ``write_html`` writes."""
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
            beside={"style": STYLE, "script": SCRIPT, "library": LIBRARY} if shared else {},
            style=Markup("" if shared else style()),
            script=Markup("" if shared else script()),
            library=Markup("" if shared else packed_library()),
            data=Markup(_json(page)),
            version=__version__,
        )
    )


def _json(page: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element, whatever it says."""
    return json.dumps(page, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def environment() -> Environment:
    """Templates of this package: everything that is not marked as safe is escaped."""
    return Environment(
        loader=PackageLoader("simkv.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=False,
        keep_trailing_newline=True,
    )


def template(name: str) -> str:
    """A file of ``templates`` as it is."""
    return (Path(__file__).parent / "templates" / name).read_text(encoding="utf-8")


def style() -> str:
    """The style sheet."""
    return style_sheet() + template("style.css")


def script() -> str:
    """The page's own scripts."""
    return "\n".join(template(name) for name in SCRIPTS)


def library() -> str:
    """The plotting library: the cartesian bundle of plotly.js (MIT, see ``vendor``)."""
    return gzip.decompress(_packed()).decode().replace("</script", "<\\/script")


def packed_library() -> str:
    """The same as gzip in base64, a third of its size: pages unpack it themselves."""
    return base64.b64encode(_packed()).decode()


def _packed() -> bytes:
    return (Path(__file__).parent / "vendor" / "plotly-cartesian-4.1.1.min.js.gz").read_bytes()
