"""Tests that the digest covers the sources and data that a run depends on, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from simkv.study import run_digest
from simkv.study.run_digest import PACKAGE, RUN_PACKAGES, list_source_files
from tests.import_graph import graph


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the package; return the copy whose digest is computed."""
    package = tmp_path / "simkv"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(run_digest, "PACKAGE", package)
    return package


def code() -> str:
    """Return the current hash of the copy."""
    run_digest.hash_code.cache_clear()
    return run_digest.hash_code()


def changes(path: Path) -> bool:
    """Return whether the hash changes with a file; the file is restored."""
    content, before = path.read_bytes(), code()
    path.write_bytes(content + b"\n")
    changed = code() != before
    path.write_bytes(content)
    assert code() == before
    return changed


@pytest.mark.parametrize(
    "name",
    [
        *(
            "cli/run.py",
            "cli/command_support.py",
            "report/html_page.py",
            "gpu/__init__.py",
            "conformance/__init__.py",
        ),
        *(
            "api.py",
            "study/worker_pool.py",
            "study/job_runner.py",
            "study/random_seeds.py",
            "study/plan/capacity_plan.py",
        ),
        *("costs/profiles/unit-step.json", "__init__.py"),
    ],
)
def test_digest_ignores_unused_modules(copy: Path, name: str) -> None:
    assert not changes(copy / name)


@pytest.mark.parametrize(
    "name",
    [
        *(f"{room}/__init__.py" for room in RUN_PACKAGES),
        *("workload/clients.py", "core/version.py", "schedulers/vllm/scheduler.py"),
        *("costs/hardware/gpus.json", "study/simulation_job.py", "study/run_digest.py"),
    ],
)
def test_digest_covers_used_modules(copy: Path, name: str) -> None:
    assert changes(copy / name)


def test_digest_covers_run_packages_only() -> None:
    covered = {path.relative_to(PACKAGE).as_posix() for path in list_source_files(PACKAGE)}
    there = {
        path.relative_to(PACKAGE).as_posix()
        for room in RUN_PACKAGES
        for path in (PACKAGE / room).rglob("*.py")
    }
    modules = {name for name in covered if name.endswith(".py")}
    assert modules == there | {"study/simulation_job.py", "study/run_digest.py"}
    assert "costs/hardware/models.json" in covered


def test_run_imports_no_other_modules() -> None:
    """The digest covers all modules that a job imports, directly or indirectly."""
    imports, left = graph(PACKAGE), [run_digest.ENTRY]
    reached: set[str] = set()
    while left:
        module = left.pop()
        if module not in reached:
            reached.add(module)
            left += imports[module]
    covered = {
        path.relative_to(PACKAGE.parent).with_suffix("") for path in list_source_files(PACKAGE)
    }
    names = {".".join(path.parts).removesuffix(".__init__") for path in covered}
    assert reached - {"simkv"} <= names
    assert "simkv.schedulers.vllm.scheduler" in names
