"""Directory of reports with an index page. Files that all pages use are stored once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from simkv.core.atomic_files import check_folder, make_folder, write_text
from simkv.core.version import __version__
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.report import narrative
from simkv.report.html_page import (
    LIBRARY,
    SCRIPT,
    STYLE,
    environment,
    write_html,
    write_shared,
)
from simkv.report.lanes_plot import BARS, rasterize_lanes, sample_lanes
from simkv.report.page_text import badge
from simkv.report.plot_style import find_end_time, sort_requests_by_arrival
from simkv.report.report_runs import PlannedRun, remedies
from simkv.scenario.packaged_scenarios import PackagedIncident
from simkv.sim.run_record import RunRecord

INDEX = "index.html"
#: Number of lanes and of bins of a thumbnail.
THUMBNAIL_LANES, THUMBNAIL_BINS = 24, 150


def check_gallery(folder: Path) -> None:
    """Raise InputError if ``folder`` contains files but no earlier gallery."""
    check_folder("--gallery", folder, "gallery", lambda there: (there / SCRIPT).is_file())


def write_gallery(
    folder: Path,
    incidents: Iterable[PackagedIncident],
    began: Callable[[str], None] = lambda _: None,
    *,
    whatif: bool = True,
    library_url: str = LIBRARY,
) -> list[Path]:
    """Write a report of each incident and an index to ``folder``, and return the paths.

    Pages of an earlier gallery are removed. ``began`` is called with the name of each incident
    before its runs. With ``whatif``, each report lists single changes that help. The plotting
    library is written to ``folder`` unless ``library_url`` refers to another location.
    """
    check_gallery(folder)
    make_folder(folder)
    written = write_shared(folder, library_url)
    cards = []
    for incident in incidents:
        began(incident.name)
        results = {
            name: run_scenario(scenario, incident.path.parent)
            for name, scenario in incident.variants.items()
        }
        pair = narrative.select_pair(results)
        lead = PlannedRun(incident.variants[pair[0]], incident.path.parent)
        changes = remedies(lead) if whatif else []
        path = folder / f"{incident.name}.html"
        write_html(path, results, changes, shared=True, library_url=library_url)
        written.append(path)
        cards.append(_card(incident, {name: results[name] for name in pair}))
    index = folder / INDEX
    write_text(index, _index(cards))
    written.append(index)
    for old in set(folder.glob("*.html")) - set(written):
        old.unlink()
    return written


def _index(cards: list[dict[str, Any]]) -> str:
    page = environment().get_template("gallery.html.j2")
    drawn = "".join(variant["lanes"] for card in cards for variant in card["variants"])
    legend = [(kind, label) for kind, (label, _) in BARS.items() if f"--kind-{kind})" in drawn]
    return page.render(cards=cards, legend=legend, style=STYLE, version=__version__)


def _card(incident: PackagedIncident, results: Mapping[str, RunResult]) -> dict[str, Any]:
    """Return the index entry of an incident, with a small plot for each variant."""
    end = find_end_time(result.record for result in results.values()) or 1.0
    return {
        "name": incident.name,
        "engine": incident.engine,
        "what": incident.what,
        "report": incident.report,
        "variants": [
            {
                "name": name,
                "served": narrative.format_outcome_counts(result.record),
                "lost": narrative.describe_main_victim(result.diagnosis),
                "lanes": Markup(thumbnail(result.record, end)),
                **badge(result),
            }
            for name, result in results.items()
        ],
    }


def thumbnail(record: RunRecord, end: float) -> str:
    """Return a small SVG plot of the requests up to ``end`` (s)."""
    shown = sample_lanes(sort_requests_by_arrival(record), THUMBNAIL_LANES)
    if not shown:
        return ""
    kinds = list(BARS)
    parts = [
        f'<svg viewBox="0 0 {THUMBNAIL_BINS} {2 * len(shown)}" preserveAspectRatio="none" '
        f'aria-hidden="true">'
    ]
    for lane, row in enumerate(
        rasterize_lanes(record, shown, np.linspace(0.0, end, THUMBNAIL_BINS + 1))
    ):
        starts = np.flatnonzero(np.diff(row, prepend=-2))
        for start, stop in zip(starts, [*starts[1:], THUMBNAIL_BINS], strict=True):
            if row[start] >= 0:
                parts.append(
                    f'<path stroke="var(--kind-{kinds[row[start]]})" '
                    f'd="M{start} {2 * lane + 1}h{stop - start}"/>'
                )
    return "".join([*parts, "</svg>"])
