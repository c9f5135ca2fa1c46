"""The examples of the documentation run: scenarios as scenarios, Python as Python."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from simkv.measure.simulate import run_file
from tests.conftest import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "scenarios").rglob("*.md")),
]
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(language, text, id=f"{page.name}:{source[: match.start()].count(chr(10)) + 1}")
    for page in PAGES
    if (source := page.read_text())
    for match in FENCE.finditer(source)
    for language, text in [match.groups()]
]


def examples(language: str) -> list[object]:
    return [example for example in EXAMPLES if example.values[0] == language]


def test_the_readme_has_examples() -> None:
    assert examples("yaml")
    assert examples("python")


@pytest.mark.parametrize(("language", "text"), examples("yaml"))
def test_a_scenario_of_the_documentation_runs(tmp_path: Path, language: str, text: str) -> None:
    if not re.search(r"^name:", text, re.MULTILINE):
        pytest.skip("a part of a scenario only")
    (tmp_path / "s.yaml").write_text(text)
    for result in run_file(tmp_path / "s.yaml").values():
        assert result.summary["requests"] > 0


@pytest.mark.parametrize(("language", "text"), examples("python"))
def test_python_of_the_documentation_runs(tmp_path: Path, language: str, text: str) -> None:
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    ran = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_pictures_of_the_documentation_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
