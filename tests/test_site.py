"""Tests that the site is built from the pages and the code, and loads nothing from other
servers.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.conftest import ROOT
from tests.report.browser import Browser, chromium

ZENSICAL = Path(sys.executable).parent / "zensical"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as ``make site`` does."""
    if not ZENSICAL.exists():
        pytest.skip("zensical is not installed")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    for command in (
        [sys.executable, ROOT / "tools" / "docs_reference.py", "docs/reference"],
        [ZENSICAL, "build", "--clean", "--strict"],
    ):
        ran = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / "build" / "site"


def pages(site: Path) -> dict[str, str]:
    return {str(page.relative_to(site)): page.read_text() for page in site.rglob("*.html")}


def test_every_page_is_in_menu(site: Path) -> None:
    menu = pages(site)["index.html"]
    made = {name for name in pages(site) if name != "404.html"}
    assert len(made) > 20
    assert {name for name in made if f'href="./{name}"' not in menu} <= {"index.html"}


def test_links_resolve(site: Path) -> None:
    lost = [
        f"{name}: {target}"
        for name, text in pages(site).items()
        if name != "404.html"
        for target in re.findall(r'(?:href|src)="([^"]+)"', text)
        if not leads_somewhere(site, name, unquote(unescape(target)))
    ]
    assert lost == []


def leads_somewhere(site: Path, page: str, target: str) -> bool:
    if re.match(r"[a-z]+:", target):
        return True
    file, _, anchor = target.partition("#")
    there = site / page if not file else site / Path(page).parent / file
    if not there.resolve().is_file():
        return file in (".", "./")
    return not anchor or there.suffix != ".html" or f'id="{anchor}"' in there.read_text()


def test_site_needs_no_network(site: Path) -> None:
    for name, text in pages(site).items():
        loaded = re.findall(r'<(?:script|img|iframe|source)[^>]*\ssrc="?([^">\s]+)', text)
        loaded += re.findall(r'<link[^>]*rel="?(?:stylesheet|preconnect|icon)[^>]*>', text)
        assert [one for one in loaded if "//" in one.replace("://www.w3.org", "")] == [], name
        assert not re.search(r'class="(?:mermaid|glightbox)\b', text), (
            name
        )  # their scripts would be loaded
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//", sheet.read_text()), sheet


def test_reference_covers_commands_and_settings(site: Path) -> None:
    text = pages(site)
    from simkv.schedulers.engine_registry import ENGINES

    for name in ("run", "plan", "trace convert", "profile build vidur", "gpu run"):
        assert f">simkv {name}<" in text["reference/commands.html"], name
    assert "--smallest" in text["reference/commands.html"]
    for spec in ENGINES.values():
        for knob in spec.config.__dataclass_fields__.keys() - {"name"}:
            assert f"<code>{knob}</code>" in text["reference/knobs.html"], knob


def test_signatures_of_the_reference_are_valid_python(site: Path) -> None:
    text = (site.parents[1] / "docs" / "reference" / "python.md").read_text()
    calls = re.findall(r"```python\nsimkv\.(\w+)(\(.*?\))\n```", text, re.DOTALL)
    assert len(calls) > 5
    for name, parameters in calls:
        compile(f"def {name}{parameters}: ...", name, "exec")


BROKEN_WORDS = """(() => {
  const broken = [];
  for (const cell of document.querySelectorAll('td, th')) {
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node; (node = walker.nextNode()); ) {
      for (const word of node.data.matchAll(/[^\\s\\-/]+/g)) {
        const range = document.createRange();
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
        if (lines.size > 1) broken.push(word[0]);
      }
    }
  }
  return broken;
})()"""


def test_tables_do_not_break_words(site: Path, tmp_path: Path) -> None:
    """The tables are checked at the width of a desktop; a break after a hyphen or slash is
    permitted.
    """
    if chromium() is None:
        pytest.skip("Chromium is not installed")
    with Browser(tmp_path) as browser:
        for name in ("accuracy", "reference/commands", "reference/figures", "reference/knobs"):
            page = browser.open(site / f"{name}.html")
            assert page.run("document.querySelectorAll('td').length") > 10
            assert page.run(BROKEN_WORDS) == [], name
