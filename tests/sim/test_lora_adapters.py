"""Tests of LoRA adapters in a run: loading times, missing support, explained waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.explain.ledger_kinds import LedgerKind
from simkv.explain.wait_ledger import total_by_kind
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario


def scenario(engine: dict[str, Any], *loras: str | None, **more: Any) -> Scenario:
    requests = [
        {"prompt_tokens": 16, "output_tokens": 4, **({"lora": lora} if lora else {})}
        for lora in loras
    ]
    tree = {"name": "t", "workload": {"requests": requests}, "engine": engine} | more
    return Scenario.model_validate({"profile": "unit-step", **tree})


VLLM = {"name": "vllm", "enable_lora": True, "async_scheduling": False}


def test_step_waits_for_adapters() -> None:
    """Loading 80 MiB takes 4.2 ms at 20 GB/s, and 84 ms at 1 GB/s."""
    plain = run_scenario(scenario(VLLM, None), Path()).record
    asking = run_scenario(scenario(VLLM, "a"), Path()).record
    loading = asking.steps.end[0] - plain.steps.end[0]
    assert loading == pytest.approx(80 * 2**20 * (1 / 20e9 + 1 / 1e9))
    assert asking.end - plain.end == pytest.approx(loading)
    larger = scenario(VLLM, "a", lora={"adapter_mib": 160.0})
    assert run_scenario(larger, Path()).record.end - plain.end == pytest.approx(2 * loading)


def test_explains_wait_for_adapter() -> None:
    result = run_scenario(scenario(VLLM, "a", "b", "c", None), Path())
    for i in (1, 2):
        assert LedgerKind.ADAPTER in total_by_kind(result.diagnosis.ledger[i])
    assert LedgerKind.ADAPTER not in total_by_kind(result.diagnosis.ledger[3])
    assert result.diagnosis.pressure.on(1)[0].id == 0
    assert 3 not in [blocker.id for blocker in result.diagnosis.pressure.on(1)]


@pytest.mark.parametrize("engine", [{"name": "vllm"}, {"name": "mistralrs"}])
def test_rejects_adapters_without_lora_support(engine: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"request 1 uses the LoRA adapter 'a'.*enable_lora"):
        run_scenario(scenario(engine, None, "a"), Path())
