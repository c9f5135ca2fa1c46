"""Tests of the command ``simkv evolve``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.scenario.custom.code_source import set_trust
from tests.study.evolve.small_scenarios import write


def invoke(*words: object) -> Any:
    set_trust(False)
    return CliRunner().invoke(app, ["evolve", *map(str, words)])


def test_prints_and_writes_winner(tmp_path: Path) -> None:
    pytest.importorskip("deap")
    quick = ["--budget", 4, "--train", 1, "--test", 1, "--jobs", 1, "--out", tmp_path / "out"]
    done = invoke(write(tmp_path), "--objective", "ttft_ms.mean", *quick)
    assert done.exit_code in (0, 1)
    assert done.exit_code == int("does NOT hold" in done.output or "No candidate" in done.output)
    assert (
        "mixed: 4 policies evaluated on 1 trial, for ttft_ms.mean (lower is better)" in done.output
    )
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"candidates.csv", "evolve.md", "points.jsonl", "winner.yaml"}


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "--objective: missing"),
        (["--objective", "e2e"], "unknown metric 'e2e'"),
        (["--objective", "e2e_ms.p99", "--propose", "cat"], "this command writes; add --trust"),
        (["--objective", "e2e_ms.p99", "--variant", "b"], "unknown variant"),
        (
            ["--objective", "e2e_ms.p99", "--propose", "cat", "--over", "timeout=1..9", "--trust"],
            "cannot be combined with --over",
        ),
        (["--objective", "e2e_ms.p99", "--over", "variants=a,b"], "expected a scenario field"),
        (["--objective", "e2e_ms.p99", "--over", "engine.max_num=1..9"], "no field 'max_num'"),
    ],
)
def test_rejects_invalid_searches(tmp_path: Path, words: list[str], wrong: str) -> None:
    done = invoke(write(tmp_path), *words, "--budget", 2, "--jobs", 1, "--out", tmp_path / "out")
    assert isinstance(done.exception, InputError), done.output
    assert wrong in str(done.exception)
    assert "\n" not in str(done.exception)


def test_rejects_foreign_output_folder(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("")
    done = invoke(write(tmp_path), "--objective", "e2e_ms.p99", "--out", tmp_path / "out")
    assert "contains other files and no search" in str(done.exception)
