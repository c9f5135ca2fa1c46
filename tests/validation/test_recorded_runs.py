"""Tests of recorded runs and their simulation: an invented record with known costs, and real
records.
"""

from __future__ import annotations

import csv
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from dev.validation_page import main as write_validation_page
from simkv.cli import app
from simkv.core.errors import InputError
from simkv.costs.cost_profile import CostProfile
from simkv.costs.sources.single_request import ModelTraits, read_isolated_requests
from simkv.costs.sources.single_request_fit import (
    CostCoefficients,
    compute_non_attention_seconds,
    fit_cost_coefficients,
    make_cost_terms,
)
from simkv.costs.step_load import count_attention_pairs
from simkv.validation.recorded_runs.cross_prediction import cross_predict
from simkv.validation.recorded_runs.interval_coverage import coverage, is_in_range, refused_runs
from simkv.validation.recorded_runs.recorded_run import read_recorded_run
from simkv.validation.recorded_runs.run_calibration import calibrate_run, find_bundle
from simkv.validation.recorded_runs.run_scores import score, simulate_and_score
from simkv.validation.recorded_runs.run_simulation import engine_of, simulate_run
from simkv.validation.recorded_runs.sensitivity import score_sensitivity
from tests.conftest import ROOT
from tests.costs.sources.test_llmservingsim_profile import bundle

TRUTH = ROOT.parent / "shared" / "ground-truth"
recorded = pytest.mark.skipif(not TRUTH.is_dir(), reason="the recorded runs are not shipped")

ENGINE = {
    "engine": "vLLM",
    "version": "0.11.0",
    "gpu": "Test GPU",
    "max_num_seqs": 8,
    "max_num_batched_tokens": 2048,
    "max_model_len": 4096,
    "num_gpu_blocks": 600,
}
FACTS: dict[str, Any] = {
    "name": "made-up",
    "model": "test/model",
    "model_dims": {"layers": 2, "q_heads": 8, "head_dim": 128, "kv_bytes_per_token": 131072},
    "engine": ENGINE,
    "origin_simulator": {
        "simulator": "Origin",
        "published": {"TTFT Mean": -4.0},
        "recomputed_from_committed_sim_csv": {"e2e_ms": {"per_request_mape_pct": 7.5}},
    },
}
SHAPE = ModelTraits(131072, 8192, 2048)
TRUE = CostCoefficients(5e-3, 9e-3, 2e-5, 3e-9, 5e-8)
COLUMNS = "id,stage,arrival_s,prompt_tokens,output_tokens,queue_ms,prefill_ms,ttft_ms,e2e_ms"

page_tool = typer.Typer()
page_tool.command()(write_validation_page)


def profile() -> CostProfile:
    """Return the true costs of the invented record."""
    terms = [term.model_dump() for term in make_cost_terms(TRUE, SHAPE)]
    return CostProfile.model_validate(
        {
            "name": "truth",
            "engine": "vLLM",
            "model": "m",
            "gpu": "g",
            "basis": "assumed",
            "terms": terms,
            "idle_pass_s": 1e-5,
            "front_s": 2e-3,
            "range": {},
            "fit": {"points": 0},
            "source": ["made up"],
        }
    )


def write(folder: Path, rows: list[list[Any]], **facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "case.json").write_text(json.dumps({**FACTS, **facts}))
    with (folder / "requests.csv").open("w", newline="") as file:
        csv.writer(file).writerows([COLUMNS.split(","), *rows])
    return folder


def plan(folder: Path) -> Path:
    """Write arrivals without measured times: twelve in isolation, then twenty at once."""
    rows = [[i, "sync", 5.0 * i, 300 + 137 * i, 40 + 9 * i, 0, 1, 1, 1] for i in range(12)]
    rows += [
        [12 + i, "throughput", 70 + i / 50, 200 + 61 * i, 30 + 7 * i, 0, 1, 1, 1] for i in range(20)
    ]
    return write(folder, rows)


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """Return a recorded run with the times of a simulation with the true costs."""
    case = read_recorded_run(plan(tmp_path / "made-up"))
    true = simulate_run(case, profile(), *engine_of(case)).requests
    table = case.requests[["id", "stage", "arrival_s", "prompt_tokens", "output_tokens"]]
    table = table.assign(**{m: true[m] for m in ("ttft_ms", "e2e_ms", "tpot_ms", "queue_ms")})
    table["prefill_ms"] = table["ttft_ms"] - table["queue_ms"] - 2.0
    table.to_csv(tmp_path / "made-up" / "requests.csv", index=False)
    return tmp_path / "made-up"


def test_calibration_finds_true_costs_that_reproduce_the_record(made_up: Path) -> None:
    case = read_recorded_run(made_up)
    costs = calibrate_run(case)
    found = score(case, simulate_run(case, costs, *engine_of(case)), costs.name)
    assert {f.metric for f in found.figures} == {
        "ttft_ms",
        "tpot_ms",
        "e2e_ms",
        "queue_ms",
        "makespan_s",
    }
    for f in found.figures:
        assert abs(f.error_pct) < 0.01 or f.real < 1, f
    assert all(p.requests == 20 for p in found.per_request)  # requests in isolation are not scored
    assert set(found.stages) == {"throughput"}


def test_calibration_requests_and_scored_requests_are_disjoint(made_up: Path) -> None:
    case = read_recorded_run(made_up)
    assert case.scored.sum() == 20
    costs = calibrate_run(case)
    table = pd.read_csv(made_up / "requests.csv")
    later = table["stage"] != "sync"
    table.loc[later, ["ttft_ms", "e2e_ms", "prefill_ms"]] *= 3
    table.to_csv(made_up / "requests.csv", index=False)
    slower = read_recorded_run(made_up)
    assert calibrate_run(slower) == costs
    found = score(slower, simulate_run(slower, costs, *engine_of(slower)), "x")
    assert found.figure("e2e_ms", "mean").error_pct == pytest.approx(-200 / 3, abs=0.1)


def test_times_from_the_queue_exclude_the_wait_for_a_step(tmp_path: Path) -> None:
    folder = plan(tmp_path / "made-up")
    table = pd.read_csv(folder / "requests.csv")
    case = read_recorded_run(folder)
    from_arrival = simulate_run(case, profile(), *engine_of(case)).requests
    table.assign(queued_s=table["arrival_s"]).to_csv(folder / "requests.csv", index=False)
    case = read_recorded_run(folder)
    assert case.from_queue
    from_queue = simulate_run(case, profile(), *engine_of(case)).requests
    waited = from_arrival["ttft_ms"] - from_queue["ttft_ms"]
    assert (waited > 1.99).all()  # at least the time to reach the engine core
    assert waited.max() > 5.0  # and the rest of the step that ran at this time
    assert (from_arrival["tpot_ms"] == from_queue["tpot_ms"]).all()


def test_kernel_tables_beside_a_case_calibrate_it(tmp_path: Path) -> None:
    folder = plan(tmp_path / "made-up")
    assert find_bundle(read_recorded_run(folder)) is None
    bundle(tmp_path / "calibration" / "other-model").joinpath("meta.yaml").write_text("model: x\n")
    assert find_bundle(read_recorded_run(folder)) is None
    mine = bundle(tmp_path / "calibration" / "mine")
    assert find_bundle(read_recorded_run(folder)) == mine
    assert calibrate_run(read_recorded_run(folder)).attention is not None
    far = tmp_path / "elsewhere"
    (tmp_path / "calibration").rename(far)
    assert find_bundle(read_recorded_run(folder)) is None
    assert find_bundle(read_recorded_run(folder), far) == far / "mine"
    far.rename(tmp_path / "calibration")
    other_gpu = {**ENGINE, "gpu": "NVIDIA H100 80GB"}
    (folder / "case.json").write_text(json.dumps({**FACTS, "engine": other_gpu}))
    (mine / "meta.yaml").write_text("model: test/model\ngpu: NVIDIA A100-SXM4-80GB\n")
    assert find_bundle(read_recorded_run(folder)) is None


def test_unrecorded_settings_are_reported_and_varied(made_up: Path) -> None:
    facts = json.loads((made_up / "case.json").read_text())
    facts["engine"] |= {"version": "0.15.2", "num_gpu_blocks": None, "max_model_len": None}
    (made_up / "case.json").write_text(json.dumps(facts))
    case = read_recorded_run(made_up)
    config, notes = engine_of(case)
    assert config.variant == "0.15.0"
    assert [note.split(":")[0] for note in notes] == [
        "vLLM 0.15.2 was not recorded; simulated with the rules of 0.15.0",
        "num_gpu_blocks was not recorded",
        "prefix_blocks.jsonl and column shared_prefix_tokens are missing",
        "max_model_len was not recorded",
        "async_scheduling was not recorded",
    ]
    changes = {o.change: o.score for o in score_sensitivity(case, calibrate_run(case))}
    assert set(changes) == {
        "num_gpu_blocks x 0.9",
        "num_gpu_blocks x 1.1",
        "async_scheduling False",
        "0.2 ms of host time per step",
        "0.5 ms of host time per step",
        "no time before the engine core",
    }
    slower = changes["0.5 ms of host time per step"].figure("tpot_ms", "mean")
    assert slower.predicted - slower.real == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("experts", [None, 8])
def test_data_parallel_ranks_share_the_requests(made_up: Path, experts: int | None) -> None:
    facts = json.loads((made_up / "case.json").read_text())
    facts["engine"]["data_parallel"] = 2
    facts["model_dims"]["experts"] = experts
    alone = read_recorded_run(made_up)
    (made_up / "case.json").write_text(json.dumps(facts))
    pair = read_recorded_run(made_up)
    one, two = (simulate_run(case, profile(), *engine_of(case)) for case in (alone, pair))
    late = alone.scored.to_numpy()
    waited, shared = (r.requests["queue_ms"][late].mean() for r in (one, two))
    assert shared < waited / 2  # eight at a time on each of two ranks
    assert two.requests["ttft_ms"].notna().all()
    if experts:  # in lockstep, a rank waits for the slower rank
        (made_up / "case.json").write_text(
            json.dumps({**facts, "model_dims": {**facts["model_dims"], "experts": None}})
        )
        free = read_recorded_run(made_up)
        apart = simulate_run(free, profile(), *engine_of(free)).requests
        assert two.requests["e2e_ms"][late].mean() > apart["e2e_ms"][late].mean()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"engine": {**ENGINE, "engine": "SGLang"}}, r"engine.engine: 'SGLang' cannot be replayed"),
        ({"engine": {**ENGINE, "max_num_seqs": 0}}, r"engine.max_num_seqs: input should be"),
        ({"engine": {**ENGINE, "num_gpu_blocks": 0}}, r"num_gpu_blocks: .* than 0; found 0"),
        ({"engine": {**ENGINE, "version": "nightly"}}, r"engine.version: .* found 'nightly'"),
        ({"origin_simulator": {"published": "none"}}, r"origin_simulator.published: .*"),
        ({"model_dims": {}}, r"model_dims.layers: field required"),
        ({"engine": {**ENGINE, "num_gpu_blocks": 20}}, r"engine: num_gpu_blocks: 20 blocks"),
    ],
)
def test_invalid_cases_are_named(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    folder = plan(tmp_path / "made-up")
    (folder / "case.json").write_text(json.dumps({**FACTS, **change}))
    with pytest.raises(InputError, match=complaint):
        engine_of(read_recorded_run(folder))


def test_null_equals_a_missing_field(made_up: Path) -> None:
    facts = json.loads((made_up / "case.json").read_text())
    names = ("tensor_parallel", "data_parallel", "block_size", "gpu_memory_utilization", "dtype")
    facts["engine"] |= dict.fromkeys(names)
    facts |= dict.fromkeys(("calibration", "origin_simulator", "workload", "makespan_s"))
    before = read_recorded_run(made_up)
    (made_up / "case.json").write_text("\ufeff" + json.dumps(facts))
    after = read_recorded_run(made_up)
    assert after.facts.engine == before.facts.engine
    assert calibrate_run(after) == calibrate_run(before)


def test_recorded_knob_that_the_nearest_release_lacks_is_omitted(made_up: Path) -> None:
    facts = json.loads((made_up / "case.json").read_text())
    facts["engine"] |= {"version": "0.18.1rc2", "scheduler_reserve_full_isl": True}
    (made_up / "case.json").write_text(json.dumps(facts))
    _, notes = engine_of(read_recorded_run(made_up))
    assert "ignored scheduler_reserve_full_isl True: 0.18.0 does not support it" in notes
    facts["engine"]["version"] = "v0.11.0"
    (made_up / "case.json").write_text(json.dumps(facts))
    with pytest.raises(InputError, match=r"not available in vLLM 0\.11\.0, added in 0\.19"):
        engine_of(read_recorded_run(made_up))


def test_outputs_of_one_token_and_odd_names_are_shown(made_up: Path, tmp_path: Path) -> None:
    facts = json.loads((made_up / "case.json").read_text())
    facts["name"] = "a|b [bold]x[/nope]"
    facts["origin_simulator"]["published"] = {"TTFT Mean": "+1 %"}
    (made_up / "case.json").write_text(json.dumps(facts))
    table = pd.read_csv(made_up / "requests.csv")
    late = table["stage"] != "sync"
    table.loc[late, "output_tokens"] = 1
    table.loc[late, "tpot_ms"] = None
    table.to_csv(made_up / "requests.csv.gz", index=False)
    (made_up / "requests.csv").unlink()
    docs, out = tmp_path / "page.md", tmp_path / "out"
    arguments = [
        "validate",
        str(made_up),
        "--sensitivity",
        "--out",
        str(out),
    ]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert "a|b [bold]x[/nope]: test/model" in done.output
    assert "TPOT" not in done.output.replace("TPOT  ", "")
    page = CliRunner().invoke(page_tool, [str(docs), str(made_up)])
    assert page.exit_code == 0, page.output
    assert r"| a\|b [bold]x[/nope] | simkv | TTFT |" in docs.read_text()


def test_measured_times_that_are_not_numbers_are_reported(made_up: Path) -> None:
    table = pd.read_csv(made_up / "requests.csv").astype({"tpot_ms": object})
    table.loc[20, "tpot_ms"] = "n/a?"
    table.to_csv(made_up / "requests.csv", index=False)
    with pytest.raises(InputError, match=r"requests.csv:22: tpot_ms: .*got 'n/a\?'"):
        read_recorded_run(made_up)
    table.iloc[:0].to_csv(made_up / "requests.csv", index=False)
    with pytest.raises(InputError, match=r"requests.csv: contains no rows"):
        read_recorded_run(made_up)


def test_rows_of_a_single_stage_cannot_be_compared(tmp_path: Path) -> None:
    folder = write(tmp_path / "x", [[i, "sync", i, 9, 9, 0, 1, 1, 1] for i in range(9)])
    with pytest.raises(InputError, match="no rows to compare"):
        read_recorded_run(folder)
    with pytest.raises(InputError, match="not a recorded case"):
        read_recorded_run(tmp_path)


def test_the_command_prints_and_writes(made_up: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["validate", str(made_up), "--out", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "TTFT mean (ms)" in done.output
    # statistics published by the simulator that the record comes from
    assert "-4.0 %" in done.output
    records = pd.read_csv(tmp_path / "out" / "error_records.csv")
    assert list(records.columns[:6]) == [
        "simulator",
        "experiment_folder",
        "model",
        "workload",
        "stage_index",
        "metric_name",
    ]
    whole = records[(records["stage_index"] == -1) & (records["metric_name"] == "e2e_mean")]
    assert whole["mape"].iloc[0] == pytest.approx(abs(whole["mpe"].iloc[0]))
    figures = pd.read_csv(tmp_path / "out" / "figures.csv")
    first = figures[(figures["metric"] == "ttft_ms") & (figures["statistic"] == "mean")].iloc[0]
    assert first["origin_error_pct"] == -4.0
    requests = pd.read_csv(tmp_path / "out" / "requests.csv")
    assert (len(requests), requests["scored"].sum()) == (32, 20)


def test_variations_of_an_earlier_command_are_removed(made_up: Path, tmp_path: Path) -> None:
    arguments = ["validate", str(made_up), "--out", str(tmp_path / "out")]
    assert CliRunner().invoke(app, [*arguments, "--sensitivity"]).exit_code == 0
    assert (tmp_path / "out" / "sensitivity.csv").is_file()
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert not (tmp_path / "out" / "sensitivity.csv").exists()


def test_unwritable_folder_is_reported_before_the_work(made_up: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for option, place, complaint in (
        ("--out", "file", "file: is a file; expected a folder"),
        ("--out", "file/below", "file is a file; expected a folder"),
    ):
        done = CliRunner().invoke(app, ["validate", str(made_up), option, str(tmp_path / place)])
        assert complaint in str(done.exception), (option, place)
        assert "TTFT" not in done.output


def test_page_and_plot_are_written_reproducibly(made_up: Path, tmp_path: Path) -> None:
    pages = []
    for name in ("a", "b"):
        page = tmp_path / name / "validation.md"
        done = CliRunner().invoke(page_tool, [str(page), str(made_up)])
        assert done.exit_code == 0, done.output
        folder = tmp_path / name
        assert sorted(p.name for p in folder.iterdir()) == ["validation.md", "validation.png"]
        pages.append([p.read_bytes() for p in sorted(folder.iterdir())])
    assert pages[0] == pages[1]
    text = pages[0][0].decode()
    assert "## made-up" in text
    assert "0.5 ms of host time per step" in text
    assert "{{" not in text


def test_attention_pairs_of_isolated_requests_include_the_shared_prefix(tmp_path: Path) -> None:
    rows = []
    for i in range(12):
        prompt = 200 + 100 * i
        before = 96 if i else 0
        new = prompt - before
        products = compute_non_attention_seconds(np.array([float(new)]), TRUE, SHAPE)[0]
        prefill = 1e3 * (products + count_attention_pairs(new, before) * TRUE.pair)
        decode = 8e3 * (TRUE.decode_step + TRUE.token + TRUE.context * (prompt + 4))
        rows.append([i, "sync", 3.0 * i, prompt, 9, 0, prefill, prefill, prefill + decode, 100])
    path = tmp_path / "requests.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([[*COLUMNS.split(","), "shared_prefix_tokens"], *rows])
    alone = read_isolated_requests(path)
    assert set(alone.hits) == {96.0}  # whole blocks of 100 tokens
    found = fit_cost_coefficients(alone, SHAPE, None)
    assert found.token == pytest.approx(TRUE.token, rel=1e-3)
    assert found.pair == pytest.approx(TRUE.pair, rel=1e-2)


def scored(name: str) -> Any:
    case = read_recorded_run(TRUTH / name)
    costs = calibrate_run(case)
    return score(case, simulate_run(case, costs, *engine_of(case)), costs.name)


@recorded
def test_the_saturated_rtx_4090_within_one_per_cent() -> None:
    found = scored("lss-rtx4090-llama3.1-8b")
    for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
        for f in found.figures:
            if f.metric == metric:
                assert abs(f.error_pct) < 1.0, f
    e2e = next(p for p in found.per_request if p.metric == "e2e_ms")
    assert e2e.mape is not None
    assert e2e.mape <= 0.7
    assert 185 <= found.replayed.preemptions <= 205  # about 194 requests in the record


@recorded
@pytest.mark.parametrize(
    ("name", "e2e", "ttft"),
    [("lss-rtxpro6000-llama3.1-8b", 1.5, 3.0), ("lss-rtxpro6000-qwen3-30b-a3b-dp2", 3.0, 8.0)],
)
def test_runs_on_an_rtx_pro_6000_from_kernel_tables(name: str, e2e: float, ttft: float) -> None:
    found = scored(name)
    assert abs(found.figure("e2e_ms", "mean").error_pct) < e2e
    assert abs(found.figure("ttft_ms", "mean").error_pct) < ttft


@recorded
@pytest.mark.parametrize("name", ["blis-h100-codellama34b", "blis-h100-llama2-7b"])
def test_runs_on_an_h100_with_costs_from_isolated_requests(name: str) -> None:
    found = scored(name)
    assert abs(found.figure("e2e_ms", "mean").error_pct) < 1.0
    assert abs(found.figure("ttft_ms", "mean").error_pct) < 3.0


def test_intervals_contain_metrics_of_the_true_costs_and_are_counted(made_up: Path) -> None:
    case = read_recorded_run(made_up)
    costs = calibrate_run(case)
    found = simulate_and_score(case, costs, *engine_of(case))
    assert all(f.held for f in found.figures)
    counted = coverage([found])
    assert counted.refused == 0
    assert counted.held == counted.figures > 10
    assert counted.half is not None
    assert 0.02 < counted.half < 0.5
    # The record is slower by half than any known error, so most metrics are outside their
    # intervals.
    slower = case.requests.assign(**{m: 1.5 * case.requests[m] for m in ("ttft_ms", "e2e_ms")})
    missed = simulate_and_score(replace(case, requests=slower), costs, *engine_of(case))
    assert coverage([missed]).held < 0.7 * counted.figures
    assert not is_in_range(found)  # more concurrent decodes than one


def test_profile_without_errors_gives_no_interval(made_up: Path) -> None:
    case = read_recorded_run(made_up)
    found = simulate_and_score(case, profile(), *engine_of(case))
    assert coverage([found]).figures == 0
    assert coverage([found]).refused > 10
    assert refused_runs([found]) == ["made-up: the error of its cost profile is unknown"]


def test_case_may_name_the_link_of_its_host(made_up: Path) -> None:
    engine = {**ENGINE, "tensor_parallel": 2}
    (made_up / "case.json").write_text(json.dumps({**FACTS, "engine": engine}))
    case = read_recorded_run(made_up)
    assert any("link was not recorded" in note for note in engine_of(case)[1])
    link = {"latency_us": 20, "bandwidth_gb_s": 16}
    (made_up / "case.json").write_text(json.dumps({**FACTS, "engine": {**engine, "link": link}}))
    case = read_recorded_run(made_up)
    assert not any("link" in note for note in engine_of(case)[1])
    found = case.facts.engine.host_link
    assert found is not None
    assert (found.latency, found.bandwidth) == (pytest.approx(2e-5), 1.6e10)
    named = {**engine, "link": "PCIe 5.0, no peer-to-peer"}
    (made_up / "case.json").write_text(json.dumps({**FACTS, "engine": named}))
    found = read_recorded_run(made_up).facts.engine.host_link
    assert found is not None
    assert found.peer_to_peer is False


def test_invalid_case_does_not_stop_the_others(made_up: Path, tmp_path: Path) -> None:
    write(tmp_path / "broken", [[0, "sync", 0.0, 300, 40, 0, 1, 1, 1]])
    second = tmp_path / "second"
    shutil.copytree(made_up, second)
    (second / "case.json").write_text(json.dumps({**FACTS, "name": "second"}))
    done = CliRunner().invoke(app, ["validate", str(tmp_path)])
    assert done.exit_code == 2
    assert "made-up" in done.stdout
    assert "Errors of all cases" in done.stdout
    assert "no rows to compare" in done.stderr
    assert done.stderr.count("\n") == 1
    # Each of two runs with the same model and GPU is predicted with the costs of the other run.
    rows = [line.split() for line in done.stdout.splitlines()]
    assert sum(row[:2] == ["made-up", "second"] for row in rows) == 1, done.stdout


def test_equal_costs_of_another_run_give_equal_errors(made_up: Path, tmp_path: Path) -> None:
    case = read_recorded_run(made_up)
    costs = calibrate_run(case)
    own = simulate_and_score(case, costs, *engine_of(case))
    assert own.fitted_to_itself
    twin = replace(own, case=replace(case, facts=case.facts.model_copy(update={"name": "twin"})))
    found = list(cross_predict([own, twin], {"made-up": costs, "twin": costs}))
    assert [(c.score.case.name, c.costs_of) for c in found] == [
        ("made-up", "twin"),
        ("twin", "made-up"),
    ]
    assert found[0].score.figures == own.figures


def test_benchmark_result_with_requests_is_a_case(made_up: Path, tmp_path: Path) -> None:
    from tests.workload.test_trace_measured import aiperf, lines

    table = pd.read_csv(made_up / "requests.csv")
    records = []
    for row in table.to_dict("records"):
        record = aiperf(row["arrival_s"], row["prompt_tokens"], row["output_tokens"])
        record["metrics"]["time_to_first_token"]["value"] = row["ttft_ms"]
        record["metrics"]["request_latency"]["value"] = row["e2e_ms"]
        record["metrics"]["inter_token_latency"] = {"value": row["tpot_ms"], "unit": "ms"}
        records.append(record)
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "case.json").write_text((made_up / "case.json").read_text())
    lines(raw / "profile_export.jsonl", records)
    case = read_recorded_run(raw)
    assert not case.from_queue
    found = simulate_and_score(case, profile(), *engine_of(case))
    for metric in ("ttft_ms", "tpot_ms", "e2e_ms"):
        assert abs(found.figure(metric, "mean").error_pct) < 1e-6


def test_ignored_prefixes_of_a_benchmark_result_are_reported(made_up: Path, tmp_path: Path) -> None:
    from tests.workload.test_trace_measured import aiperf, lines

    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "case.json").write_text((made_up / "case.json").read_text())
    (raw / "prefix_blocks.jsonl").write_text('{"id": 0, "hash_ids": [0]}\n')
    lines(raw / "profile_export.jsonl", [aiperf(0.0, 50, 5), aiperf(0.1, 50, 5)])
    assert any(
        "assuming no shared prefixes" in note for note in engine_of(read_recorded_run(raw))[1]
    )


def test_closed_loop_clients_send_after_a_reply(made_up: Path) -> None:
    facts = json.loads((made_up / "case.json").read_text())
    (made_up / "case.json").write_text(json.dumps({**facts, "max_concurrency": 1}))
    case = read_recorded_run(made_up)
    one = simulate_run(case, profile(), *engine_of(case))
    # With one request at a time, none waits, and the run takes as long as all requests together.
    assert one.requests["queue_ms"].max() == pytest.approx(0.0, abs=1e-3)
    total = (one.requests["e2e_ms"] - 2.0).sum() / 1e3
    assert one.makespan_s == pytest.approx(total, rel=0.01)
    (made_up / "case.json").write_text(json.dumps({**facts, "max_concurrency": 4}))
    four = read_recorded_run(made_up)
    assert simulate_run(four, profile(), *engine_of(four)).makespan_s < 0.6 * one.makespan_s
    (made_up / "case.json").write_text(json.dumps({**facts, "max_concurrency": 0}))
    with pytest.raises(InputError, match=r"case.json: max_concurrency: .*greater than 0"):
        read_recorded_run(made_up)
