"""Tests of profiles composed of operator times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from dev.operator_efficiency import LOADS
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile, StepCost
from simkv.costs.hardware.interconnect import Interconnect
from simkv.costs.hardware.model_gpu_catalog import find_architecture, find_gpu
from simkv.costs.hardware.replica_hardware import Hardware, make_hardware
from simkv.costs.operators.calibration_rules import (
    ConstantsRule,
    CostConstants,
    apply_constants,
)
from simkv.costs.operators.composed_profiles import (
    PACKAGED_SETTING,
    combinations,
    load_composed_profile,
)
from simkv.costs.operators.operator_tables import _read, find_installed_tables
from simkv.costs.operators.profile_resolution import (
    compose_from_tables,
    estimate_from_data_sheet,
    resolve_profile,
)
from simkv.costs.step_load import StepLoad, count_attention_pairs

NEUTRAL = CostConstants()
DECODE = StepLoad(0, 0, 0, 1, 1000, 0, 1)
PROMPT = StepLoad(1, 2048, 0, 0, 0, count_attention_pairs(2048, 0), 1)

needs_tables = pytest.mark.skipif(
    find_installed_tables() is None,
    reason="needs the operator tables: pip install 'simkv[hardware]'",
)


def llama(gpu: str = "H100-SXM", **parallel: object) -> Hardware:
    size = "70B" if parallel else "8B"
    architecture = find_architecture(f"Llama-3.1-{size}")
    return make_hardware(find_gpu(gpu), architecture, weights="fp8", **parallel)  # type: ignore[arg-type]


def seconds(profile: CostProfile, load: StepLoad) -> float:
    return StepCost(profile)(load)


@pytest.mark.parametrize("measured", [pytest.param(True, marks=needs_tables), False])
def test_steps_take_at_least_the_time_to_read_the_weights(measured: bool) -> None:
    hardware = llama(tp=4)
    make = compose_from_tables if measured else estimate_from_data_sheet
    profile = make(hardware, PACKAGED_SETTING, constants=NEUTRAL)
    assert profile is not None
    model = hardware.architecture
    read = (model.parameters - model.embeddings + model.vocab * model.hidden * 2) / 4
    floor = read / hardware.gpu.bandwidth
    assert floor < seconds(profile, DECODE) < 3 * floor
    # A prompt needs two operations per weight and token.
    work = 2 * 2048 * (model.parameters - model.embeddings) / 4
    assert seconds(profile, PROMPT) > work / hardware.gpu.peak_flops(8)


def test_step_times_depend_on_gpu_links_graphs_and_scheduling() -> None:
    base = estimate_from_data_sheet(llama(tp=4), PACKAGED_SETTING, NEUTRAL)
    faster = estimate_from_data_sheet(llama("H200", tp=4), PACKAGED_SETTING, NEUTRAL)
    assert seconds(faster, DECODE) < seconds(base, DECODE)
    slow = Interconnect("measured", 5e9, 3e-5)
    hardware = replace(llama(tp=4), interconnect=slow)
    assert seconds(
        estimate_from_data_sheet(hardware, PACKAGED_SETTING, NEUTRAL), PROMPT
    ) > 1.5 * seconds(base, PROMPT)
    eager = replace(PACKAGED_SETTING, graph_mode="full decode only")
    added = estimate_from_data_sheet(llama(tp=4), eager, NEUTRAL)
    # 0.6 ms for each of 80 layers, and all-reduces that are launched separately.
    assert seconds(added, PROMPT) - seconds(base, PROMPT) == pytest.approx(0.048, rel=0.1)
    assert seconds(added, DECODE) == pytest.approx(seconds(base, DECODE))
    sync = estimate_from_data_sheet(
        llama(tp=4), replace(PACKAGED_SETTING, asynchronous=False), NEUTRAL
    )
    assert seconds(sync, DECODE) - seconds(base, DECODE) == pytest.approx(0.0018 + 0.00005)


def test_sliding_windows_limit_the_kv_read_by_decodes() -> None:
    gpt = make_hardware(find_gpu("H100-SXM"), find_architecture("gpt-oss-20b"))
    profile = estimate_from_data_sheet(gpt, PACKAGED_SETTING, NEUTRAL)
    short, long = (seconds(profile, StepLoad(0, 0, 0, 64, 64 * n, 0, 64)) for n in (4000, 8000))
    kv = 2 * 8 * 64 * 2 * 4000 * 64 * gpt.architecture.depth / gpt.gpu.bandwidth
    # Half of the layers attend only to the last 128 tokens.
    assert 0.5 * kv < long - short < kv


def test_data_parallel_experts_process_the_tokens_of_all_ranks() -> None:
    deepseek = find_architecture("DeepSeek-V3")
    split = make_hardware(find_gpu("H200"), deepseek, tp=1, dp=8, ep=8)
    profile = estimate_from_data_sheet(split, PACKAGED_SETTING, NEUTRAL)
    alone = seconds(profile, StepLoad(0, 0, 0, 4, 4000, 0, 4))
    together = seconds(profile, StepLoad(0, 0, 0, 4, 4000, 0, 4, group_tokens=512))
    assert together > 1.2 * alone


@pytest.mark.parametrize(
    "model",
    ["DeepSeek-V3", "DeepSeek-V3.2", "Qwen3.5-397B-A17B", "gpt-oss-120b", "GLM-5", "Kimi-K2.5"],
)
def test_every_kind_of_layer_has_a_time(model: str) -> None:
    hardware = make_hardware(find_gpu("B200"), find_architecture(model), tp=8)
    guess = estimate_from_data_sheet(hardware, PACKAGED_SETTING, NEUTRAL)
    for load in LOADS:
        assert 1e-3 < seconds(guess, load) < 5
    # vLLM's sparse kernels take up to ten times as long as estimated from the data sheet.
    sparse = model in ("DeepSeek-V3.2", "GLM-5")
    engines = ("sglang",) if sparse else ("sglang", "vllm")
    for engine in engines if find_installed_tables() else ():
        setting = replace(PACKAGED_SETTING, engine=engine, release="0.5.9")
        made = compose_from_tables(hardware, setting, (), NEUTRAL)
        assert made is not None
        assert made.fit.points > 10
        for load in LOADS:
            # The measured times of short sparse prefills include launches by the host.
            assert 0.3 < seconds(made, load) / seconds(guess, load) < 5


def test_constants_scale_only_their_terms() -> None:
    base = estimate_from_data_sheet(llama(tp=4), PACKAGED_SETTING, NEUTRAL)
    doubled = apply_constants(base, CostConstants(decode=2.0))
    assert seconds(doubled, DECODE) == pytest.approx(2 * seconds(base, DECODE), rel=1e-3)
    assert seconds(doubled, PROMPT) == pytest.approx(seconds(base, PROMPT), rel=1e-3)
    both = apply_constants(base, CostConstants(prefill=2.0, decode=2.0, prefill_step_s=0.1))
    assert seconds(both, PROMPT) == pytest.approx(2 * seconds(base, PROMPT) + 0.1, rel=1e-3)
    slower = apply_constants(base, CostConstants(collectives=3.0, seq_s=0.01, step_s=0.02))
    more = seconds(slower, DECODE) - seconds(base, DECODE)
    assert 0.03 < more < 0.04
    assert apply_constants(base, NEUTRAL) is base


def test_rules_match_systems_engines_releases_and_experts() -> None:
    rule = ConstantsRule(
        systems=["h100_sxm"],
        engine="vllm",
        releases=("0.11", "0.18"),
        experts="none",
        constants=NEUTRAL,
        source="a test",
    )
    inside = replace(PACKAGED_SETTING, release="0.12.0")
    assert rule.fits(llama(), inside)
    assert not rule.fits(llama("H200"), inside)
    assert not rule.fits(llama(), replace(inside, release="0.18.0"))
    assert not rule.fits(llama(), replace(inside, engine="sglang"))
    gpt = make_hardware(find_gpu("H100-SXM"), find_architecture("gpt-oss-20b"))
    assert not rule.fits(gpt, inside)
    joined = CostConstants(decode=2.0, seq_s=0.1).joined(CostConstants(decode=3.0, seq_s=0.2))
    assert joined == CostConstants(decode=6.0, seq_s=0.1 + 0.2)


@needs_tables
def test_packaged_profiles_match_composed_profiles() -> None:
    """The tolerance is 3 %, because thinned tables have an error of up to 1 % per term."""
    ready = [one for one in combinations() if one.path]
    assert len(ready) >= 30
    for one in ready[::6]:
        short = load_composed_profile(one.hardware, PACKAGED_SETTING)
        whole = compose_from_tables(one.hardware, PACKAGED_SETTING, constants=NEUTRAL)
        assert short is not None
        assert whole is not None
        for load in LOADS:
            assert seconds(short, load) == pytest.approx(seconds(whole, load), rel=0.03)


def test_packaged_profiles_are_small_and_state_their_basis() -> None:
    listed = combinations()
    assert len(listed) >= 40
    assert sum(one.path.stat().st_size for one in listed if one.path) < 2_000_000
    for one in listed:
        if one.path:
            profile = load_composed_profile(one.hardware, PACKAGED_SETTING)
            assert profile is not None
            assert profile.basis == "composed of measured operators"
            assert "Apache-2.0" in profile.source[0]
            assert "unknown" in profile.fit.note
        else:
            profile = estimate_from_data_sheet(one.hardware, PACKAGED_SETTING, NEUTRAL)
            assert profile.basis == "estimated from the data sheet"
            assert profile.fit.held_out["decode"].p95 > 0.1


def test_falls_back_to_packaged_profiles_then_data_sheets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "simkv.costs.operators.profile_resolution.find_installed_tables", lambda: None
    )
    # No other test uses this setting; profiles are cached.
    setting = replace(PACKAGED_SETTING, max_num_seqs=17)
    known = resolve_profile(combinations()[0].hardware, setting)
    assert known.basis == "composed of measured operators"
    other = resolve_profile(llama("H100-SXM", tp=8), setting)
    assert other.basis == "estimated from the data sheet"
    assert other.graph_sizes == list(setting.graph_sizes)


@needs_tables
def test_does_not_open_serving_measurements_of_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a copy of the package, the code and ``silicon_sample.csv`` cannot be read."""
    root = find_installed_tables()
    assert root is not None
    hardware = llama(tp=4)
    expected = compose_from_tables(hardware, PACKAGED_SETTING, constants=NEUTRAL)
    package = tmp_path / "aiconfigurator_core"
    (package / "systems" / "silicon_sample.csv").mkdir(parents=True)
    (package / "systems" / "data").symlink_to(root)
    (package / "__init__.py").write_text("raise SystemExit('the package is data')")
    monkeypatch.syspath_prepend(tmp_path)
    assert find_installed_tables() == package / "systems" / "data"
    assert compose_from_tables(hardware, PACKAGED_SETTING, constants=NEUTRAL) == expected


def test_prefers_custom_tables_also_for_unmeasured_gpus(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    hardware = make_hardware(find_gpu("RTX 4090"), find_architecture("Llama-3.1-8B"))
    with pytest.raises(InputError, match="no tables of NVIDIA GeForce RTX 4090; expected"):
        resolve_profile(hardware, PACKAGED_SETTING, [tmp_path])
    place = tmp_path / "nvidia_geforce_rtx_4090" / "gemm" / "vllm" / "0.24.0"
    place.mkdir(parents=True)
    rows = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": 1e-8 * n * k + 1e-4 * m}
        for m in (1, 8192)
        for n in (1024, 65536)
        for k in (1024, 65536)
    ]
    pd.DataFrame(rows).to_parquet(place / "gemm_perf.parquet")
    found = resolve_profile(hardware, PACKAGED_SETTING, [tmp_path])
    assert found.basis == "composed of measured operators"
    assert "prefill attention: estimated from the data sheet" in found.source
    model = hardware.architecture
    read = model.parameters - model.vocab * model.hidden  # all weights except the embedding
    assert seconds(found, DECODE) == pytest.approx(1e-11 * read, rel=0.1)
    pd.DataFrame(rows).drop(columns="n").to_parquet(place / "gemm_perf.parquet")
    _read.cache_clear()
    with pytest.raises(InputError, match=r"missing column: 'n'"):
        resolve_profile(hardware, replace(PACKAGED_SETTING, release="0.24.1"), [tmp_path])
