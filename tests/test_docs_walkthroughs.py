"""Tests that run the tutorial and every how-to page as a reader would, and compare the output."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs_walkthrough import (
    ROOT,
    Step,
    updated,
    walk,
)

DOCS = ROOT / "docs"
NOT_RUN = {
    "follow-a-new-release.md": "its commands download a release",
    "run-your-scheduler.md": "its commands need the source of an engine",
    "test-a-pull-request.md": "its commands need the source of an engine",
}
PAGES = [
    *(DOCS / name for name in ("tutorial.md", "diagnose.md", "explain.md", "hardware.md")),
    *(page for page in sorted((DOCS / "how-to").glob("*.md")) if page.name not in NOT_RUN),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_output_is_current(tmp_path: Path, page: Path) -> None:
    if "$ simkv gpu run" in page.read_text():
        pytest.importorskip("torch", reason="the commands of the page need the extra gpu")
    steps = list(walk(page.read_text(), tmp_path))
    assert steps
    for step in steps:
        assert step.agrees, f"$ {step.command}\n" + "\n".join(step.got)
        assert any(line.strip(". ") for line in step.expected), f"{step.command} shows nothing"


def test_every_how_to_is_in_site() -> None:
    named = (ROOT / "mkdocs.yml").read_text()
    pages = (DOCS / "how-to").glob("*.md")
    assert [page.name for page in pages if f"{page.name}\n" not in named] == []


PAGE = """
```text title="log"
a
b
c
```

```console
$ cat log
a
...
$ false
$ echo $?
1
$ echo one \\
>   two
one two
```
"""


@pytest.mark.parametrize("name", NOT_RUN)
def test_page_without_walkthrough_shows_no_output(tmp_path: Path, name: str) -> None:
    assert not list(walk((DOCS / "how-to" / name).read_text(), tmp_path))


def test_walkthrough_runs_files_and_commands(
    tmp_path: Path,
) -> None:
    assert [step.agrees for step in walk(PAGE, tmp_path)] == [True] * 4


@pytest.mark.parametrize(
    ("shown", "came", "agrees"),
    [
        (["a", "..."], ["a"], True),
        (["a", "..."], ["b", "a"], False),
        (["a"], ["a", "b"], False),
        (["...", "b"], ["a", "b"], True),
        (["1.5"], ["125"], False),
        ([], ["a"], False),
    ],
)
def test_only_elided_output_may_differ(shown: list[str], came: list[str], agrees: bool) -> None:
    assert Step("", shown, came).agrees is agrees


def test_update_preserves_elisions(tmp_path: Path) -> None:
    stale = PAGE.replace("$ cat log\na\n", "$ cat log\na, once\n").replace("one two", "three")
    assert updated(stale.replace("a, once", "a"), tmp_path) == PAGE
