"""Tests of models and GPUs of the catalog, and of the number of KV blocks that fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.costs.hardware.cache_size_log import read_cache_size
from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.costs.hardware.kv_capacity import (
    KvCapacity,
    can_checkpoint_states,
    compute_kv_capacity,
    kv_groups,
)
from simkv.costs.hardware.model_architecture import Mamba
from simkv.costs.hardware.model_gpu_catalog import (
    find_architecture,
    find_gpu,
    find_model,
    gpus,
    models,
)
from simkv.costs.hardware.model_memory import weight_bytes
from simkv.costs.hardware.replica_hardware import make_hardware
from simkv.costs.operators.configuration_kind import find_gpu_family
from simkv.schedulers.vllm.config import VllmConfig


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("meta-llama/Llama-3.1-8B", 8.03),
        ("Llama-2-7b-hf", 6.74),
        ("codellama/CodeLlama-34b-Instruct-hf", 33.74),
        ("Llama-3.1-70B-Instruct", 70.55),
        ("mistralai/Mixtral-8x7B-v0.1", 46.70),
        ("Qwen/Qwen2.5-0.5B", 0.494),
        ("Qwen3-30B-A3B-Instruct-2507", 30.53),
        ("phi-4", 14.66),
        ("mistral-small", 23.57),
    ],
)
def test_parameter_counts_match_published_values(name: str, billions: float) -> None:
    assert find_model(name).parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_kv_bytes_match_recorded_values() -> None:
    assert find_model("Llama-3.1-8B").kv_bytes_per_token == 131072
    assert find_model("Llama-2-7b-hf").kv_bytes_per_token == 524288
    assert find_model("CodeLlama-34b-Instruct-hf").kv_bytes_per_token == 196608


def test_names_are_unique_and_match_longer_names() -> None:
    for known in (models(), gpus()):
        names = [name for item in known for name in (item.name, *item.also)]
        assert len({name.casefold() for name in names}) == len(names)
    long = "2 x NVIDIA RTX PRO 6000 Blackwell Server 96 GB"
    assert find_gpu(long).name == "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    assert find_gpu("NVIDIA H100 80GB (by the evaluator)").name == "NVIDIA H100 80GB HBM3"
    assert find_gpu("H200-SXM").name == "NVIDIA H200"
    assert find_gpu("NVIDIA A100-SXM4-40GB").memory_bytes < 50e9
    with pytest.raises(InputError, match="unknown GPU 'TPU v9'"):
        find_gpu("TPU v9")
    for name in ("my H100", "foo-H100", "H100 foo", "NVIDIA H100 MIG 1g.10gb"):
        with pytest.raises(InputError, match=r"unknown GPU .*; nearest: .*NVIDIA H100 80GB HBM3"):
            find_gpu(name)
    with pytest.raises(InputError, match=r"nearest: meta-llama/Llama-3.1-8B, "):
        find_model("meta-llama/Llama-3.1-8")


def room(model: str, gpu: str, tokens: int = 2048, **hardware: Any) -> KvCapacity:
    """Return the KV capacity as in vLLM 0.19.0 with 256 sequences."""
    knobs = VllmConfig(variant="0.19.0", max_num_batched_tokens=tokens, startup_check=False)
    made = make_hardware(find_gpu(gpu), find_architecture(model), **hardware)
    return compute_kv_capacity(made, find_execution_settings(knobs))


def test_expert_parallelism_splits_only_experts() -> None:
    model, gpu = find_architecture("Qwen3-30B-A3B"), find_gpu("H100")
    experts = find_model("Qwen3-30B-A3B").mlp_parameters
    whole = weight_bytes(make_hardware(gpu, model))
    assert whole == pytest.approx(2 * model.parameters, rel=1e-6)
    half = weight_bytes(make_hardware(gpu, model, dp=2, ep=2))
    assert whole - half == pytest.approx(experts, rel=1e-6)
    fp8 = weight_bytes(make_hardware(gpu, model, experts="fp8"))
    assert whole - fp8 == pytest.approx(experts, rel=1e-6)


def test_reports_weights_that_do_not_fit() -> None:
    fit = room("Llama-3.1-70B", "L4")
    assert fit.num_gpu_blocks == 0
    assert "meta-llama/Llama-3.1-70B does not fit on 1 x NVIDIA L4: per GPU, 21.2 GB" in fit.refusal


def test_tensor_parallelism_splits_weights_and_kv() -> None:
    one, two, sixteen = (room("Llama-3.1-8B", "H100", tp=tp) for tp in (1, 2, 16))
    assert two.block_bytes * 2 == one.block_bytes
    assert two.num_gpu_blocks > 2 * one.num_gpu_blocks
    assert sixteen.block_bytes * 8 == one.block_bytes  # each GPU has one of the 8 KV heads


def test_latents_are_replicated_and_layer_groups_share_blocks() -> None:
    wide, narrow = (room("DeepSeek-V3", "H200", tp=tp) for tp in (8, 16))
    assert wide.block_bytes == narrow.block_bytes == 61 * 576 * 2 * 16
    assert room("DeepSeek-V3", "H200", tp=8, kv="fp8").block_bytes == wide.block_bytes // 2
    gpt = room("gpt-oss-120b", "H100")  # 18 layers with a sliding window and 18 without
    assert gpt.block_bytes == 18 * 2 * 8 * 64 * 2 * 16


@pytest.mark.parametrize(
    ("model", "tp", "given", "size", "states"),
    [  # as logged by vLLM: vllm-project/vllm#36010, #42406; Nemotron 3 Nano has 2096, too
        ("Qwen3.5-27B", 2, 16, 784, 3),
        ("Qwen3.5-35B-A3B", 2, 64, 1088, 3),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", 1, 16, 2096, 4),
    ],
)
def test_blocks_are_large_enough_for_a_state(
    model: str, tp: int, given: int, size: int, states: int
) -> None:
    hardware = make_hardware(find_gpu("H100"), find_architecture(model), tp=tp)
    assert kv_groups(hardware) == [0, *["mamba"] * states]
    found = compute_kv_capacity(hardware, find_execution_settings(VllmConfig(block_size=given)))
    assert found.block_size == size
    before = compute_kv_capacity(
        hardware, find_execution_settings(VllmConfig(block_size=given, variant="0.20.0"))
    )
    assert before.block_size == given
    assert found.block_bytes * given == before.block_bytes * size  # equal bytes per token


@pytest.mark.parametrize(
    ("model", "groups", "checkpointing"),
    [  # as computed by get_kv_cache_groups of vLLM 0.21.0 to 0.33.0
        ("Jamba-v0.1", [0, *["mamba"] * 7], False),
        ("NVIDIA-Nemotron-Nano-9B-v2", [0, *["mamba"] * 7], True),
        ("granite-4.0-h-small", [0, *["mamba"] * 9], True),
        ("Bamba-9B-v2", [0, *["mamba"] * 10], True),
        ("Qwen3.5-27B", [0, *["mamba"] * 3], False),
        ("gpt-oss-20b", [0, 128], False),
        ("Llama-4-Scout-17B-16E", [0, *["chunked-8192"] * 3], False),
        ("gemma-4-31B-it", ["0/32", *[1024] * 5], False),
        ("gemma-4-26B-A4B-it", ["0/32", *[1024] * 5], False),
        ("Kimi-Linear-48B-A3B-Instruct", [0, *["mamba"] * 3], False),
    ],
)
def test_layer_groups_match_vllm(model: str, groups: list[int | str], checkpointing: bool) -> None:
    hardware = make_hardware(find_gpu("H100"), find_architecture(model))
    assert kv_groups(hardware) == groups
    assert can_checkpoint_states(hardware) is checkpointing


def test_block_sizes_equalize_the_bytes_of_layer_groups() -> None:
    """The expected groups are vLLM's.

    The 31B model has 16 KV heads of size 256 in layers with a sliding window, and 4 heads of size
    512 in other layers.
    """
    for model, tp, groups, layer in (
        ("gemma-4-31B-it", 1, ["0/32", *[1024] * 5], 16 * 2 * 16 * 256 * 2),
        ("gemma-4-31B-it", 8, [0, *[1024] * 5], 16 * 2 * 2 * 256 * 2),
        ("gemma-4-26B-A4B-it", 8, [0, *["1024/32"] * 5], 16 * 2 * 1 * 512 * 2),
    ):
        found = room(model, "H200", tp=tp)
        assert kv_groups(found.hardware) == groups
        assert found.block_bytes == layer * (10 if "31B" in model else 5)
    wide = kv_groups(room("gemma-4-31B-it", "H200").hardware, 64)
    assert wide == ["0/128", *[1024] * 5]


def test_pads_blocks_whose_sizes_cannot_be_equalized() -> None:
    model = find_architecture("gpt-oss-20b")
    window, whole = model.layers
    odd = replace(whole, attention=replace(whole.attention, head_dim=96))
    hardware = make_hardware(find_gpu("H100"), replace(model, layers=(window, odd)))
    assert kv_groups(hardware) == [0, 128]
    assert (
        compute_kv_capacity(hardware, find_execution_settings(VllmConfig())).block_bytes
        == 12 * 2 * 8 * 96 * 2 * 16
    )


@pytest.mark.parametrize(("variant", "size"), [("0.26.0", 960), ("0.27.0", 1024)])
def test_blocks_of_latent_attention_are_multiples_of_its_kernel_block(
    variant: str, size: int
) -> None:
    hardware = make_hardware(
        find_gpu("H200"), find_architecture("Kimi-Linear-48B-A3B-Instruct"), tp=2
    )
    assert (
        compute_kv_capacity(
            hardware, find_execution_settings(VllmConfig(variant=variant))
        ).block_size
        == size
    )


def test_block_size_of_nemotron_with_16_bit_states() -> None:
    """vLLM 0.10 stored 16-bit states and used blocks of 672 tokens (vllm-project/vllm#24280)."""
    published = find_architecture("NVIDIA-Nemotron-Nano-9B-v2")
    layers = tuple(
        replace(part, attention=replace(part.attention, number_bytes=2))
        if isinstance(part.attention, Mamba)
        else part
        for part in published.layers
    )
    hardware = make_hardware(find_gpu("H100"), replace(published, layers=layers))
    assert compute_kv_capacity(hardware, find_execution_settings(VllmConfig())).block_size == 672


@pytest.mark.parametrize(
    ("text", "engine", "blocks", "tokens"),
    [
        ("INFO executor_base.py:62] # GPU blocks: 2588, # CPU blocks: 0", "vllm", 2588, 41408),
        ("INFO [kv_cache_utils.py:864] GPU KV cache size: 41,408 tokens", "vllm", 2588, 41408),
        ("max_total_num_tokens=41410, chunked_prefill_size=8192", "sglang", 2588, 41410),
        ("KV Cache is allocated. dtype: bf16, #tokens: 41408, K size", "sglang", 2588, 41408),
        ("Reset block num, the total_block_num:2588, prefill", "fastdeploy", 2588, 41408),
        ("Using PagedAttention with block size 16 and 2588 GPU blocks", "mistralrs", 2588, 41408),
    ],
)
def test_reads_the_cache_size_from_logs_of_engines(
    tmp_path: Path, text: str, engine: str, blocks: int, tokens: int
) -> None:
    log = tmp_path / "engine.log"
    log.write_text(f"starting\n{text}\nserving\n")
    found = read_cache_size(log, 16)
    assert (found.engine, found.blocks, found.tokens, found.line) == (engine, blocks, tokens, 2)


def test_rejects_logs_without_a_cache_size(tmp_path: Path) -> None:
    log = tmp_path / "engine.log"
    log.write_text("nothing of interest\n")
    with pytest.raises(InputError, match="no line with the KV cache size"):
        read_cache_size(log)
    with pytest.raises(InputError, match="cannot be read"):
        read_cache_size(tmp_path / "none.log")


@pytest.mark.parametrize(
    ("spelling", "name", "bandwidth"),
    [
        ("GB10", "NVIDIA GB10", 273e9),
        ("RTX-5080", "NVIDIA GeForce RTX 5080", 960e9),
        ("RTX 4080", "NVIDIA GeForce RTX 4080", 716.8e9),
        ("rtx-3060", "NVIDIA GeForce RTX 3060", 360e9),
        ("RTX 6000 Ada", "NVIDIA RTX 6000 Ada Generation", 960e9),
        ("Tesla T4", "NVIDIA T4", 320e9),
        ("V100", "NVIDIA V100-SXM2-32GB", 900e9),
        ("GH200", "NVIDIA GH200 480GB", 4.0e12),
        ("H20", "NVIDIA H20", 4.0e12),
    ],
)
def test_gpus_of_data_sheets_are_found_by_short_names(
    spelling: str, name: str, bandwidth: float
) -> None:
    found = find_gpu(spelling)
    assert (found.name, found.bandwidth) == (name, bandwidth)
    assert found.capability
    assert (find_gpu_family(found.name) == "unknown") == (found.capability < (8, 0))


@pytest.mark.parametrize(("size", "billions"), [("27b", 27.0), ("12b", 11.77), ("4b", 3.88)])
def test_gemma_3_has_its_published_size(size: str, billions: float) -> None:
    hardware = make_hardware(find_gpu("H100"), find_architecture(f"gemma-3-{size}-it"))
    assert weight_bytes(hardware) / 2e9 == pytest.approx(billions, rel=0.01)
