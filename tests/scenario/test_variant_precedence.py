"""Tests of notes on values that are set for all variants, but overridden by some."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

import simkv
from simkv.scenario.variant_precedence import find_overriding_variants, override_notes
from simkv.scenario.yaml_document import read_document
from simkv.study.sweep.sweep import build_sweep
from simkv.study.sweep_axes import parse_axis
from tests.conftest import ROOT

TEXT = """\
name: chat
workload: {burst: {num_prompts: 4, prompt_tokens: 40, output_tokens: 8}}
engine: {name: vllm, variant: 0.33.0, num_gpu_blocks: 40, max_model_len: 64}
profile: unit-step
variants:
  small: {engine: {num_gpu_blocks: 20}}
  plain: {}
  other: {engine: {name: mistralrs, variant: bucketed, block_size: 8, num_gpu_blocks: 40}}
"""
NOTE = "does not affect variant small, which sets engine.num_gpu_blocks itself, to 20"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "s.yaml").write_text(TEXT)
    return tmp_path / "s.yaml"


def simkv_at(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "simkv", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
    )


def test_finds_variants_that_set_a_field_themselves(file: Path) -> None:
    document = read_document(file)
    assert find_overriding_variants(document, "engine.num_gpu_blocks") == {"small": 20, "other": 40}
    assert find_overriding_variants(document, "engine.max_num_seqs") == {"other": None}
    assert find_overriding_variants(document, "engine.block_size") == {"other": 8}
    assert find_overriding_variants(document, "timeout") == {}
    assert find_overriding_variants(document, "variants.small.engine.num_gpu_blocks") == {}
    assert override_notes(document, ["timeout=3", "workload.burst.num_prompts=3"]) == []
    assert "num_gpu_blocks: 40" in file.read_text()
    assert document.tree["engine"]["num_gpu_blocks"] == 40  # the document is unchanged


def test_run_prints_a_note(file: Path) -> None:
    text = TEXT.replace("  other: {engine: {name: mistralrs", "  # {engine: {name: mistralrs")
    file.write_text(text)
    ran = simkv_at(file.parent, "run", "s.yaml", "--no-plots", "--set", "engine.num_gpu_blocks=30")
    assert ran.returncode == 0
    assert ran.stderr == f"simkv: note: --set engine.num_gpu_blocks=30: {NOTE}\n"
    ran = simkv_at(file.parent, "run", "s.yaml", "--no-plots", "--set", "engine.max_num_seqs=3")
    assert (ran.returncode, ran.stderr) == (0, "")


def test_sweep_prints_a_note_and_shows_the_values_in_effect(file: Path) -> None:
    file.write_text(TEXT.replace("  other: {engine: {name: mistralrs", "  # {x: {name: mistralrs"))
    ran = simkv_at(file.parent, "sweep", "s.yaml", "--over", "engine.num_gpu_blocks=30,40")
    assert (ran.returncode, ran.stderr) == (
        0,
        f"simkv: note: --over engine.num_gpu_blocks: {NOTE}\n",
    )
    with (file.parent / "runs" / "chat-sweep" / "table.csv").open() as table:
        rows = [(row["variant"], row["engine.num_gpu_blocks"]) for row in csv.DictReader(table)]
    assert rows == [("small", "20"), ("plain", "30"), ("small", "20"), ("plain", "40")]


def test_sweep_over_a_field_that_no_variant_sets_has_no_note(file: Path) -> None:
    whole = build_sweep(file, [parse_axis("timeout=3,4")])
    assert all(run.variant_knobs == {} for run in whole.runs)
    assert whole.notes == ()


def test_python_api_issues_a_warning(file: Path) -> None:
    file.write_text(TEXT.replace("  other: {engine: {name: mistralrs", "  # {x: {name: mistralrs"))
    with pytest.warns(UserWarning, match=NOTE):
        simkv.run(file, engine__num_gpu_blocks=30)
    with pytest.warns(UserWarning, match=NOTE):
        simkv.sweep(file, {"engine.num_gpu_blocks": [30, 40]}, jobs=1)
