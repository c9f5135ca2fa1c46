"""HTML report of a run: text and tables are rendered here, figures by the page's scripts.

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
from simkv.metrics.run_result import RunResult
from simkv.report import narrative
from simkv.report.page_data import build_page_data
from simkv.report.page_text import build_page_text, captions
from simkv.report.page_theme import style_sheet

#: File names of the parts that reports may share.
STYLE, SCRIPT, LIBRARY = "report.css", "report.js", "plotly.min.js"
LIBRARY_FILE = Path(__file__).parent / "vendor" / "plotly-cartesian-4.1.1.min.js"
#: Scripts of the page, in the order of their dependencies.
SCRIPTS = ("model.js", "theme.js", "lanes.js", "figures.js", "main.js")
#: Figures with a time axis, which zoom together.
TIME_AXIS_FIGURES = ("lanes", "blocks", "queues")


@dataclass(frozen=True)
class PageSection:
    """Additional section of a page: text, a PNG, and tables as (title, headings, rows)."""

    title: str
    words: str
    picture: bytes
    tables: Sequence[tuple[str, Sequence[str], Sequence[Sequence[str]]]]

    @property
    def source(self) -> str:
        """Picture as a data URL."""
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
    """Write the report of ``results``, variants by name, to ``path``.

    ``whatif`` contains sentences about changes that help, best first; ``section`` is placed after
    them. Parts common to all reports are embedded, or with ``shared`` expected beside the page (see
    ``write_shared``) and at ``library_url``. The same results give the same bytes.
    """
    text = render_html(results, whatif, shared=shared, library_url=library_url, section=section)
    write_text(path, text)


def write_shared(folder: Path, library_url: str = LIBRARY) -> list[Path]:
    """Write the parts common to all reports to ``folder``: style, scripts and plotting library.

    Without the library, if it is elsewhere.
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
    """Return the template environment; text that is not marked as safe is escaped."""
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
    """Return the plotting library: the cartesian bundle of plotly.js (MIT, see ``vendor``)."""
    return LIBRARY_FILE.read_text(encoding="utf-8").replace("</script", "<\\/script")


@cache
def packed_library() -> str:
    """Return the library as gzip in base64, half of its size; pages decompress it."""
    return base64.b64encode(gzip.compress(LIBRARY_FILE.read_bytes(), mtime=0)).decode()
