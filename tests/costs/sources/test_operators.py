"""Tests of profiles from operator tables of Vidur and aiconfigurator with artificial values."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.cost_profile import StepCost, load_profile
from simkv.costs.hardware.model_gpu_catalog import Model
from simkv.costs.sources.aiconfigurator_profile import aiconfigurator_profile
from simkv.costs.sources.vidur_profile import OPERATORS_PER_LAYER, vidur_profile
from simkv.costs.step_load import StepLoad, count_attention_pairs

MODEL = Model.model_validate(
    {
        "name": "test/tiny",
        "layers": 3,
        "hidden": 64,
        "heads": 8,
        "kv_heads": 4,
        "head_dim": 16,
        "intermediate": 128,
        "vocab": 256,
    }
)


def vidur_tables(folder: Path) -> tuple[Path, Path]:
    ops = ("emb", *OPERATORS_PER_LAYER)
    mlp = pd.DataFrame(
        [
            {"num_tokens": t, "num_tensor_parallel_workers": 1, "n_embd": 64}
            | {f"time_stats.{op}.median": 0.001 * t for op in ops}
            for t in (1, 10, 100)
        ]
    )
    about = {"n_q_head": 8, "n_kv_head": 4, "num_tensor_parallel_workers": 1}
    rows = [
        about
        | {
            "batch_size": b,
            "prefill_chunk_size": p,
            "kv_cache_size": c,
            "is_prefill": p > 0,
            "time_stats.attn_decode.median": None if p else 0.001 * b * c,
            "time_stats.attn_prefill.median": 0.01 * p if p else None,
            "time_stats.attn_output_reshape.median": 0.5,
        }
        for b, p, c in ((1, 0, 10), (1, 0, 20), (4, 0, 10), (4, 0, 20), (1, 10, 0), (1, 50, 0))
    ]
    paths = folder / "mlp.csv.gz", folder / "attention.csv"
    mlp.to_csv(paths[0], index=False)
    pd.DataFrame(rows).to_csv(paths[1], index=False)
    return paths


def test_vidur_profile_sums_all_operators(tmp_path: Path) -> None:
    mlp, attention = vidur_tables(tmp_path)
    cost = StepCost(vidur_profile(mlp, attention, MODEL, "Test GPU"))
    per_token = 1 + 3 * sum(OPERATORS_PER_LAYER.values())  # us
    assert cost(StepLoad(0, 0, 0, 4, 60, 0, 4)) == pytest.approx(
        1e-6 * (4 * per_token + 3 * (4 * 15 + 500))
    )
    assert cost(StepLoad(1, 30, 0, 0, 0, count_attention_pairs(30, 0), 1)) == pytest.approx(
        1e-6 * (30 * per_token + 3 * (300 + 500))
    )


def test_rejects_vidur_tables_of_another_model(tmp_path: Path) -> None:
    mlp, attention = vidur_tables(tmp_path)
    other = MODEL.model_copy(update={"hidden": 128})
    with pytest.raises(InputError, match=r"hidden size of 128 and 1 GPUs; found 64 on 1"):
        vidur_profile(mlp, attention, other, "Test GPU")
    heads = MODEL.model_copy(update={"heads": 16})
    with pytest.raises(InputError, match=r"no rows for 16 heads, 4 KV heads"):
        vidur_profile(mlp, attention, heads, "Test GPU")


def aiconfigurator_tables(folder: Path, most_kv_heads: int = 4) -> Path:
    pytest.importorskip("pyarrow")
    attention = {"num_heads": 8, "kv_cache_dtype": "bfloat16"}
    context = [
        attention
        | {"batch_size": 1, "isl": n, "num_key_value_heads": 4, "step": 0, "latency": 0.1 * n}
        for n in (10, 100)
    ]
    decode = [
        attention
        | {"batch_size": b, "isl": 1, "num_key_value_heads": most_kv_heads, "step": c - 1}
        | {"latency": 0.001 * b * c}
        for b in (1, 4)
        for c in (100, 400)
    ]
    gemm = [
        {"device": "Test GPU", "gemm_dtype": "bfloat16", "m": m, "n": n, "k": k}
        | {"latency": 1e-6 * m * n * k}
        for m in (1, 16)
        for n in (32, 512)
        for k in (32, 512)
    ]
    for name, rows in (
        ("context_attention", context),
        ("generation_attention", decode),
        ("gemm", gemm),
    ):
        pd.DataFrame(rows).to_parquet(folder / f"{name}_perf.parquet")
    return folder


def products(tokens: int, emits: int) -> float:
    """Return the time (s) of all matrix products of the tiny model; the artificial times are m x n
    x k ns.
    """
    layer = 64 * (8 + 2 * 4) * 16 + 64 * 128 + 64 * 256 + 128 * 64
    return 1e-9 * (tokens * 3 * layer + emits * 64 * 256)


def test_aiconfigurator_products_are_interpolated(tmp_path: Path) -> None:
    profile = aiconfigurator_profile(aiconfigurator_tables(tmp_path), MODEL)
    cost = StepCost(profile)
    assert cost(StepLoad(0, 0, 0, 4, 800, 0, 4)) == pytest.approx(products(4, 4) + 3 * 4 * 200e-6)
    found = cost(StepLoad(1, 16, 0, 0, 0, count_attention_pairs(16, 0), 1))
    assert found == pytest.approx(products(16, 1) + 3 * 1.6e-3)
    assert profile.gpu == "Test GPU"


def test_ignores_rows_with_other_head_sizes_and_windows(tmp_path: Path) -> None:
    """Published tables mix such rows: 64 heads of gpt-oss and 64 heads of CodeLlama."""
    folder = aiconfigurator_tables(tmp_path)
    whole = StepCost(aiconfigurator_profile(folder, MODEL))
    for name in ("context_attention", "generation_attention"):
        path = folder / f"{name}_perf.parquet"
        own = pd.read_parquet(path).assign(head_dim=MODEL.head_dim, window_size=0)
        small, short = own.assign(head_dim=8), own.assign(window_size=128)
        slow = own.assign(latency=2 * own["latency"])  # measured with another kernel
        others = [table.assign(latency=1e-3) for table in (small, short)]
        pd.concat([*others, slow, own], ignore_index=True).to_parquet(path)
    mixed = StepCost(aiconfigurator_profile(folder, MODEL))
    for load in (
        StepLoad(0, 0, 0, 4, 800, 0, 4),
        StepLoad(1, 64, 0, 0, 0, count_attention_pairs(64, 0), 1),
    ):
        assert mixed(load) == pytest.approx(whole(load))


def test_scales_kv_beyond_the_measured_kv_heads(tmp_path: Path) -> None:
    folder = aiconfigurator_tables(tmp_path, most_kv_heads=2)
    cost = StepCost(aiconfigurator_profile(folder, MODEL))
    # 4 heads at 150 tokens read as many bytes as 2 heads at 300 tokens.
    assert cost(StepLoad(0, 0, 0, 4, 600, 0, 4)) == pytest.approx(products(4, 4) + 3 * 4 * 300e-6)


def test_reports_head_counts_that_were_not_measured(tmp_path: Path) -> None:
    folder = aiconfigurator_tables(tmp_path)
    other = MODEL.model_copy(update={"heads": 16})
    with pytest.raises(InputError, match=r"no rows for 16 heads.*found heads \[8\]"):
        aiconfigurator_profile(folder, other)


def test_rejects_mixtures_of_experts(tmp_path: Path) -> None:
    experts = MODEL.model_copy(update={"experts": 8, "experts_per_token": 2})
    with pytest.raises(InputError, match="these tables support dense models only"):
        aiconfigurator_profile(aiconfigurator_tables(tmp_path), experts)
    with pytest.raises(InputError, match="a mixture of experts"):
        vidur_profile(tmp_path / "mlp.csv", tmp_path / "attention.csv", experts, "L4")


def test_rejects_bundles_of_another_model(tmp_path: Path) -> None:
    from tests.costs.sources.test_llmservingsim_profile import bundle

    folder = bundle(tmp_path / "bundle")
    (folder / "meta.yaml").write_text("model: meta-llama/Llama-3.1-8B\n")
    out = tmp_path / "mine.json"
    arguments = ["profile", "build", "llmservingsim", str(folder), "--model", "Qwen2.5-0.5B"]
    done = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    assert "expected --model meta-llama/Llama-3.1-8B, got Qwen2.5" in str(done.exception)
    assert not out.exists()


def test_command_writes_a_valid_profile(tmp_path: Path) -> None:
    from tests.costs.sources.test_llmservingsim_profile import bundle

    folder = bundle(tmp_path / "bundle")
    out = tmp_path / "mine.json"
    arguments = ["profile", "build", "llmservingsim", str(folder), "--model", "Qwen2.5-0.5B"]
    done = CliRunner().invoke(
        app, [*arguments, "--max-num-seqs", "4", "--link", "20,16", "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "decode_seqs: measured range 1 to 3" in done.output
    profile = load_profile("mine.json", tmp_path)
    assert profile.graph_sizes == [1, 2, 4, 8]
    assert "embedding x1" in {term.name for term in profile.terms}
    assert any(term.name == "layernorm x48" for term in profile.terms)


OLD = ("--variant", "0.19.0")


def test_blocks_command_prints_the_cache_size(tmp_path: Path) -> None:
    run = CliRunner().invoke
    done = run(app, ["blocks", "--model", "Llama-3.1-8B", "--gpu", "RTX 4090", *OLD])
    assert done.output.startswith("num_gpu_blocks: 2806\n")
    log = tmp_path / "x.log"
    log.write_text("GPU KV cache size: 41,408 tokens\n")
    assert run(app, ["blocks", "--log", str(log)]).output.startswith("num_gpu_blocks: 2588\n")
    log.write_text("with block size 32 and 513 GPU blocks: available context length is 16416\n")
    assert (
        "16416 tokens in blocks of 32; mistralrs" in run(app, ["blocks", "--log", str(log)]).output
    )
    log.write_text("Overriding num_gpu_blocks=0 with num_gpu_blocks_override=512\n")
    assert run(app, ["blocks", "--log", str(log)]).output.startswith("num_gpu_blocks: 512\n")
    seven = run(app, ["blocks", "--model", "Llama-3.1-8B", "--gpu", "L4", "--tp", "7"])
    assert "cannot split the 32 heads and 8 KV heads of meta-llama/Llama-3.1-8B" in str(
        seven.exception
    )
    assert isinstance(run(app, ["blocks", "--gpu", "L4"]).exception, InputError)
