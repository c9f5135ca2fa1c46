"""Tests that ``--json`` prints one document that agrees with the schema of ``simkv schema
COMMAND``.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from typer.testing import CliRunner

from simkv.cli import build_app
from simkv.cli.plan import select_options
from simkv.core.errors import InputError
from simkv.report.json_answers import ANSWERS, SweepAnswer
from tests.conftest import ROOT

SCENARIO = """\
name: queue
engine: {name: vllm, num_gpu_blocks: 40, max_model_len: 512}
workload:
  arrivals: {num_prompts: 12, request_rate: 20, prompt_tokens: 64, output_tokens: 16}
profile: l4-mistralrs-pr2034
expect: {run: {finished: 12}}
"""
LOG = """\
INFO 11-23 10:00:01 [loggers.py:259] Engine 000: Avg prompt throughput: 900.0 tokens/s, Avg \
generation throughput: 20.0 tokens/s, Running: 4 reqs, Waiting: 30 reqs, GPU KV cache usage: 99.1%
INFO 11-23 10:00:11 [loggers.py:259] Engine 000: Avg prompt throughput: 0.0 tokens/s, Avg \
generation throughput: 20.0 tokens/s, Running: 4 reqs, Waiting: 31 reqs, GPU KV cache usage: 99.6%
"""
RESULT = """\
{"completed": 8, "total_input_tokens": 800, "total_output_tokens": 80, "request_rate": 5,
"mean_ttft_ms": 30, "mean_tpot_ms": 9, "output_throughput": 40}
"""
CUSTOM = """\
from simkv.custom import CustomVllmScheduler, PolicyRequest


class Shortest(CustomVllmScheduler):
    def waiting_order(self, r: PolicyRequest) -> float:
        return r.prompt_tokens
"""
#: Options of each command. If the exit code is not 0, it follows after a vertical bar.
CALLS = {
    "run": "queue.yaml --emit vllm-log --perfetto trace.json",
    "explain": "queue.yaml 3",
    "diagnose": "server.log --fast | 3",
    "compare": "--from-command 'vllm serve meta-llama/Llama-3.1-8B' --from-command "
    "'vllm serve meta-llama/Llama-3.1-8B --max-num-seqs 2' --gpu H100-SXM --num-prompts 8 "
    "--request-rate 50 --seeds 1 | 1",
    "diff": "runs/queue runs/queue",
    "zoo": "mistralrs-forty",
    "plan": "queue.yaml --smallest engine.num_gpu_blocks=40..42 --slo unserved<=0 --repeats 1 "
    "--no-cliff --jobs 1",
    "sweep": "queue.yaml --over engine.num_gpu_blocks=40,41 --jobs 1",
    "whatif": "queue.yaml --jobs 1",
    "bisect": "queue.yaml --over engine.num_gpu_blocks=20..60 --samples 2 --jobs 1",
    "blocks": "--model llama-3.1-8b --gpu H100-SXM",
    "conform": f"{ROOT}/tests/conformance/traces/mistralrs/seed.jsonl.gz",
    "check-scheduler": "custom.yaml --trust",
    "policies": "",
    "profile list": "llama H100",
    "validate": "result.json --gpu H100-SXM --model llama-3.1-8b",
    "calibrate": "result.json --gpu H100-SXM --model llama-3.1-8b",
}


def call(command: str, options: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and standard output."""
    words = [*command.split(), *shlex.split(options)]
    if words[0] == "plan":
        select_options(all_of_them=True)
    result = CliRunner().invoke(build_app(words[0]), words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a directory with a scenario, its results and a log."""
    there = tmp_path_factory.mktemp("json")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(there)
        Path("queue.yaml").write_text(SCENARIO)
        Path("server.log").write_text(LOG)
        Path("result.json").write_text(RESULT)
        Path("shortest.py").write_text(CUSTOM)
        engine = "name: shortest, file: shortest.py"
        Path("custom.yaml").write_text(SCENARIO.replace("name: vllm", engine))
        code, _ = call("run", "queue.yaml")
        assert code == 0
        yield there


def test_every_schema_is_used_by_a_command() -> None:
    assert CALLS.keys() == ANSWERS.keys()


@pytest.mark.parametrize("command", CALLS)
def test_answer_agrees_with_its_schema(command: str) -> None:
    options, _, expected = CALLS[command].partition("|")
    code, printed = call(command, f"{options} --json")
    answer = json.loads(printed, parse_constant=pytest.fail)
    assert code == int(expected or 0), printed
    code, schema = call("schema", command)
    assert code == 0
    jsonschema.validate(answer, json.loads(schema))
    assert answer["version"]


def test_missing_and_infinite_numbers_are_null() -> None:
    rows = [{"a": float("inf"), "b": [float("nan"), 1.5]}]
    answer = SweepAnswer(scenario="s", rows=rows, folder="f").model_dump_json()
    assert json.loads(answer)["rows"] == [{"a": None, "b": [None, 1.5]}]


def test_json_gives_the_printed_answer_and_the_same_exit_code(folder: Path) -> None:
    Path("short.yaml").write_text(SCENARIO.replace("finished: 12", "finished: 11"))
    plain_code, plain = call("run", "short.yaml")
    code, printed = call("run", "short.yaml --json")
    assert code == plain_code == 1
    answer = json.loads(printed)
    assert f"Result: {answer['answer']['Result']}" in plain
    assert [one["ok"] for one in answer["expectations"]] == [False]
    assert (folder / answer["folder"] / "summary.json").is_file()


def test_unknown_command_names_those_with_json() -> None:
    result = CliRunner().invoke(build_app("schema"), ["schema", "paln"])
    assert isinstance(result.exception, InputError)
    assert "did you mean 'plan'?" in str(result.exception)
