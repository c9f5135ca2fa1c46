"""Tests of launchers: defaults equal the values of the released code, by release, GPU and model."""

from __future__ import annotations

from typing import Any

import pytest

from simkv.core.launcher_rules import LaunchError, LaunchTarget, ModelFacts
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.scenario.launch_defaults import target_of_gpu
from simkv.schedulers.sglang.launcher_defaults import context_length
from simkv.schedulers.sglang.spec import SGLANG
from simkv.schedulers.trtllm.spec import TRTLLM
from simkv.schedulers.vllm.launcher_defaults import longest, model_length
from simkv.schedulers.vllm.spec import VLLM


def machine(gpu: str, model: str = "llama-3.1-8b", kv: str = "bf16") -> LaunchTarget:
    return target_of_gpu(find_gpu(gpu), find_architecture(model), kv)


def vllm(gpu: str, variant: str, model: str = "llama-3.1-8b", **given: Any) -> dict[str, Any]:
    given = {"variant": variant, **given}
    return {**given, **VLLM.launch.before(given, machine(gpu, model))}


@pytest.mark.parametrize(
    ("gpu", "variant", "tokens", "seqs"),
    [
        ("H100-SXM", "0.33.0", 8192, 1024),
        ("H100-SXM", "0.10.2", 8192, 1024),
        ("H200", "0.33.0", 8192, 1024),
        ("RTX PRO 6000", "0.19.0", 8192, 1024),
        ("A100", "0.33.0", 2048, 256),
        ("A100 PCIe", "0.11.0", 2048, 256),
        ("L40S", "0.33.0", 2048, 256),
        ("RTX 4090", "0.9.2", 2048, 256),
        ("B200", "0.27.1", 8192, 1024),
        ("B200", "0.28.0", 16384, 1024),
        ("MI300X", "0.33", 16384, 1024),
        ("GB300", "0.33.0-swap", 16384, 1024),
    ],
)
def test_vllm_serve_derives_step_limits_from_gpu(
    gpu: str, variant: str, tokens: int, seqs: int
) -> None:
    found = vllm(gpu, variant)
    assert (found["max_num_batched_tokens"], found["max_num_seqs"]) == (tokens, seqs)
    assert found["block_size"] == 16


def test_vllm_uses_small_gpu_defaults_for_gb10_since_033() -> None:
    gb10 = LaunchTarget("NVIDIA GB10", 128 << 30, (12, 1))
    assert VLLM.launch.before({"variant": "0.32.0"}, gb10)["max_num_seqs"] == 1024
    assert VLLM.launch.before({"variant": "0.33.0"}, gb10)["max_num_seqs"] == 256


@pytest.mark.parametrize(
    ("variant", "given", "tokens", "seqs"),
    [
        ("0.33.0", {"max_num_batched_tokens": 512}, 512, 512),
        ("0.10.0", {"max_num_batched_tokens": 512}, 512, 1024),
        ("0.33.0", {"max_num_seqs": 2, "max_model_len": 1000}, 2000, 2),
        ("0.11.0", {"max_num_seqs": 2, "max_model_len": 1000}, 8192, 2),
        ("0.33.0", {"enable_chunked_prefill": False}, 131072, 1024),
        ("0.33.0", {"enable_chunked_prefill": False, "max_model_len": 4096}, 8192, 1024),
    ],
)
def test_vllm_derives_other_defaults_from_given_settings(
    variant: str, given: dict[str, Any], tokens: int, seqs: int
) -> None:
    found = vllm("H100-SXM", variant, **given)
    assert (found["max_num_batched_tokens"], found["max_num_seqs"]) == (tokens, seqs)


def test_vllm_raises_token_budget_to_gemma_4_video_since_022() -> None:
    def tokens(gpu: str, variant: str) -> int:
        found: int = vllm(gpu, variant, "gemma-4-31b-it")["max_num_batched_tokens"]
        return found

    assert [tokens("L40S", v) for v in ("0.21.0", "0.22.0")] == [2048, 2496]
    assert tokens("H100-SXM", "0.33.0") == 8192


@pytest.mark.parametrize(
    ("gpu", "variant", "model", "kv", "size"),
    [
        ("H100-SXM", "0.17.0", "deepseek-r1", "bf16", 64),
        ("H100-SXM", "0.18.0", "deepseek-r1", "bf16", 16),
        ("H100-SXM", "0.33.0", "deepseek-r1", "fp8", 64),
        ("H200", "0.33.0", "deepseek-v3.2", "bf16", 64),
        ("A100", "0.11.0", "deepseek-r1", "bf16", 16),
        ("B200", "0.9.2", "deepseek-r1", "bf16", 16),
        ("B200", "0.12.0", "deepseek-r1", "bf16", 128),
        ("B200", "0.15.0", "deepseek-r1", "bf16", 64),
        ("B200", "0.33.0", "deepseek-r1", "bf16", 32),
        ("B200", "0.33.0", "llama-3.1-8b", "bf16", 16),
    ],
)
def test_vllm_block_size_depends_on_attention_backend(
    gpu: str, variant: str, model: str, kv: str, size: int
) -> None:
    given = {"variant": variant}
    assert VLLM.launch.before(given, machine(gpu, model, kv))["block_size"] == size


@pytest.mark.parametrize(
    ("facts", "old", "new"),
    [
        (ModelFacts("plain", 4096), 4096, 4096),
        (ModelFacts("llama", 131072, "llama", "llama3", 8.0, 8192), 131072, 131072),
        (ModelFacts("scaled in config", 163840, "deepseek_v3", "yarn", 40, 4096), 163840, 163840),
        (ModelFacts("not scaled there", 32768, "qwen2", "yarn", 4.0, 32768), 131072, 32768),
        (ModelFacts("linear", 4096, "llama", "linear", 4.0), 16384, 16384),
        (ModelFacts("gemma3", 131072, "gemma3", "linear", 8.0), 131072, 131072),
        (ModelFacts("phi", 131072, "phi3", "longrope", 1.0, 4096), 4096, 4096),
    ],
)
def test_model_length_is_scaled_as_in_release(facts: ModelFacts, old: int, new: int) -> None:
    assert [model_length(facts, release) for release in ("0.19.0", "0.33.0")] == [old, new]


def test_longrope_has_full_length_before_0111() -> None:
    phi = ModelFacts("phi", 131072, "phi3", "longrope", 1.0, 4096)
    assert model_length(phi, "0.10.2") == 131072


def test_vllm_rejects_model_length_that_cache_cannot_hold() -> None:
    small, on = {"num_gpu_blocks": 1001, "variant": "0.33.0"}, machine("L4")
    assert longest(small, 131072) == 16000
    with pytest.raises(LaunchError, match="at most 16,000, or to auto") as error:
        VLLM.launch.after(small, on)
    assert error.value.field == "max_model_len"
    assert VLLM.launch.after({**small, "max_model_len": "auto"}, on) == {"max_model_len": 16000}
    old = {**small, "variant": "0.13.0"}
    with pytest.raises(LaunchError, match=r"at most 16,016$"):
        VLLM.launch.after({**old, "max_model_len": "auto"}, on)
    assert VLLM.launch.after({**small, "max_model_len": 99}, on) == {}
    enough = {**small, "num_gpu_blocks": 8193}
    assert VLLM.launch.after(enough, on) == {"max_model_len": 131072}


def test_cache_with_windows_holds_longer_sequence() -> None:
    section = {"num_gpu_blocks": 1001, "max_num_batched_tokens": 2048, "max_num_seqs": 8}
    assert longest({**section, "kv_cache_groups": (0, 128)}, 1 << 20) == 11760
    # Validation rejects these groups elsewhere.
    assert longest({**section, "kv_cache_groups": (0, 0)}, 1 << 20) == 1 << 20


@pytest.mark.parametrize(
    ("gpu", "variant", "model", "chunk", "page"),
    [
        ("H100-SXM", "0.5.23", "llama-3.1-8b", 8192, 1),
        ("H200", "0.5.15", "llama-3.1-8b", 8192, 1),
        ("B200", "0.5.23", "llama-3.1-8b", 16384, 64),
        ("L40S", "0.5.23", "llama-3.1-8b", 4096, 1),
        ("RTX 4090", "0.5.15", "llama-3.1-8b", 2048, 1),
        ("RTX 4090", "0.5.20", "llama-3.1-8b", 4096, 1),
        ("H200", "0.5.23", "deepseek-v3.2", 8192, 64),
        ("H200", "0.5.23", "deepseek-v3", 8192, 1),
    ],
)
def test_sglang_derives_prefill_chunk_from_gpu(
    gpu: str, variant: str, model: str, chunk: int, page: int
) -> None:
    found = SGLANG.launch.before({"variant": variant}, machine(gpu, model))
    assert (found["chunked_prefill_size"], found["page_size"]) == (chunk, page)
    assert found["max_prefill_tokens"] == 16384
    assert SGLANG.launch.before({"chunked_prefill_size": -1, "page_size": 4}, machine(gpu)) == {
        "max_prefill_tokens": 16384
    }


@pytest.mark.parametrize(
    ("tokens", "model", "rows"),
    [(415010, "llama-3.1-8b", 2048), (400000, "llama-2-7b", 4096), (1000, "llama-3.1-8b", 500)],
)
def test_sglang_derives_rows_from_full_length_sequences(tokens: int, model: str, rows: int) -> None:
    on = machine("H100-SXM", model)
    found = SGLANG.launch.after({"max_total_num_tokens": tokens}, on)
    assert found == {"max_running_requests": rows}
    ranks = {"max_total_num_tokens": tokens, "dp_size": 2}
    assert SGLANG.launch.after(ranks, on) == {"max_running_requests": 2 * rows}


def test_sglang_scales_length_without_original_length_in_config() -> None:
    assert context_length(ModelFacts("a", 4096, rope_type="linear", rope_factor=4.0)) == 16384
    yarn = ModelFacts("b", 163840, rope_type="yarn", rope_factor=40.0, rope_original=4096)
    assert context_length(yarn) == 163840


def test_trtllm_uses_model_length() -> None:
    assert TRTLLM.launch.before({}, machine("H100-SXM")) == {"max_seq_len": 131072}
    assert TRTLLM.launch.before({"max_seq_len": 9}, machine("H100-SXM")) == {}
