"""Tests of sweeps: which runs are made, which results are reused, and error messages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import simkv
from simkv.core.errors import InputError
from simkv.scenario.scenario_loader import load
from simkv.study.job_runner import JobExecutor, open_runner
from simkv.study.random_seeds import reseed_scenario
from simkv.study.run_digest import compute_digest
from simkv.study.simulation_job import (
    JobResult,
    RunsFailed,
    SimulationJob,
    run_job,
)
from simkv.study.sweep.sweep import Sweep, build_sweep, run_sweep
from simkv.study.sweep.sweep_table import build_sweep_table, flatten_figures
from simkv.study.sweep_axes import parse_axis, parse_sample

BLOCKS = "engine.num_gpu_blocks"


def here(function: Any, jobs: Sequence[SimulationJob]) -> Iterator[JobResult]:
    """Execute the jobs in this process from last to first, because their order must not matter."""
    return map(function, reversed(jobs))


def run_all(
    sweep: Sweep, execute: JobExecutor, store: Path | None = None, advance: Any = None
) -> dict[str, Any]:
    with open_runner(execute, store) as runner:
        return run_sweep(sweep, runner, advance)


def swept(sweep: Sweep, store: Path | None = None) -> pd.DataFrame:
    return build_sweep_table(sweep, run_all(sweep, here, store))


def test_one_row_per_point_variant_and_repeat(small: Path) -> None:
    frame = swept(build_sweep(small, [parse_axis(f"{BLOCKS}=128,256")], repeats=2))
    keys = frame[["point", BLOCKS, "variant", "repeat"]].to_numpy().tolist()
    assert keys == [
        [point, blocks, variant, repeat]
        for point, blocks in enumerate((128, 256))
        for variant in ("plain", "cold")
        for repeat in (0, 1)
    ]
    # All points have the same seeds, and the first seed is the scenario's own.
    assert frame["seed"].nunique() == 2
    assert set(frame[frame["repeat"] == 0]["seed"]) == {7}


def test_row_matches_run(small: Path) -> None:
    frame = swept(build_sweep(small, [parse_axis(f"{BLOCKS}=96,128"), parse_axis("variants=cold")]))
    assert list(frame["variant"]) == ["cold", "cold"]
    for _, row in frame.iterrows():
        alone = simkv.run(small, **{BLOCKS: int(row[BLOCKS])}).results["cold"].summary
        for name, value in flatten_figures(alone).items():
            assert row[name] == value, name


def test_repeats_differ_and_repeat_zero_is_scenario(small: Path) -> None:
    scenario = load(small)["plain"]
    assert reseed_scenario(scenario, 0) is scenario
    seeds = [reseed_scenario(scenario, n).workload.arrivals.seed for n in range(4)]  # type: ignore[union-attr]
    assert len(set(seeds)) == 4
    frame = swept(build_sweep(small, [parse_axis("variants=plain")], repeats=4))
    assert frame["e2e_ms.mean"].nunique() == 4


def test_repeats_resample_sessions(small: Path) -> None:
    text = small.read_text().replace("arrivals", "sessions").replace("num_prompts", "num_sessions")
    small.write_text(
        text.replace("seed: 7", "seed: 7\n    turns: {distribution: uniform, low: 1, high: 9}")
    )
    scenario = load(small)["plain"]
    sessions, again = scenario.workload.sessions, reseed_scenario(scenario, 1).workload.sessions
    assert sessions is not None
    assert again is not None
    assert sessions.session_calls != again.session_calls
    fields = {name: getattr(again, name) for name in again.model_fields_set}
    assert again.session_calls == type(again)(**fields).session_calls


def test_digest_covers_relevant_fields_only(small: Path, root: Path) -> None:
    def digest(*overrides: str) -> str:
        return compute_digest(load(small, overrides)["plain"], small.parent)

    first = digest()
    assert digest() == first
    for same in ("summary=other", "name=other", "engine.block_size=16", "engine_ready=0.0"):
        assert digest(same) == first, same
    for other in (
        "engine.max_num_seqs=17",
        "workload.arrivals.seed=8",
        "workload.arrivals.request_rate=.inf",
        "timeout=41",
        "horizon=40",
        "profile=unit-step",
    ):
        assert digest(other) != first, other
    profile = json.loads((small.parent / "costs.json").read_text())
    profile["idle_pass_s"] *= 2
    (small.parent / "costs.json").write_text(json.dumps(profile))
    assert digest() != first


def test_digest_covers_trace_contents(small: Path) -> None:
    trace = small.parent / "trace.csv"
    rows = "arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,100,10\n1.0,100,10\n"
    trace.write_text(rows)
    override = "workload.trace=trace.csv"
    before = compute_digest(load(small, [override])["plain"], small.parent)
    trace.write_text(rows.replace("1.0,100", "1.25,100"))
    assert compute_digest(load(small, [override])["plain"], small.parent) != before


def test_rejects_job_with_changed_files(small: Path) -> None:
    job = build_sweep(small, []).runs[0].job
    assert run_job(job).summary
    assert "a worker process and the main process use different versions" in str(
        run_job(replace(job, digest="0" * 32)).error
    )


def test_skips_finished_jobs(small: Path, tmp_path: Path) -> None:
    store = tmp_path / "points.jsonl"
    asked: list[int] = []

    def counting(function: Any, jobs: Sequence[SimulationJob]) -> Iterator[JobResult]:
        asked.append(len(jobs))
        return map(function, jobs)

    first = build_sweep(small, [parse_axis(f"{BLOCKS}=96,128")])
    whole = build_sweep(small, [parse_axis(f"{BLOCKS}=256,128,96")])
    run_all(first, counting, store)
    run_all(whole, counting, store)
    run_all(whole, counting, store)
    assert asked == [4, 2]
    assert swept(whole, store).to_csv() == swept(whole).to_csv()
    # Settings that result in the same scenario are the same point.
    run_all(
        build_sweep(small, [parse_axis("engine.block_size=16")], [f"{BLOCKS}=96"]), counting, store
    )
    assert asked == [4, 2]


def test_interrupted_sweep_keeps_results(small: Path, tmp_path: Path) -> None:
    store = tmp_path / "points.jsonl"
    whole = build_sweep(small, [parse_axis(f"{BLOCKS}=96..256:32")])

    def interrupted(function: Any, jobs: Sequence[SimulationJob]) -> Iterator[JobResult]:
        yield from map(function, jobs[:5])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(whole, interrupted, store)
    assert len(store.read_text().splitlines()) == 5
    seen: list[tuple[int, int]] = []
    run_all(whole, here, store, lambda done, total: seen.append((done, total)))
    assert seen == [(done, 12) for done in range(5, 13)]


def test_reports_all_errors_before_running(small: Path) -> None:
    axes = [parse_axis(f"{BLOCKS}=-1,128,256"), parse_axis("engine.max_num_seqs=0,4,x")]
    with pytest.raises(InputError) as caught:
        build_sweep(small, axes)
    lines = str(caught.value).splitlines()
    assert len(lines) == 3, lines
    for wrong, count in ((f"{BLOCKS}=-1", 3), ("max_num_seqs=0", 3), ("max_num_seqs=x", 3)):
        assert any(wrong in line and f"at {count} of 9 points" in line for line in lines), wrong


def test_reports_unreadable_trace_before_running(small: Path) -> None:
    (small.parent / "trace.csv").write_text("arrived_at,num_prefill_tokens\n1,2\n")
    with pytest.raises(InputError, match=r"trace\.csv"):
        build_sweep(small, [parse_axis("workload.trace=trace.csv")])


@pytest.mark.parametrize(
    ("axes", "repeats", "what"),
    [
        (["engine.max_num_sqs=1,2"], 1, "did you mean 'max_num_seqs'"),
        (["variants=plain,warm"], 1, "unknown variant"),
        (["timeout=1,2", "timeout=3"], 1, "specified twice"),
        (["timeout=1..60000:1"], 2, "240,000 runs"),
    ],
)
def test_rejects_invalid_sweeps(small: Path, axes: list[str], repeats: int, what: str) -> None:
    with pytest.raises(InputError, match=what):
        build_sweep(small, [parse_axis(axis) for axis in axes], repeats=repeats)


def test_rejects_repeats_without_randomness(small: Path) -> None:
    small.write_text(
        "name: b\nworkload: {burst: {num_prompts: 2, prompt_tokens: 9, output_tokens: 3}}\n"
        "engine: {name: vllm, num_gpu_blocks: 128, max_model_len: 100}\nprofile: unit-step\n"
    )
    assert len(build_sweep(small, []).runs) == 1
    with pytest.raises(InputError, match="has no random part"):
        build_sweep(small, [], repeats=2)


def test_reports_idle_knobs(small: Path) -> None:
    axes = [parse_axis(f"{BLOCKS}=128,256"), parse_axis("engine.enable_prefix_caching=true,false")]
    assert build_sweep(small, axes).idle_knobs == []
    cold = parse_axis("variants=cold")
    assert build_sweep(small, [*axes, cold]).idle_knobs == ["engine.enable_prefix_caching"]


def test_samples(small: Path) -> None:
    axes = [parse_axis(f"{BLOCKS}=100..299"), parse_axis("engine.max_num_seqs=2,16")]
    sweep = build_sweep(small, axes, sample=parse_sample("lhs:4"), seed=5)
    assert [run.point for run in sweep.runs] == [0, 0, 1, 1, 2, 2, 3, 3]
    drawn = [run.knobs for run in sweep.runs[::2]]
    assert sorted((int(str(knobs[BLOCKS])) - 100) // 50 for knobs in drawn) == [0, 1, 2, 3]
    assert sorted(int(str(knobs["engine.max_num_seqs"])) for knobs in drawn) == [2, 2, 16, 16]


def test_failed_runs_do_not_stop_others(small: Path, tmp_path: Path) -> None:
    store = tmp_path / "points.jsonl"
    whole = build_sweep(small, [parse_axis(f"{BLOCKS}=96,128")])

    def failing(function: Any, jobs: Sequence[SimulationJob]) -> Iterator[JobResult]:
        yield JobResult(jobs[0].digest, None, InputError("out of luck"))
        yield from map(function, jobs[1:])

    with pytest.raises(RunsFailed, match=rf"1 of 4 runs failed.*plain, {BLOCKS}=96.*out of luck"):
        run_all(whole, failing, store)
    assert len(store.read_text().splitlines()) == 3


def test_latency_without_sample_is_empty() -> None:
    none = {"mean": 0.0, "p99": 0.0}
    flat = flatten_figures(
        {"steps": 0, "ttft_ms": none, "e2e_ms": {"mean": 2.0, "p99": 3.0}, "notes": ["a", "b"]}
    )
    assert flat == {
        "steps": 0,
        "ttft_ms.mean": None,
        "ttft_ms.p99": None,
        "e2e_ms.mean": 2.0,
        "e2e_ms.p99": 3.0,
        "notes": "a\nb",
    }
