"""Tests of the ``hardware`` section, and of the costs, blocks and ranks that it determines."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.core.request import Prompt
from simkv.costs.hardware.model_gpu_catalog import find_architecture
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.hardware_section import HardwareSection, build_hardware
from simkv.scenario.run_fields import find_differences
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_costs import list_replica_costs
from simkv.scenario.scenario_loader import load
from simkv.scenario.scenario_schema import json_schema
from simkv.scenario.scenario_writer import to_yaml
from simkv.schedulers.engine_registry import build_scheduler
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.execution_settings import derive_settings
from simkv.schedulers.vllm.config import VllmConfig
from simkv.study.job_runner import open_pooled_runner
from simkv.study.plan.capacity_plan import count_gpus, make_plan
from simkv.study.plan.plan_preparation import prepare
from simkv.study.plan.plan_request import PlanRequest
from simkv.study.plan.plan_summary import compare_plans, describe_basis
from simkv.study.run_digest import compute_digest

ROOT = Path(__file__).parents[2]
TEXT = """name: mine
workload: {requests: [{arrival: 0, prompt_tokens: 1000, output_tokens: 20}]}
engine: {name: vllm, num_gpu_blocks: auto}
hardware: {gpu: h100_sxm, model: llama-3.1-8b}
"""


def file(folder: Path, text: str = TEXT) -> Path:
    path = folder / "s.yaml"
    path.write_text(text)
    return path


def one(folder: Path, *overrides: str, text: str = TEXT) -> Scenario:
    return load(file(folder, text), overrides)["run"]


def blocks(scenario: Scenario) -> int:
    assert isinstance(scenario.engine, VllmConfig)
    return scenario.engine.num_gpu_blocks


def test_all_spellings_give_the_same_scenario(tmp_path: Path) -> None:
    first = one(tmp_path)
    others = ("hardware.gpu=H100-SXM", "hardware.gpu=NVIDIA H100 80GB HBM3")
    for other in others:
        assert one(tmp_path, other) == first
    assert one(tmp_path, "hardware.model=Llama 3.1_8B") == first
    assert first.hardware
    assert first.hardware.model == "meta-llama/Llama-3.1-8B"
    assert find_differences(first, one(tmp_path, "hardware.gpu=h100-sxm")) == []


def test_layer_groups_follow_from_the_model_if_the_release_has_groups(tmp_path: Path) -> None:
    def engine(*overrides: str) -> VllmConfig:
        found = one(tmp_path, "hardware.model=NVIDIA-Nemotron-Nano-9B-v2", *overrides).engine
        assert isinstance(found, VllmConfig)
        return found

    newest, given = engine(), engine("engine.mamba_prefill_checkpoints=false")
    assert newest.kv_cache_groups == (0, *["mamba"] * 7)
    assert (newest.block_size, newest.mamba_prefill_checkpoints) == (1312, True)
    assert (given.block_size, given.mamba_prefill_checkpoints) == (1312, False)
    assert not engine("engine.variant=0.31.0").mamba_prefill_checkpoints
    assert engine("engine.variant=0.20.0").kv_cache_groups == (0,)
    assert engine("engine.kv_cache_groups=[0]").kv_cache_groups == (0,)


def test_costs_and_blocks_follow_from_the_hardware(tmp_path: Path) -> None:
    plain, wider, smaller = (
        one(tmp_path, *overrides)
        for overrides in ((), ("hardware.tp=2",), ("hardware.weights=fp8", "hardware.kv=fp8"))
    )
    assert blocks(plain) < blocks(wider)
    assert blocks(smaller) > 2 * blocks(plain)
    times = {
        name: run_scenario(scenario, tmp_path).summary["e2e_ms"]["mean"]
        for name, scenario in {"plain": plain, "wider": wider, "smaller": smaller}.items()
    }
    assert times["wider"] < times["plain"]
    assert times["smaller"] < times["plain"]
    names = [spec.profile.gpu for spec in run_scenario(plain, tmp_path).specs]
    assert names == ["NVIDIA H100 80GB HBM3"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["hardware.gpu=H101"], "hardware.gpu: unknown GPU 'H101'"),
        (["hardware.model=llama-4"], "hardware.model: unknown model 'llama-4'"),
        (["hardware.model=none.json"], "hardware.model: file"),
        (["hardware.pp=2"], "hardware.pp: must be 1, got 2: pipeline parallelism is not modelled"),
        (
            ["hardware.tp=3"],
            "hardware: tp: 3 GPUs cannot split the 32 heads and 8 KV heads",
        ),
        (
            ["hardware.tp=4", "hardware.gpus_per_node=2"],
            "hardware: gpus_per_node: the model needs 4 GPUs, but a node has 2",
        ),
        (["hardware.tp=16"], "the model needs 16 GPUs, but a node has 8"),
        (["hardware.ep=2"], "hardware: ep: meta-llama/Llama-3.1-8B has no experts"),
        (["hardware.weights=fp7"], "hardware.weights: unknown value 'fp7'"),
        (["hardware.interconnect=Ethernet"], "hardware.interconnect: "),
        (["hardware.interconnect={latency_us: 1}"], "interconnect.bandwidth_gb_s: missing"),
        (["engine.variant=9"], "engine.variant: YAML reads 9 as a number"),
        (["hardware=5"], "hardware: should be a mapping of fields"),
        (["hardware.tables=none"], "hardware.tables: directory"),
        (["hardware.gpu=L4", "hardware.interconnect=NVLink"], "NVIDIA L4 has no NVLink"),
        (["hardware.modle=x"], "hardware.modle: unknown field (did you mean 'model'?)"),
        (
            ["hardware.gpu=L4", "hardware.model=llama-3.1-70b"],
            "engine.num_gpu_blocks: meta-llama/Llama-3.1-70B does not fit on 1 x NVIDIA L4",
        ),
        (["profile=unit-step"], "engine.num_gpu_blocks: auto requires hardware"),
        (["hardware=null"], "profile: missing; set profile or hardware"),
    ],
)
def test_errors_name_the_field(tmp_path: Path, overrides: list[str], words: str) -> None:
    if overrides == ["hardware=null"]:
        overrides = ["hardware=null", "engine.num_gpu_blocks=1000"]
    with pytest.raises(InputError) as caught:
        one(tmp_path, *overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_multi_node_hardware_requires_a_measured_link(tmp_path: Path) -> None:
    within, between = (
        f"hardware.interconnect={{latency_us: {us}, bandwidth_gb_s: {rate}}}"
        for us, rate in ((10, 400), (30, 25))
    )
    near, far = (
        run_scenario(one(tmp_path, "hardware.tp=16", link), tmp_path).summary["e2e_ms"]["mean"]
        for link in (within, between)
    )
    assert near < far
    one(tmp_path, "hardware.gpu=GB200", "hardware.tp=16")
    one(tmp_path, "hardware.dp=16")  # ranks of a dense model share nothing


RANKS = """name: ranks
workload: {burst: {num_prompts: 8, prompt_tokens: 1000, output_tokens: 21}}
engine: {name: sglang, max_total_num_tokens: auto, enable_dp_attention: true, dp_size: 4}
hardware: {gpu: H200, model: deepseek-v3, dp: 4, tp: 2, ep: 8, weights: fp8_block}
"""


def test_data_parallel_ranks_are_replicas_in_lockstep(tmp_path: Path) -> None:
    scenario = one(tmp_path, text=RANKS)
    assert scenario.fleet
    assert (scenario.fleet.replicas, scenario.fleet.lockstep) == (4, True)
    assert one(tmp_path, "fleet={replicas: 4, lockstep: true}", text=RANKS) == scenario
    assert count_gpus(scenario, None) == 8
    run = run_scenario(scenario, tmp_path, intervals=False)
    assert run.record.requests.keys() == set(range(8))
    other = one(tmp_path, "engine.stream_interval=10", text=RANKS)
    slow = run_scenario(other, tmp_path, intervals=False)
    # All ranks have the same requests, so the tenth token is sent after ten equal steps.
    assert slow.summary["tpot_ms"] == run.summary["tpot_ms"]
    assert slow.summary["ttft_ms"] == run.summary["ttft_ms"]
    assert slow.summary["itl_ms"]["mean"] == pytest.approx(10 * run.summary["itl_ms"]["mean"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.dp_size=2", "engine: dp_size: must equal hardware.dp (4), got 2"),
        ("engine.enable_dp_attention=false", "use 2 or more with enable_dp_attention"),
        (
            "engine.scheduler_recv_interval=10",
            "scheduler_recv_interval: values above 1 are not modelled with",
        ),
        ("fleet={replicas: 4}", "{replicas: 4, lockstep: true}; set this or remove"),
        ("fleet={replicas: 2, lockstep: true}", "{replicas: 4, lockstep: true}; set this or"),
    ],
)
def test_rejects_inconsistent_rank_counts(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        one(tmp_path, override, text=RANKS)


def test_each_rank_gets_its_share_of_the_server_limits() -> None:
    """SGLang divides the limits in ``_handle_data_parallelism`` (arg_groups/parallel_hook.py)."""
    config = SglangConfig(
        max_running_requests=1000,
        chunked_prefill_size=16384,
        enable_dp_attention=True,
        dp_size=8,
    )
    assert (config.rows, config.chunk, config.conservativeness) == (125, 2048, 0.3)
    assert derive_settings(config).max_num_batched_tokens == 2048
    assert derive_settings(config).max_num_seqs == 125
    scheduler = build_scheduler(config)
    for i in range(3):
        scheduler.add(Prompt(i, 1000, 10))
    assert scheduler.schedule().scheduled == [(0, 1000), (1, 1000), (2, 48)]


SMALL = TEXT.replace("auto", "1000, max_model_len: 8192")


def test_rejects_hardware_together_with_a_profile(tmp_path: Path) -> None:
    both = SMALL + "profile: unit-step\n"
    with pytest.raises(InputError, match=r"s.yaml:5: profile: cannot be combined with hardware"):
        load(file(tmp_path, both))
    variants = SMALL + "variants: {a: {}, b: {profile: unit-step}}\n"
    found = load(file(tmp_path, variants))
    assert found["a"].hardware
    assert not found["b"].hardware
    assert found["b"].profile == "unit-step"
    back = load(file(tmp_path, to_yaml(found)))
    assert back == found
    plain = one(tmp_path, "profile=unit-step", text=SMALL)
    assert (plain.profile, plain.hardware) == ("unit-step", None)


def test_saved_scenario_gives_the_same_run(tmp_path: Path) -> None:
    scenario = one(tmp_path)
    (tmp_path / "again").mkdir()
    again = load(file(tmp_path / "again", to_yaml({"run": scenario})))["run"]
    assert again == scenario
    assert compute_digest(again, tmp_path) == compute_digest(scenario, tmp_path)


FEW_BLOCKS = ("engine.num_gpu_blocks=900", "engine.max_model_len=8192")


def test_digest_covers_the_costs_of_the_hardware(tmp_path: Path) -> None:
    given = [
        compute_digest(one(tmp_path, *FEW_BLOCKS, *more), tmp_path)
        for more in ((), ("hardware.kv=fp8",), ("hardware.interconnect=PCIe", "hardware.tp=2"))
    ]
    assert len(set(given)) == 3


def test_replica_groups_override_single_fields(tmp_path: Path) -> None:
    text = TEXT + (
        "fleet: {replicas: [{count: 2}, {hardware: {gpu: H200, tp: 2}}, {profile: unit-step,\n"
        "  engine: {num_gpu_blocks: 700}}]}\n"
    )
    scenario = one(tmp_path, text=text)
    costs = [costs for _, costs in list_replica_costs(scenario)]
    assert [c.profile for c in costs] == [None, None, "unit-step"]
    assert [(c.hardware.gpu, c.hardware.tp) for c in costs if c.hardware] == [
        ("NVIDIA H100 80GB HBM3", 1),
        ("NVIDIA H200", 2),
    ]
    sizes = [c.engine.num_gpu_blocks for c in costs]  # type: ignore[attr-defined]
    assert sizes[0] == blocks(scenario)
    assert sizes[1] > 2 * sizes[0]
    assert sizes[2] == 700
    with pytest.raises(InputError, match="auto requires hardware"):
        one(tmp_path, text=text.replace(",\n  engine: {num_gpu_blocks: 700}", ""))
    wrong = text.replace("tp: 2", "tp: 5")
    with pytest.raises(InputError, match=r"s.yaml:5: hardware: tp: 5 GPUs cannot split"):
        one(tmp_path, text=wrong)


def test_reads_a_custom_model_from_its_config(tmp_path: Path) -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1000,
    }
    (tmp_path / "small.json").write_text(json.dumps(config))
    scenario = one(tmp_path, "hardware.model=small.json", "engine.num_gpu_blocks=600")
    assert scenario.hardware
    assert build_hardware(scenario.hardware).architecture.name == "small"
    (tmp_path / "small.json").write_text(json.dumps({**config, "model_type": "rwkv"}))
    with pytest.raises(InputError, match=r"small.json: model_type: unsupported model type 'rwkv'"):
        one(tmp_path, "hardware.model=small.json")


def test_measured_link_and_formats_are_passed_to_the_hardware() -> None:
    section = HardwareSection.model_validate(
        {
            "gpu": "RTX 4090",
            "model": "nvidia/Llama-3.3-70B-Instruct-FP4",
            "tp": 2,
            "interconnect": {"latency_us": 20, "bandwidth_gb_s": 16},
        }
    )
    made = build_hardware(section)
    assert made.architecture.layers == find_architecture("llama-3.1-70b").layers
    assert (made.weights, made.interconnect.kind) == ("nvfp4", "measured")
    assert (made.interconnect.latency, made.interconnect.bandwidth) == (20e-6, 16e9)


def test_sglang_cache_size_is_in_tokens(tmp_path: Path) -> None:
    text = TEXT.replace("{name: vllm, num_gpu_blocks: auto}", "{name: sglang, ENGINE}")
    text = text.replace("ENGINE", "page_size: 16, max_total_num_tokens: auto")
    engine = one(tmp_path, text=text).engine
    assert isinstance(engine, SglangConfig)
    assert engine.max_total_num_tokens > 100_000
    assert engine.max_total_num_tokens % 16 == 0


def test_schema_includes_hardware_and_auto() -> None:
    definitions: dict[str, Any] = json_schema()["$defs"]
    assert "gpu" in definitions["HardwareSection"]["properties"]
    assert "required" not in definitions["PartHardwareSection"]
    memory = definitions["VllmConfig"]["properties"]["num_gpu_blocks"]
    assert {"const": "auto", "type": "string"} in memory["anyOf"]


def test_plan_price_includes_every_gpu_of_a_replica(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("h100_sxm: 2.0\nH200: 3.0\n")
    request = PlanRequest(
        smallest="fleet.replicas=1..2",
        objectives=["starved<=0"],
        prices=str(tmp_path / "prices.yaml"),
        overrides=("hardware.tp=2",),
    )
    (prepared,) = prepare(file(tmp_path), request)
    assert (prepared.price, prepared.gpu) == (2.0, "NVIDIA H100 80GB HBM3")


def test_plan_over_hardware_finds_the_cheapest(tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text("H100: 2.0\nL40S: 0.9\nL4: 0.5\n")
    request = PlanRequest(
        smallest="fleet.replicas=1..2",
        objectives=["ttft_ms.p99<=5000"],
        prices=str(tmp_path / "prices.yaml"),
        each=("hardware.gpu=H100-SXM,L40S,L4", "hardware.tp=1,2"),
        overrides=("hardware.model=qwen3-14b", "engine.max_model_len=8192"),
        cliff=False,
    )
    left_out: list[str] = []
    prepared = prepare(file(tmp_path), request, left_out.append)
    assert [one.label for one in prepared] == [
        "hardware.gpu=H100-SXM hardware.tp=1",
        "hardware.gpu=H100-SXM hardware.tp=2",
        "hardware.gpu=L40S hardware.tp=1",
        "hardware.gpu=L40S hardware.tp=2",
        "hardware.gpu=L4 hardware.tp=2",
    ]
    (told,) = left_out
    assert told.startswith("hardware.gpu=L4 hardware.tp=1: skipped: ")
    assert "Qwen/Qwen3-14B does not fit on 1 x NVIDIA L4" in told
    with open_pooled_runner(None) as bench:
        plans = [make_plan(one, bench) for one in prepared]
    lines = compare_plans(plans)
    assert lines[0] == "Cheapest first:"
    cheapest = "  hardware.gpu=L40S hardware.tp=1: fleet.replicas = 1, 1 GPU, 0.90 per hour, "
    assert lines[1].startswith(cheapest)
    assert re.search(r" per million output tokens \((data sheet|composed) ±\d+ %\)$", lines[1])
    assert "(composed ±" in "\n".join(lines)
    assert "Step times have different bases (composed, data sheet)" in "\n".join(lines)
    assert len(lines) == 7
    basis = describe_basis(plans)
    assert all("held_out" not in line for line in basis)
    times = [line for line in basis if line.startswith("Step times: ")]
    assert 1 < len(times) <= 5
    assert len({line.partition(" (hardware.gpu=")[0] for line in times}) == len(times)
    with pytest.raises(InputError, match="does not fit"):
        prepare(file(tmp_path), request.model_copy(update={"each": ("hardware.gpu=L4",)}))


def host(folder: Path, *overrides: str) -> tuple[int, float]:
    """Return the number of host blocks, and the KV bytes per token on one GPU."""
    found = one(folder, "engine.kv_offloading_size=64", *overrides)
    assert isinstance(found.engine, VllmConfig)
    return found.engine.num_cpu_blocks, found.offload.bytes_per_token


def test_host_memory_in_gib_gives_blocks_of_all_gpus(tmp_path: Path) -> None:
    token = 131072  # KV bytes per token of Llama-3.1-8B
    assert host(tmp_path) == (64 * 2**30 // (16 * token), token)
    assert host(tmp_path, "hardware.tp=2") == (64 * 2**30 // (16 * token), token / 2)
    # Eight KV heads of 128 two-byte numbers in 32 layers; with 16 GPUs, each GPU has a whole head.
    assert host(tmp_path, "hardware.tp=16", "hardware.gpus_per_node=16")[0] == 64 * 2**30 // (
        2 * 16 * token
    )
    assert host(tmp_path, "offload.bytes_per_token=5")[1] == 5.0
    assert host(tmp_path, "engine.block_size=32")[0] == 64 * 2**30 // (32 * token)
    assert one(tmp_path).offload.bytes_per_token == token


def test_newer_releases_store_one_host_copy_of_latents(tmp_path: Path) -> None:
    def deepseek(variant: str) -> int:
        of = ("hardware.model=DeepSeek-V3", "hardware.gpu=h200", "hardware.tp=8")
        return host(tmp_path, *of, f"engine.variant={variant}")[0]

    token = 61 * 576 * 2
    assert deepseek("0.27.0") == 64 * 2**30 // (-(-16 * token // 4096) * 4096)
    assert deepseek("0.26.0") == 64 * 2**30 // (-(-8 * 16 * token // 4096) * 4096)


def test_without_hardware_host_memory_requires_bytes_per_token(tmp_path: Path) -> None:
    text = """name: mine
workload: {requests: [{arrival: 0, prompt_tokens: 100, output_tokens: 20}]}
engine: {name: vllm, num_gpu_blocks: 1000, kv_offloading_size: 0.5}
profile: costs.json
"""
    (tmp_path / "costs.json").write_text((ROOT / "scenarios" / "assumed-costs.json").read_text())
    found = one(tmp_path, "offload.bytes_per_token=300", text=text).engine
    assert isinstance(found, VllmConfig)
    assert found.num_cpu_blocks == 2**29 // 8192
    with pytest.raises(InputError, match=r"s\.yaml:3: .*size: requires the size of a block"):
        one(tmp_path, text=text)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.kv_offloading_size=-1", "must be a number of GiB greater than 0, got -1"),
        ("engine.kv_offloading_size=lots", "must be a number of GiB greater than 0, got 'lots'"),
        ("engine.kv_offloading_size=0.0001", "less than the size of one block .2097152 bytes"),
        ("engine.num_cpu_blocks=5", "num_cpu_blocks sets the same size in blocks"),
        ("engine.kv_offloading_backend=lmcache", "must be native, got 'lmcache'"),
        ("engine.variant=0.20.0", "num_cpu_blocks: not modelled for vLLM 0.20.0"),
        ("hardware.gpu=foo", "hardware.gpu: unknown GPU 'foo'"),
    ],
)
def test_rejects_invalid_host_memory_sizes(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        one(tmp_path, "engine.kv_offloading_size=64", override)


def test_replica_group_has_its_own_host_blocks(tmp_path: Path) -> None:
    groups = (
        "[{engine: {kv_offloading_size: 32}}, {hardware: {tp: 8, gpus_per_node: 16, gpu: H200}}]"
    )
    text = TEXT.replace("auto}", "auto, kv_offloading_size: 64}")
    found = one(tmp_path, text=f"{text}fleet: {{replicas: {groups}}}\n")
    assert found.fleet
    assert isinstance(found.fleet.replicas, tuple | list)
    engines = [found.engine, *(group.engine for group in found.fleet.replicas)]
    assert [getattr(engine, "num_cpu_blocks", None) for engine in engines] == [32768, 16384, 32768]


def test_schema_includes_host_memory_in_gib() -> None:
    known = json_schema()["$defs"]["VllmConfig"]["properties"]
    assert {"kv_offloading_size", "kv_offloading_backend", "num_cpu_blocks"} <= known.keys()
