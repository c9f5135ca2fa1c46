"""Tests that, with ``hardware``, missing settings get the values that the engine's launcher
chooses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import simkv
from simkv.core.errors import InputError
from simkv.metrics.scenario_runner import run_scenario
from simkv.report.console_details import settings_lines
from simkv.scenario.run_fields import find_differences
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.scenario.scenario_writer import to_yaml
from simkv.schedulers.vllm.release_rules import NEWEST
from simkv.study.field_changes import with_field
from simkv.study.run_digest import compute_digest
from simkv.study.sweep.sweep import build_sweep
from simkv.study.sweep_axes import parse_axis

TEXT = """\
name: at-once
workload: {burst: {num_prompts: 3, prompt_tokens: 3000, output_tokens: 5}}
engine: {name: vllm}
hardware: {gpu: H100-SXM, model: llama-3.1-8b}
"""
ON_H100 = {
    "block_size": 16,
    "num_gpu_blocks": 28060,
    "max_num_seqs": 1024,
    "max_num_batched_tokens": 8192,
    "max_model_len": 131072,
}


def all_of(folder: Path, *overrides: str, text: str = TEXT) -> dict[str, Scenario]:
    (folder / "s.yaml").write_text(text)
    return load(folder / "s.yaml", overrides)


def one(folder: Path, *overrides: str, text: str = TEXT) -> Scenario:
    return all_of(folder, *overrides, text=text)["run"]


def values(scenario: Scenario, names: Any = ON_H100) -> dict[str, Any]:
    return {name: getattr(scenario.engine, name) for name in names}


def test_missing_settings_equal_the_launch_defaults(tmp_path: Path) -> None:
    left_out = one(tmp_path)
    assert values(left_out) == ON_H100
    given = [f"engine.{name}={value}" for name, value in ON_H100.items()]
    assert one(tmp_path, *given) == left_out
    assert compute_digest(one(tmp_path, *given), tmp_path) == compute_digest(left_out, tmp_path)
    autos = [f"engine.{name}=auto" for name in (*ON_H100, "gpu_memory_utilization")]
    assert one(tmp_path, *autos) == left_out


def test_given_setting_is_kept_and_others_follow(tmp_path: Path) -> None:
    few = one(tmp_path, "engine.max_num_batched_tokens=512", "engine.max_model_len=4096")
    assert values(few) == {
        **ON_H100,
        "num_gpu_blocks": values(few)["num_gpu_blocks"],
        "max_num_seqs": 512,
        "max_num_batched_tokens": 512,
        "max_model_len": 4096,
    }
    assert (
        values(few)["num_gpu_blocks"] > ON_H100["num_gpu_blocks"]
    )  # the largest step needs less memory


def test_variants_and_points_have_defaults_of_their_hardware(tmp_path: Path) -> None:
    text = TEXT + "variants: {a: {hardware: {gpu: A100}}, b: {engine: {name: sglang}}, c: {}}\n"
    found = all_of(tmp_path, text=text)
    assert values(found["a"])["max_num_seqs"] == 256
    assert values(found["b"], ["chunked_prefill_size", "max_running_requests"]) == {
        "chunked_prefill_size": 8192,
        "max_running_requests": 2048,
    }
    assert values(found["c"]) == ON_H100
    assert [str(d) for d in find_differences(found["c"], found["a"])] == [
        "hardware.gpu: NVIDIA H100 80GB HBM3 → NVIDIA A100-SXM4-80GB"
    ]
    axes = [parse_axis("hardware.tp=1,2"), parse_axis("engine.max_num_seqs=64,1024")]
    runs = build_sweep(tmp_path / "s.yaml", axes, ["variants={c: {}}"]).runs
    sizes = [values(run.job.scenario)["num_gpu_blocks"] for run in runs]
    assert sizes[1] == ON_H100["num_gpu_blocks"]
    assert len(set(sizes)) == 4


def test_only_points_of_a_sweep_must_be_able_to_start(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(TEXT.replace("H100-SXM", "L4"))
    axes = [parse_axis("hardware.gpu=H100-SXM,L40S")]
    assert len(build_sweep(tmp_path / "s.yaml", axes).runs) == 2
    with pytest.raises(InputError, match=r"at 1 of 2 points.*gpu=L4"):
        build_sweep(tmp_path / "s.yaml", [parse_axis("hardware.gpu=H100-SXM,L4")])


def test_error_of_an_engine_that_cannot_start_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"s.yaml:3: engine.max_model_len: .* at most 29,520, or"):
        one(tmp_path, "hardware.gpu=L4")
    fitted = one(tmp_path, "hardware.gpu=L4", "engine.max_model_len=auto")
    assert values(fitted)["max_model_len"] == 29520
    with pytest.raises(InputError, match=r"max_model_len: .*600 blocks .* at most 9,584"):
        one(tmp_path, "engine.num_gpu_blocks=600")
    assert one(tmp_path, "engine.num_gpu_blocks=600", "engine.max_model_len=auto")
    # A file with variants may be incomplete without the variants.
    text = TEXT.replace("H100-SXM", "L4") + "variants: {a: {engine: {max_model_len: 8192}}}\n"
    assert values(all_of(tmp_path, text=text)["a"])["max_model_len"] == 8192


def test_replicas_have_defaults_of_their_hardware_or_profile(tmp_path: Path) -> None:
    groups = (
        "fleet: {replicas: [{count: 2}, {hardware: {gpu: A100}}, {profile: unit-step},"
        " {hardware: {model: gpt-oss-20b}}, {hardware: {gpu: B200}, engine: {max_num_seqs: 7}}]}\n"
    )
    scenario = one(tmp_path, text=TEXT + groups)
    assert scenario.fleet
    engines: list[Any] = [group.engine or scenario.engine for group in scenario.fleet.groups]
    assert values(scenario) == ON_H100
    assert [e.max_num_seqs for e in engines] == [1024, 256, 256, 1024, 7]
    assert [e.max_num_batched_tokens for e in engines] == [8192, 2048, 2048, 8192, 16384]
    assert [e.max_model_len for e in engines] == [131072, 131072, 8192, 131072, 131072]
    assert engines[2].num_gpu_blocks == 1024  # no hardware: the defaults of the config
    assert [e.kv_cache_groups for e in engines][2:] == [(0,), (0, 128), (0,)]
    text = TEXT.replace("llama-3.1-8b", "gpt-oss-20b")
    text += "fleet: {replicas: [{count: 1}, {hardware: {model: llama-3.1-8b}}]}\n"
    windows = one(tmp_path, text=text)
    assert windows.fleet
    assert windows.fleet.groups[1].engine
    assert values(windows, ["kv_cache_groups"]) == {"kv_cache_groups": (0, 128)}
    assert windows.fleet.groups[1].engine.kv_cache_groups == (0,)  # type: ignore[attr-defined]


def test_without_hardware_no_defaults_are_chosen(tmp_path: Path) -> None:
    text = TEXT.replace("hardware: {gpu: H100-SXM, model: llama-3.1-8b}", "profile: unit-step")
    plain = one(tmp_path, text=text)
    assert values(plain) == {
        "block_size": 16,
        "num_gpu_blocks": 1024,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 2048,
        "max_model_len": 8192,
    }
    assert plain.origins.engine is None
    with pytest.raises(InputError, match=r"engine.max_num_seqs: auto requires hardware"):
        one(tmp_path, "engine.max_num_seqs=auto", text=text)
    assert one(tmp_path, "engine.gpu_memory_utilization=auto", text=text) == plain


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("trtllm", {"max_seq_len": 131072, "max_batch_size": 2048}),
        ("fastdeploy", {"max_num_seqs": 8}),
        ("mistralrs", {"max_num_seqs": 16}),
    ],
)
def test_cache_size_of_every_engine_follows_from_memory(
    tmp_path: Path, engine: str, expected: dict[str, Any]
) -> None:
    scenario = one(tmp_path, f"engine={{name: {engine}}}")
    settings = scenario.origins.engine
    assert settings
    sizes = {"trtllm": "max_tokens_in_paged_kv_cache", "fastdeploy": "num_blocks"}
    size = sizes.get(engine, "num_gpu_blocks")
    assert size in settings.default
    blocks = getattr(scenario.engine, size)
    tokens = blocks * {"fastdeploy": 64, "mistralrs": 32}.get(engine, 1)
    assert 400_000 < tokens < 500_000
    assert values(scenario, expected) == expected


def test_settings_of_further_variants_are_differences(tmp_path: Path) -> None:
    results = {
        name: run_scenario(one(tmp_path, *overrides), tmp_path, intervals=False)
        for name, overrides in {
            "first": [],
            "fp8": ["hardware.weights=fp8"],
            "slots": ["engine.max_num_seqs=64"],
        }.items()
    }
    first, fp8, slots, _ = settings_lines(results)
    blocks = [values(result.scenario)["num_gpu_blocks"] for result in results.values()]
    assert isinstance(first, str)
    assert first.startswith(f"Settings (first): block_size 16, num_gpu_blocks {blocks[0]}, ")
    assert fp8 == (
        f"Settings (fp8): as first, except num_gpu_blocks {blocks[1]} (default of vllm {NEWEST} on "
        "H100-SXM)."
    )
    assert blocks[0] < blocks[1]
    assert isinstance(slots, str)
    assert slots.endswith("; given: max_num_seqs 64.")


def test_console_and_saved_file_mark_defaults(tmp_path: Path) -> None:
    scenario = one(tmp_path, "engine.max_num_seqs=64")
    result = run_scenario(scenario, tmp_path, intervals=False)
    blocks = values(scenario)["num_gpu_blocks"]
    assert list(settings_lines({"run": result})) == [
        f"Settings: block_size 16, num_gpu_blocks {blocks}, max_num_batched_tokens 8192, "
        f"max_model_len 131072 (default of vllm {NEWEST} on H100-SXM); given: max_num_seqs 64.",
        "API server: 3 ms per request, 2 us per prompt token, 80 us per output token, 5 ms latency "
        f"(packaged values for vllm {NEWEST}; to simulate without it, set front_end: none).",
    ]
    text = to_yaml({"run": scenario})
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert f"num_gpu_blocks: {blocks} # default of vllm {NEWEST} on H100-SXM" in lines
    assert "max_num_seqs: 64" in lines
    assert YAML(typ="safe").load(text)["engine"]["max_model_len"] == 131072
    again = one(tmp_path, text=text)
    assert again == scenario
    assert compute_digest(again, tmp_path) == compute_digest(scenario, tmp_path)


def test_only_hardware_overrides_recompute_the_defaults(tmp_path: Path) -> None:
    scenario = one(tmp_path, "engine.max_num_seqs=64")
    longer = with_field(scenario, "workload.burst.num_prompts", 4, tmp_path)
    assert longer.origins.engine == scenario.origins.engine
    moved = with_field(scenario, "hardware.gpu", "A100", tmp_path)
    assert values(moved)["max_num_batched_tokens"] == 2048
    assert values(moved)["max_num_seqs"] == 64


def test_loaded_scenario_recomputes_the_defaults_on_other_hardware(tmp_path: Path) -> None:
    text = TEXT + "fleet: {replicas: [{count: 1}, {hardware: {model: qwen3-8b}}]}\n"
    scenario = one(tmp_path, "engine.max_num_seqs=64", text=text)
    moved = simkv.run(scenario, **{"hardware.gpu": "A100"}).results["run"].scenario
    assert values(moved)["max_num_batched_tokens"] == 2048
    assert values(moved)["max_num_seqs"] == 64
    assert moved.fleet
    assert moved.fleet.groups[1].hardware
    engine: Any = moved.fleet.groups[1].engine
    assert (engine.max_num_seqs, engine.max_model_len) == (64, 40960)
    assert simkv.run(scenario).results["run"].scenario == scenario


ALMOST = """\
name: almost
workload: {burst: {num_prompts: 3, prompt_tokens: 300, output_tokens: 5}}
engine: {name: vllm, variant: 0.11.0}
hardware: {gpu: H100-SXM, model: Qwen3-32B}
"""


@pytest.mark.parametrize(("length", "blocks"), [("", 2560), ("engine.max_model_len=32768", 2048)])
def test_start_within_the_error_of_the_memory_is_not_refused(
    tmp_path: Path, length: str, blocks: int
) -> None:
    """The computed KV cache has 2,007 blocks; 40,960 tokens (the default) and 32,768 tokens need a
    few more.
    """
    scenario = all_of(tmp_path, *filter(None, [length]), text=ALMOST)["run"]
    assert scenario.engine.num_gpu_blocks == blocks  # type: ignore[union-attr]
    origin = scenario.origins.engine
    assert origin is not None
    assert f"raised from 2,007 to {blocks:,}" in origin.source


def test_start_far_beyond_the_memory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="refuses to start"):
        all_of(tmp_path, "hardware.gpu=L40S", "hardware.weights=fp8", text=ALMOST)
