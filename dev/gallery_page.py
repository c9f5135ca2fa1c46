"""Generate docs/gallery.md: ``python -m dev.gallery_page docs``.

The page has one picture per packaged incident: the lanes of its requests, before and after a fix.
"""

from __future__ import annotations

from pathlib import Path

import typer

from simkv.core.atomic_files import make_folder, write_text
from simkv.metrics.scenario_runner import run_scenario
from simkv.report import narrative
from simkv.report.lanes_plot import draw_lanes
from simkv.report.plot_style import plot_settings
from simkv.scenario.packaged_scenarios import PackagedIncident, find_incidents

PAGE = "gallery.md"
PICTURES = "pictures/incidents"
#: Resolution of a picture, which is 900 pixels wide.
DPI = 90
ENGINES = {
    "fastdeploy": "FastDeploy",
    "mistralrs": "mistral.rs",
    "sglang": "SGLang",
    "trtllm": "TensorRT-LLM",
    "vllm": "vLLM",
}
HEAD = """\
# Gallery of incidents

Each picture shows one packaged incident. A lane is one request: grey is waiting, dark blue is
prefill, light blue is decode, yellow is time after a preemption, and orange is waiting until the
client gave up. The upper half is the incident. The lower half is another variant of the same
scenario: one that serves more requests or serves them faster, if there is one. To run an incident,
use `simkv run NAME`. To find its cause, use `simkv explain NAME`.

`make gallery` generates this page from the packaged scenarios.
"""


def write_incident(incident: PackagedIncident, folder: Path) -> str:
    """Draw the picture of an incident into a folder below ``folder``, and return the incident's
    section of the page.
    """
    results = {
        name: run_scenario(incident.variants[name], incident.path.parent)
        for name in incident.variants
    }
    pair = narrative.select_pair(results)
    picture = f"{PICTURES}/{incident.name}.png"
    with plot_settings():
        figure = draw_lanes({name: results[name].record for name in pair}, incident.name)
        figure.savefig(folder / picture, dpi=DPI, metadata={"Software": None})
    counts = [
        f"`{one}`: {narrative.format_outcome_counts(results[one].record)} "
        f"within {results[one].record.end:,.1f} s"
        for one in pair
    ]
    return "\n".join(
        [
            f"### {incident.name}",
            "",
            f"{incident.what} ([report]({incident.report})).",
            "",
            f"![Lanes of the requests of {incident.name}]({picture})",
            "",
            f"{'; '.join(counts)}.",
            "",
        ]
    )


def write_page(folder: Path) -> Path:
    """Write the page and its pictures to the folder of the documentation."""
    make_folder(folder / PICTURES)
    parts = [HEAD]
    engine = ""
    for incident in find_incidents():
        if incident.engine != engine:
            engine = incident.engine
            parts.append(f"## {ENGINES[engine]}\n")
        parts.append(write_incident(incident, folder))
    write_text(folder / PAGE, "\n".join(parts))
    return folder / PAGE


if __name__ == "__main__":
    typer.run(write_page)
