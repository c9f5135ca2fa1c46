"""Tests of commands without a scenario file: options describe the server and its load."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

from simkv.scenario.scenario_builder import build_scenario
from simkv.scenario.scenario_options import ScenarioOptions
from simkv.study.change_check import ChangeCheck, FigureChange
from tests.cli.test_cli import Simkv

SERVER = ("--gpu", "L4", "--model", "llama-3.1-8b")
LOAD = ("--request-rate", "2", "--input-len", "300", "--output-len", "20", "--num-prompts", "30")
LINE = "vllm serve meta-llama/Llama-3.1-8B --max-model-len 8192"


@pytest.fixture
def simkv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Simkv:
    return Simkv(tmp_path, monkeypatch, capsys)


def summary(simkv: Simkv, name: str) -> dict[str, object]:
    found = json.loads((simkv.folder / name / "summary.json").read_text())
    variant: dict[str, object] = found["variants"]["run"]
    return variant


def num_gpu_blocks(simkv: Simkv, name: str) -> int:
    text = (simkv.folder / name / "scenario.yaml").read_text()
    found = re.search(r"num_gpu_blocks: (\d+)", text)
    assert found
    return int(found[1])


def test_reduced_length_is_noted(simkv: Simkv) -> None:
    done = simkv("run", "--gpu", "H100", "--model", "llama-3.1-70b", "--tp", 2, *LOAD, "--no-plots")
    assert done.code == 0, done.err
    text = " ".join(done.out.split())
    length = re.search(r"max_model_len (\d+) ", text)
    assert length
    assert int(length[1]) < 131072
    assert f"max_model_len is reduced from the model's 131,072 to {int(length[1]):,}" in text


def test_invalid_setting_gives_one_error(simkv: Simkv) -> None:
    simkv.write(
        "name: s\nworkload: {burst: {num_prompts: 2, prompt_tokens: 9, output_tokens: 2}}\n"
        "engine: {name: vllm}\nhardware: {gpu: H100, model: llama-3.1-8b}\n"
    )
    done = simkv("run", "s.yaml", "--set", "engine.max_num_seqs=-1")
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "engine.max_num_seqs: should be greater than 0; found -1" in done.err


def test_misspelled_gpu_suggests_the_plain_name(simkv: Simkv) -> None:
    done = simkv("run", "--gpu", "H1OO", "--model", "llama-3.1-8b", *LOAD)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "nearest: NVIDIA H100 80GB HBM3, " in done.err


@pytest.mark.parametrize("command", ["run", "init", "plan", "compare"])
def test_errors_are_printed_without_notes(simkv: Simkv, command: str) -> None:
    own = {"plan": ("--slo", "ttft_ms.p99<=500"), "compare": ("--from-command", LINE) * 2}
    server = () if command == "compare" else ("--model", "llama-3.1-8b")
    done = simkv(command, "--gpu", "H1OO", *server, *LOAD, *own.get(command, ()))
    assert (done.code, done.err.count("\n")) == (2, 1), done.err


def test_rejected_requests_are_not_a_matter_of_load(simkv: Simkv) -> None:
    simkv.write(
        "name: s\nworkload: {burst: {num_prompts: 2, prompt_tokens: 400, output_tokens: 2}}\n"
        "engine: {name: vllm, num_gpu_blocks: 100, max_model_len: 300}\nprofile: unit-step\n"
    )
    done = simkv("run", "s.yaml", "--no-plots")
    text = " ".join(done.out.split())
    assert "Fix: the engine rejects these requests under any load" in text
    assert "whatif" not in text


def test_run_needs_no_file(simkv: Simkv) -> None:
    done = simkv("run", *SERVER, *LOAD, "--out", "a", "--no-plots", "--gpu-price", "L4=0.5")
    assert done.code == 0, done.err
    assert "30 of 30 finished" in done.out
    assert "Cost: 1 x NVIDIA L4: 0.5 per hour" in done.out
    command = re.search(r"^Launch command: (.*)$", done.out, re.MULTILINE)
    assert command
    # The KV cache for the launcher's default length does not fit on an L4, so the command states a
    # shorter length.
    again = simkv("run", "--gpu", "L4", "--from-command", command[1], *LOAD, "--out", "b")
    assert again.code == 0, again.err
    assert summary(simkv, "a") == summary(simkv, "b")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--dp", 2), "vllm serve meta-llama/Llama-3.1-8B --data-parallel-size 2"),
        (
            ("--from-command", "vllm serve meta-llama/Llama-3.1-8B -dp 2"),
            "vllm serve meta-llama/Llama-3.1-8B --data-parallel-size 2",
        ),
        (
            (
                "--from-command",
                "python -m sglang.launch_server --model meta-llama/Llama-3.1-8B --tp 2 --dp 2 "
                "--enable-dp-attention",
            ),
            "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --tp-size 2 "
            "--dp-size 2 --enable-dp-attention",
        ),
    ],
)
def test_launch_command_states_all_ranks_once(
    simkv: Simkv, options: tuple[str, ...], expected: str
) -> None:
    model = () if "--from-command" in options else ("--model", "llama-3.1-8b")
    done = simkv("run", "--gpu", "H100", *model, *options, *LOAD, "--no-plots")
    found = re.search(r"^Launch command: (.*)$", done.out, re.MULTILINE)
    assert found, done.err
    assert found[1] == expected


def test_launch_command_starts_the_named_model(simkv: Simkv) -> None:
    words = ("--model", "meta-llama/Llama-3.1-8B-Instruct", *LOAD, "--no-plots")
    done = simkv("run", "--gpu", "H100", *words)
    assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in done.out
    slo = ("--slo", "ttft_ms.p95<=2000", "--no-cliff", "--smallest", "fleet.replicas=1..2")
    plan = simkv("plan", "--gpu", "H100", *words[:-1], *slo, "--jobs", 1)
    assert "vllm serve meta-llama/Llama-3.1-8B-Instruct" in plan.out
    wrong = simkv("plan", "--gpu", "H100,B2000", *words[:-1], *slo)
    assert (wrong.code, wrong.out) == (2, "")
    assert "--gpu B2000: unknown GPU" in wrong.err


def test_load_from_a_benchmark_command_is_the_same_load(simkv: Simkv) -> None:
    load = (
        "vllm bench serve --dataset-name random --random-input-len 300 --random-output-len 20 "
        "--request-rate 2 --num-prompts 30 --save-result"
    )
    one = simkv("run", *SERVER, *LOAD, "--out", "a", "--no-plots")
    other = simkv("run", *SERVER, "--load", load, "--out", "b", "--no-plots")
    assert (one.code, other.code) == (0, 0)
    assert "ignored (no effect on the load): --save-result" in other.err
    assert summary(simkv, "a") == summary(simkv, "b")


def test_seeds_give_intervals_and_a_steady_state_check(simkv: Simkv) -> None:
    done = simkv("run", *SERVER, *LOAD, "--seeds", 3, "--no-plots")
    assert done.code == 0, done.err
    assert re.search(r"mean TTFT +\S+ \S+ \(.* to .*\); runs .* to .*; step times: from", done.out)
    assert re.search(r"^Steady state: ", done.out, re.MULTILINE)
    same = simkv("run", "mistralrs-six", "--seeds", 3, "--exit-zero", "--no-plots")
    assert same.code == 2
    assert "no random part" in same.err


def test_init_writes_the_scenario_that_run_builds(simkv: Simkv) -> None:
    done = simkv("init", *SERVER, *LOAD)
    assert done.code == 0, done.err
    text = (simkv.folder / "scenario.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=simkv-schema.json\n")
    set_ = text.replace("  # max_num_seqs: 256\n", "  max_num_seqs: 7\n")
    simkv.write(set_, "set.yaml")
    shown = simkv("run", "set.yaml", "--out", "c", "--no-plots")
    assert "given: max_num_seqs 7" in " ".join(shown.out.split()), shown
    assert json.loads((simkv.folder / "simkv-schema.json").read_text())["properties"]["workload"]
    assert simkv("run", "scenario.yaml", "--out", "a", "--no-plots").code == 0
    assert simkv("run", *SERVER, *LOAD, "--out", "b", "--no-plots").code == 0
    assert summary(simkv, "a") == summary(simkv, "b")
    assert "use --overwrite" in simkv("init", *SERVER).err


def test_plan_has_one_answer_per_gpu_that_fits_and_its_command(simkv: Simkv) -> None:
    done = simkv(
        *("plan", "--gpu", "L4,L40S", "--tp", "1", "--model", "Qwen/Qwen3-14B", *LOAD),
        *("--smallest", "fleet.replicas=1..2", "--slo", "ttft_ms.p95<=60000", "--repeats", 1),
        *("--gpu-price", "L4=0.5", "--gpu-price", "L40S=1", "--jobs", 1),
    )
    assert done.code == 0, done.err
    assert "hardware.gpu=L4: skipped: " in done.err
    assert "per million output tokens" in done.out
    assert "\n  vllm serve Qwen/Qwen3-14B\n" in done.out


def test_compare_exits_1_beyond_the_tolerance(simkv: Simkv) -> None:
    pair = ("--from-command", LINE, "--from-command", f"{LINE} --max-num-seqs 1")
    words = ("--gpu", "L4", *LOAD, "--seeds", 2, "--jobs", 1)
    worse = simkv("compare", *pair, *words)
    assert worse.code == 1
    assert "WORSE" in worse.out
    assert re.search(r"whose E2E latency grows by more than 5%: [1-9]", worse.out)
    assert re.search(r"request \d+: \S+ s → \S+ s", worse.out)
    assert simkv("compare", *pair, *words, "--tolerance", 1e9).code == 0
    same = simkv("compare", "--from-command", LINE, "--from-command", f"{LINE} --port 1", *words)
    assert same.code == 0
    assert "whose E2E latency grows by more than 5%: 0; shrinks: 0" in same.out
    one = simkv("compare", "--from-command", LINE, *words)
    assert (one.code, one.err) == (
        2,
        "simkv: --from-command: expected two launch commands, one before and one after the "
        "change; found 1\n",
    )


def test_change_that_is_within_the_tolerance_in_part_of_its_range_is_no_failure() -> None:
    sure = FigureChange("ttft_all_ms.p99", 1.0, 1.3, 0.3, 0.06, 0.5)
    noise = FigureChange("e2e_all_ms.p99", 1.0, 1.3, 0.3, -0.03, 0.5)
    better = FigureChange("output_throughput", 1.0, 1.3, 0.3, 0.2, 0.5)
    fewer = FigureChange("output_throughput", 1.0, 0.8, -0.2, -0.3, -0.1)
    partly = FigureChange("ttft_all_ms.mean", 1.0, 1.01, 0.01, 0.005, 1.06)
    found = ChangeCheck((sure, noise, partly, better, fewer), (), (), 1, 2, True)
    assert found.beyond(0.05) == [sure, fewer]
    assert found.unsure(0.05) == [noise, partly]


def test_diff_shows_equal_latencies_once(simkv: Simkv) -> None:
    assert simkv("run", *SERVER, *LOAD, "--out", "a", "--no-plots").code == 0
    seats = ("--set", "engine.max_num_seqs=2")
    assert simkv("run", *SERVER, *LOAD, *seats, "--out", "b", "--no-plots").code == 0
    found = simkv("diff", "a", "b")
    assert found.code == 1
    assert "P99 TTFT" in found.out
    assert "of all requests" not in found.out


def test_diff_names_figures_outcomes_and_the_first_decision(simkv: Simkv) -> None:
    assert simkv("run", *SERVER, *LOAD, "--out", "a", "--no-plots").code == 0
    seats = ("--set", "engine.max_num_seqs=1", "--set", "timeout=20", "--exit-zero")
    assert simkv("run", *SERVER, *LOAD, *seats, "--out", "b", "--no-plots").code == 0
    found = simkv("diff", "a", "b")
    assert found.code == 1
    assert re.search(r"setting engine.max_num_seqs: \d+ → 1\n", found.out)
    assert "mean TTFT" in found.out
    assert "output token throughput" in found.out
    assert re.search(r"request \d+: finished → starved", found.out)
    assert re.search(r"first differing decision: step [1-9]", found.out)
    assert simkv("diff", "a", "a").code == 0
    assert simkv("diff", "a", ".").code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--gpu", "L4"), "--model: missing"),
        (("--model", "llama-3.1-8b"), "--gpu: missing"),
        ((*SERVER, "--peak", "1h"), "--peak: requires --trace"),
        ((*SERVER, "--trace", "none.csv"), "--trace none.csv: this file does not exist\n"),
        ((*SERVER, "--request-rate", "0"), "request_rate: should be greater than 0; found 0.0"),
        ((*SERVER, "--load", "x", "--seed", "1"), "--seed: cannot be combined with --load"),
        ((*SERVER, "--engine", "vlm"), "did you mean 'vllm'"),
        (("x.yaml", *SERVER), "--gpu: cannot be combined with a scenario file"),
        ((*SERVER, "--gpu-price", "L4"), "--gpu-price L4: expected a GPU and the price"),
    ],
)
def test_bad_options_are_one_message(simkv: Simkv, words: tuple[str, ...], message: str) -> None:
    done = simkv("run", *words)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert message in done.err


def test_errors_call_standard_input_by_its_name(
    simkv: Simkv, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    done = simkv("diagnose", "-")
    assert done.code == 2
    assert done.err.startswith("simkv: standard input: unknown kind of file")


def test_busiest_period_of_a_trace(simkv: Simkv) -> None:
    rows = [*range(0, 100, 10), *range(100, 110), *range(120, 200, 10)]
    text = "arrival,prompt_tokens,output_tokens\n" + "".join(f"{at},100,5\n" for at in rows)
    simkv.write(text, "t.csv")
    done = simkv(
        *("run", *SERVER, "--trace", "t.csv", "--peak", "10s", "--growth", "2"),
        *("--out", "a", "--no-plots"),
    )
    assert done.code == 0, done.err
    assert "busiest 10s: starts at 100 s of the trace, 10 requests" in done.err
    assert "requests, 1 per second; with --growth 2, 2 per second\n" in done.err
    assert summary(simkv, "a")["requests"] == 10


def test_access_log_gives_arrivals_and_options_the_lengths(simkv: Simkv) -> None:
    line = '1.2.3.4 - - [10/Oct/2026:13:55:{:02} +0000] "POST /v1/{} HTTP/1.1" {} 120\n'
    calls = [("chat/completions", 200), ("models", 200), ("completions", 429), ("messages", 200)]
    text = "".join(line.format(at, *calls[at % 4]) for at in range(40))
    simkv.write(text, "access.log")
    missing = simkv("run", *SERVER, "--trace", "access.log")
    assert (missing.code, missing.err.count("\n")) == (2, 1)
    assert "--input-len: missing" in missing.err
    lengths = ("--input-len", 50, "--output-len", 5)
    done = simkv("run", *SERVER, "--trace", "access.log", *lengths, "--out", "a", "--no-plots")
    assert done.code == 0, done.err
    assert "20 requests of access.log written to runs/access-traffic/traffic.csv" in done.err
    assert summary(simkv, "a")["total_output_tokens"] == 100


def test_log_of_a_server_gives_its_requests_and_settings(simkv: Simkv) -> None:
    given = ("--set", "engine.max_num_seqs=9", "--emit", "vllm-log,vllm-log-requests")
    assert simkv("run", *SERVER, *LOAD, *given, "--out", "a", "--no-plots").code == 0
    log = next((simkv.folder / "a").rglob("*.log"))
    done = simkv("run", *SERVER, "--trace", log, "--growth", 2, "--out", "b", "--no-plots")
    assert done.code == 0, done.err
    assert "settings found in the log: max_num_seqs 9" in done.err
    assert "To reproduce the server of the log: simkv diagnose" in done.err
    assert "may be faster or slower than the server of the log" in done.err
    cache = re.search(
        r"in the log is not used; to use it: --set (engine.num_gpu_blocks=\d+)\n", done.err
    )
    assert cache
    other = ("--set", "engine.gpu_memory_utilization=0.95")
    cached = (*other, "--set", cache[1])
    found = []
    for name, more in (("e", other), ("d", cached)):
        words = (*SERVER, "--trace", log, *more, "--out", name, "--no-plots")
        assert simkv("run", *words).code == 0
        found.append(num_gpu_blocks(simkv, name))
    assert found[0] > found[1] == num_gpu_blocks(simkv, "a")
    assert "is unknown: the default" not in done.err
    command = simkv("run", "--gpu", "L4", "--from-command", LINE, "--trace", log, "--out", "c")
    assert command.code == 0, command.err
    assert "settings in the log are ignored" in command.err
    before, after = summary(simkv, "a"), summary(simkv, "b")
    assert before["requests"] == after["requests"] == 30
    assert before["makespan_s"] > after["makespan_s"]  # type: ignore[operator]


def test_without_gpu_the_step_costs_are_fitted_to_the_log(simkv: Simkv) -> None:
    given = ("--emit", "vllm-log,vllm-log-requests", "--out", "a", "--no-plots")
    assert simkv("run", *SERVER, *LOAD, *given).code == 0
    log = next((simkv.folder / "a").rglob("*.log"))
    words = ("--smallest", "fleet.replicas=1..2", "--slo", "ttft_ms.p95<=60000", "--jobs", 1)
    done = simkv("plan", "--trace", log, "--growth", 2, *words, "--no-cliff")
    assert done.code == 0, done.err
    assert f"step costs are fitted to {log.name}" in done.err
    assert "Answer: fleet.replicas = 1" in done.out
    assert "as recorded" in done.out
    refused = simkv("plan", "--trace", log, "--request-rate", 2, *words)
    assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_unknown_release_has_the_rules_of_the_nearest() -> None:
    built = build_scenario(
        ScenarioOptions(gpu="H100", model="Qwen3-32B", engine="sglang", version="0.5.4.post2")
    )
    assert built.document.tree["engine"]["variant"] == "0.5.15"
    assert "sglang 0.5.4.post2 is simulated with the rules of 0.5.15" in built.notes
