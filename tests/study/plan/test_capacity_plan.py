"""Tests that compare plans with an exhaustive search."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

import simkv
from simkv.core.errors import InputError
from simkv.metrics.fleet_metrics import find_peak_load
from simkv.scenario.objectives import compute_objective_figures, parse_objective
from simkv.study.plan.candidate_results import CandidateResults
from simkv.study.plan.plan_confidence import AnswerRange
from simkv.study.plan.rate_cliff import RATE_FACTORS_UP

CACHE = "engine.num_gpu_blocks=64..288:16"


def brute_force(path: Path, knob: str, values: list[Any], objectives: list[str]) -> list[bool]:
    """Return, for each value of a knob, whether a single run meets the objectives and serves all
    requests.
    """
    bounds = [parse_objective(text) for text in [*objectives, "unserved<=0"]]
    found = []
    for value in values:
        outcome = simkv.run(path, **{knob: value})
        held = compute_objective_figures(outcome.results["run"].summary)
        found.append(all(bound.holds(held) for bound in bounds))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_smallest_cache_matches_exhaustive_search(small: Path, seed: int) -> None:
    draw = random.Random(seed)
    rate, engine = draw.choice([1.0, 2.0, 3.0]), draw.choice(["vllm", "sglang"])
    text = (
        small.read_text().replace("seed: 7", f"seed: {seed}").replace("rate: 2.0", f"rate: {rate}")
    )
    if engine == "sglang":
        text = text.replace(
            "{name: vllm, num_gpu_blocks: 128, max_num_seqs: 16, max_model_len: 1000}",
            "{name: sglang, max_total_num_tokens: 2048}",
        )
    small.write_text(text)
    knob = "engine.num_gpu_blocks" if engine == "vllm" else "engine.max_total_num_tokens"
    unit = 16 if engine == "vllm" else 256
    values = [unit * n for n in range(4, 19)]
    objectives = [f"ttft_ms.p99<={draw.choice([200, 400, 800])}", "longest_stall_s<=2"]
    meets = brute_force(small, knob, values, objectives)
    plan = simkv.plan(
        small,
        smallest=f"{knob}={values[0]}..{values[-1]}:{unit}",
        objectives=objectives,
        repeats=1,
        cliff=False,
        jobs=1,
    )
    answer = plan.answer["run"]
    # In any case, the objectives are met by the answer and its neighbours, but not by the candidate
    # before.
    safe = [i for i in range(len(values)) if all(meets[i : i + 3])]
    if answer is None:
        assert not meets[-1]
        return
    place = values.index(int(answer))
    assert place in safe
    assert place == 0 or not meets[place - 1]
    if meets == sorted(meets):
        assert place == meets.index(True)
    exhaustive = simkv.plan(
        small,
        smallest=f"{knob}={values[0]}..{values[-1]}:{unit}",
        objectives=objectives,
        repeats=1,
        cliff=False,
        jobs=1,
        exhaustive=True,
    )
    assert len(exhaustive.evaluations) == len(values)
    assert exhaustive.evaluations["holds"].tolist() == meets


def test_finds_highest_rate(small: Path) -> None:
    small.write_text(small.read_text().replace("num_gpu_blocks: 128", "num_gpu_blocks: 96"))
    knob, values = "workload.arrivals.request_rate", [0.5 * n for n in range(1, 13)]
    objectives = ["ttft_ms.p99<=300"]
    meets = brute_force(small, knob, values, objectives)
    plan = simkv.plan(
        small, largest=f"{knob}=0.5..6:0.5", objectives=objectives, repeats=1, cliff=False, jobs=1
    )
    best = max(value for value, good in zip(values, meets, strict=True) if good)
    assert meets == sorted(meets, reverse=True), "this case is meant to be monotone"
    assert plan.answer == {"run": best}
    before = plan.summary["run"]["objectives"][0]
    assert before["binds"]
    assert before["value_before"] > 300 >= before["value"]


def test_detects_failing_candidate_above_answer(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CandidateResults.holds

    def with_a_hole(self: CandidateResults, candidate: int, condition: Any) -> bool | None:
        found = real(self, candidate, condition)
        return found if found is None else candidate >= 5 and candidate != 6

    monkeypatch.setattr(CandidateResults, "holds", with_a_hole)
    plan = simkv.plan(
        small, smallest=CACHE, objectives=["steps>=0"], repeats=1, cliff=False, jobs=1
    )
    assert plan.answer == {"run": 64 + 7 * 16}
    assert plan.summary["run"]["not_monotone"]["does_not"] == [64 + 6 * 16]
    assert "not monotone: 144 meets the objectives, but 160 does not" in str(plan)


def test_answer_holds_for_every_seed(small: Path) -> None:
    objectives = ["ttft_ms.p99<=300"]
    plan = simkv.plan(
        small,
        smallest=CACHE,
        objectives=objectives,
        repeats=4,
        cliff=False,
        jobs=1,
        exhaustive=True,
    )
    rows = plan.evaluations
    assert rows["repeat"].nunique() == 4
    for repeat, answer in enumerate(plan.summary["run"]["seeds"]["answers"]):
        own = rows[rows["repeat"] == repeat].set_index("engine.num_gpu_blocks")["holds"]
        assert answer == own[own].index.min()
    together = rows.groupby("engine.num_gpu_blocks")["holds"].all()
    assert plan.answer["run"] == together[together].index.min()
    searched = simkv.plan(
        small, smallest=CACHE, objectives=objectives, repeats=4, cliff=False, jobs=1
    )
    assert searched.answer == plan.answer
    assert searched.summary["run"]["seeds"] == plan.summary["run"]["seeds"]


def test_propagates_profile_error(small: Path) -> None:
    error = 0.3
    plan = simkv.plan(
        small,
        smallest=CACHE,
        objectives=["ttft_ms.p99<=300"],
        repeats=1,
        profile_error=error,
        jobs=1,
    )

    def alone(scale: float) -> Any:
        factors = dict.fromkeys(("decode", "prefill", "mixed"), scale)
        found = simkv.plan(
            small,
            smallest=CACHE,
            objectives=["ttft_ms.p99<=300"],
            overrides={f"step_scale.{kind}": value for kind, value in factors.items()},
            repeats=1,
            cliff=False,
            jobs=1,
        )
        return found.answer["run"]

    low, high = alone(1 / (1 + error)), alone(1 / (1 - error))
    assert plan.summary["run"]["profile_error"]["range"] == [low, high]
    assert low < high
    assert low <= plan.answer["run"] <= high  # type: ignore[operator]
    assert set(plan.cliff["side"]) == {"", "faster", "slower"}
    by_side = plan.cliff[plan.cliff["factor"] == 1.0].set_index("side")["ttft_ms.mean"]
    assert by_side["faster"] < by_side[""] < by_side["slower"]


def test_cliff_scales_rate_of_same_requests(small: Path) -> None:
    plan = simkv.plan(small, smallest=CACHE, objectives=["ttft_ms.p99<=300"], repeats=1, jobs=1)
    cliff = plan.cliff.set_index("factor")
    faster = simkv.run(
        small,
        engine__num_gpu_blocks=plan.answer["run"],
        workload__arrivals__request_rate=3.2,
    )
    assert cliff.loc[1.6, "rate"] == 3.2
    assert cliff.loc[1.6, "e2e_ms.p99"] == faster.figures.loc["e2e_ms.p99", "run"]
    assert cliff["total_input_tokens"].nunique() == 1


def test_cliff_search_stops_at_first_miss(small: Path) -> None:
    def factors(bound: str, cache: str = CACHE) -> dict[float, bool]:
        plan = simkv.plan(small, smallest=cache, objectives=[bound], repeats=1, jobs=1)
        return dict(zip(plan.cliff["factor"], plan.cliff["holds"], strict=True))

    assert factors("ttft_ms.p99<=1000000") == dict.fromkeys([1.0, *RATE_FACTORS_UP], True)
    *near, edge = factors("ttft_ms.p99<=300").items()
    assert near
    assert all(holds for _, holds in near)
    assert not edge[1]
    first, *slower = reversed(factors("ttft_ms.p99<=100", f"{CACHE.split('=')[0]}=80,81").items())
    assert first == (1.0, False)
    assert [factor for factor, _ in slower] in ([0.8], [0.8, 0.5])


def test_summary_states_the_cliff(small: Path) -> None:
    def line(bound: str, cache: str = CACHE) -> str:
        plan = simkv.plan(small, smallest=cache, objectives=[bound], repeats=1, jobs=1)
        nonlocal holds
        holds = dict(zip(plan.cliff["factor"], plan.cliff["holds"], strict=True))
        (found,) = [one for one in str(plan).splitlines() if "at other request rates: " in one]
        return found.partition("rates: ")[2]

    holds: dict[float, bool] = {}
    fast = line("ttft_ms.p99<=1000000")
    assert fast.endswith(" meets the objectives up to 12.8 requests/s (6.4 x the rate)")
    text = line("ttft_ms.p99<=300")
    *_, last, edge = holds
    rates = f"up to {2 * last:.4g} requests/s ({last:g} x the rate), does not meet them at"
    assert text.endswith(f"{rates} {2 * edge:.4g} requests/s ({edge:g} x the rate)")
    slow = line("ttft_ms.p99<=1", f"{CACHE.split('=')[0]}=80,81")
    assert slow == "81 does not meet the objectives at 1 requests/s (0.5 x the rate) or more"


def test_survive_holds_with_failure_at_peak(small: Path) -> None:
    text = small.read_text().replace("request_rate: 2.0", "request_rate: 8.0")
    small.write_text(text + "fleet: {replicas: 1, router: least_loaded}\n")
    bounds = [parse_objective(text) for text in ("e2e_ms.p99<=2600", "unserved<=0")]

    def holds(outcome: Any) -> bool:
        return all(
            bound.holds(compute_objective_figures(outcome.results["run"].summary))
            for bound in bounds
        )

    calm, both = [], []
    for replicas in range(1, 8):
        run = simkv.run(small, fleet__replicas=replicas)
        worst = find_peak_load(run.results["run"])
        tree = YAML(typ="safe").load(small.read_text())
        failing = [{"replica": worst["replica"], "at": worst["at_s"]}]
        tree["fleet"] = {"replicas": replicas, "router": "least_loaded", "failures": failing}
        tree["profile"] = str(small.parent / "costs.json")
        calm.append(holds(run))
        both.append(calm[-1] and holds(simkv.run(tree)))
    ask: dict[str, Any] = {
        "smallest": "fleet.replicas=1..7",
        "objectives": ["e2e_ms.p99<=2600"],
        "repeats": 1,
        "cliff": False,
        "jobs": 1,
    }
    without, surviving = simkv.plan(small, **ask), simkv.plan(small, survive=1, **ask)
    assert calm == sorted(calm)
    assert both == sorted(both)
    assert without.answer["run"] == 1 + calm.index(True)
    assert surviving.answer["run"] == 1 + both.index(True)
    assert surviving.answer["run"] > without.answer["run"]  # type: ignore[operator]
    rows = surviving.evaluations.set_index(["fleet.replicas", "failing"])
    answer = surviving.answer["run"]
    assert rows.loc[(answer, True), "holds"]
    assert not rows.loc[(answer - 1, True), "holds"]
    assert rows.loc[(answer - 1, False), "holds"]
    assert "with one replica failing" in str(surviving)


def test_no_answer_reports_missed_objectives(small: Path) -> None:
    plan = simkv.plan(
        small, smallest=CACHE, objectives=["ttft_ms.p99<=1"], repeats=1, profile_error=0.1, jobs=1
    )
    assert plan.answer == {"run": None}
    assert plan.plans["run"].by_error == AnswerRange(None, None)
    assert "No engine.num_gpu_blocks from 64 to 288 meets the objectives" in str(plan)
    assert "not even with steps faster by the profile's error" in str(plan)
    assert "with slower steps, 288 does not meet ttft_ms.p99 <= 1 (" in str(plan)
    assert "to 288, so more would not help" in str(plan)
    assert re.search(r"at 288, the run does not meet ttft_ms.p99 <= 1 \([\d.]+ m?s\)", str(plan))


def test_range_of_a_largest_value_is_printed_from_low_to_high(small: Path) -> None:
    """With faster steps, a higher rate meets the objective, but the lower rate comes first."""
    plan = simkv.plan(
        small,
        largest="workload.arrivals.request_rate=0.5..6:0.5",
        objectives=["ttft_ms.p99<=1500"],
        repeats=1,
        cliff=False,
        profile_error=0.5,
        jobs=1,
    )
    found = re.search(r"\(([\d.]+) to ([\d.]+) within the profile's error\)", str(plan))
    assert found
    assert float(found[1]) < float(found[2])


def test_range_without_upper_end_names_saturation(small: Path) -> None:
    """Two slots suffice, but not if steps take more than twice as long."""
    small.write_text(small.read_text().replace("timeout: 40\n", "").replace(": 30", ": 60"))
    knob, slo = "engine.max_num_seqs=1..2", ["ttft_ms.p99<=4000"]
    ask: dict[str, Any] = {"smallest": knob, "objectives": slo, "repeats": 1, "jobs": 1}
    plan = simkv.plan(small, **ask, profile_error=0.6, cliff=False)
    assert plan.answer["run"] is not None
    by_error = plan.plans["run"].by_error
    assert by_error is not None
    assert by_error.high is None
    assert "because the load saturates it: requests arrive faster than they finish" in str(plan)
    assert "no upper end" not in str(simkv.plan(small, **ask, profile_error=0.0, cliff=False))


def test_held_out_scenario(small: Path) -> None:
    def planned(**more: Any) -> Any:
        return simkv.plan(
            small,
            smallest=CACHE,
            objectives=["ttft_ms.p99<=300"],
            repeats=1,
            cliff=False,
            jobs=1,
            **more,
        )

    other = {"workload.arrivals.request_rate": 6.0}
    there = planned(overrides=other).answer["run"]
    found = planned(held_back=other)
    held = found.summary["run"]["held_back"]
    assert there > found.answer["run"]
    assert held == {
        "overrides": ["workload.arrivals.request_rate=6.0"],
        "answer_holds": False,
        "answer_there": there,
    }
    assert "does NOT hold" in str(found)


def test_prices_and_variants(small: Path, tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("none: 3.6\n")
    small.write_text(
        small.read_text()
        + "variants:\n  plain: {}\n  fast: {workload: {arrivals: {request_rate: 3.0}}}\n"
    )
    ask: dict[str, Any] = {
        "smallest": CACHE,
        "objectives": ["ttft_ms.p99<=300"],
        "repeats": 1,
        "cliff": False,
        "prices": prices,
        "gpus_per_replica": 2,
        "jobs": 1,
    }
    plans = simkv.plan(small, **ask)
    assert list(plans.answer) == ["plain", "fast"]
    only = simkv.plan(small, variants=["fast"], **ask)
    assert only.answer == {"fast": plans.answer["fast"]}
    cost = only.summary["fast"]["cost"]
    rows = only.evaluations
    row = rows[rows["engine.num_gpu_blocks"] == only.answer["fast"]].iloc[0]
    assert cost["per_hour"] == 7.2
    assert cost["per_million_output_tokens"] == pytest.approx(
        7.2 * row["makespan_s"] / 3600 / (row["total_output_tokens"] / 1e6)
    )


@pytest.mark.parametrize(
    ("more", "what"),
    [
        ({}, "exactly one of --smallest and --largest"),
        ({"smallest": CACHE, "largest": CACHE}, "exactly one of --smallest and --largest"),
        ({"smallest": CACHE}, "--slo: missing"),
        ({"smallest": "engine.num_gpu_blocks=1..x"}, "expected numbers"),
        ({"smallest": "engine.num_gpu_blocks=0.5..2"}, "--smallest engine.num_gpu_blocks: a grid"),
        ({"smallest": "variants=a"}, "expected a scenario field"),
        ({"smallest": CACHE, "objectives": ["starved<=0"], "variants": ["x"]}, "unknown variant"),
        ({"smallest": CACHE, "objectives": ["starved<=0"], "prices": "no.yaml"}, "cannot be read"),
        (
            {"smallest": CACHE, "objectives": ["sessions.turn_ms.p95<=9"]},
            "--slo sessions.turn_ms.p95 <= 9: requires a workload with sessions",
        ),
        ({"smallest": "engine.num_gpu_block=1..3", "objectives": ["steps>=0"]}, "did you mean"),
    ],
)
def test_rejects_invalid_requests(small: Path, more: dict[str, Any], what: str) -> None:
    with pytest.raises(InputError, match=what):
        simkv.plan(small, jobs=1, **more)


def test_rejects_repeats_without_randomness(small: Path, tmp_path: Path) -> None:
    small.write_text(
        "name: two\nworkload: {burst: {num_prompts: 2, prompt_tokens: 9, output_tokens: 9}}\n"
        "engine: {name: vllm, num_gpu_blocks: 64, max_model_len: 1000}\nprofile: unit-step\n"
    )
    ask: dict[str, Any] = {"smallest": CACHE, "objectives": ["starved<=0"], "jobs": 1}
    with pytest.raises(InputError, match="--repeats 2: the workload has no random part"):
        simkv.plan(small, repeats=2, **ask)
    plan = simkv.plan(small, **ask)
    assert plan.cliff.empty
    assert "no objective is limiting" in str(plan)
    assert "no interval over seeds" in str(plan)


def test_reads_plan_section(small: Path) -> None:
    lines = small.read_text() + (
        "plan:\n  smallest: engine.num_gpu_blocks=64..288:16\n"
        "  objectives: [ttft_ms.p99<=300, longest_stall_s<=5]\n"
        "  goodput: {ttft: 500, tpot: 50}\n  repeats: 2\n"
    )
    small.write_text(lines)
    by_section = simkv.plan(small, cliff=False, jobs=1)
    by_options = simkv.plan(
        small,
        smallest=CACHE,
        objectives=["ttft_ms.p99<=300", "longest_stall_s<=5"],
        goodput={"ttft": 500, "tpot": 50},
        repeats=2,
        cliff=False,
        jobs=1,
    )
    assert by_section.summary == by_options.summary
    assert simkv.run(small).figures.loc["requests", "run"] == 30
    for former, wrong, what in (
        ("ttft_ms.p99<=300", "ttft_ms.p98<=300", r"small\.yaml:14: plan\.objectives\.0: .*p99"),
        ("ttft: 500", "tttf: 500", r"small\.yaml:15: plan\.goodput: .*unknown latency 'tttf'"),
        ("repeats: 2", "repeat: 2", r"small\.yaml:16: plan\.repeat: unknown field.*repeats"),
    ):
        small.write_text(lines.replace(former, wrong))
        with pytest.raises(InputError, match=what):
            simkv.plan(small, jobs=1)


def test_example_runs(root: Path, tmp_path: Path) -> None:
    example = str(root / "examples" / "plan.py")
    done = subprocess.run(
        [sys.executable, example], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Answer: fleet.replicas = " in done.stdout
    assert "plan.json" in done.stdout


def test_tries_more_replicas_if_one_fails(small: Path) -> None:
    plan = simkv.plan(
        small,
        smallest="fleet.replicas=1..12",
        objectives=["starved<=0"],
        repeats=1,
        cliff=False,
        jobs=1,
    )
    assert plan.answer["run"] == 1
    assert sorted(set(plan.evaluations["fleet.replicas"])) == [1, 2, 3]
