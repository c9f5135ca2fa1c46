"""Tests of computed sizes of the KV cache, compared with sizes in the logs of engines.

``recorded_blocks.csv`` contains values from public logs: ``recorded`` is in blocks, tokens or GiB
of KV on one GPU. If a report states only its own prediction and the error of this prediction, the
note contains both.
"""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from simkv.core.errors import InputError
from simkv.core.execution_settings import ExecutionSettings
from simkv.costs.hardware.kv_capacity import GIB, compute_kv_capacity
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.model_memory import weight_bytes
from simkv.costs.hardware.replica_hardware import make_hardware
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.execution_settings import derive_settings as sglang_setting

ROWS = list(csv.DictReader((Path(__file__).with_name("recorded_blocks.csv")).open()))
#: Measurement campaign whose logs were used to derive the constants.
CAMPAIGN = "llm-d-planner"


def error(row: dict[str, str]) -> float:
    """Return the relative error of the computed size."""
    hardware = make_hardware(
        find_gpu(row["gpu"]),
        find_architecture(row["model"]),
        tp=int(row["tp"]),
        weights=row["weights"] or None,  # type: ignore[arg-type]
        kv=row["kv"] or None,  # type: ignore[arg-type]
    )
    setting = ExecutionSettings(
        row["engine"],
        row["release"],
        int(row["tokens"]),
        int(row["seqs"]),
        graph_sizes=(1, 512),
        memory_share=float(row["share"]),
    )
    room = compute_kv_capacity(hardware, setting)
    found = {
        "gib": room.rest / GIB,
        "tokens": room.num_gpu_blocks * setting.block_size,
        "blocks": room.num_gpu_blocks,
    }
    return found[row["unit"]] / float(row["recorded"]) - 1


def spread(rows: list[dict[str, str]]) -> tuple[float, float]:
    """Return the median and the 90th percentile of the absolute errors, in per cent."""
    errors = sorted(100 * abs(error(row)) for row in rows)
    return median(errors), errors[-(-9 * len(errors) // 10) - 1]


def test_computed_sizes_match_public_logs(capsys: pytest.CaptureFixture[str]) -> None:
    others = [row for row in ROWS if CAMPAIGN not in row["source"]]
    assert len(ROWS) >= 25
    with capsys.disabled():
        for name, rows in (("all", ROWS), ("not of the campaign", others)):
            middle, most = spread(rows)
            print(f"\nKV blocks, {name}: {len(rows)} logs, median {middle:.1f} %, P90 {most:.1f} %")
    middle, most = spread(ROWS)
    assert (middle < 2.0, most < 6.0) == (True, True)
    middle, most = spread(others)
    assert (middle < 2.0, most < 9.0) == (True, True)


def test_kv_blocks_with_128_sequences_match_a_recorded_run() -> None:
    """A run on an RTX 4090 with 128 sequences had about 2,950 blocks (issue 15)."""
    hardware = make_hardware(find_gpu("RTX 4090"), find_architecture("Llama-3.1-8B"))
    room = compute_kv_capacity(
        hardware, ExecutionSettings("vllm", "0.19.0", 2048, 128, memory_share=0.9)
    )
    assert room.num_gpu_blocks == pytest.approx(2950, rel=0.02)


def test_reserves_memory_for_graphs_from_0_20_on() -> None:
    hardware = make_hardware(find_gpu("H100"), find_architecture("Llama-3.1-8B"))

    def rest(release: str, *sizes: int) -> int:
        setting = ExecutionSettings("vllm", release, 2048, 256, sizes, memory_share=0.9)
        return compute_kv_capacity(hardware, setting).rest

    assert rest("0.19.0", 1, 512) - rest("0.20.0", 1, 512) == 1_000_000_000
    assert rest("0.20.0") == rest("0.19.0")


def test_sglang_reserves_memory_by_gpu_and_parallelism() -> None:
    """The expected sums follow ``handle_gpu_memory_settings``, in MiB."""
    model, latent = "Qwen3-30B-A3B", "DeepSeek-V3"
    prefills = 8 * (8 + 14 + 8 + 8 + 12 + 8)  # sizes of the graphs up to 8192 tokens
    for name, version, gpu, tp, dp, reserved in (
        (model, "0.5.23", "RTX 4090", 1, 1, 512 + 1.5 * 8192 + 2 * 48 + 128 + prefills),
        (model, "0.5.15", "RTX 4090", 1, 1, 512 + 1.5 * 8192 + 2 * 24 + 128 + prefills),
        (model, "0.5.23", "H100", 2, 1, 512 + 1.5 * 8192 + 2 * 256 + 256 + prefills),
        (model, "0.5.23", "H100", 4, 1, 512 + 1.5 * 8192 + 2 * 512 + 512 + prefills),
        (
            *(model, "0.5.23", "H100", 1, 4),
            512 + 1.5 * 8192 + 2 * 512 + 512 + 512 * 4 * 4.5 + prefills,
        ),
        (latent, "0.5.23", "H200", 8, 1, 512 + 1.5 * 8192 + 2 * 512 + 1024 + 1.5 * 1024),
    ):
        hardware = make_hardware(find_gpu(gpu), find_architecture(name), tp=tp, dp=dp)
        config = SglangConfig(
            variant=version,  # type: ignore[arg-type]
            enable_dp_attention=dp > 1,
            dp_size=dp,
        )
        memory = hardware.gpu.memory_bytes
        free = memory - 0.5 * 2**30 - (1.9 * 2**30 if tp * dp > 1 else 0)
        share = round((memory / 2**20 - reserved) / (memory / 2**20), 3)
        assert compute_kv_capacity(hardware, sglang_setting(config)).usable == int(free * share)


def test_sglang_derives_its_memory_fraction_from_the_chunk_size() -> None:
    hardware = make_hardware(find_gpu("H100"), find_architecture("Llama-3.1-8B"))
    large, small = (
        compute_kv_capacity(hardware, ExecutionSettings("sglang", "0.5.23", chunk, 256, (1, 256)))
        for chunk in (8192, 2048)
    )
    memory = hardware.gpu.memory_bytes
    assert 0.8 < large.usable / memory < 0.86
    assert small.rest > large.rest


def test_sampler_of_0_11_0_does_not_sort() -> None:
    """A published server of Qwen3-32B held 32,112 tokens; since 0.11.1, the sampler sorts the
    logits again.
    """
    hardware = make_hardware(find_gpu("H100"), find_architecture("Qwen3-32B"))

    def tokens(release: str) -> int:
        setting = ExecutionSettings("vllm", release, 8192, 1024, memory_share=0.9)
        return compute_kv_capacity(hardware, setting).num_gpu_blocks * 16

    assert tokens("0.11.0") == 32_112
    assert tokens("0.11.1") == tokens("0.16.0") < tokens("0.11.0")
    assert tokens("0.17.0") == tokens("0.11.0")


def test_draft_layer_has_weights_and_kv() -> None:
    hardware = make_hardware(
        find_gpu("H200-SXM"), find_architecture("deepseek-ai/DeepSeek-V3"), tp=8
    )
    setting = ExecutionSettings("vllm", "0.20.0", 8192, 256)
    plain = compute_kv_capacity(hardware, setting)
    drafts = compute_kv_capacity(hardware, replace(setting, draft_layers=1))
    assert drafts.block_bytes / plain.block_bytes == pytest.approx(62 / 61)
    experts = 256 * 3 * 7168 * 2048 / 8  # parameters per GPU, one byte each
    assert experts < drafts.weights - plain.weights < 1.1 * experts


@pytest.mark.parametrize(
    ("model", "gpu", "release", "loaded"),
    [  # "Model loading took": vllm-project/vllm#23278, #33155; myoceane.fr (recorded_blocks.csv)
        ("gpt-oss-120b", "H100", "0.10.1.1", 65.97),
        ("gpt-oss-120b", "H100", "0.14.0", 64.38),
        ("gpt-oss-20b", "A100-80GB", "0.19.0", 13.72),
    ],
)
def test_padded_experts_match_logged_weights(
    model: str, gpu: str, release: str, loaded: float
) -> None:
    hardware = make_hardware(find_gpu(gpu), find_architecture(model))
    setting = ExecutionSettings("vllm", release, 8192, 1024, memory_share=0.9)
    assert compute_kv_capacity(hardware, setting).weights / GIB == pytest.approx(loaded, rel=0.006)


def test_padding_depends_on_the_width_of_experts_on_each_gpu() -> None:
    """On 4 GPUs the width is 720: Marlin pads it to 768 and the hidden size from 2,880 to 3,072."""
    hardware = make_hardware(find_gpu("H100"), find_architecture("gpt-oss-120b"), tp=4)
    setting = ExecutionSettings("vllm", "0.11.0", 8192, 256, memory_share=0.9)
    more = compute_kv_capacity(hardware, setting).weights - weight_bytes(hardware)
    assert more == pytest.approx(36 * 128 * 3 * (768 * 3072 - 720 * 2880) * 4.25 / 8, rel=1e-6)


def test_several_gpus_are_not_one() -> None:
    with pytest.raises(InputError, match="expected one GPU, found 'H100,H200'"):
        find_gpu("H100,H200")
