"""Tests that the generated pages of the documentation are current."""

from __future__ import annotations

import re

from dev.accuracy_page import read_results, render
from dev.gallery_page import PICTURES
from simkv.conformance.recording_counts import packaged_counts
from simkv.scenario.packaged_scenarios import find_incidents
from tests.conftest import ROOT

DOCS = ROOT / "docs"


def test_accuracy_page_is_current() -> None:
    """`make accuracy` changes nothing."""
    assert render(packaged_counts(), read_results()) == (DOCS / "accuracy.md").read_text()


def test_accuracy_agrees_with_page_of_points() -> None:
    """The errors with configurations and with pairs left out agree with docs/silicon.md."""
    chosen = re.search(r"\(chosen\) \| \d+ \|(.*)\|", (DOCS / "silicon.md").read_text())
    assert chosen
    ttft, tpot, pair_ttft, pair_tpot = (float(one) for one in chosen[1].split("|"))
    left_out = [one for one in read_results() if "excluded" in one["judge"]]
    assert [(one["ttft"], one["tpot"]) for one in left_out] == [
        (ttft, tpot),
        (pair_ttft, pair_tpot),
    ]


def test_gallery_has_every_incident() -> None:
    page = (DOCS / "gallery.md").read_text()
    names = [incident.name for incident in find_incidents()]
    assert re.findall(r"^### (.*)$", page, re.MULTILINE) == names
    pictures = {file.stem for file in (DOCS / PICTURES).glob("*.png")}
    assert pictures == set(names)
    for incident in find_incidents():
        assert incident.what in page
        assert incident.report in page
