"""Tests of the GitHub action and the pre-commit hook, which are one script, on passing and failing
scenarios.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from junitparser import JUnitXml
from ruamel.yaml import YAML

from tests.conftest import ROOT

SCRIPT = ROOT / "tools" / "check-scenarios.sh"
SCENARIO = """
name: {name}
workload: {{burst: {{num_prompts: 3, prompt_tokens: 40, output_tokens: 5}}}}
engine: {{name: vllm, num_gpu_blocks: 600}}
profile: unit-step
{expect}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    expects = {"good": "expect: {run: {finished: 3}}", "bad": "expect: {run: {finished: 2}}"}
    for name in ("good", "bad", "silent"):
        text = SCENARIO.format(name=name, expect=expects.get(name, ""))
        (tmp_path / f"{name}.yaml").write_text(text)
    (tmp_path / "wrong.yaml").write_text("name: wrong\nexpect: {}\n")
    (tmp_path / "bin").mkdir()
    simkv = tmp_path / "bin" / "simkv"
    simkv.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m simkv.cli "$@"\n')
    simkv.chmod(0o755)
    return tmp_path


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    return subprocess.run([SCRIPT, *words], cwd=folder, env=env, capture_output=True, text=True)


def test_met_expectations_pass(folder: Path) -> None:
    ran = check(folder, "out", "good.yaml", "silent.yaml")
    assert ran.returncode == 0, ran.stderr
    assert "silent.yaml: expects nothing" in ran.stdout
    assert sum(suite.failures for suite in JUnitXml.fromfile(str(folder / "out/good.xml"))) == 0
    assert "good" in (folder / "out" / "good.html").read_text()
    assert (folder / "out" / "good" / "summary.json").is_file()
    assert not (folder / "out" / "silent").exists()


def test_missed_expectation_fails_but_runs_all(folder: Path) -> None:
    ran = check(folder, "out", "bad.yaml", "good.yaml")
    assert ran.returncode == 1
    assert sum(suite.failures for suite in JUnitXml.fromfile(str(folder / "out/bad.xml"))) == 1
    assert (folder / "out" / "bad.html").is_file()
    assert (folder / "out" / "good.xml").is_file()


@pytest.mark.parametrize("words", [("out", "wrong.yaml"), ("out", "silent.yaml"), ("out",)])
def test_invalid_scenario_has_higher_exit_code(folder: Path, words: tuple[str, ...]) -> None:
    assert check(folder, *words).returncode == 2


def test_source_runs_zoo_and_scenarios(folder: Path) -> None:
    simkv = folder / "bin" / "simkv"
    simkv.write_text('#!/bin/sh\necho "$@" >> calls; [ "$1" != zoo ] || exit 1\n')
    ran = check(folder, "--trust", "--source", ".", "out", "good.yaml", "missing/*.yaml")
    assert ran.returncode == 1, ran.stderr
    calls = (folder / "calls").read_text().splitlines()
    assert calls[0] == "zoo --source . --trust --junit out/zoo.xml"
    assert calls[1].endswith("--no-plots --trust --source .")
    assert calls[2].startswith("report out/good")
    assert calls[2].endswith("--trust")
    (folder / "calls").unlink()
    assert check(folder, "--trust", "--source", ".", "out").returncode == 1
    assert check(folder, "--source", ".", "out").returncode == 2  # requires --trust


def test_action_and_hook_run_script() -> None:
    yaml = YAML(typ="safe")
    steps = yaml.load((ROOT / "action.yml").read_text())["runs"]["steps"]
    assert [s for s in steps if "tools/check-scenarios.sh" in s.get("run", "")]
    hook = yaml.load((ROOT / ".pre-commit-hooks.yaml").read_text())[0]
    assert hook["entry"].split()[0] == "tools/check-scenarios.sh"
    assert os.access(SCRIPT, os.X_OK)
    command = next(step["run"] for step in steps if "SOURCE" in step.get("env", {}))
    assert '${SOURCE:+--source "$SOURCE"}' in command
    source = yaml.load((ROOT / ".pre-commit-hooks.yaml").read_text())[1]
    assert source["entry"].split() == ["simkv", "zoo", "--trust", "--source"]
