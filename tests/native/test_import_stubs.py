"""Tests of the stubs that replace imports of vLLM's scheduler."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from simkv.native.import_stubs import MissingImport
from simkv.native.vllm.vllm_stubs import stub_vllm_imports

SCHEDULER = """
from vllm.config import VllmConfig
from vllm.utils.brandnew import Base, most
from vllm.v1.core.sched.fairness import share
import fancy.limits

class Scheduler(Base):
    def __init__(self, config: VllmConfig | None = None) -> None:
        self.share = share()

    def ask_engine(self) -> bool:
        return most() > 3

    def ask_package(self) -> bool:
        return bool(fancy.limits.strict)
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    sched = tmp_path / "vllm/v1/core/sched"
    sched.mkdir(parents=True)
    for folder in (sched, *list(sched.parents)[:3]):
        (folder / "__init__.py").write_text("")
    (sched / "scheduler.py").write_text(SCHEDULER)
    (sched / "fairness.py").write_text("def share():\n    return 0.25\n")
    return tmp_path


def test_new_module_of_the_scheduler_is_loaded(source: Path) -> None:
    with stub_vllm_imports(source):
        scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler()
    assert scheduler.share == 0.25


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("ask_engine", r"uses most\(\) of vllm.utils.brandnew; .*add it to REAL_MODULES"),
        ("ask_package", "uses strict of fancy.limits; fancy is not installed; install it"),
    ],
)
def test_decision_of_a_stub_is_named(source: Path, method: str, words: str) -> None:
    with stub_vllm_imports(source):
        scheduler = importlib.import_module("vllm.v1.core.sched.scheduler").Scheduler()
        with pytest.raises(MissingImport, match=words):
            getattr(scheduler, method)()
