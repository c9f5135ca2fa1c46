"""Tests of the list of available costs, and of notes on profiles that were made for another
engine.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from simkv.cli import app, command_support
from simkv.core.errors import InputError
from simkv.costs import packaged_profiles
from simkv.costs.operators.composed_profiles import combinations, composed_profile_path
from simkv.costs.packaged_profiles import find_known_costs, make_section
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.hardware_section import HardwareSection, build_hardware
from simkv.scenario.scenario_loader import load


def test_words_filter_the_list_in_any_spelling() -> None:
    whole = find_known_costs()
    named = {one.name for one in whole if one.name}
    assert {"unit-step", "l4-mistralrs-pr2034"} <= named
    found = find_known_costs(["llama", "70B", "h100_sxm"])
    assert {one.model for one in found} == {"meta-llama/Llama-2-70b-hf", "meta-llama/Llama-3.1-70B"}
    plain = [one for one in found if "packaged" not in one.basis]
    assert {(one.gpu, one.fits) for one in plain} == {("NVIDIA H100 80GB HBM3", 2)}
    assert any(one.basis.endswith("packaged: tp 4, fp8, KV fp8") for one in found)
    assert [one.name for one in find_known_costs(["mistralrs", "slow"])] == [
        "l4-mistralrs-slow-prefill"
    ]


def test_reports_models_that_fit_no_gpu_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_profiles, "find_installed_tables", lambda: None)
    (one,) = find_known_costs(["Kimi-K2.5", "RTX 3090"])
    assert (one.fits, one.basis) == (None, "estimated from the data sheet")
    assert one.error.endswith("(not measured: model, release, GPU)")


def test_command_states_how_to_use_a_listed_profile() -> None:
    run = CliRunner().invoke
    done = run(app, ["profile", "list", "qwen3", "8b", "l40s"])
    assert "hardware: {gpu: NVIDIA L40S, model: Qwen/Qwen3-8B}" in done.output
    done = run(app, ["profile", "list", "llama", "70b"])
    assert "model: meta-llama/Llama-3.1-70B, tp: 2, weights: fp8}" in done.output
    everything = run(app, ["profile", "list"]).output
    assert "openai/gpt-oss-120b" in everything and "unit-step" in everything  # noqa: PT018
    assert isinstance(run(app, ["profile", "list", "abacus"]).exception, InputError)


def test_section_selects_the_packaged_profile() -> None:
    packaged = [one.hardware for one in combinations() if one.path]
    assert len(packaged) > 10
    for hardware in packaged:
        section = HardwareSection.model_validate(make_section(hardware))
        assert composed_profile_path(build_hardware(section)) == composed_profile_path(hardware)


def test_names_are_not_cut_on_narrow_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_support, "console", lambda: Console(width=50))
    table = CliRunner().invoke(app, ["profile", "list", "mistralrs"]).output
    assert "l4-mistralrs-slow-prefill" in table and "…" not in table  # noqa: PT018
    assert "Omitted columns: " in table


@pytest.mark.parametrize(
    ("engine", "note"),
    [
        ("{name: vllm, num_gpu_blocks: 1000}", "was made for mistral.rs, pull request 2034"),
        ("{name: mistralrs, num_gpu_blocks: 1000}", ""),
    ],
)
def test_reports_costs_of_another_engine(tmp_path: Path, engine: str, note: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: s\nworkload: {burst: {num_prompts: 2, prompt_tokens: 30, output_tokens: 5}}\n"
        f"engine: {engine}\nprofile: l4-mistralrs-pr2034\n"
    )
    notes = run_scenario(load(path)["run"], tmp_path).notes
    told = [text for text in notes if "was made for" in text]
    assert len(told) == bool(note)
    assert all(note in text for text in told)


def test_reports_costs_of_another_release(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    text = (
        "name: s\nworkload: {burst: {num_prompts: 2, prompt_tokens: 30, output_tokens: 5}}\n"
        "engine: {name: vllm, variant: 0.19.0, num_gpu_blocks: 1000, max_model_len: 8192}\n"
    )
    path.write_text(text + "hardware: {gpu: H100, model: llama-3.1-8b}\n")
    (spec,) = run_scenario(load(path)["run"], tmp_path).specs
    (tmp_path / "mine.json").write_text(spec.profile.model_dump_json())
    for variant, told in (("0.19.0", 0), ("0.33.0", 1)):
        path.write_text(text.replace("0.19.0", variant) + "profile: mine.json\n")
        notes = run_scenario(load(path)["run"], tmp_path).notes
        assert sum("made for vllm 0.19.0" in note for note in notes) == told
    path.write_text(text + "profile: unit-step\n")
    assert not run_scenario(load(path)["run"], tmp_path).notes


@pytest.mark.parametrize("columns", ["80", "120"])
def test_profile_list_keeps_gpus_and_basis(monkeypatch: pytest.MonkeyPatch, columns: str) -> None:
    """The GPU, the least number of GPUs and the basis are the answer to a search."""
    monkeypatch.setenv("COLUMNS", columns)
    lines = CliRunner().invoke(app, ["profile", "list", "llama", "70b"]).output.splitlines()
    heading = next(line for line in lines if "model" in line)
    assert "gpu" in heading
    assert "basis" in heading
    assert "GPUs" in "".join(lines[:3])
