"""Tests of the process of the command line: interrupts, pipes, full disks, terminals and
start-up.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

import simkv
from simkv.cli import command_support
from tests.conftest import ROOT

#: Script that interrupts itself before its n-th import, or later if there is no n-th import. The
#: script first restores the default handler, because shells ignore interrupts in background
#: processes.
INTERRUPTED = """
import os, signal, sys
class Interrupts:
    left = int(sys.argv.pop(1))
    def find_spec(self, *_):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from simkv.__main__ import main
main()
"""


def python(
    *arguments: str, folder: Path, shell: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        f"'{sys.executable}' -m simkv {shell}" if shell else command,
        shell=bool(shell),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        executable="/bin/bash" if shell else None,
    )


@pytest.mark.parametrize("moment", [4, 20, 60, 200, 400, 550])
def test_interrupt_during_imports_is_one_line(tmp_path: Path, moment: int) -> None:
    command = ("run", "mistralrs-six", "--no-plots")
    ran = python("-c", INTERRUPTED, str(moment), *command, folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (130, "")
    assert ran.stderr == "simkv: interrupted; nothing was written\n"
    assert list(tmp_path.iterdir()) == []


def test_interrupt_in_a_callback_is_not_lost(tmp_path: Path) -> None:
    """Python discards exceptions in callbacks of weak references, and imports use such
    callbacks.
    """
    kill = "os.kill(os.getpid(), signal.SIGINT)"
    lost = f"weak = weakref.ref(type('X', (), {{}})(), lambda _: {kill}); gc.collect()"
    program = INTERRUPTED.replace(kill, lost).replace("import os,", "import gc, weakref, os,")
    ran = python("-c", program, "20", "run", "mistralrs-six", "--no-plots", folder=tmp_path)
    assert (ran.returncode, ran.stdout) == (130, "")
    assert ran.stderr == "simkv: interrupted; nothing was written\n"


def test_closed_pipe_does_not_change_the_exit_code(tmp_path: Path) -> None:
    for command in ("schema", "--help"):  # output larger and smaller than the buffer of a pipe
        ran = python(folder=tmp_path, shell=f"{command} | head -1; exit ${{PIPESTATUS[0]}}")
        assert (ran.returncode, ran.stderr) == (0, ""), command
        assert len(ran.stdout.splitlines()) == 1
    ran = python(folder=tmp_path, shell="run mistralrs-forty --no-plots | head -1; exit 0")
    assert (tmp_path / "runs" / "mistralrs-forty" / "summary.json").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no /dev/full")
def test_full_standard_output_is_one_line(tmp_path: Path) -> None:
    for command in ("schema", "--help"):
        ran = python(folder=tmp_path, shell=f"{command} > /dev/full")
        assert ran.returncode == 2
        assert ran.stderr == (
            "simkv: standard output: cannot be written: no space left on device\n"
        ), command


def test_characters_without_encoding_are_replaced(tmp_path: Path) -> None:
    ran = python(
        folder=tmp_path, shell="explain mistralrs-forty-pressure", PYTHONIOENCODING="ascii"
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.isascii()
    assert "?" in ran.stdout


@pytest.mark.parametrize("module", ["simkv", "simkv.cli"])
def test_runs_as_a_module(tmp_path: Path, module: str) -> None:
    ran = python("-m", module, "--version", folder=tmp_path)
    assert ran.stdout.startswith(f"simkv {simkv.__version__} (")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_of_commands_and_options(tmp_path: Path, shell: str) -> None:
    asked = {"_TYPER_COMPLETE_ARGS": "simkv plan --small", "COMP_WORDS": "simkv plan --small"}
    asked |= {"COMP_CWORD": "2", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    ran = python("-m", "simkv", folder=tmp_path, _SIMKV_COMPLETE=f"complete_{shell}", **asked)
    assert "--smallest" in ran.stdout


def test_prints_completion_scripts(tmp_path: Path) -> None:
    source = python("-m", "simkv", folder=tmp_path, _SIMKV_COMPLETE="source_bash")
    assert "_simkv_completion" in source.stdout


#: Modules that are slow to import; help and version need none of them.
HEAVY = {"numpy", "pandas", "pydantic", "rich", "matplotlib", "ruamel", "scipy", "simpy", "jinja2"}


def imported(folder: Path, *arguments: str) -> set[str]:
    """Return the names of the modules that a command imports."""
    ran = python("-X", "importtime", "-m", "simkv", *arguments, folder=folder)
    assert ran.returncode == 0
    lines = [line for line in ran.stderr.splitlines() if line.startswith("import time:")]
    return {line.rpartition("|")[2].strip() for line in lines}


def test_help_imports_few_modules(tmp_path: Path) -> None:
    """Help needs neither rich nor most of simkv (0.14 s of CPU instead of 0.35)."""
    for arguments in (["--help"], ["--version"]):
        found = imported(tmp_path, *arguments)
        assert {name.partition(".")[0] for name in found} & HEAVY == set()
        own = {name for name in found if name.startswith("simkv.") and name.count(".") > 1}
        own = {name for name in own if not name.startswith("simkv.cli.")}
        names = ("core.errors", "core.atomic_files", "core.version", "scenario.scenario_options")
        assert own == {f"simkv.{name}" for name in names}
    assert "rich" in imported(tmp_path, "run", "mistralrs-six", "--no-plots", "--exit-zero")


def test_package_lists_its_names() -> None:
    assert {"run", "compare", "sweep", "plan", "plot", "pareto", "load"} <= set(dir(simkv))
    assert {name for name in dir(simkv) if not name.startswith("__")} < set(simkv.__all__)
    assert all(getattr(simkv, name) is not None for name in simkv.__all__)


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """Create a directory on a disk of 64 kB; requires permission to mount."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small disk here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        ("run mistralrs-forty --no-plots --steps", "finished"),
        ("report mistralrs-six --no-whatif --out page.html", ""),
    ],
)
def test_full_disk_is_one_line(full_disk: Path, command: str, printed: str) -> None:
    """The metrics are still printed, and no partial files remain."""
    ran = python(folder=full_disk, shell=command)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("simkv: ")
    assert line.endswith("cannot be written: no space left on device")
    assert printed in ran.stdout
    assert [path for path in full_disk.rglob("*") if path.is_file()] == []


def test_progress_in_a_pipe_is_a_line_every_ten_seconds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = iter([0.0, 4.0, 12.0, 15.0, 22.0])
    monkeypatch.setattr(command_support, "monotonic", lambda: next(now))
    with command_support.progress("runs", 8) as advance:
        for _ in range(4):
            advance()
    assert (
        capsys.readouterr().err
        == "simkv: runs: 2 of 8 after 12 s\nsimkv: runs: 4 of 8 after 22 s\n"
    )


@pytest.mark.parametrize("total", [None, 8])
def test_progress_bar_labels_its_times(monkeypatch: pytest.MonkeyPatch, total: int | None) -> None:
    """Without a total, there is no remaining time."""
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(command_support, "console", lambda **_: terminal)
    with command_support.progress("runs", total) as advance:
        advance()
    assert isinstance(terminal.file, io.StringIO)
    drawn = terminal.file.getvalue()
    assert "0:00:00 elapsed" in drawn
    assert (" left" in drawn) == (total is not None)


def test_explain_wraps_lines_at_columns(tmp_path: Path) -> None:
    shell = "explain mistralrs-six"
    wide, narrow = (python(folder=tmp_path, shell=shell, COLUMNS=n) for n in ("400", "60"))
    assert any(len(line) > 60 for line in wide.stdout.splitlines())
    assert all(len(line) <= 60 for line in narrow.stdout.splitlines())


@pytest.mark.parametrize("columns", [70, 110])
def test_piped_output_has_the_width_of_columns(tmp_path: Path, columns: int) -> None:
    shell = "run mistralrs-six --no-plots --exit-zero | cat"
    ran = python(folder=tmp_path, shell=shell, COLUMNS=str(columns))
    table = [line for line in ran.stdout.splitlines() if "─" in line]
    assert table
    assert max(map(len, table)) <= columns
