"""Tests of KV in host memory: copy times, steps that wait, and recorded counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.explain.ledger_kinds import KIND_LABELS, LedgerKind
from simkv.explain.wait_ledger import total_by_kind
from simkv.metrics.run_metrics import summarize
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario import Scenario

SLOW = {"bytes_per_token": 1e6, "host_gb_s": 1.0, "latency_us": 0.0}  # 1 ms per token


def scenario(*requests: dict[str, Any], engine: Any = None, **link: float) -> Scenario:
    """Return a scenario with four blocks of 16 tokens on the GPU, and 100 blocks in host memory."""
    base = {"name": "vllm", "num_gpu_blocks": 5, "max_model_len": 64, "num_cpu_blocks": 100}
    tree = {
        "name": "t",
        "profile": "unit-step",
        "workload": {"requests": [*requests]},
        "engine": {**base, "async_scheduling": False, **(engine or {})},
        "offload": {**SLOW, **link},
    }
    return Scenario.model_validate(tree)


def ask(arrival: float, group: str, outputs: int = 2, shared: int = 48) -> dict[str, Any]:
    """Return a request with a prompt of 48 tokens; the group shares the given number of these
    tokens.
    """
    named = {"prefix_group": group, "prefix_tokens": shared}
    return {"arrival": arrival, "prompt_tokens": 48, "output_tokens": outputs, **named}


#: A prompt, a second prompt that evicts its blocks on the GPU, and the first prompt again.
AGAIN = [ask(0, "a"), ask(100, "b", 8), ask(200, "a")]


def test_loads_computed_kv_from_host_memory() -> None:
    """If the prompt is repeated, 48 tokens load in 48 ms, and the last token is recomputed."""
    result = run_scenario(scenario(*AGAIN), Path())
    record = result.record
    first = record.requests[2].chunks[0]
    assert (first.tokens, first.context) == (1, 47)
    # The copy starts immediately; an idle pass of 1 s must end before the scheduler notices the end
    # of the copy.
    assert record.steps.start[first.row] == pytest.approx(201.048)
    assert summarize(record)["kv_tiers"] == {
        "gpu_hit_rate": 0.0,
        "host_hit_rate": pytest.approx(100 * 47 / 144),
        "loaded_tokens": 48,
        "stored_tokens": 96,
    }
    waits = total_by_kind(result.diagnosis.ledger[2])
    assert waits[LedgerKind.KV] == pytest.approx(record.steps.start[first.row] - 200)
    assert KIND_LABELS[LedgerKind.KV] == "waiting for KV from host memory"


def test_recomputes_without_host_memory() -> None:
    record = run_scenario(scenario(*AGAIN, engine={"num_cpu_blocks": 0}), Path()).record
    assert record.requests[2].chunks[0].context == 0
    assert "kv_tiers" not in summarize(record)


def test_loads_last_block_of_cached_prompt() -> None:
    """The prefix cache does not provide the last token, and thus not its block; host memory has
    this block.
    """
    result = run_scenario(scenario(ask(0, "a"), ask(100, "a")), Path())
    tiers = summarize(result.record)["kv_tiers"]
    assert tiers["gpu_hit_rate"] == pytest.approx(100 * 31 / 96)
    assert tiers["host_hit_rate"] == pytest.approx(100 * 16 / 96)
    assert tiers["loaded_tokens"] == 16


def test_waits_for_whole_load_of_shared_blocks() -> None:
    asks = [*AGAIN[:2], ask(200, "a"), ask(200, "a", shared=16)]
    engine = {"num_gpu_blocks": 9, "max_model_len": 128}
    asks[1] = {"arrival": 100, "prompt_tokens": 120, "output_tokens": 8}
    result = run_scenario(scenario(*asks, engine=engine), Path())
    assert total_by_kind(result.diagnosis.ledger[3])[LedgerKind.KV] == pytest.approx(1.048)


def test_step_waits_for_copy_of_reused_block() -> None:
    """The copy of the first prompt takes 48 s, and it holds all blocks."""
    asks = [ask(0, "a"), ask(10, "b")]
    plain = run_scenario(scenario(*asks), Path()).record
    waiting = scenario(*asks, bytes_per_token=1e9)
    record = run_scenario(waiting, Path()).record
    row = record.requests[1].chunks[0].row
    assert plain.steps.start[row] < 12
    assert record.steps.start[row] >= 48


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"enable_prefix_caching": False}, "enable_prefix_caching: False is not modelled"),
        ({"block_size": 1, "num_gpu_blocks": 100}, "block_size: 1 is not modelled"),
        ({"kv_cache_groups": [0, 32], "num_gpu_blocks": 100}, "kv_cache_groups"),
        ({"num_speculative_tokens": 2}, "num_speculative_tokens: 2 is not modelled"),
        ({"variant": "0.23.0"}, "not modelled for vLLM 0.23.0, only since 0.24"),
    ],
)
def test_rejects_incompatible_settings(knobs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        scenario(ask(0, "a"), engine=knobs)


def test_rejects_offloading_in_lockstep_or_disaggregation() -> None:
    tree = scenario(ask(0, "a")).model_dump(exclude_unset=True)
    with pytest.raises(ValueError, match="lockstep cannot be combined with KV in host"):
        Scenario.model_validate({**tree, "fleet": {"replicas": 2, "lockstep": True}})
    groups = [{"role": "prefill"}, {"role": "decode"}]
    transfer = {"bytes_per_token": 1, "bandwidth": 1000.0}
    apart = {"replicas": groups, "kv_transfer": transfer}
    with pytest.raises((InputError, ValueError), match="num_cpu_blocks"):
        run_scenario(Scenario.model_validate({**tree, "fleet": apart}), Path())


def test_scenario_sets_link_bandwidth() -> None:
    narrow = run_scenario(scenario(*AGAIN), Path()).record.requests[2].first_token
    faster = run_scenario(scenario(*AGAIN, host_gb_s=48.0), Path()).record.requests[2].first_token
    assert faster is not None
    assert narrow is not None
    assert narrow - faster == pytest.approx(0.047, abs=0.011)


ON_DISK = {"secondary_tiers": ["fs"], "num_cpu_blocks": 4}
#: Disk: 1 ms per token read, 0.5 ms per token written, and 1 ms latency each.
DISK = {"disk_read_gb_s": 1.0, "disk_write_gb_s": 2.0, "disk_latency_us": 1000.0}


def test_loads_kv_from_disk() -> None:
    """Host memory has four blocks, and each prompt needs three, so the other prompts evict the
    first prompt.
    """
    asks = [ask(0, "a"), ask(100, "b", 8), ask(200, "c"), ask(300, "a")]
    result = run_scenario(scenario(*asks, engine=ON_DISK, **DISK), Path())
    record = result.record
    assert summarize(record)["kv_tiers"] == {
        "gpu_hit_rate": 0.0,
        "host_hit_rate": 0.0,
        "disk_hit_rate": pytest.approx(100 * 47 / 192),
        "loaded_tokens": 48,
        "stored_tokens": 144,
        "read_tokens": 48,
        "written_tokens": 144,
    }
    waits = total_by_kind(result.diagnosis.ledger[3])
    # The lookup takes 1 ms and the read 49 ms; after an idle pass of 1 s, the scheduler starts the
    # load of 48 ms.
    assert waits[LedgerKind.DISK] == pytest.approx(0.001 + 0.049)
    assert waits[LedgerKind.KV] == pytest.approx(1.048)
    assert KIND_LABELS[LedgerKind.DISK] == "waiting for KV from disk"


def test_new_request_waits_for_disk_lookup() -> None:
    result = run_scenario(scenario(ask(0, "a"), engine=ON_DISK, **DISK), Path())
    assert total_by_kind(result.diagnosis.ledger[0])[LedgerKind.DISK] == pytest.approx(0.001)


def test_prompt_larger_than_host_memory_is_livelock() -> None:
    """Each block of the prompt evicts the next one, as in vLLM 0.33.0 (``disk-`` recordings)."""
    asks = [
        {**ask(100 * i, group, shared=96), "prompt_tokens": 96} for i, group in enumerate("aba")
    ]
    small = {"num_gpu_blocks": 8, "max_model_len": 112, "max_num_batched_tokens": 32}
    engine = {**ON_DISK, **small, "max_num_seqs": 4}
    record = run_scenario(scenario(*asks, engine=engine, **DISK), Path()).record
    assert record.engine_halt is not None
    assert (record.engine_halt.kind, record.engine_halt.requests) == ("livelock", [2])
    assert record.copied is not None
    assert (record.copied.read_tokens or 0) > 10 * 96
    room = run_scenario(scenario(*asks, engine={**engine, "num_cpu_blocks": 6}, **DISK), Path())
    assert room.record.engine_halt is None
    assert room.record.requests[2].disk_tokens == 96


def test_rejects_unsupported_tiers() -> None:
    for knobs, said in (
        ({"secondary_tiers": ["fs"], "num_cpu_blocks": 0}, "needs num_cpu_blocks of at least 1"),
        ({"secondary_tiers": ["fs", "fs"]}, "more than one tier is not modelled"),
    ):
        with pytest.raises(ValueError, match=said):
            scenario(ask(0, "a"), engine=knobs)
