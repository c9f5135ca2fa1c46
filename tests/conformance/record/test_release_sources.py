"""Tests of sources of releases: ``make follow`` finds, unpacks and runs them.

Released packages have hundreds of megabytes and are not part of the repository. Tests of real
schedulers need them unpacked as ``vllm-VERSION`` and ``sglang-VERSION`` in the directory
``SIMKV_WHEELS`` (default: ``wheels`` beside the checkout). Without them, these tests are skipped.
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
from simkv.native.release_sources import open_sources
from tests.conftest import ROOT

WHEELS = Path(os.environ.get("SIMKV_WHEELS", ROOT.parent / "wheels"))
VERSIONS = {"vllm": "0.33.0", "sglang": "0.5.23"}
TITLES = {"vllm": "vLLM", "sglang": "SGLang"}

#: Planted changes: file, original text and replacement.
CORE, MANAGERS = "vllm/v1/core", "sglang/srt/managers"
PLANTED = {
    ("vllm", "order"): (f"{CORE}/sched/request_queue.py", "self.appendleft(", "self.append("),
    ("vllm", "budget"): (
        f"{CORE}/sched/scheduler.py",
        "token_budget = self.max_num_scheduled_tokens",
        "token_budget = self.max_num_scheduled_tokens - 1",
    ),
    ("vllm", "watermark"): (
        f"{CORE}/kv_cache_manager.py",
        "int(watermark *",
        "1 + int(watermark *",
    ),
    ("vllm", "victim"): (
        f"{CORE}/sched/scheduler.py",
        "(r.priority, r.arrival_time)",
        "(r.arrival_time, r.priority)",
    ),
    ("vllm", "threshold"): (
        f"{CORE}/sched/scheduler.py",
        "num_new_tokens = long_prefill_token_threshold",
        "num_new_tokens = long_prefill_token_threshold + 1",
    ),
    ("sglang", "order"): (
        f"{MANAGERS}/scheduler.py",
        "self.waiting_queue.append(req)",
        "self.waiting_queue.insert(0, req)",
    ),
    ("sglang", "budget"): (
        f"{MANAGERS}/schedule_policy.py",
        "self.rem_chunk_tokens -= num_mixed_decode_tokens",
        "self.rem_chunk_tokens -= num_mixed_decode_tokens + 1",
    ),
    ("sglang", "new-token ratio"): (
        f"{MANAGERS}/scheduler_components/new_token_ratio_tracker.py",
        "self.current - self.decay",
        "self.current - 2 * self.decay",
    ),
    ("sglang", "victim"): (
        f"{MANAGERS}/schedule_batch.py",
        "return (len(req.output_ids), -len(req.origin_input_ids))",
        "return (len(req.output_ids), len(req.origin_input_ids))",
    ),
    ("sglang", "threshold"): (
        f"{MANAGERS}/scheduler.py",
        "if len(adder.can_run_list) >= self.get_num_allocatable_reqs(",
        "if len(adder.can_run_list) + 1 >= self.get_num_allocatable_reqs(",
    ),
}
#: Packages that are copied before a change is planted in them.
SRT = ("beam_search", "disaggregation", "dllm", "environ.py", "managers", "mem_cache")
SRT += ("model_executor", "sampling", "utils")
COPIED = {
    "vllm": ("vllm/v1", "vllm/distributed", "vllm/utils"),
    "sglang": [f"sglang/srt/{part}" for part in SRT],
}


def wheel_of(engine: str, version: str) -> Path:
    folder = WHEELS / f"{engine}-{version}"
    if not folder.is_dir():
        pytest.skip(f"no sources of this release: {folder.name} is missing in {WHEELS.name}/")
    if engine == "sglang":
        pytest.importorskip("torch")
    return folder


@pytest.fixture
def wheel() -> Path:
    return wheel_of("vllm", VERSIONS["vllm"])


def make_follow(engine: str, report: Path, source: Path) -> subprocess.CompletedProcess[str]:
    """Run ``make follow`` with the simkv of this interpreter instead of installing one."""
    simkv = f"{sys.executable} -m simkv"
    given = [f"ENGINE={engine}", f"VERSION={VERSIONS[engine]}", f"SOURCE={source}"]
    given += [f"REPORT={report}", "COUNT=40"]
    command = ["make", "-o", ".venv/.installed", "follow", f"SIMKV={simkv}", *given]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("engine", VERSIONS)
def test_make_follow_reports_an_unchanged_release(engine: str, tmp_path: Path) -> None:
    version = VERSIONS[engine]
    done = make_follow(engine, tmp_path / "page.md", wheel_of(engine, version))
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {TITLES[engine]} {version} uses the rules of {version}\n")


@pytest.mark.parametrize(("engine", "what"), PLANTED)
def test_make_follow_reports_a_planted_change(engine: str, what: str, tmp_path: Path) -> None:
    version = VERSIONS[engine]
    folder = wheel_of(engine, version)
    copy, (file, old, new) = tmp_path / "changed", PLANTED[engine, what]
    for part in COPIED[engine]:
        if (folder / part).is_dir():
            shutil.copytree(folder / part, copy / part)
        else:
            shutil.copy(folder / part, copy / part)
    text = (copy / file).read_text(encoding="utf-8")
    assert old in text
    (copy / file).write_text(text.replace(old, new, 1), encoding="utf-8")
    done = make_follow(engine, tmp_path / "page.md", copy)
    assert done.returncode != 0
    page = (tmp_path / "page.md").read_text(encoding="utf-8")
    title = f"# {TITLES[engine]} {version} differs from every combination of known rules\n"
    assert page.startswith(title)
    assert "| field | recorded | simulated |" in page


def test_conform_reads_the_output_of_record(wheel: Path, tmp_path: Path) -> None:
    run = CliRunner().invoke
    given = ["record", "vllm", VERSIONS["vllm"], "--cases", "4", "--source", str(wheel)]
    result = run(app, [*given, "--out", str(tmp_path / "new/folder")])
    assert result.exit_code == 0, result.output
    files = sorted(map(str, (tmp_path / "new/folder").glob("*.jsonl.gz")))
    assert len(files) >= 4
    assert run(app, ["conform", *files]).exit_code == 0
    packed = str(tmp_path / "all.jsonl.gz")
    assert run(app, [*given, "--out", packed]).exit_code == 0
    assert f"{len(files)} of {len(files)} recordings equal" in run(app, ["conform", packed]).output


@pytest.mark.parametrize("version", ["0.5.15", "0.5.20", "0.5.22", "0.5.23"])
def test_sglang_releases_are_recorded(version: str, tmp_path: Path) -> None:
    folder = wheel_of("sglang", version)
    given = ["record", "sglang", version, "--cases", "40", "--source", str(folder)]
    command = [sys.executable, "-m", "simkv", *given, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"the rules of {version} reproduce 40 of 40" in done.stdout
    assert len(list(tmp_path.iterdir())) == 40


def _wheel(folder: Path, version: str) -> Path:
    path = folder / f"engine-{version}-py3-none-any.whl"
    with ZipFile(path, "w") as archive:
        archive.writestr("engine/core.py", "x = 1\n")
        archive.writestr("engine/big.so", "compiled")
        archive.writestr("other/core.py", "y = 1\n")
    return path


def test_unpacks_the_sources_of_a_wheel_temporarily(tmp_path: Path) -> None:
    with open_sources("engine", "newest", _wheel(tmp_path, "1.2.3+cu12")) as found:
        assert found.version == "1.2.3"
        files = [p.relative_to(found.folder) for p in found.folder.rglob("*") if p.is_file()]
        assert files == [Path("engine/core.py")]
    assert not found.folder.exists()


def test_uses_a_directory_of_sources_in_place(tmp_path: Path) -> None:
    (tmp_path / "engine").mkdir()
    with open_sources("engine", "1.0", tmp_path) as found:
        assert found == (tmp_path, "1.0")
    with (
        pytest.raises(InputError, match="no directory other/"),
        open_sources("other", "1.0", tmp_path),
    ):
        pass


def test_rejects_files_that_are_no_wheel(tmp_path: Path) -> None:
    (tmp_path / "not.whl").write_text("no", encoding="utf-8")
    given = ["follow", "vllm", "1.0", "--source", str(tmp_path / "not.whl")]
    result = CliRunner().invoke(app, given)
    assert isinstance(result.exception, InputError)
    assert "neither a directory nor a readable wheel" in str(result.exception)


def test_finds_installed_packages() -> None:
    from importlib.metadata import version

    with open_sources("simpy", version("simpy")) as found:
        assert (found.folder / "simpy" / "core.py").is_file()


def test_reports_a_failed_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "false")
    with (
        pytest.raises(InputError, match=r"engine==1\.0: download by pip failed: .*--source"),
        open_sources("engine", "1.0"),
    ):
        pass
