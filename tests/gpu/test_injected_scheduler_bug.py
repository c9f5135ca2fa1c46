"""Tests with a bug planted in the scheduler of only one side: L0 must detect and locate it."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from simkv.costs.hardware.model_shape import MODEL_SHAPES
from simkv.gpu.execution_record import GpuSetup, write_executions
from simkv.gpu.scenario_execution import ScenarioExecution
from simkv.schedulers.engine_registry import ENGINES
from simkv.validation.gpu_runs.timed_replay import check_agreement, read_runs
from tests.laws.pressure_scenarios import plain_scenario

SETUP = GpuSetup(MODEL_SHAPES["tiny"], graph_tokens=64)
#: Engine, variant, original code of its scheduler, and a faulty replacement.
BUGS = [
    ("vllm", "0.33.0", "next(reversed(self.running))]", "next(iter(self.running))]"),
    (
        "vllm",
        "0.33.0",
        "return self.missing(hits, end) + revived",
        "return 1 + self.missing(hits, end) + revived",
    ),
    ("sglang", "0.5.23", "(r.out, -r.prompt_tokens), reverse=True", "(r.out, r.id)"),
    ("sglang", "0.5.23", "self.retract_steps * len(staying)", "len(staying)"),
    (
        "mistralrs",
        "pr2034",
        "return q.length + 1\n\n    def _key",
        "return q.length\n\n    def _key",
    ),
    (
        "mistralrs",
        "bucketed",
        "return min(groups, key=lambda key: key[0])",
        "return max(groups)",
    ),
    ("fastdeploy", "fixed-reserve", "self.running[-1] if self.running", "self.running[0] if 1"),
    ("fastdeploy", "fixed-reserve", "return blocks + len(self.running) *", "return 9 + blocks *"),
]


def file_of(engine: str, old: str) -> str:
    """Return the module of an engine that contains ``old`` exactly once."""
    files = Path(str(import_module(f"simkv.schedulers.{engine}").__file__)).parent
    found = [path.stem for path in sorted(files.glob("*.py")) if path.read_text().count(old) == 1]
    assert len(found) == 1, f"{old!r} stands in {found}"
    return found[0]


@pytest.fixture
def plant(monkeypatch):
    """Replace a module by a copy in which one part of the source is replaced."""

    def planted(engine: str, old: str, new: str) -> None:
        name = f"simkv.schedulers.{engine}.{file_of(engine, old)}"
        module = import_module(name)
        source = inspect.getsource(module)
        mutant = ModuleType(name)
        mutant.__dict__.update({"__file__": module.__file__, "__package__": module.__package__})
        with monkeypatch.context() as context:
            context.setitem(sys.modules, name, mutant)
            exec(compile(source.replace(old, new), str(module.__file__), "exec"), mutant.__dict__)
        monkeypatch.setitem(sys.modules, name, mutant)
        # The engine's spec, rebuilt with the classes of the mutant.
        for again in [m for m in sys.modules if m.startswith(f"simkv.schedulers.{engine}.")]:
            if again != name and not again.endswith((".config", ".versions")):
                monkeypatch.delitem(sys.modules, again)
        spec = getattr(import_module(f"simkv.schedulers.{engine}.spec"), engine.upper())
        monkeypatch.setitem(ENGINES, engine, spec)

    return planted


@pytest.mark.parametrize(("engine", "variant", "old", "new"), BUGS)
def test_l0_detects(engine, variant, old, new, plant, tmp_path):
    run = ScenarioExecution(plain_scenario(engine, variant), SETUP).serve()
    assert check_agreement(run.scenario, run.passes, run.recorder).step is None
    write_executions(tmp_path / "out", {"run": run}, SETUP)
    plant(engine, old, new)
    verdict = read_runs(tmp_path / "out")["run"].verdict
    assert verdict.step is not None
    assert verdict.recorded != verdict.replayed


def test_scheduler_that_reads_the_clock_is_detected(monkeypatch):
    """Decisions that depend on anything except the step times cannot be replayed."""
    server = ScenarioExecution(plain_scenario("vllm", "0.33.0"), SETUP)
    scheduler, clock = server.recorder.inner, server.clock
    decide = scheduler.schedule

    def moody():
        scheduler._max_running = 1 + int(clock.wall() * 1e6) % 7
        return decide()

    monkeypatch.setattr(scheduler, "schedule", moody)
    run = server.serve()
    assert check_agreement(run.scenario, run.passes, run.recorder).step is not None
