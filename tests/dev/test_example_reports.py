"""Tests of the example reports of the repository."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from dev.example_reports import EXAMPLES
from tests.conftest import ROOT

REPORTS = ROOT / "reports"


def test_reports_contain_an_index_and_the_examples() -> None:
    pages = {path.name for path in REPORTS.glob("*.html")}
    assert pages == {"index.html", *(f"{name}.html" for name in EXAMPLES)}
    index = (REPORTS / "index.html").read_text(encoding="utf-8")
    assert {*re.findall(r'href="([\w-]+\.html)"', index)} == pages - {"index.html"}


@pytest.mark.parametrize("name", ["index", *EXAMPLES])
def test_everything_that_a_page_loads_exists(name: str) -> None:
    page = (REPORTS / f"{name}.html").read_text(encoding="utf-8")
    loaded = re.findall(r'<(?:script|link)[^>]* (?:src|href)="([^"]+)"', page)
    assert len(loaded) == (1 if name == "index" else 3)
    for target in loaded:
        assert (REPORTS / target).is_file(), target


def test_the_plotting_library_is_in_the_repository_once() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    # A git hook sets variables in the environment that would select another repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "ls-files", "*plotly*.js*"]
    listed = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert listed.stdout.split() == ["simkv/report/vendor/plotly-cartesian-4.1.1.min.js"]
