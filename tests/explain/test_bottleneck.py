"""Tests of the bottleneck of a run: the resource that requests waited for, with its setting."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from simkv.explain.bottleneck import Bottleneck, find_bottleneck
from simkv.explain.ledger_kinds import LedgerKind
from simkv.metrics.run_metrics import compute_slowdown
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.report.narrative import describe_cause
from simkv.scenario.scenario_loader import load
from simkv.schedulers.engine_registry import find_engine_spec

TEXT = """
name: queue
profile: unit-step
workload: {burst: {num_prompts: 12, interval: 0.5, prompt_tokens: 16, output_tokens: 40}}
engine: {name: vllm, num_gpu_blocks: 400, max_model_len: 256, max_num_seqs: 64}
"""


def run(folder: Path, *overrides: str) -> RunResult:
    (folder / "s.yaml").write_text(TEXT)
    return run_scenario(load(folder / "s.yaml", overrides)["run"], folder, intervals=False)


def bottleneck(result: RunResult) -> Bottleneck:
    found = find_bottleneck(result.record, result.diagnosis.ledger, result.record.requests)
    assert found
    return found


def test_busy_slots_are_bottleneck_of_empty_cache(tmp_path: Path) -> None:
    found = bottleneck(result := run(tmp_path, "engine.max_num_seqs=2"))
    assert found.kind is LedgerKind.SLOT
    assert found.running == 2
    waits = (LedgerKind.SLOT, LedgerKind.BEHIND)
    assert found.seconds == pytest.approx(sum(result.diagnosis.totals[kind] for kind in waits))
    # Two requests of 16 to 56 tokens hold 2 to 8 of 399 blocks.
    assert 2 / 399 <= found.kv_use <= 8 / 399
    assert describe_cause(result).startswith(
        "all 2 slots busy (max_num_seqs=2), KV cache only 1 % used. Time of all requests: "
    )


def test_full_cache_is_bottleneck(tmp_path: Path) -> None:
    found = bottleneck(result := run(tmp_path, "engine.num_gpu_blocks=17"))
    assert found.kind is LedgerKind.BLOCKS
    assert found.blocks == 16
    assert found.kv_use > 0.7
    assert describe_cause(result, []).startswith("KV cache full (9")
    assert " of 16 blocks used), up to " in describe_cause(result, [])
    assert describe_cause(result).startswith("10 preemptions because the KV cache was full; ")


def test_full_cache_is_bottleneck_even_if_all_slots_are_busy(tmp_path: Path) -> None:
    """Four requests of 65 to 80 tokens need 5 blocks each, and thus all 20 blocks."""
    found = bottleneck(
        run(
            tmp_path,
            "engine.max_num_seqs=4",
            "engine.num_gpu_blocks=21",
            "workload.burst.prompt_tokens=65",
            "workload.burst.output_tokens=15",
            "engine.enable_prefix_caching=false",
        )
    )
    assert found.kv_use > 0.95
    assert found.kind is LedgerKind.BLOCKS


def test_run_without_waiting_has_no_bottleneck(tmp_path: Path) -> None:
    result = run(tmp_path, "workload.burst.interval=100")
    assert describe_cause(result) == "none; requests hardly waited."


@pytest.mark.parametrize(
    ("kind", "use", "phrase"),
    [
        (LedgerKind.BLOCKS, 0.99, "KV cache full (99 % of 400 blocks used), up to 7 requests"),
        (LedgerKind.BLOCKS, 0.6, "too few free KV blocks for the next request (60 % of 400"),
        (LedgerKind.RESERVED, 0.6, "free KV blocks reserved for running requests (60 % of"),
        (LedgerKind.SLOT, 0.6, "all 64 slots busy (max_num_seqs=64), KV cache 60 % used"),
        (LedgerKind.BUDGET, 0.1, "token budget of each step used up (max_num_batched_tokens="),
        (LedgerKind.ADAPTER, 0.6, "all 1 LoRA slots busy (max_loras=1), KV cache 60 % used"),
        (LedgerKind.RULE, 0.1, "a scheduling rule excluded requests, KV cache only 10 % used"),
    ],
)
def test_describes_each_bottleneck(
    tmp_path: Path, kind: LedgerKind, use: float, phrase: str
) -> None:
    (tmp_path / "s.yaml").write_text(TEXT)
    engine = load(tmp_path / "s.yaml", [])["run"].engine
    assert (
        Bottleneck(kind, 1.0, use, 400, 5, 7)
        .describe(engine, find_engine_spec(engine))
        .startswith(phrase)
    )


@pytest.mark.parametrize(
    ("rate", "cause"), [(1, "none; requests hardly waited ("), (".inf", "the API")]
)
def test_unnoticeable_waits_are_no_cause(tmp_path: Path, rate: object, cause: str) -> None:
    """Requests without any load spend 20 % of their time in the API server, but only 10 ms."""
    (tmp_path / "s.yaml").write_text(
        "name: short\n"
        "hardware: {gpu: H100, model: llama-3.1-8b}\n"
        f"workload: {{arrivals: {{num_prompts: 100, request_rate: {rate}, prompt_tokens: 100, "
        "output_tokens: 5}}\n"
        "engine: {name: vllm, max_model_len: 8192}\n"
    )
    result = run_scenario(load(tmp_path / "s.yaml")["run"], tmp_path, intervals=False)
    assert describe_cause(result).startswith(cause)
    found = bottleneck(result)
    assert found.kind is LedgerKind.FRONT_END
    assert found.seconds > 0.1 * sum(result.diagnosis.totals.values())


def test_shared_steps_are_the_cause_of_slow_requests_that_do_not_wait(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(
        "name: shared\n"
        "hardware: {gpu: A100, model: llama-3.1-8b}\n"
        "workload: {arrivals: {num_prompts: 400, request_rate: 12, prompt_tokens: 1000, "
        "output_tokens: 200, seed: 1}}\n"
        "engine: {name: vllm, max_model_len: 8192}\n"
    )
    result = run_scenario(load(tmp_path / "s.yaml")["run"], tmp_path, intervals=False)
    found = re.match(r"many requests share each step.* take (\S+) times", describe_cause(result))
    assert found, describe_cause(result)
    assert float(found[1]) == pytest.approx(compute_slowdown(result.record), abs=0.05)
    assert float(found[1]) >= 3
