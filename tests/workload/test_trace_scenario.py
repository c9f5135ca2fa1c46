"""Tests of traces and generators in scenario files, and of the commands for traces."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from ruamel.yaml import YAML

from simkv.cli import main
from simkv.core.errors import InputError
from simkv.metrics.scenario_runner import run_file
from simkv.scenario.scenario_loader import load
from simkv.scenario.scenario_schema import json_schema

TRACE = "arrival,prompt_tokens,output_tokens\n" + "".join(
    f"{i / 2},{10 + i},{2 + i % 3}\n" for i in range(40)
)
SCENARIO = """\
name: replay
workload:
  trace: t.csv
  duration: 10
engine: {name: vllm, num_gpu_blocks: 400, max_model_len: 4096}
profile: unit-step
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    (tmp_path / "t.csv").write_text(TRACE)
    path = tmp_path / "s.yaml"
    path.write_text(SCENARIO)
    return path


def simkv(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """Run a command and return its exit code."""
    monkeypatch.setattr(sys, "argv", ["simkv", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def test_runs_a_trace_beside_the_scenario(scenario: Path) -> None:
    result = run_file(scenario)["run"]
    assert result.summary["finished"] == 20
    assert [life.request.prompt_tokens for life in result.record.requests.values()] == [
        *range(10, 30)
    ]


def test_reports_rows_left_out_of_a_trace(scenario: Path) -> None:
    (scenario.parent / "t.csv").write_text(TRACE + "x,1,1\n")
    with pytest.raises(InputError, match=r"t\.csv:42: arrival: should be a number of at least 0"):
        run_file(scenario)
    result = run_file(scenario, ["workload.skip_bad=true"])["run"]
    assert result.notes[0].startswith("1 of 41 bad rows excluded: 1 arrival: should be")


@pytest.mark.parametrize(
    ("assignments", "size"),
    [
        (["workload.limit=3"], 3),
        (["workload.trace=other.csv"], 1),
        (["workload.start=5", "workload.rate_scale=2"], 20),
        (["workload.sample=7"], 7),
        (["workload.burst={num_prompts: 4, prompt_tokens: 5, output_tokens: 5}"], 4),
    ],
)
def test_set_selects_another_trace_part_or_form(
    scenario: Path, assignments: list[str], size: int
) -> None:
    (scenario.parent / "other.csv").write_text("arrival,prompt_tokens,output_tokens\n0,1,1\n")
    assert load(scenario, assignments)["run"].workload.size == size


def test_variants_may_have_other_forms(scenario: Path) -> None:
    scenario.write_text(
        SCENARIO
        + "variants:\n"
        + "  part: {workload: {limit: 4}}\n"
        + "  burst: {workload: {burst: {num_prompts: 3, prompt_tokens: 5, output_tokens: 5}}}\n"
    )
    sizes = {name: s.workload.size for name, s in load(scenario).items()}
    assert sizes == {"part": 4, "burst": 3}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("trace: none.csv", r"s\.yaml:3: workload\.trace: file .*none\.csv"),
        ("trace: t.csv\n  format: azur", r"s\.yaml:4: workload\.format: .*did you mean 'azure'"),
        ("trace: t.csv\n  strat: 5", r"s\.yaml:4: workload\.strat: unknown.*did you mean 'start'"),
        ("trace: t.csv\n  start: -1", r"s\.yaml:4: workload\.start: should be greater"),
        ("trace: t.csv\n  sample: 1.5", r"s\.yaml:4: workload\.sample: should be less"),
        (
            "burst: {num_prompts: 1, prompt_tokens: 1, output_tokens: 1}\n  limit: 4",
            r"s\.yaml:2: workload: limit: only allowed with a trace",
        ),
        (
            "arrivals: {num_prompts: 1, request_rate: 1, output_tokens: 1, prompt_tokens: "
            "{distribution: empirical, trace: x.csv}}",
            r"s\.yaml:3: workload\.arrivals\.prompt_tokens\.trace: file",
        ),
    ],
)
def test_errors_name_the_field_of_the_scenario(scenario: Path, text: str, message: str) -> None:
    scenario.write_text(SCENARIO.replace("trace: t.csv\n  duration: 10", text))
    with pytest.raises(InputError, match=message):
        load(scenario)


def test_trace_of_lengths_requires_a_request_rate(scenario: Path) -> None:
    (scenario.parent / "t.csv").write_text("prompt_tokens,output_tokens\n5,1\n7,2\n")
    scenario.write_text(SCENARIO.replace("  duration: 10\n", ""))
    with pytest.raises(InputError, match=r"contains no arrival times; set .*request_rate"):
        run_file(scenario)
    result = run_file(scenario, ["workload.request_rate=4"])["run"]
    assert [life.request.arrival for life in result.record.requests.values()][-1] == 0.5
    at_once = run_file(scenario, ["workload.request_rate=.inf"])["run"]
    assert {life.request.arrival for life in at_once.record.requests.values()} == {0.0}


def test_max_tokens_applies_to_a_trace(scenario: Path) -> None:
    result = run_file(scenario, ["workload.max_tokens=3", "workload.ignore_eos=true"])["run"]
    lives = [life.request for life in result.record.requests.values()]
    assert {r.max_tokens for r in lives} == {3}
    assert max(r.output_tokens for r in lives) == 3
    assert all(r.ignore_eos for r in lives)


def test_schema_includes_every_workload_form(scenario: Path) -> None:
    forms: list[dict[str, Any]] = [
        {"trace": "t.csv", "sample": 0.5, "format": "azure", "start": 1},
        {"arrivals": {"num_prompts": 1, "request_rate": 1, "prompt_tokens": 1, "output_tokens": 1}},
        {
            "sessions": {
                "num_sessions": 2,
                "request_rate": 1,
                "turns": 2,
                "prompt_tokens": {"distribution": "zipf", "high": 5},
                "output_tokens": 1,
                "think_time": {"distribution": "exponential", "mean": 1},
            },
            "max_concurrency": 2,
        },
    ]
    tree = YAML(typ="safe").load(SCENARIO)
    for form in forms:
        jsonschema.validate({**tree, "workload": form}, json_schema())
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**tree, "workload": {"trase": "t.csv"}}, json_schema())


def test_inspect_prints_a_table_or_json(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, picture = scenario.parent / "t.csv", scenario.parent / "p.png"
    arguments = ("trace", "inspect", trace, "--plot", picture, "--kv-bytes-per-token", "1024")
    assert simkv(monkeypatch, *arguments) == 0
    told = capsys.readouterr()
    assert "Requests" in told.out
    assert "no waiting" in told.out
    assert told.err == ""
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert simkv(monkeypatch, *arguments) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert simkv(monkeypatch, "trace", "inspect", trace, "--json", "--limit", "7") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["requests"], found["format"]) == (7, "simkv")


def test_convert_reports_the_written_requests(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, out = scenario.parent / "t.csv", scenario.parent / "out.csv.gz"
    assert simkv(monkeypatch, "trace", "convert", trace, out, "--sample", "0.5") == 0
    count = int(capsys.readouterr().out.split()[0])
    assert 10 < count < 30
    first = out.read_bytes()
    assert simkv(monkeypatch, "trace", "convert", trace, out, "--sample", "0.5") == 2
    capsys.readouterr()
    again = ("trace", "convert", trace, out, "--sample", "0.5", "--overwrite")
    assert simkv(monkeypatch, *again) == 0
    assert out.read_bytes() == first
    for name, message in (("x.txt", "must end in"), ("t.csv", "is the input file")):
        assert simkv(monkeypatch, "trace", "convert", trace, scenario.parent / name) == 2
        assert message in capsys.readouterr().err
    assert simkv(monkeypatch, "trace", "convert", trace, scenario.parent / "no" / "x.csv") == 2


def test_failed_conversion_leaves_no_files(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = scenario.parent / "bad.csv"
    bad.write_text(TRACE + "x,1,1\n")
    before = sorted(scenario.parent.iterdir())
    assert simkv(monkeypatch, "trace", "convert", bad, scenario.parent / "out.csv") == 2
    assert "bad.csv:42: arrival" in capsys.readouterr().err
    assert sorted(scenario.parent.iterdir()) == before


def test_sample_prints_requests(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = scenario.parent / "t.csv"
    assert simkv(monkeypatch, "trace", "sample", trace, "--sample", "5") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "arrival,prompt_tokens,output_tokens"
    assert len(lines) == 6
    assert set(lines[1:]) <= {f"{i / 2},{10 + i},{2 + i % 3}" for i in range(40)}
    assert simkv(monkeypatch, "trace", "sample", trace, "--sample", "many") == 2
    assert "expected a fraction such as 0.1" in capsys.readouterr().err


def test_bad_rows_are_reported_on_standard_error(
    scenario: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = scenario.parent / "bad.csv"
    bad.write_text(TRACE + "x,1,1\n")
    assert simkv(monkeypatch, "trace", "inspect", bad) == 2
    assert "simkv: " in (message := capsys.readouterr().err)
    assert "--skip-bad" in message
    assert simkv(monkeypatch, "trace", "inspect", bad, "--skip-bad") == 0
    assert "1 of 41 bad rows excluded" in capsys.readouterr().err
