"""Tests that a build reported as compiled is compiled, and a build reported as pure Python is not.

``make compiled`` sets ``SIMKV_TESTED=compiled``; otherwise the sources are tested.
"""

from __future__ import annotations

import copy
import importlib
import os
import runpy
from importlib.machinery import EXTENSION_SUFFIXES

import pytest

from simkv.core.block_pool import BlockPool
from simkv.core.request import Prompt
from simkv.core.version import is_compiled
from simkv.scenario.custom.vllm_policy import CustomVllmScheduler
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.custom_policy import VllmExpressionScheduler
from simkv.schedulers.vllm.decode_group import DecodeGroup
from simkv.schedulers.vllm.memory import VllmMemory
from simkv.schedulers.vllm.request_state import FcfsQueue, PriorityQueue, RequestState
from simkv.schedulers.vllm.scheduler_base import VllmSchedulerBase
from tests.conftest import ROOT

COMPILED = os.environ.get("SIMKV_TESTED") == "compiled"
HOT = runpy.run_path(str(ROOT / "tools" / "compiled_modules.py"))["compiled_modules"](ROOT)


@pytest.mark.parametrize("path", HOT)
def test_hot_modules_are_compiled_as_reported(path: str) -> None:
    name = path.removesuffix(".py").replace("/", ".")
    file = importlib.import_module(name).__file__
    assert file is not None
    assert file.endswith(tuple(EXTENSION_SUFFIXES) if COMPILED else ".py")


def test_subclasses_of_compiled_classes_copy_fully() -> None:
    """A copy made by Python code has the attributes that the compiled class declares, and no
    others.
    """
    assert issubclass(CustomVllmScheduler, VllmSchedulerBase)
    assert issubclass(VllmExpressionScheduler, VllmSchedulerBase)
    hot = {path.removesuffix(".py").replace("/", ".") for path in HOT}
    bases: list[type] = [
        VllmSchedulerBase,
        VllmMemory,
        PriorityQueue,
        FcfsQueue,
        DecodeGroup,
        RequestState,
        BlockPool,
    ]
    while bases:
        base = bases.pop()
        bases += base.__subclasses__()
        if base.__module__.startswith("simkv.") and base.__module__ not in hot:
            assert "__mypyc_attrs__" in vars(base), base


def test_loop_and_rules_are_compiled() -> None:
    assert {"simkv/sim/engine.py", "simkv/schedulers/vllm/scheduler.py"} <= set(HOT)


def test_version_reports_compilation() -> None:
    assert is_compiled() is COMPILED


@pytest.mark.parametrize("knobs", [{}, {"policy": "priority"}, {"variant": "0.33.0-skip-blocked"}])
@pytest.mark.parametrize("cached", [False, True])
def test_copied_scheduler_decides_equally(knobs: dict[str, str], cached: bool) -> None:
    sizes = {"num_gpu_blocks": 512, "max_model_len": 512, "enable_prefix_caching": cached}
    config = VllmConfig(**{**sizes, **knobs})  # type: ignore[arg-type]
    scheduler = build_scheduler(config)
    for i in range(40):
        scheduler.add(Prompt(i, 300, 100, priority=i % 3))
    scheduler.complete(scheduler.schedule(), ())
    twin = copy.deepcopy(scheduler)
    for _ in range(20):
        batch, same = scheduler.schedule(), twin.schedule()
        assert batch.rows() == same.rows()
        assert batch.preempted == same.preempted
        assert scheduler.complete(batch, ()) == twin.complete(same, ())
    assert scheduler.fingerprint() == twin.fingerprint()
