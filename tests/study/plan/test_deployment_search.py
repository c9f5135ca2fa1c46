"""Tests that compare the search of ``simkv plan --tune`` with simulations of all deployments."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

import simkv
from simkv.scenario.yaml_document import read_document
from simkv.study.job_runner import open_pooled_runner
from simkv.study.plan.deployment_layouts import Layout, prepare_layouts
from simkv.study.plan.deployment_search import (
    DeploymentSearch,
    PlannedDeployment,
    find_cheapest,
    find_front,
    search_deployments,
)
from simkv.study.plan.deployment_tables import describe_best, find_best
from simkv.study.plan.plan_cost import PlanCost
from simkv.study.plan.plan_request import PlanRequest
from tests.cli.test_cli import Simkv

H100 = """\
name: many
workload:
  arrivals:
    num_prompts: 60
    request_rate: 40
    seed: 3
    prompt_tokens: {distribution: uniform, low: 2000, high: 6000}
    output_tokens: {distribution: uniform, low: 20, high: 60}
engine: {name: vllm, variant: "0.33", max_model_len: 8192}
hardware: {gpu: H100-SXM, model: llama-3.1-8b}
fleet: {replicas: 1, router: least_loaded}
"""
GOAL = "ttft_ms.p99<=900"


@pytest.fixture
def many(tmp_path: Path) -> Path:
    path = tmp_path / "many.yaml"
    path.write_text(H100)
    return path


def search(
    path: Path, *each: str, goal: str = GOAL, repeats: int = 1
) -> tuple[DeploymentSearch, list[str]]:
    request = PlanRequest(
        smallest="fleet.replicas=1..6", objectives=(goal,), each=each, repeats=repeats
    )
    left_out: list[str] = []
    with open_pooled_runner(None, 1) as runner:
        bases, tokens = prepare_layouts(read_document(path), request, False, left_out.append)
        return search_deployments(bases, tokens, runner, left_out.append), left_out


def least(found: DeploymentSearch, layout: Layout) -> int | None:
    some = [
        one.replicas for one in found.deployments if one.layout is layout and one.meets is not False
    ]
    return min(some, default=None)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> DeploymentSearch:
    path = tmp_path_factory.mktemp("tune") / "many.yaml"
    path.write_text(H100)
    return search(path, "hardware.tp=1,2", "engine.max_num_batched_tokens=2048,8192")[0]


def test_least_replicas_match_a_run_of_each_number(found: DeploymentSearch, many: Path) -> None:
    whole = [layout for layout in found.layouts if not layout.prefill]
    assert {(one.tp, one.step_tokens) for one in whole} == {
        (t, s) for t in (1, 2) for s in (2048, 8192)
    }
    for layout in whole:
        meets = []
        for replicas in range(1, 7):
            knobs = {
                "hardware.tp": layout.tp,
                "engine.max_num_batched_tokens": layout.step_tokens,
                "fleet.replicas": replicas,
            }
            summary = simkv.run(many, **knobs).results["run"].summary
            if summary["ttft_ms"]["p99"] <= 900 and summary["finished"] == 60:
                meets.append(replicas)
        assert least(found, layout) == min(meets)
    assert max(least(found, layout) or 0 for layout in whole) > 1, "one replica is always enough"


def test_splits_have_at_most_one_replica_more_than_the_deployment_that_they_split(
    found: DeploymentSearch,
) -> None:
    for tp in (1, 2):
        layouts = [one for one in found.layouts if one.tp == tp]
        total = min(least(found, one) or 99 for one in layouts if not one.prefill)
        splits = [one for one in found.deployments if one.layout in layouts and one.layout.prefill]
        assert splits
        for one in splits:
            assert one.gpus == tp * (one.layout.prefill + one.replicas)
            assert one.gpus <= tp * (max(total, 2) + 1)
            summary = next(iter(one.layout.results.summaries.values()))
            assert summary["fleet"]["transfers"] > 0


def test_front_has_no_deployment_that_another_beats(found: DeploymentSearch) -> None:
    meeting = [one for one in found.deployments if one.meets is not False]
    assert 1 < len(found.front) < len(meeting)
    for one in found.front:
        assert one.meets
        assert not any(
            other.gpus and other.tok_s_per_gpu > one.tok_s_per_gpu and other.tpot_ms < one.tpot_ms
            for other in meeting
        )
    tpots = [one.tpot_ms for one in found.front]
    assert tpots == sorted(tpots)


def test_front_leaves_out_negligible_differences_and_misses(found: DeploymentSearch) -> None:
    one = found.front[0]
    assert one.tpot_ms
    nearly = replace(one, tpot_ms=one.tpot_ms * 0.995)
    faster = replace(one, tpot_ms=one.tpot_ms * 0.9, tok_s_per_gpu=one.tok_s_per_gpu * 0.9)
    misses = replace(one, tpot_ms=0.1, meets=False)
    assert find_front([one, nearly, misses]) in ([one], [nearly])
    assert find_front([one, faster, misses]) == [faster, one]
    assert find_front([misses]) == []


def test_deployments_of_the_front_meet_the_objectives_with_all_seeds(many: Path) -> None:
    goal = "ttft_ms.p99<=700"
    single, _ = search(many, "hardware.tp=1", goal=goal)
    several, _ = search(many, "hardware.tp=1", goal=goal, repeats=4)
    for one in several.front:
        seeds = {
            condition.repeat
            for candidate, condition in one.layout.results.summaries
            if candidate == one.candidate
        }
        assert seeds == {0, 1, 2, 3}
    assert min(map(gpus, several.front)) >= min(map(gpus, single.front))
    lost = [one for one in several.deployments if one.meets is False]
    assert any(
        one.layout.results.holds(one.candidate, c)
        for one in lost
        for c in one.layout.prepared.seed_conditions(0)
    )


def gpus(one: PlannedDeployment) -> int:
    return one.gpus


def test_layouts_that_do_not_fit_are_left_out_with_a_line(many: Path, tmp_path: Path) -> None:
    found, left_out = search(many, "hardware.tp=1,3")
    assert {one.tp for one in found.layouts} == {1}
    assert [line for line in left_out if line.startswith("hardware.tp=3: skipped: ")]
    assert len(left_out) == 1
    other = tmp_path / "other.yaml"
    other.write_text(
        H100.replace('{name: vllm, variant: "0.33", max_model_len: 8192}', "{name: sglang}")
    )
    found, left_out = search(other, "hardware.tp=1")
    assert not [one for one in found.layouts if one.prefill]
    assert [line for line in left_out if "prefill/decode split: skipped: " in line]


def test_gpu_that_is_not_on_the_front_has_a_line_with_its_fewest_gpus(
    found: DeploymentSearch,
) -> None:
    front = [one for one in found.front if one.layout.tp == 1]
    other = replace(found.layouts[0], prepared=replace(found.layouts[0].prepared, point="gpu=B"))
    added = DeploymentSearch((*found.layouts, other), tuple(front))
    lines = [line for line in describe_best(added) if "fewest GPUs with gpu=B: " in line]
    assert len(lines) == 1
    least = min(
        one.gpus for one in added.deployments if one.layout is other and one.meets is not False
    )
    assert f"({least} GPUs); not on the front" in lines[0]
    assert not any("fewest GPUs" in line for line in describe_best(found))


def test_cheapest_deployment_need_not_be_on_the_front(
    found: DeploymentSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, *_ = [one for one in found.front if one.tpot_ms]
    other = replace(front, tpot_ms=3 * front.tpot_ms, tok_s_per_gpu=front.tok_s_per_gpu / 2)

    def priced(one: PlannedDeployment, price: float) -> PlannedDeployment:
        return replace(one, cost=PlanCost("any", 2, price, None, None))

    assert find_front([front, other]) == [front]
    dear, cheap = priced(front, 7.0), priced(other, 5.0)
    assert find_cheapest([dear, cheap]) is cheap
    assert find_cheapest([dear, replace(cheap, meets=False)]) is dear
    assert find_cheapest([front, cheap]) is None  # not all prices are known
    monkeypatch.setattr(DeploymentSearch, "deployments", property(lambda _: [dear, cheap]))
    best = dict(find_best(DeploymentSearch(found.layouts, (dear,))))
    assert best["lowest cost per hour"] is cheap
    assert best["lowest mean TPOT"] is dear


def test_command_prints_front_and_commands_and_writes_files(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    cli = Simkv(tmp_path, monkeypatch, capsys)
    words = (many, "--tune", "--slo", GOAL, "--over", "hardware.tp=1,2", "--repeats", 1)
    done = cli("plan", *words, "--jobs", 1, "--out", "a", "--gpu-price", "H100=2")
    assert done.code == 0, done.err
    assert "most tok/s per GPU" in done.out
    assert "lowest cost per hour" in done.out
    assert "\n  vllm serve meta-llama/Llama-3.1-8B" in done.out
    assert '"kv_role":"kv_both"' in done.out or "prefill + " not in done.out.split("Best")[1]
    assert max(len(line) for line in done.out.split("Best")[0].splitlines()) <= 80
    table = pd.read_csv(tmp_path / "a/deployments.csv")
    answer = json.loads((tmp_path / "a/plan.json").read_text())
    assert len(table) == len(answer["deployments"])
    assert table["on_front"].sum() == sum(row["on_front"] for row in answer["deployments"]) > 0
    assert (tmp_path / "a/pareto.png").stat().st_size > 5000
    again = cli("plan", *words, "--jobs", 2, "--out", "b", "--json", "--gpu-price", "H100=2")
    assert json.loads(again.out)["deployments"] == answer["deployments"]


def test_command_exits_1_if_none_meets_the_objectives(
    many: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cli = Simkv(tmp_path, monkeypatch, capsys)
    words = ("--over", "hardware.tp=1", "--smallest", "fleet.replicas=1..2", "--repeats", 1)
    done = cli("plan", many, "--tune", "--slo", "tpot_ms.mean<=0.1", *words, "--jobs", 1)
    assert done.code == 1
    assert "No deployment meets the objectives." in done.out


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--tune", "--largest", "timeout=1..3"], "--largest: cannot be combined with --tune"),
        (["--tune", "--exhaustive"], "--exhaustive: cannot be combined with --tune"),
        (["--tune", "--smallest", "timeout=1..3"], "expected --smallest fleet.replicas=LOW..HIGH"),
        (["--kv-bandwidth", "5"], "--kv-bandwidth: requires --tune"),
    ],
)
def test_bad_options_exit_with_2(
    many: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    what: str,
) -> None:
    done = Simkv(tmp_path, monkeypatch, capsys)("plan", many, "--slo", GOAL, *words)
    assert done.code == 2
    assert what in done.err
