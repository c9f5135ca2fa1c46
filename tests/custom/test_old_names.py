"""Tests of ``simkv.own``, the old name of ``simkv.custom``: same classes and results."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from simkv import custom
from simkv.conformance.policy_export import export_policy
from simkv.scenario.custom.old_names import OLD_NAMES
from tests.conftest import ROOT
from tests.custom.sample_scheduler import RULE

SCHEDULER = """
from dataclasses import dataclass
from simkv.custom import Batch, CustomConfig, CustomScheduler


@dataclass(frozen=True)
class Knobs(CustomConfig):
    most: int = 2


class Mine(CustomScheduler):
    config: Knobs

    def decide(self, batch: Batch) -> None:
        for r in [*self.running, *self.waiting[: self.config.most]]:
            if self.fits(r, r.left):
                self.compute(batch, r, r.left)
"""
SCENARIO = """
name: mine
workload: {burst: {num_prompts: 6, prompt_tokens: 40, output_tokens: 5}}
engine: {name: mine, file: mine.py, num_blocks: 60}
profile: unit-step
"""


def old_spelling(text: str) -> str:
    """Return the text of a file with the names used before ``simkv.custom`` existed."""
    text = text.replace("simkv.custom", "simkv.own")
    for old, new in OLD_NAMES.items():
        text = re.sub(rf"\b{new}\b", old, text)
    return text


def simkv(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simkv", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
    )


def test_old_names_are_aliases() -> None:
    sys.modules.pop("simkv.own", None)
    with pytest.warns(FutureWarning, match=r"use simkv\.custom"):
        own = import_module("simkv.own")
    for old, new in OLD_NAMES.items():
        assert getattr(own, old) is getattr(custom, new)
    unchanged = {name for name in custom.__all__ if name not in OLD_NAMES.values()}
    assert all(getattr(own, name) is getattr(custom, name) for name in unchanged)


@pytest.mark.parametrize(
    "command",
    [
        ("run", "s.yaml", "--no-plots", "--trust", "--full"),
        ("sweep", "s.yaml", "--over", "engine.most=1,2,3", "--jobs", "2", "--trust"),
        ("check-scheduler", "mine.py", "--examples", "3"),
    ],
    ids=lambda words: words[0],
)
def test_scheduler_with_old_names_gives_same_results(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    ran = []
    for name, text in (("new", SCHEDULER), ("old", old_spelling(SCHEDULER))):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(text)
        (folder / "s.yaml").write_text(SCENARIO)
        ran.append(simkv(*command, folder=folder))
    new, old = ran
    assert (new.returncode, new.stderr) == (0, "")
    assert (old.returncode, old.stdout) == (new.returncode, new.stdout)
    (notice,) = old.stderr.splitlines()
    assert notice.startswith("simkv.own:1: FutureWarning: use simkv.custom")
    for file in (tmp_path / "new").rglob("requests.csv"):
        other = tmp_path / "old" / file.relative_to(tmp_path / "new")
        assert other.read_bytes() == file.read_bytes()


@pytest.mark.filterwarnings("ignore:use simkv.custom:FutureWarning")
def test_exports_policy_with_old_names(tmp_path: Path) -> None:
    file = tmp_path / RULE.name
    file.write_text(old_spelling(RULE.read_text()))
    text = export_policy(file, {}, "x")
    for old in ("RuleView", "VllmKnobs", "VllmRule"):
        assert f"\n{old} = {OLD_NAMES[old]}\n" in text
    plain = export_policy(RULE, {}, "x")
    assert " = Custom" not in plain
    assert text.count("class ") == plain.count("class ")
