"""Tests of the files of a run: they are written completely or not at all, and other files do not
change.
"""

from __future__ import annotations

import csv
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simkv import __version__
from simkv.core.errors import InputError
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_file
from simkv.report.published_figures import compare_published
from simkv.report.run_files import check_run_folder, write_run

TEXT = """\
name: t
workload:
  requests:
    - {prompt_tokens: 4, output_tokens: 3}
    - {prompt_tokens: 6, output_tokens: 40, timeout: 9.5}
engine: {name: mistralrs, variant: pr2034}
profile: my.json
variants: {a: {}, b: {engine: {variant: bucketed, block_size: 8}, timeout: 100.0}}
published: {a: {figures: {makespan_s: 5.0}, at_least: {starved: 1}}}
provenance: {given: [the rules]}
"""
PROFILE = {
    "name": "mine",
    "engine": "any",
    "model": "none",
    "gpu": "mine",
    "basis": "assumed",
    "terms": [{"name": "a step", "feature": "steps", "seconds": 1.0}],
    "idle_pass_s": 0.5,
    "range": {"decode_seqs": [2, 4]},
    "fit": {"points": 0},
    "source": [],
}


@pytest.fixture
def results(tmp_path: Path) -> dict[str, RunResult]:
    (tmp_path / "s.yaml").write_text(TEXT)
    (tmp_path / "my.json").write_text(json.dumps(PROFILE))
    return run_file(tmp_path / "s.yaml")


def write(folder: Path, results: dict[str, RunResult], draw: Any = None, **how: Any) -> Path:
    write_run(folder, results, compare_published(results), draw or (lambda target: None), **how)
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# Written files


def test_summary_has_figures_of_every_variant(
    tmp_path: Path, results: dict[str, RunResult]
) -> None:
    summary = json.loads((write(tmp_path / "out", results) / "summary.json").read_text())
    assert (summary["scenario"], summary["version"]) == ("t", __version__)
    assert list(summary["variants"]) == ["a", "b"]
    variant = summary["variants"]["a"]
    whole = ["requests", "finished", "starved", "timed_out", "rejected", "lost", "stalled"]
    assert {name: variant[name] for name in whole} == dict(
        zip(whole, [2, 1, 0, 1, 0, 0, 0], strict=True)
    )
    assert variant["verdict"] == "timed_out"
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert list(variant[name]) == ["mean", "median", "p90", "p95", "p99"]
    for name in (
        "makespan_s",
        "output_throughput",
        "request_throughput",
        "preemptions",
        "recomputed_tokens",
        "longest_stall_s",
        "steps",
    ):
        assert isinstance(variant[name], float | int)
    assert variant["profile"]["name"] == "mine"
    assert summary["published"][0] == {
        "variant": "a",
        "figure": "makespan_s",
        "published": 5.0,
        "bound": False,
        "simulated": 9.5,
        "error": pytest.approx(0.9),
    }
    assert summary["provenance"]["given"] == ["the rules"]


def test_requests_csv_has_a_row_per_variant_and_request(
    tmp_path: Path, results: dict[str, RunResult]
) -> None:
    path = write(tmp_path / "out", results) / "requests.csv"
    assert path.read_text().splitlines()[0] == (
        "variant,id,arrival_s,prompt_tokens,output_tokens,outcome,first_token_s,finish_s,ttft_s,"
        "tpot_s,e2e_s,preemptions,recomputed_tokens"
    )
    found = rows(path)
    assert [(row["variant"], row["id"], row["outcome"]) for row in found] == [
        ("a", "0", "finished"),
        ("a", "1", "timed_out"),
        ("b", "0", "finished"),
        ("b", "1", "timed_out"),
    ]
    assert found[0] | {"tpot_s": "1.5", "e2e_s": "4.0", "finish_s": "4.0"} == found[0]
    assert (found[1]["finish_s"], found[1]["tpot_s"], found[1]["e2e_s"]) == ("", "", "")


def test_steps_csv_is_written_on_demand(tmp_path: Path, results: dict[str, RunResult]) -> None:
    assert not (write(tmp_path / "out", results) / "steps.csv").exists()
    found = rows(write(tmp_path / "out", results, steps=True) / "steps.csv")
    assert [row["step"] for row in found if row["variant"] == "a"] == [
        str(i) for i in range(results["a"].summary["steps"])
    ]
    assert (found[0]["kind"], found[0]["start_s"], found[0]["end_s"]) == ("prefill", "0.0", "1.0")


def test_ledger_covers_requests_and_preemptions_name_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: t\nprofile: unit-step\nworkload: {burst: {num_prompts: 3, prompt_tokens: 12, "
        "output_tokens: 9}}\nengine: {name: vllm, block_size: 4, num_gpu_blocks: 12, "
        "startup_check: false}\n"
    )
    results = run_file(path)
    folder = write(tmp_path / "out", results, ledger=True)
    ends: dict[str, list[tuple[float, float]]] = {}
    for row in rows(folder / "ledger.csv"):
        ends.setdefault(row["id"], []).append((float(row["start_s"]), float(row["end_s"])))
    for row in rows(folder / "requests.csv"):
        tiles = ends[row["id"]]
        assert tiles[0][0] == float(row["arrival_s"])
        assert all(a[1] == b[0] for a, b in pairwise(tiles))
        assert tiles[-1][1] == float(row["finish_s"])
    taken = rows(folder / "preemptions.csv")
    summary = json.loads((folder / "summary.json").read_text())["variants"]["run"]
    assert len(taken) == summary["preemptions"] > 0
    assert {(row["victim"], row["by"], row["why"]) for row in taken} == {
        ("2", "2", "blocks")
    }  # the request found no block for itself
    found = summary["diagnosis"]
    assert found["preemptions_by_reason"] == {"blocks": len(taken)}
    assert found["recompute_tax"]["tokens"] == summary["recomputed_tokens"] > 0
    lives = sum(float(row["finish_s"]) for row in rows(folder / "requests.csv"))
    assert sum(found["time_s"].values()) == pytest.approx(lives)
    assert found["blockers"][0]["id"] in (0, 1)


def test_run_without_preemptions_has_an_empty_table(
    tmp_path: Path, results: dict[str, RunResult]
) -> None:
    folder = write(tmp_path / "out", {"a": results["a"]}, ledger=True)
    text = (folder / "preemptions.csv").read_text()
    assert text == "variant,at_s,victim,by,why,tokens\n"


def test_resolved_scenario_repeats_the_run(tmp_path: Path, results: dict[str, RunResult]) -> None:
    first = write(tmp_path / "out", results, steps=True)
    assert (first / "my.json").exists()  # the profile is in the same folder
    again = write(tmp_path / "again", run_file(first / "scenario.yaml"), steps=True)
    for name in ("summary.json", "requests.csv", "steps.csv", "scenario.yaml"):
        assert (again / name).read_bytes() == (first / name).read_bytes(), name


# All files or none


def listing(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_failed_plot_leaves_no_partial_files(
    tmp_path: Path, results: dict[str, RunResult], failure: type[BaseException]
) -> None:
    def draw(target: Path) -> None:
        (target / "half.png").write_text("half")
        raise failure

    before = listing(tmp_path)
    with pytest.raises(failure):
        write(tmp_path / "out" / "deep", results, draw)
    assert listing(tmp_path) - before <= {"out"}

    write(tmp_path / "out" / "deep", results)
    kept = listing(tmp_path)
    with pytest.raises(failure):
        write(tmp_path / "out" / "deep", results, draw)
    assert listing(tmp_path) == kept


def test_replaces_an_earlier_run(tmp_path: Path, results: dict[str, RunResult]) -> None:
    folder = write(tmp_path / "out", results, steps=True)
    (folder / "lanes.png").write_text("old")
    (folder / "report.html").write_text("old")
    write(folder, {"a": results["a"]})
    assert sorted(path.name for path in folder.iterdir()) == [
        "my.json",
        "requests.csv",
        "scenario.yaml",
        "summary.json",
    ]
    assert {path.name for path in tmp_path.iterdir()} == {"out", "s.yaml", "my.json"}


def test_keeps_other_files_in_the_directory(tmp_path: Path, results: dict[str, RunResult]) -> None:
    folder = write(tmp_path / "out", results)
    (folder / "notes").mkdir()
    (folder / "notes" / "why.md").write_text("hours of work")
    (folder / "trace.json").write_text("{}")
    (folder / "link").symlink_to("nowhere")
    write(folder, results)
    assert (folder / "notes" / "why.md").read_text() == "hours of work"
    assert (folder / "trace.json").read_text() == "{}"
    assert (folder / "link").is_symlink()


def test_old_run_survives_a_failed_replacement(
    tmp_path: Path, results: dict[str, RunResult], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "out", results)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "new":
            raise OSError("disk gone")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(InputError, match="out: cannot be written: disk gone"):
        write(folder, results)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


# Other files


@pytest.mark.parametrize("name", ["new", "deep/er", "empty"])
def test_accepts_new_and_empty_directories(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    check_run_folder(tmp_path / name)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("file", "is a file"),
        ("file/below", "file is a file"),
        ("foreign", "contains other files and no earlier run"),
        ("data", "contains other files and no earlier run"),
        ("broken", "contains other files and no earlier run"),
        ("x" * 300, "cannot be written: file name too long"),
    ],
)
def test_rejects_directories_with_other_files(tmp_path: Path, name: str, complaint: str) -> None:
    (tmp_path / "file").write_text("")
    for folder, summary in (("foreign", None), ("data", "{}"), ("broken", "{")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "thesis.tex").write_text("years of work")
        if summary:
            (tmp_path / folder / "summary.json").write_text(summary)
    with pytest.raises(InputError) as raised:
        check_run_folder(tmp_path / name)
    assert str(raised.value).startswith(f"--out {tmp_path / name}: ")
    assert complaint in str(raised.value)


def test_rejects_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="is the current directory"):
        check_run_folder(Path())


# The resolved scenario

BURST = (
    "{num_prompts: 2, prompt_tokens: 3, output_tokens: 2, interval: 1.0, "
    "prefix_group: a, prefix_tokens: 2}"
)
DRAWN = (
    "{num_prompts: 3, request_rate: 1.0, burstiness: 0.5, output_tokens: 2, "
    "prompt_tokens: {distribution: uniform, low: 1, high: 9}}"
)
TRACE = "trace: ../t.csv, limit: 2, rate_scale: 2.0"
WORKLOADS = {
    "the same": (f"burst: {BURST}", "max_concurrency: 1"),
    "back to a default": (f"burst: {BURST}", "burst: {interval: 0.0, priority: 0}"),
    "back to nothing": (f"burst: {BURST}", "burst: {prefix_group: null, prefix_tokens: 0}"),
    "another form": (f"burst: {BURST}", "requests: [{prompt_tokens: 1, output_tokens: 1}]"),
    "another distribution": (
        f"arrivals: {DRAWN}",
        "arrivals: {prompt_tokens: {distribution: lognormal, mean: 5.0, max: 9}, burstiness: 1.0}",
    ),
    "no distribution": (f"arrivals: {DRAWN}", "arrivals: {prompt_tokens: 4}"),
    "from a trace": (TRACE, f"burst: {BURST}"),
    "to a trace": (f"burst: {BURST}", TRACE),
    "another part of a trace": (TRACE, "limit: 3, rate_scale: 1.0"),
}


@pytest.mark.parametrize(("base", "other"), WORKLOADS.values(), ids=WORKLOADS)
def test_saved_scenario_repeats_every_variant(tmp_path: Path, base: str, other: str) -> None:
    (tmp_path / "t.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        + "".join(f"2024-05-10 00:00:0{i}.000000,{i + 3},{i + 1}\n" for i in range(4))
    )
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "s.yaml"
    path.write_text(
        "name: t\nengine: {name: mistralrs}\nprofile: unit-step\ntimeout: 50.0\n"
        f"workload: {{{base}}}\n"
        f"variants: {{a: {{}}, b: {{workload: {{{other}}}, timeout: null, horizon: 80.0}}}}\n"
    )
    first = run_file(path)
    out = write(tmp_path / "elsewhere" / "out", first)
    again = run_file(out / "scenario.yaml")
    assert [r.summary for r in again.values()] == [r.summary for r in first.values()]
    rows_of = [[life.request for life in r.record.requests.values()] for r in first.values()]
    assert [
        [life.request for life in r.record.requests.values()] for r in again.values()
    ] == rows_of
    assert write(tmp_path / "again", again)
    for name in ("scenario.yaml", "requests.csv"):
        assert (tmp_path / "again" / name).read_bytes() == (out / name).read_bytes()


def test_saved_scenario_repeats_a_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "name: t\nworkload: {burst: {num_prompts: 2, prompt_tokens: 9, output_tokens: 5}}\n"
        "engine: {name: fastdeploy, block_size: 4, num_blocks: 9}\nprofile: unit-step\n"
        "variants: {plain: {}, piped: {pipeline: {}}}\n"
    )
    first = run_file(path)
    again = run_file(write(tmp_path / "out", first) / "scenario.yaml")
    assert [r.summary for r in again.values()] == [r.summary for r in first.values()]
    assert again["piped"].scenario.pipeline == first["piped"].scenario.pipeline
