"""Wheels: found, unpacked and, where some are at hand, driven from ``make follow`` to its report.

The wheels of vLLM are hundreds of megabytes each and not part of the repository: the folder
``wheels`` beside the checkout, or the one that SIMKV_WHEELS names, holds them unpacked as
``vllm-VERSION``. Without it the tests that drive them are skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.proof.record.wheel import sources
from tests.conftest import ROOT

WHEELS = Path(os.environ.get("SIMKV_WHEELS", ROOT.parent / "wheels"))
VERSION = "0.33.0"

#: A file of its sources, what stands there, and what is planted in its place.
CORE = "vllm/v1/core"
PLANTED = {
    "order": (f"{CORE}/sched/request_queue.py", "self.appendleft(", "self.append("),
    "budget": (
        f"{CORE}/sched/scheduler.py",
        "token_budget = self.max_num_scheduled_tokens",
        "token_budget = self.max_num_scheduled_tokens - 1",
    ),
    "watermark": (f"{CORE}/kv_cache_manager.py", "int(watermark *", "1 + int(watermark *"),
    "victim": (
        f"{CORE}/sched/scheduler.py",
        "(r.priority, r.arrival_time)",
        "(r.arrival_time, r.priority)",
    ),
    "threshold": (
        f"{CORE}/sched/scheduler.py",
        "num_new_tokens = long_prefill_token_threshold",
        "num_new_tokens = long_prefill_token_threshold + 1",
    ),
}


@pytest.fixture
def wheel() -> Path:
    folder = WHEELS / f"vllm-{VERSION}"
    if not folder.is_dir():
        pytest.skip(f"no wheel of vLLM is at hand: no folder {folder.name} in {WHEELS.name}/")
    return folder


def make_follow(report: Path, source: Path) -> subprocess.CompletedProcess[str]:
    """``make follow`` with this interpreter's simkv in place of the one that it would install."""
    simkv = f"{sys.executable} -m simkv"
    given = [f"VERSION={VERSION}", f"SOURCE={source}", f"REPORT={report}", "COUNT=40"]
    command = ["make", "-o", ".venv/.installed", "follow", f"SIMKV={simkv}", *given]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_make_follow_reports_an_unchanged_release(wheel: Path, tmp_path: Path) -> None:
    done = make_follow(tmp_path / "page.md", wheel)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith(f"# vLLM {VERSION} decides by the rules of {VERSION}\n")


@pytest.mark.parametrize("what", PLANTED)
def test_make_follow_reports_a_planted_change(what: str, wheel: Path, tmp_path: Path) -> None:
    copy, (file, old, new) = tmp_path / "changed", PLANTED[what]
    shutil.copytree(wheel / "vllm/v1", copy / "vllm/v1")
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    done = make_follow(tmp_path / "page.md", copy)
    assert done.returncode != 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith(f"# vLLM {VERSION} decides as no combination of the known rules does\n")
    assert "| field | recorded | simulated |" in page


def test_record_keeps_what_conform_reads(wheel: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    given = ["record", "vllm", VERSION, "--cases", "4", "--source", str(wheel)]
    result = run(app, [*given, "--out", str(tmp_path / "new/folder")])
    assert result.exit_code == 0, result.output
    files = sorted(map(str, (tmp_path / "new/folder").glob("*.jsonl.gz")))
    assert len(files) >= 4
    assert run(app, ["conform", *files]).exit_code == 0


@pytest.mark.parametrize("version", ["0.5.20", "0.5.22", "0.5.23"])
def test_the_whole_loop_of_sglang_is_recorded(version: str, tmp_path: Path) -> None:
    folder = WHEELS / f"sglang-{version}"
    if not folder.is_dir():
        pytest.skip(f"no wheel of SGLang is at hand: no folder {folder.name} in {WHEELS.name}/")
    pytest.importorskip("torch")
    given = ["record", "sglang", version, "--cases", "12", "--source", str(folder)]
    command = [sys.executable, "-m", "simkv", *given, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"the rules of {version} make 12 of 12" in done.stdout
    assert len(list(tmp_path.iterdir())) == 12


def _wheel(folder: Path, version: str) -> Path:
    path = folder / f"engine-{version}-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("engine/core.py", "x = 1\n")
        archive.writestr("engine/big.so", "compiled")
        archive.writestr("other/core.py", "y = 1\n")
    return path


def test_of_a_wheel_the_sources_are_unpacked_and_go_again(tmp_path: Path) -> None:
    with sources("engine", "newest", _wheel(tmp_path, "1.2.3+cu12")) as found:
        assert found.version == "1.2.3"
        files = [p.relative_to(found.folder) for p in found.folder.rglob("*") if p.is_file()]
        assert files == [Path("engine/core.py")]
    assert not found.folder.exists()


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    with sources("engine", "1.0", tmp_path) as found:
        assert found == (tmp_path, "1.0")
    with (
        pytest.raises(InputError, match="no folder other/ in it"),
        sources("other", "1.0", tmp_path),
    ):
        pass


def test_what_is_no_wheel_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "not.whl").write_text("no", encoding="utf-8")
    given = ["follow", "vllm", "1.0", "--source", str(tmp_path / "not.whl")]
    result = CliRunner().invoke(app, given)
    assert isinstance(result.exception, InputError)
    assert "not a folder, nor a wheel that can be read" in str(result.exception)


def test_what_is_installed_is_found() -> None:
    from importlib.metadata import version

    with sources("simpy", version("simpy")) as found:
        assert (found.folder / "simpy" / "core.py").is_file()


def test_a_wheel_that_pip_cannot_get_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with (
        pytest.raises(InputError, match=r"engine==1\.0: pip cannot download it: .*--source"),
        sources("engine", "1.0"),
    ):
        pass
