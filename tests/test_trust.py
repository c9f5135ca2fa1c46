"""Tests with planted attacks: no code of a downloaded folder is executed unless the user trusts the
folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from simkv.scenario.custom import code_source
from tests.conftest import ROOT
from tests.custom.sample_scheduler import GOOD

SCENARIO = """
name: planted
workload: {burst: {num_prompts: 3, prompt_tokens: 40, output_tokens: 5}}
engine: {name: vllm, num_gpu_blocks: 600}
profile: unit-step
expect: {run: {finished: 3}}
"""
#: A scenario that names a file with code.
CODE = """
name: code
workload: {burst: {num_prompts: 3, prompt_tokens: 40, output_tokens: 5}}
engine: {name: mine, file: mine.py, num_blocks: 20}
profile: unit-step
expect: {run: {finished: 3}}
"""
#: Names of modules that Python, pip, simkv or its dependencies import.
SHADOWS = (
    *("__future__", "json", "multiprocessing", "pickle", "selectors", "signal", "struct"),
    *("sitecustomize", "usercustomize", "pip", "evil", "mine", "click", "jinja2", "matplotlib"),
    *("numpy", "pandas", "pydantic", "rich", "ruamel", "scipy", "simpy", "typer", "yaml"),
)
#: Modules that ``python -m`` imports before simkv; only -I or -P prevents their execution.
BEFORE = ("simkv",)
PLANTED = "import os; open(os.path.join({folder!r}, 'executed'), 'a').write(__name__ + '\\n')\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a folder with planted code; ``executed`` names the files that were executed."""
    planted = tmp_path / "planted"
    planted.mkdir()
    for name in (*SHADOWS, *BEFORE):
        code = GOOD if name == "mine" else ""
        (planted / f"{name}.py").write_text(code + "\n" + PLANTED.format(folder=str(planted)))
    info = planted / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{code_source.ENTRY_POINT_GROUP}]\nevil = evil:Evil\n")
    (planted / "planted.yaml").write_text(SCENARIO)
    (planted / "evil.yaml").write_text(SCENARIO.replace("vllm", "evil"))
    return planted


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """Create a folder with the commands ``simkv`` and ``python``, as in an installation."""
    commands = tmp_path / "bin"
    commands.mkdir()
    script = commands / "simkv"
    script.write_text(
        f"#!/bin/sh\nPYTHONPATH={ROOT}${{PYTHONPATH:+:$PYTHONPATH}} "
        f'exec {sys.executable} {commands / "main.py"} "$@"\n'
    )
    (commands / "main.py").write_text(
        "from simkv.__main__ import main\nif __name__ == '__main__':\n    main()\n"
    )
    python = commands / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    for file in (script, python):
        file.chmod(0o755)
    return commands


def call(
    command: list[str | Path], folder: Path, bin_folder: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["PATH"] = f"{bin_folder}{os.pathsep}{env['PATH']}"
    return subprocess.run(
        command, cwd=folder, env=env | environment, capture_output=True, text=True, check=False
    )


def executed(folder: Path) -> list[str]:
    marked = folder / "executed"
    return marked.read_text().split() if marked.exists() else []


def test_command_and_workers_run_no_code_of_folder(folder: Path, bin_folder: Path) -> None:
    over = ["--over", "engine.num_gpu_blocks=600,700", "--jobs", "2"]
    ran = call(["simkv", "sweep", "planted.yaml", *over], folder, bin_folder)
    assert (ran.returncode, executed(folder)) == (0, []), ran.stderr
    ran = call(["simkv", "run", "evil.yaml", "--no-plots"], folder, bin_folder)
    assert (ran.returncode, executed(folder)) == (2, [])
    assert "evil.yaml:4: engine.name: " in ran.stderr


def test_check_processes_run_no_code_of_folder(folder: Path, bin_folder: Path) -> None:
    good = folder.parent / "good.py"
    good.write_text(GOOD)
    command: list[str | Path] = ["simkv", "check-scheduler", good, "--examples", "2"]
    ran = call(command, folder, bin_folder)
    assert (ran.returncode, executed(folder)) == (0, []), ran.stderr


def test_python_m_simkv_runs_no_code_of_folder(folder: Path, bin_folder: Path) -> None:
    for name in BEFORE:
        (folder / f"{name}.py").unlink()
    for module, name, code in (("simkv", "planted", 0), ("simkv.cli", "evil", 2)):
        command: list[str | Path] = ["python", "-m", module, "run", f"{name}.yaml", "--no-plots"]
        ran = call(command, folder, bin_folder, PYTHONPATH=str(ROOT))
        assert (ran.returncode, executed(folder)) == (code, []), ran.stderr


def test_explicit_current_folder_stays_on_path(tmp_path: Path, bin_folder: Path) -> None:
    code = (
        "import os, sys; sys.argv, sys.path[0] = ['-m'], os.getcwd(); import simkv; "
        "print(os.getcwd() in sys.path)"
    )
    command: list[str | Path] = ["python", "-c", code]
    for here, path, stays in (
        (tmp_path, str(ROOT), False),
        (tmp_path, f"{ROOT}:.", True),
        (ROOT, ".", True),
    ):
        ran = call(command, here, bin_folder, PYTHONPATH=path)
        assert ran.stdout == f"{stays}\n", ran.stderr


def test_ignores_entry_points_of_current_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))

    def found() -> list[str]:
        code_source._points.cache_clear()
        return code_source.list_installed_schedulers()

    monkeypatch.chdir(folder.parent)
    assert "evil" in found()  # an installed package: its folder is elsewhere
    monkeypatch.setenv("PYTHONPATH", "planted")
    assert "evil" not in found()
    monkeypatch.delenv("PYTHONPATH")
    monkeypatch.chdir(folder)
    assert "evil" not in found()
    monkeypatch.chdir(folder.parent)
    monkeypatch.setattr(sys, "path", ["planted", *sys.path[1:]])
    assert "evil" not in found()
    code_source._points.cache_clear()


def test_action_installs_with_real_pip(folder: Path, bin_folder: Path) -> None:
    steps = YAML(typ="safe").load((ROOT / "action.yml").read_text())["runs"]["steps"]
    (install,) = [step["run"] for step in steps if " install " in step.get("run", "")]
    ran = call(["bash", "-ec", install], folder, bin_folder, GITHUB_ACTION_PATH="/nonexistent")
    assert "/nonexistent" in ran.stderr
    assert executed(folder) == []


def check(folder: Path, bin_folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    script = ROOT / "tools" / "check-scenarios.sh"
    return call([script, *words], folder, bin_folder, PYTHONPATH=".")


def test_file_names_are_not_parsed_as_options(folder: Path, bin_folder: Path) -> None:
    names = ["-rf.yaml", "--trust", "...yaml", "-e.yaml"]
    for name in names:
        (folder / name).write_text(CODE if name == "--trust" else SCENARIO)
    (folder / "-e.yaml").write_text("name: silent\n")
    ran = check(folder, bin_folder, "out", *names)
    assert ran.returncode == 2
    assert "--trust:4: engine: mine.py: the scenario would run this code" in ran.stderr
    assert "./-e.yaml: expects nothing" in ran.stdout
    assert executed(folder) == []
    assert {path.name for path in (folder / "out").glob("*.xml")} == {"-rf.xml", "scenario...xml"}
    assert (folder / "planted.yaml").is_file()


def test_trusted_folder_code_runs(folder: Path, bin_folder: Path) -> None:
    (folder / "code.yaml").write_text(CODE)
    for name in SHADOWS:
        if name != "mine":
            (folder / f"{name}.py").unlink()
    (folder / "helper.py").write_text("")
    with (folder / "mine.py").open("a") as code:
        code.write("import helper\n")
    ran = check(folder, bin_folder, "--trust", "out", "code.yaml")
    assert ran.returncode == 0, ran.stderr
    assert executed(folder)
