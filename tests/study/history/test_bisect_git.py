"""Tests of ``simkv bisect --git`` on the history of a toy scheduler, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.scenario.custom.code_source import set_trust
from simkv.study.history import revision_run
from tests.study.history.toy_history import PLANTED, git, write_history

pytestmark = pytest.mark.usefixtures("untrusted")


@pytest.fixture
def untrusted() -> None:
    set_trust(False)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_history(tmp_path_factory.mktemp("toy"))


def bisect(scenario: Path, *words: str) -> str:
    clone, out = scenario.parent / "clone", scenario.parent / "results"
    command = ["bisect", str(scenario), "--git", str(clone), "--out", str(out), *words]
    result = CliRunner().invoke(app, command)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def only_broken(*_: object) -> Any:
    """Return a replacement for runs, because only revisions without a result are run again."""
    raise revision_run._CannotRun("SyntaxError")


def test_planted_regression_is_found_and_resumed(
    toy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone = toy.parent / "clone"
    said = bisect(toy, "r1..r40", "--trust")
    commit = git(clone, "rev-parse", f"r{PLANTED}").strip()
    assert "Change of verdict: served → starved" in said
    assert f"Commit:      {commit}" in said
    assert "Author date: 2026-01-28T12:00:00+00:00 (Toy)" in said
    assert "Subject:     Admit long requests first" in said
    assert "+        self.waiting.sort(key=lambda r: -r.length)" in said
    assert "40 commits in the range: " in said
    assert "SyntaxError" in said
    assert "/worktree/" not in said
    assert git(clone, "status", "--porcelain") == ""
    monkeypatch.setattr(revision_run.ScenarioRunner, "_summary", only_broken)
    again = bisect(toy, "r1..r40", "--trust", "--json")
    found = json.loads(again)
    assert [one["after"]["commit"] for one in found["flips"]] == [commit]
    assert found["criterion"] == "verdict"
    assert len(found["samples"]) + len(found["skipped"]) <= 10
    # Conditions and metrics use the same stored runs.
    for when in ("starved>=1", "starved", "ttft_all_ms.p99"):
        assert commit in bisect(toy, "r1..r40", "--trust", "--when", when)
    same = bisect(toy, "r1..r40", "--trust", "--when", "lost")
    assert "No change: GOOD is served; BAD is starved (1 of 8: request 1)" in same
    assert commit not in same


def test_bad_input(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="pass --trust"):
        bisect(toy, "r1..r40")
    with pytest.raises(InputError, match="missing range"):
        bisect(toy, "--trust")
    with pytest.raises(InputError, match="expected exactly one of --over, --variants, --git"):
        bisect(toy, "r1..r40", "--trust", "--variants")
    with pytest.raises(InputError, match="--when slow: unknown verdict"):
        bisect(toy, "r1..r40", "--trust", "--when", "slow")
    with pytest.raises(InputError, match="the scenario has no such variant"):
        bisect(toy, "r1..r40", "--trust", "--variant", "other")
    elsewhere = tmp_path / "clone"
    elsewhere.mkdir()
    git(elsewhere, "init", "--quiet")
    git(elsewhere, "commit", "--quiet", "--allow-empty", "-m", "first")
    with pytest.raises(InputError, match=r"engine.file: clone/toy.py is not in the clone"):
        bisect(toy, "HEAD..HEAD", "--trust", "--git", str(elsewhere))
    result = CliRunner().invoke(app, ["bisect", str(toy), "r1..r40"])
    assert isinstance(result.exception, InputError)
    assert "requires --git CLONE" in str(result.exception)


def test_run_of_one_variant(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "name: two\nworkload: {burst: {num_prompts: 2, prompt_tokens: 20, output_tokens: 5}}\n"
        "engine: {name: vllm, num_gpu_blocks: 60, max_model_len: 900}\nprofile: unit-step\n"
        "variants: {one: {}, other: {engine: {no_such_setting: 3}}}\nexpect: {one: {finished: 2}}\n"
    )
    words = ["run", str(path), "--no-plots", "--out", str(tmp_path / "out"), "--variant"]
    assert CliRunner().invoke(app, [*words, "one"]).exit_code == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert list(found["variants"]) == ["one"]
    for bad, message in (
        ("other", "no_such_setting"),
        ("third", "the scenario has no such variant"),
    ):
        assert message in str(CliRunner().invoke(app, [*words, bad]).exception)
    path.write_text(path.read_text().replace("variants: {one: {}, ", "variants: 5 # "))
    assert isinstance(CliRunner().invoke(app, [*words, "one"]).exception, InputError)
