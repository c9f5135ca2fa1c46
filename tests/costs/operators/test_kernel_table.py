"""Tests of the choice of the kernel that an engine's release runs, and of the tables with its
times.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from simkv.costs.hardware.model_architecture import Gqa
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import KernelSwitch, make_hardware
from simkv.costs.operators.composed_profiles import PACKAGED_SETTING
from simkv.costs.operators.kernel_table import (
    Kernel,
    KernelTable,
    Operator,
    find_kernel,
    find_kernels,
    read_kernels,
)
from simkv.costs.operators.lookup.attention_lookup import lookup_decode
from simkv.costs.operators.lookup.experts_lookup import find_kernel_spread, lookup_experts
from simkv.costs.operators.lookup.gemm_lookup import lookup_gemm
from simkv.costs.operators.operator_tables import TableStore
from simkv.costs.operators.operator_times import MoeShape


def write_table(root: Path, place: str, rows: list[dict[str, object]]) -> None:
    """Write a table; ``place`` is ``system/family/backend/version/table``."""
    pytest.importorskip("pyarrow")
    path = root / f"{place}_perf.parquet"
    path.parent.mkdir(parents=True, exist_ok=True)
    pd.DataFrame(rows).to_parquet(path)


def test_each_rule_names_a_kernel_and_applies_to_known_names() -> None:
    known = read_kernels()
    names = {kernel.name for kernel in known.kernels}
    assert {rule.kernel for rule in known.rules} == names
    assert all(rule.source for rule in known.rules)


@pytest.mark.parametrize(
    ("gpu", "model", "operator", "form", "release", "switches", "kernel"),
    [
        ("A100", "gpt-oss-20b", "experts", "mxfp4", "0.11.0", (), "Marlin, 4-bit experts"),
        ("H100", "gpt-oss-20b", "experts", "mxfp4", "0.11.0", (), "triton_kernels, mxfp4 experts"),
        ("H100", "gpt-oss-20b", "experts", "mxfp4", "0.18.0", ("marlin",), "Marlin, 4-bit experts"),
        (
            "B200",
            "gpt-oss-120b",
            "experts",
            "mxfp4",
            "0.12.0",
            ("mxfp8",),
            "FlashInfer TensorRT-LLM, mxfp4 experts with mxfp8 activations",
        ),
        ("H100", "deepseek-r1", "experts", "fp8_block", "0.19.0", (), "Triton, fp8_block experts"),
        ("H100", "deepseek-r1", "experts", "fp8_block", "0.24.0", (), None),
        ("H100", "qwen3-235b-a22b", "experts", "fp8", "0.12.0", (), "Triton, fp8 experts"),
        ("H100", "qwen3-235b-a22b", "experts", "fp8", "0.24.0", (), None),
        ("H200", "qwen3-235b-a22b", "experts", "bf16", "0.12.0", (), "Triton, bf16 experts"),
        ("H100", "qwen3-32b", "products", "fp8_block", "0.10.2", (), None),
        ("A100", "gpt-oss-20b", "attention", "bf16", "0.11.0", (), "Triton attention with sinks"),
        ("A100", "qwen3-32b", "attention", "bf16", "0.11.0", (), None),
    ],
)
def test_release_gpu_and_switches_select_the_kernel(
    gpu: str,
    model: str,
    operator: Operator,
    form: str,
    release: str,
    switches: tuple[KernelSwitch, ...],
    kernel: str | None,
) -> None:
    hardware = make_hardware(find_gpu(gpu), find_architecture(model), tp=8, kernels=switches)
    found = find_kernel(operator, form, hardware, replace(PACKAGED_SETTING, release=release))
    assert (found and found.name) == kernel


def test_kernels_of_a_model_cover_its_operators() -> None:
    mixture = make_hardware(find_gpu("H100"), find_architecture("gpt-oss-20b"))
    dense = make_hardware(find_gpu("H100"), find_architecture("llama-3.1-8b"), weights="fp8")
    assert set(find_kernels(mixture, PACKAGED_SETTING)) == {
        "products in bf16",
        "attention",
        "experts in mxfp4",
    }
    assert set(find_kernels(dense, PACKAGED_SETTING)) == {"products in fp8", "attention"}


def test_products_take_the_rows_of_the_kernel_also_of_another_engine(tmp_path: Path) -> None:
    shape = {"gemm_dtype": "fp8_block", "n": 64, "k": 64, "m": 1}
    write_table(
        tmp_path, "x/gemm/vllm/1.0/gemm", [{**shape, "kernel_source": "Cutlass", "latency": 0.03}]
    )
    write_table(
        tmp_path,
        "x/gemm/sglang/1.0/gemm",
        [{**shape, "kernel_source": "sglang_deepgemm", "latency": 0.02}],
    )
    store = TableStore((tmp_path,), "x", "vllm", "1.0")
    table = KernelTable(backend="sglang", dtype="fp8_block", source="deepgemm")
    for kernel, seconds, known in (
        (Kernel(name="DeepGEMM", tables=(table,)), 2e-5, True),
        (Kernel(name="absent"), 3e-5, False),
        (None, 3e-5, True),
    ):
        found = lookup_gemm(store, "fp8_block", 64, 64, 1e15, kernel)
        assert found is not None
        assert (found[0](1), found[1]) == (pytest.approx(seconds), known)


def test_experts_prefer_the_shape_itself_over_an_earlier_table(tmp_path: Path) -> None:
    shape = MoeShape(1024, 1024, 2, 8, 1, 8)
    columns = {
        "moe_dtype": "fp8_block",
        "distribution": "power_law_1.2",
        "hidden_size": 1024,
        "inter_size": 1024,
        "topk": 2,
        "num_experts": 8,
        "moe_tp_size": 1,
        "num_tokens": 1,
        "kernel_source": "triton",
    }
    rows = {"vllm": (1, 0.8), "sglang": (8, 0.3)}
    for backend, (ep, latency) in rows.items():
        row = {**columns, "moe_ep_size": ep, "latency": latency}
        write_table(tmp_path, f"x/moe/{backend}/1.0/moe", [row])
    tables = tuple(KernelTable(backend=b, dtype="fp8_block", source="triton") for b in rows)
    store = TableStore((tmp_path,), "x", "vllm", "1.0")
    found = lookup_experts(store, shape, "fp8_block", 1e15, Kernel(name="Triton", tables=tables))
    assert found is not None
    assert (found[0](1), found[2]) == (pytest.approx(3e-4), True)


def attention_row(heads: int, kv_heads: int, latency: float) -> dict[str, object]:
    return {
        "kv_cache_dtype": "bfloat16",
        "num_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "window_size": 0,
        "batch_size": 1,
        "isl": 100,
        "step": 0,
        "latency": latency,
    }


@pytest.mark.parametrize(
    ("release", "spread"),
    [
        ("0.12.0", (0.5, 8.0)),  # no older table: all kernels of both engines
        ("0.19.0", (1.0, 1.0)),  # measured
        ("0.21.0", (1.0, 4.0)),  # between two tables
        ("0.30.0", (1.0, 1.0)),  # newer than all tables: only the release is unknown
    ],
)
def test_experts_of_an_unknown_kernel_have_the_spread_of_the_tables(
    tmp_path: Path, release: str, spread: tuple[float, float]
) -> None:
    def rows(kernel: str, ms: float) -> list[dict[str, object]]:
        shape = {"hidden_size": 4096, "inter_size": 1536, "topk": 8, "num_experts": 128}
        split = {"moe_tp_size": 8, "moe_ep_size": 1, "distribution": "power_law_1.2"}
        named = {"moe_dtype": "nvfp4", "kernel_source": kernel}
        return [
            {**shape, **split, **named, "num_tokens": n, "latency": ms} for n in (1, 64, 512, 4096)
        ]

    write_table(tmp_path, "x/moe/vllm/0.19.0/moe", rows("slow", 2.0) + rows("other", 4.0))
    write_table(tmp_path, "x/moe/vllm/0.24.0/moe", rows("fast", 1.0))
    write_table(tmp_path, "x/moe/sglang/0.5.10/moe", rows("slowest", 16.0))
    store = TableStore((tmp_path,), "x", "vllm", release)
    low, high = find_kernel_spread(store, MoeShape(4096, 1536, 8, 128, 8, 1), "nvfp4", 1e18)
    assert (math.exp(low), math.exp(high)) == pytest.approx(spread)


def test_multi_head_attention_comes_from_another_engine_before_scaled_heads(
    tmp_path: Path,
) -> None:
    place = "x/attention/{}/1.0/generation_attention"
    write_table(tmp_path, place.format("vllm"), [attention_row(32, 8, 0.01)])
    write_table(tmp_path, place.format("sglang"), [attention_row(32, 32, 0.02)])
    store = TableStore((tmp_path,), "x", "vllm", "1.0")
    for shape, seconds, words in (
        (Gqa(32, 32, 128), 2e-5, "another engine"),
        (Gqa(32, 8, 128), 1e-5, ""),
        (Gqa(32, 16, 128), 2e-5, "scaled from 32/8"),
    ):
        found = lookup_decode(store, shape, "bf16", 1e15)
        assert found is not None
        assert found[0](1, 100) == pytest.approx(seconds)
        assert words in found[1]


def test_window_limits_the_context_where_only_full_attention_was_measured(tmp_path: Path) -> None:
    rows = [{**attention_row(8, 1, latency), "isl": n} for n, latency in ((128, 0.1), (8192, 5.0))]
    write_table(tmp_path, "x/attention/vllm/1.0/generation_attention", rows)
    store = TableStore((tmp_path,), "x", "vllm", "1.0")
    found = lookup_decode(store, Gqa(8, 1, 128, window=128), "bf16", 1e15)
    assert found is not None
    assert found[0](1, 8192) == pytest.approx(1e-4)


def test_fp8_of_a_checkpoint_with_blocks_means_blocks() -> None:
    gpu = find_gpu("H100")
    blocks = make_hardware(gpu, find_architecture("Qwen3-32B-FP8"), weights="fp8")
    assert (blocks.weights, blocks.attention) == ("fp8_block", "fp8_block")
    named = make_hardware(gpu, find_architecture("Qwen3-235B-A22B-Instruct-2507-FP8"), tp=4)
    assert (named.weights, named.experts) == ("fp8_block", "fp8_block")
    channels = make_hardware(gpu, find_architecture("Llama-3.1-8B-Instruct-FP8"))
    assert channels.weights == "fp8"
    plain = make_hardware(gpu, find_architecture("Qwen3-32B"), weights="fp8")
    assert plain.weights == "fp8"
