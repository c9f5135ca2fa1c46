"""Tests that the examples of the documentation run, both scenarios and Python code."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from simkv.cli import app
from simkv.cli.plan import select_options
from simkv.metrics.expectation_checks import check_expectations
from simkv.metrics.scenario_runner import run_file
from tests.conftest import ROOT
from tests.test_docs_walkthroughs import PAGES as WALKS

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "reference" not in page.parts),
    *sorted((ROOT / "scenarios").rglob("*.md")),
]
#: Pages that are generated from the code with the site; tests/test_site.py checks links to these
#: pages.
REFERENCE = ROOT / "docs" / "reference"
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
EXAMPLES = [
    pytest.param(language, text, id=f"{page.name}:{source[: match.start()].count(chr(10)) + 1}")
    for page in PAGES
    if (source := page.read_text())
    for match in FENCE.finditer(source)
    if page not in WALKS or match[1] == "sh"
    for language, text in [match.groups()]
]


def examples(language: str) -> list[object]:
    return [example for example in EXAMPLES if example.values[0] == language]


def test_readme_has_examples() -> None:
    assert examples("yaml")
    assert examples("python")


@pytest.mark.parametrize(("language", "text"), examples("yaml"))
def test_documented_scenarios_run(tmp_path: Path, language: str, text: str) -> None:
    """The scenario runs, meets its expectations and has real costs, and each of its variants
    changes the result.
    """
    if not re.search(r"^name:", text, re.MULTILINE):
        pytest.skip("a part of a scenario only")
    if re.search(r"^jobs:", text, re.MULTILINE):
        pytest.skip("a GitHub Actions workflow")
    (tmp_path / "s.yaml").write_text(text)
    results = run_file(tmp_path / "s.yaml")
    assert [str(one) for one in check_expectations(results) if not one.ok] == []
    assert "unit-step" not in text
    outcomes = [
        {name: value for name, value in result.summary.items() if name not in ("notes", "fidelity")}
        for result in results.values()
    ]
    for place, one in enumerate(outcomes):
        assert one["requests"] > 0
        assert one not in outcomes[:place], f"{list(results)[place]} changes nothing"


def commands(text: str) -> list[list[str]]:
    """Return the calls of simkv in a shell example, word by word."""
    lines = text.replace("\\\n", " ").splitlines()
    return [
        shlex.split(line.removeprefix("$ "), comments=True)
        for line in lines
        if line.removeprefix("$ ").startswith("simkv ")
    ]


@pytest.mark.parametrize(("language", "text"), examples("sh"))
def test_documented_commands_exist(language: str, text: str) -> None:
    """Options and subcommands exist. Blocks ``console`` are run in test_docs_walkthroughs.py."""
    select_options(all_of_them=True)
    for words in commands(text):
        group = get_command(app)
        names = iter(words[1:])
        while hasattr(group, "commands"):
            name = next(names)
            if name not in group.commands and "case" in group.commands:
                break
            group = group.commands[name]
        known = {option for one in group.params for option in (*one.opts, *one.secondary_opts)}
        used = {word.partition("=")[0] for word in names if word.startswith("--")}
        assert used <= known | {"--help"}, " ".join(words)


@pytest.mark.parametrize(("language", "text"), examples("python"))
def test_documented_python_runs(tmp_path: Path, language: str, text: str) -> None:
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    ran = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_links_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
        there = (page.parent / target).resolve()
        if "://" not in target and there.parent != REFERENCE:
            assert there.exists(), target


MAP = ROOT / "docs" / "architecture.md"
#: Pattern of a reference: `simkv/package/file.py`, a folder, or a file and a name that it defines,
#: such as `simkv/package/file.py:Class.method`.
PLACE = re.compile(r"`((?:simkv|tests|docs)/[\w./]*)(?::([\w.]+))?`")


def defined(tree: ast.Module | ast.ClassDef) -> set[str]:
    """Return the names defined by a file or class; members of a class are named ``Class.name``."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}" for name in defined(node)}
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def lost(text: str) -> list[str]:
    """Return the files and names that a page mentions, but that do not exist."""
    found = []
    for path, name in PLACE.findall(text):
        there = ROOT / path
        known = defined(ast.parse(there.read_text())) if name and there.is_file() else set()
        if not there.exists() or (name and name not in known):
            found.append(f"{path}:{name}".rstrip(":"))
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_documented_names_exist(page: Path) -> None:
    assert lost(page.read_text()) == []


def test_architecture_names_modules() -> None:
    assert len(PLACE.findall(MAP.read_text())) > 30


def test_architecture_lists_every_package() -> None:
    rooms = {path.parent.name for path in (ROOT / "simkv").glob("*/__init__.py")}
    picture = MAP.read_text().partition("```mermaid")[2].partition("```")[0]
    assert {room for room in rooms if not re.search(rf"\b{room}\b", picture)} == set()


def test_detects_unknown_name() -> None:
    page = "`simkv/api.py:run` `simkv/api.py:walk` `simkv/attic/` `simkv/core/request.py:Prompt.id`"
    assert lost(page) == ["simkv/api.py:walk", "simkv/attic/"]


def test_packages_of_the_coverage_report_exist() -> None:
    counted = re.search(r"^COUNTED := (.+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert counted
    for name in counted[1].split():
        assert (ROOT / "simkv" / name).is_dir(), name
        assert (ROOT / "tests" / name).is_dir(), name
