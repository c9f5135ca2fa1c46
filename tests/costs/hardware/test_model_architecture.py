"""Tests of parsing model architectures, and of lookup of models and GPUs by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simkv.core.errors import InputError
from simkv.costs.hardware.hf_config import parse_architecture
from simkv.costs.hardware.model_architecture import (
    DenseMlp,
    GatedDeltaNet,
    Gqa,
    Indexer,
    Mamba,
    Mla,
    MoeMlp,
)
from simkv.costs.hardware.model_gpu_catalog import (
    architectures,
    find_architecture,
    find_gpu,
    find_model,
    gpus,
)
from simkv.costs.hardware.number_formats import NUMBER_FORMATS, find_number_format
from simkv.costs.hardware.replica_hardware import Hardware, make_hardware

TINY: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("DeepSeek-V3", 671.0),
        ("Kimi-K2.5", 1026.0),
        ("Qwen3.5-397B-A17B", 397.0),
        ("Qwen3-235B-A22B", 235.1),
        ("GLM-5", 744.0),
        ("GLM-4.5-Air", 106.85),
        ("GLM-4.6", 352.8),
        ("MiniMax-M2.5", 229.0),
        ("Llama-3.1-405B", 405.85),
        ("Jamba-v0.1", 51.57),
        ("NVIDIA-Nemotron-Nano-9B-v2", 8.89),
        ("NVIDIA-Nemotron-3-Nano-30B-A3B", 31.58),
        ("granite-4.0-h-small", 32.2),
        ("Bamba-9B-v2", 9.78),
        # the published 30.7 billion do not count V in layers where V equals K
        ("gemma-4-31B-it", 30.81),
        ("gemma-4-26B-A4B-it", 25.23),
        ("Kimi-Linear-48B-A3B-Instruct", 49.12),
    ],
)
def test_parameter_counts_match_published_values(name: str, billions: float) -> None:
    assert find_architecture(name).parameters / 1e9 == pytest.approx(billions, rel=3e-3)


def test_groups_layers_by_kind() -> None:
    kinds = {
        name: [(part.count, part.attention, part.mlp) for part in find_architecture(name).layers]
        for name in ("gpt-oss-20b", "Qwen3.5-27B", "DeepSeek-V3.2")
    }
    moe = MoeMlp(32, 4, 2880)
    assert kinds["gpt-oss-20b"] == [(12, Gqa(64, 8, 64, 128), moe), (12, Gqa(64, 8, 64), moe)]
    assert kinds["Qwen3.5-27B"] == [
        (48, GatedDeltaNet(16, 48, 128, 128, 4), DenseMlp(17408)),
        (16, Gqa(24, 4, 256, output_gate=True), DenseMlp(17408)),
    ]
    mla = Mla(128, 1536, 512, 128, 64, 128, Indexer(64, 128, 2048))
    sparse = (58, mla, MoeMlp(256, 8, 2048, 2048))
    assert kinds["DeepSeek-V3.2"] == [(3, mla, DenseMlp(18432)), sparse]


def test_parses_layer_kinds_of_hybrid_models() -> None:
    kinds = {
        name: [(part.count, part.attention, part.mlp) for part in find_architecture(name).layers]
        for name in ("Jamba-v0.1", "NVIDIA-Nemotron-Nano-9B-v2", "granite-4.0-h-small")
    }
    mamba1, jamba = Mamba(8192, 16, 4, rank=256), MoeMlp(16, 2, 14336)
    assert kinds["Jamba-v0.1"] == [
        (12, mamba1, DenseMlp(14336)),
        (16, mamba1, jamba),
        (4, Gqa(32, 8, 128), DenseMlp(14336)),
    ]
    mamba2, mlp = Mamba(10240, 128, 4, 128, 8, number_bytes=4), DenseMlp(15680, gated=False)
    assert kinds["NVIDIA-Nemotron-Nano-9B-v2"] == [
        (21, mamba2, mlp),
        (6, mamba2, DenseMlp(0)),
        (4, Gqa(40, 8, 128), mlp),
    ]
    granite = MoeMlp(72, 10, 768, 1536)
    assert kinds["granite-4.0-h-small"] == [
        (36, Mamba(8192, 128, 4, 128, 1), granite),
        (4, Gqa(32, 8, 128), granite),
    ]


def test_gemma_4_has_wider_heads_in_layers_without_a_window() -> None:
    kinds = [(p.count, p.attention, p.mlp) for p in find_architecture("gemma-4-26B-A4B-it").layers]
    experts = MoeMlp(128, 8, 704, 2112)
    assert kinds == [(25, Gqa(16, 8, 256, 1024), experts), (5, Gqa(16, 2, 512), experts)]


def test_parses_layer_numbers_of_kimi_linear() -> None:
    first, delta, latent = find_architecture("Kimi-Linear-48B-A3B-Instruct").layers
    assert first.attention == delta.attention == GatedDeltaNet(32, 32, 128, 128, 4, gate_rank=128)
    assert (first.count, first.mlp, delta.count) == (1, DenseMlp(9216), 19)
    assert (latent.count, latent.attention) == (7, Mla(32, 0, 512, 128, 64, 128))
    assert delta.mlp == latent.mlp == MoeMlp(256, 8, 1024, 1024)


NEMOTRON: dict[str, Any] = {
    **TINY,
    "model_type": "nemotron_h",
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "M-*E",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "conv_kernel": 4,
    "n_groups": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}


def test_mamba_weights_and_states_match_hand_computation() -> None:
    mamba = Mamba(128, 32, 4, 8, 2)
    convolved = 128 + 2 * 2 * 32
    assert mamba.weights(64) == 64 * (128 + convolved + 8) + 4 * convolved + 128 * 64
    assert mamba.state_bytes(1) == 2 * 128 * 32 + 2 * 3 * convolved
    # Each of the four GPUs has one KV head group; two of these are copies.
    assert mamba.state_bytes(4) == 2 * 128 * 32 / 4 + 2 * 3 * (128 + 2 * 4 * 32) / 4
    first = Mamba(128, 16, 4, rank=4)
    inner = 128 * (4 + 2 * 16) + 4 * 128 + 128 * 16
    assert first.weights(64) == 64 * 2 * 128 + inner + 4 * 128 + 128 * 64
    made = parse_architecture(NEMOTRON, "tiny")
    experts = MoeMlp(4, 2, 48, gated=False)
    assert [(part.attention, part.mlp) for part in made.layers] == [
        (replace(mamba, number_bytes=4), DenseMlp(128, gated=False)),
        (Gqa(4, 2, 16), experts),
    ]
    assert experts.weights(64) == 2 * 64 * 48 * 4 + 64 * 4
    names = {
        "hybrid_override_pattern": None,
        "layers_block_type": ["mamba", "mlp", "attention", "moe"],
    }
    assert parse_architecture({**NEMOTRON, **names}, "tiny") == made


def test_falcon_has_attention_and_mamba_in_every_layer() -> None:
    shapes = {"mamba_n_heads": 4, "mamba_d_ssm": 96, "mamba_d_state": 16, "mamba_d_conv": 4}
    made = parse_architecture(
        {**TINY, **shapes, "model_type": "falcon_h1", "mamba_n_groups": 1}, "tiny"
    )
    assert [(p.count, p.attention, p.mlp) for p in made.layers] == [
        (2, Mamba(96, 16, 4, 4, 1), DenseMlp(0)),
        (2, Gqa(4, 2, 16), DenseMlp(128)),
    ]


def test_llama_4_has_chunked_attention_and_alternating_experts() -> None:
    maverick = find_architecture("Llama-4-Maverick-17B-128E-Instruct")
    local, whole = Gqa(40, 8, 128, 8192, chunked=True), Gqa(40, 8, 128)
    moe = MoeMlp(128, 1, 8192, 8192)
    assert [(p.count, p.attention, p.mlp) for p in maverick.layers] == [
        (24, local, DenseMlp(16384)),
        (12, local, moe),
        (12, whole, moe),
    ]
    assert maverick.parameters / 1e9 == pytest.approx(400, rel=3e-3)
    chunks = {"model_type": "llama4", "text_config": {**TINY, "model_type": "llama4_text"}}
    chunks["text_config"] |= {"num_local_experts": 4, "no_rope_layers": [1]}
    with pytest.raises(InputError, match="no_rope_layers: must be a list of 2 numbers"):
        parse_architecture(chunks, "tiny")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hybrid_override_pattern": "M-*"}, "hybrid_override_pattern: must have one value"),
        ({"hybrid_override_pattern": "M-?E"}, "hybrid_override_pattern: unsupported"),
        ({"hybrid_override_pattern": "-M-*"}, "hybrid_override_pattern: mlp must follow a mamba"),
        ({"mamba_ssm_cache_dtype": "fp8"}, "mamba_ssm_cache_dtype: must be one of float32"),
        ({"moe_latent_size": 8}, "moe_latent_size: not supported: it changes the layers"),
        ({"conv_kernel": None}, "conv_kernel: missing"),
    ],
)
def test_rejects_unsupported_fields_of_hybrid_models(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=f"tiny: {re.escape(words)}"):
        parse_architecture({**NEMOTRON, **change}, "tiny")


def test_weights_of_a_small_model_match_hand_computation() -> None:
    tiny = parse_architecture(TINY, "tiny")
    attention = 64 * (64 + 32 + 32 + 64)
    assert tiny.layers[0].attention.weights(64) == attention
    assert tiny.parameters == 2 * (attention + 3 * 64 * 128) + 2 * 100 * 64 + 5 * 64
    tied = parse_architecture({**TINY, "tie_word_embeddings": True})
    assert tiny.parameters - tied.parameters == 100 * 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "rwkv"}, "model_type: unsupported model type 'rwkv'; expected one of"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers: must be an integer"),
        ({"layer_types": ["full_attention"]}, "layer_types: must be a list of 2 names"),
        ({"layer_types": ["full_attention", "odd"]}, "layer_types: unsupported layer type 'odd'"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size: not supported"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantization_config: unsupported"),
    ],
)
def test_rejects_unsupported_configs_and_names_the_field(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({k: v for k, v in {**TINY, **change}.items() if v is not None}))
    with pytest.raises(InputError, match=f"config.json: {words}"):
        parse_architecture(path)
    path.write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        parse_architecture(path)


@pytest.mark.parametrize(
    "name", ["h100_sxm", "H100-SXM", "h100 sxm", "H100SXM", "NVIDIA H100 80GB HBM3", "h100"]
)
def test_finds_gpus_by_any_spelling(name: str) -> None:
    assert find_gpu(name).name == "NVIDIA H100 80GB HBM3"


def test_distinguishes_gpus_of_one_family() -> None:
    names = ("h100-pcie", "h200_sxm", "gb200", "b200_sxm", "a100-40", "A100 80GB PCIe", "rtx_3090")
    found = [find_gpu(name).name for name in names]
    assert found == [
        "NVIDIA H100 PCIe",
        "NVIDIA H200",
        "NVIDIA GB200",
        "NVIDIA B200",
        "NVIDIA A100-SXM4-40GB",
        "NVIDIA A100 80GB PCIe",
        "NVIDIA GeForce RTX 3090",
    ]
    systems = [gpu.system for gpu in gpus() if gpu.system]
    assert [find_gpu(system).system for system in systems] == systems


@pytest.mark.parametrize(
    ("name", "model", "weights"),
    [
        ("llama-3.1-70b", "meta-llama/Llama-3.1-70B", "bf16"),
        ("LLAMA 3.1_70B instruct", "meta-llama/Llama-3.1-70B", "bf16"),
        ("nvidia/Llama-3.3-70B-Instruct-FP8", "meta-llama/Llama-3.1-70B", "fp8"),
        ("nvidia/Llama-3.3-70B-Instruct-FP4", "meta-llama/Llama-3.1-70B", "nvfp4"),
        ("Qwen/Qwen3-32B-FP8", "Qwen/Qwen3-32B-FP8", "fp8_block"),
        ("deepseek r1", "deepseek-ai/DeepSeek-R1", "fp8_block"),
        ("zhipuai/GLM-5", "zai-org/GLM-5", "bf16"),
    ],
)
def test_finds_models_by_any_spelling(name: str, model: str, weights: str) -> None:
    found = find_architecture(name)
    assert (found.name, found.published.weights) == (model, weights)


def test_packaged_models_have_sources_and_unique_names() -> None:
    assert all("config.json" in known.source for known in architectures())
    for known in architectures():
        assert find_architecture(known.name) is known
    with pytest.raises(InputError, match="layers are all equal"):
        find_model("gpt-oss-120b")
    with pytest.raises(InputError, match="nearest: openai/gpt-oss-20b, "):
        find_architecture("openai/gpt-oss-21b")


def _hardware(model: str, **fields: Any) -> Hardware:
    return make_hardware(find_gpu("H100"), find_architecture(model), **fields)


def test_number_formats_default_to_the_published_weights() -> None:
    gpt = _hardware("gpt-oss-120b")
    assert (gpt.weights, gpt.attention, gpt.experts, gpt.kv) == ("bf16", "bf16", "mxfp4", "bf16")
    kimi = _hardware("Kimi-K2.5", tp=8)
    assert (kimi.weights, kimi.attention, kimi.experts) == ("bf16", "bf16", "int4_g32")
    said = _hardware("Kimi-K2.5", tp=8, weights="nvfp4", attention="bf16")
    assert (said.weights, said.attention, said.experts) == ("nvfp4", "bf16", "nvfp4")
    assert NUMBER_FORMATS["nvfp4"].bytes == 0.5625
    with pytest.raises(InputError, match="did you mean 'fp8_block'"):
        find_number_format("fp8_blok")


@pytest.mark.parametrize(
    ("model", "fields", "words"),
    [
        ("Llama-3.1-8B", {"tp": 7}, "tp: 7 GPUs cannot split the 32 heads and 8 KV heads"),
        ("Qwen2.5-7B", {"tp": 7}, "28 heads and 4 KV heads of .*; expected one of 1, 2, 4, 28$"),
        ("Kimi-K2.5", {"tp": 3}, "tp: 3 GPUs cannot split the 64 heads of"),
        ("Llama-3.1-8B", {"ep": 2}, "ep: meta-llama/Llama-3.1-8B has no experts"),
        ("gpt-oss-20b", {"tp": 4, "ep": 3}, "ep: must divide tp x dp = 4 GPUs, got 3"),
    ],
)
def test_rejects_gpu_counts_that_do_not_divide_a_model(
    model: str, fields: dict[str, int], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        _hardware(model, **fields)
