"""Tests of the full report of a run: a block per variant as in ``vllm bench serve``, and
comparisons.
"""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from simkv.cli.command_support import show
from simkv.metrics.scenario_runner import run_file
from simkv.report.console_details import render_results
from simkv.report.published_figures import compare_published

TEXT = """\
name: t
report: https://example.org/1
summary: Two requests, [not markup].
workload:
  requests:
    - {prompt_tokens: 4, output_tokens: 3}
    - {prompt_tokens: 4, output_tokens: 300, timeout: 9.5}
engine: {name: mistralrs, variant: pr2034}
profile: l4-mistralrs-pr2034
provenance: {given: [the rules], fitted: [the costs], assumed: [the rest]}
"""
VARIANTS = "variants: {one: {}, two: {engine: {num_gpu_blocks: 3}}}\n"
PUBLISHED = """\
published:
  one:
    figures: {finished: 2, makespan_s: 10.0}
    at_least: {timed_out: 1}
    note: by hand
"""


def printed(folder: Path, text: str, width: int = 160) -> str:
    (folder / "s.yaml").write_text(text)
    results = run_file(folder / "s.yaml")
    out = io.StringIO()
    on = Console(file=out, width=width, highlight=False)
    show(*render_results(results, compare_published(results)), on=on)
    return out.getvalue()


@pytest.fixture
def text(tmp_path: Path) -> str:
    return printed(tmp_path, TEXT + VARIANTS + PUBLISHED)


def test_names_the_replayed_report(text: str) -> None:
    assert text.startswith("t: Two requests, [not markup].\nReplays https://example.org/1\n")


def test_block_has_the_layout_of_vllm_bench_serve(tmp_path: Path) -> None:
    lines = printed(tmp_path, TEXT).splitlines()
    start = lines.index("=========== Serving Simulation Result ============")
    block = lines[start : lines.index("=" * 50, start) + 1]
    assert [line for line in block if len(line) > 60] == []
    assert "Successful requests:                    1" in block
    assert "Failed requests:                        1" in block
    assert "  timed out:                            1" in block
    assert any(line.startswith("Output token throughput (tok/s):        0.") for line in block)
    for title in (
        "---------------Time to First Token----------------",
        "-----Time per Output Token (excl. 1st token)------",
        "---------------Inter-token Latency----------------",
        "----------------End-to-end Latency----------------",
        "--------------------Scheduling--------------------",
    ):
        assert title in block
    for short in ("TTFT", "TPOT", "ITL", "E2EL"):
        for name in ("Mean", "Median", "P90", "P95", "P99"):
            assert sum(line.startswith(f"{name} {short} (ms):") for line in block) == 1
    after = block[block.index("--------------------Scheduling--------------------") :]
    assert [line.split(":")[0] for line in after[1:5]] == [
        "Preemptions",
        "Recomputed tokens",
        "Longest stall (s)",
        "Starved requests",
    ]


def test_compares_variants_side_by_side(text: str) -> None:
    table = text[text.index("Variants side by side") :]
    header = next(line for line in table.splitlines() if "one" in line)
    assert header.split() == ["one", "two"]
    finished = next(line for line in table.splitlines() if line.strip().startswith("Finished"))
    assert finished.split() == ["Finished", "1", "1"]


def test_single_variant_has_no_comparison(tmp_path: Path) -> None:
    assert "side by side" not in printed(tmp_path, TEXT)


def test_many_variants_need_several_tables(tmp_path: Path) -> None:
    many = "variants: {" + ", ".join(f"v{i}: {{}}" for i in range(16)) + "}\n"
    text = printed(tmp_path, TEXT + many)
    assert text.count("Makespan (s)") == 2
    for i in range(16):
        assert f"v{i}" in text


def test_published_figures_have_their_errors(text: str) -> None:
    table = text[text.index("Published and simulated figures") :]
    rows = {line.split()[1]: line.split() for line in table.splitlines() if "  one" in line}
    assert rows["finished"][-2:] == ["-50.00", "%"]
    assert rows["makespan_s"][2:4] == ["10", "9.50"]
    assert rows["timed_out"][2:] == ["≥", "1", "1.00", "holds"]
    assert "one: by hand" in table


def test_lists_given_fitted_and_assumed_separately(text: str) -> None:
    tail = text[text.index("\nGiven\n") :]
    assert "\nGiven\n  - the rules\n\nFitted\n  - the costs\n\nAssumed\n  - the rest\n" in tail
    assert (
        "l4-mistralrs-pr2034 (NVIDIA L4): fitted to published figures, points: 14, rms error"
        in tail
    )


def test_notes_and_verdict_follow_the_block(tmp_path: Path) -> None:
    tight = TEXT.replace("variant: pr2034", "variant: pr2034, num_gpu_blocks: 2")
    lines = printed(tmp_path, tight).splitlines()
    end = lines.index("=" * 50)
    assert lines[end + 1].startswith("Ending: ")
    notes = [line for line in lines[end + 2 :] if line.startswith("Note: ")]
    assert any("do not fit" in note for note in notes)


def test_fits_a_narrow_terminal(tmp_path: Path) -> None:
    assert "Makespan (s)" in printed(tmp_path, TEXT + VARIANTS, width=60)


def test_lines_are_printed_literally() -> None:
    out = io.StringIO()
    show("[bold]x[/] " + "y" * 50 + " :smile:", on=Console(file=out, width=20))
    assert out.getvalue() == "[bold]x[/] " + "y" * 50 + " :smile:\n"
