"""Tests that every packaged incident has a description and agrees with the schema.

``tests/digests`` checks that each incident has the expected result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.scenario import packaged_scenarios as packaged_scenarios
from simkv.scenario.packaged_scenarios import (
    PackagedIncident,
    find_incidents,
    find_scenario,
    list_packaged_scenarios,
)
from simkv.scenario.scenario_schema import json_schema

INCIDENTS = find_incidents()


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("incident", INCIDENTS, ids=lambda incident: incident.name)
def test_incident_describes_itself(incident: PackagedIncident) -> None:
    assert incident.path.stem == incident.name
    assert incident.report.startswith("https://github.com/")
    assert 20 < len(incident.what) < 150
    for name, scenario in incident.variants.items():
        assert name in scenario.expect, f"nothing is expected of {name}"
        assert scenario.provenance.given
        assert scenario.provenance.assumed


def test_zoo_contains_the_required_incidents() -> None:
    reports = " ".join(incident.report for incident in INCIDENTS)
    for number in (2031, 2033, 2034, 2043, 31731, 39734, 31954, 5696, 7038, 5796):
        assert f"/{number}" in reports


@pytest.mark.parametrize("path", list_packaged_scenarios().values(), ids=lambda path: path.stem)
def test_incident_agrees_with_the_json_schema(path: Path) -> None:
    data = json.loads(json.dumps(YAML(typ="safe").load(path)))
    Draft202012Validator(json_schema()).validate(data)


@pytest.mark.parametrize(
    ("variant", "valid"),
    [
        ({"engine": {"variant": "bucketed"}}, True),
        ({"engine": {"name": "vllm", "watermark": 0.5}}, True),
        ({"workload": {"burst": {"interval": 2}}}, True),
        ({"timeout": None, "expect": {"x": {"preemptions": 3}}}, True),
        ({"engine": {"varian": "bucketed"}}, False),
        ({"engine": {"variant": "bucket"}}, False),
        # a list is replaced as a whole
        ({"workload": {"requests": [{"prompt_tokens": 1}]}}, False),
        ({"timeouts": 3}, False),
    ],
)
def test_schema_has_the_fields_that_a_variant_may_change(
    variant: dict[str, Any], valid: bool
) -> None:
    scenario = {
        "name": "x",
        "workload": {"burst": {"num_prompts": 1, "prompt_tokens": 1, "output_tokens": 1}},
        "engine": {"name": "mistralrs"},
        "profile": "unit-step",
        "variants": {"one": variant},
    }
    assert Draft202012Validator(json_schema()).is_valid(scenario) == valid


def test_changed_engine_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = list_packaged_scenarios()["mistralrs-2033-newest-first"].read_text()
    (tmp_path / "x.yaml").write_text(source.replace("variant: merged2250", "variant: bucketed"))
    monkeypatch.setattr(packaged_scenarios, "find_scenarios_directory", lambda: tmp_path)
    result = invoke("zoo", "--junit", str(tmp_path / "zoo.xml"))
    assert result.exit_code == 1
    assert "after: request 0 preemptions = 0: found 1, missed by +1" in result.stdout
    assert "20 of 24 expectations of 1 incidents hold" in result.stdout
    suite = ElementTree.parse(tmp_path / "zoo.xml").getroot()[0]
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == (
        "mistralrs-2033-newest-first",
        "24",
        "4",
    )


def test_zoo_lists_one_line_per_incident() -> None:
    result = invoke("zoo", "--list")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [incident.name for incident in INCIDENTS]
    assert all(
        incident.report in line and incident.what in line
        for incident, line in zip(INCIDENTS, lines, strict=True)
    )


def test_zoo_runs_the_named_incidents() -> None:
    result = invoke("zoo", "mistralrs-six")
    assert result.exit_code == 0
    assert result.stdout.startswith("ok")
    assert "of 1 incidents hold" in result.stdout


def test_unknown_name_is_rejected() -> None:
    with pytest.raises(InputError, match="did you mean 'mistralrs-six'"):
        find_incidents(["mistralrs-sx"])
    with pytest.raises(InputError, match="did you mean 'mistralrs-six'"):
        find_scenario(Path("mistralrs-sx"))


def test_file_takes_precedence_over_packaged_scenario(tmp_path: Path) -> None:
    assert find_scenario(Path("mistralrs-six")) == list_packaged_scenarios()["mistralrs-six"]
    file = tmp_path / "mistralrs-six"
    file.write_text("")
    assert find_scenario(file) == file


def test_run_accepts_a_name_and_prints_the_expectation(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simkv.cli", "run", "mistralrs-2321-mixed-modality"]
    out = ["--no-plots", "--out", str(tmp_path / "out"), "--junit", str(tmp_path / "six.xml")]
    done = subprocess.run([*command, *out], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Expectations: 28 of 28 hold." in done.stdout
    missed = subprocess.run(
        [*command, *out, "--set", "variants.after-together.engine.variant=bucketed"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert missed.returncode == 1
    assert "missed" in missed.stdout
    failures = ElementTree.parse(tmp_path / "six.xml").getroot().iter("failure")
    assert "verdict = served: found livelock" in [failure.get("message") for failure in failures]
