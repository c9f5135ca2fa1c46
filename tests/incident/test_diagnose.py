"""Tests of diagnoses: from a server's files to the answer, for a planted incident with hidden
costs.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import pytest

from simkv.cli.diagnose import _simulated
from simkv.core.errors import InputError
from simkv.costs.cost_profile import StepCost, load_profile
from simkv.costs.step_load import StepLoad
from simkv.incident import diagnose_stages
from simkv.incident.diagnosis_document import render_diagnosis
from simkv.incident.emit.emitted_files import emit
from simkv.incident.incident_answer import IncidentAnswer, explain_incident
from simkv.incident.incident_folder import write_scenario
from simkv.incident.observed_comparison import ObservedComparison
from simkv.incident.remedies import _to_defaults
from simkv.incident.server_setup import UserSettings, infer_setup
from simkv.incident.source_reader import read_source
from simkv.incident.wait_summary import is_healthy
from simkv.metrics.run_metrics import compute_slowdown
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument
from tests.cli.test_cli import Simkv

HERE = Path(__file__).parents[2] / "scenarios"
#: Two caches: the first is too small for its load, the second has room for the whole load.
ENGINE = {"name": "vllm", "variant": "0.19.0", "max_num_seqs": 32, "max_model_len": 2048}
LOAD = {
    "num_prompts": 60,
    "request_rate": 8.0,
    "prompt_tokens": {"distribution": "lognormal", "mean": 400, "sigma": 0.8, "max": 1500},
    "output_tokens": {"distribution": "lognormal", "mean": 80, "sigma": 0.5, "max": 300},
    "seed": 3,
}


def planted(blocks: int, rate: float) -> RunResult:
    """Return the run whose log and spans are read."""
    document = {
        "name": "planted",
        "workload": {"arrivals": LOAD | {"request_rate": rate}},
        "engine": ENGINE | {"num_gpu_blocks": blocks},
        "profile": "assumed-costs.json",
    }
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "planted.yaml", document)).values()))
    return run_scenario(scenario, HERE, intervals=False)


def diagnosed(result: RunResult, folder: Path, *, flags: bool = False) -> IncidentAnswer:
    """Return the answer to the files that a server writes for this run."""
    files = emit(folder / "server", {"run": result}, ("vllm-log", "otel"))
    diagnose_stages.read_stage(files, folder / "out")
    return diagnose_stages.explain_stage(folder / "out", UserSettings(), try_flags=flags)


@pytest.fixture(scope="module")
def incident(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, IncidentAnswer, Path]:
    folder = tmp_path_factory.mktemp("incident")
    result = planted(180, 8.0)
    return result, diagnosed(result, folder), folder / "out"


def test_the_incident_is_reproduced(incident: tuple[RunResult, IncidentAnswer, Path]) -> None:
    result, found, folder = incident
    assert found.explained
    assert not found.healthy
    rows = pd.DataFrame(result.request_rows("run"))
    text = (folder / "diagnosis.md").read_text()
    row = next(line for line in text.splitlines() if line.startswith("| E2E mean"))
    observed, simulated = (float(cell) for cell in row.split("|")[2:4])
    assert observed == pytest.approx(rows["e2e_s"].mean(), rel=1e-3)
    assert simulated == pytest.approx(observed, rel=0.05)


def test_every_stage_writes_files(incident: tuple[RunResult, IncidentAnswer, Path]) -> None:
    _, _, folder = incident
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "evidence.json",
        "requests.csv",
        "observed.csv",
        "workload.csv",
        "scenario.yaml",
        "profile.json",
        "diagnosis.md",
        "compared.csv",
        "observed.png",
        "report.html",
    }


def test_report_shows_observed_values(
    incident: tuple[RunResult, IncidentAnswer, Path],
) -> None:
    _, found, folder = incident
    page = (folder / "report.html").read_text()
    picture = base64.b64encode((folder / "observed.png").read_bytes()).decode()
    assert f'<img src="data:image/png;base64,{picture}"' in page
    assert "Observed beside simulated" in page
    assert page.count(" / ") > 12 * 3
    assert "## Over time, observed / simulated" in found.text
    rows = found.text.partition("## Over time")[2].partition("## ")[0].splitlines()
    cells = [row.split("|")[1:-1] for row in rows if row.startswith("| ")][2:]
    assert len(cells) == 12
    for column in (1, 2, 5):  # running and waiting requests by line of the log, E2E by arrival
        told = [cell[column].split(" / ") for cell in cells if " - " not in cell[column]]
        assert told
        assert all(float(a) == pytest.approx(float(b), rel=0.3, abs=1) for a, b in told)


def test_victims_waited_longest(
    incident: tuple[RunResult, IncidentAnswer, Path],
) -> None:
    result, found, _ = incident
    rows = pd.DataFrame(result.request_rows("run"))
    worst = rows["queue_s"].nlargest(6).index.tolist() if "queue_s" in rows else []
    assert found.summary_lines[1].startswith("Affected: request ")
    for number in worst[:3]:
        assert f"request {number} " in found.summary_lines[1]


def test_time_of_all_requests_is_listed(
    incident: tuple[RunResult, IncidentAnswer, Path],
) -> None:
    part = incident[1].text.partition("## Where the time went")[2].partition("## ")[0]
    shares = [float(share) for share in re.findall(r"\(([\d.]+) %\)$", part, re.MULTILINE)]
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert re.search(r"^- decode: .* s \([\d.]+ %\)$", part, re.MULTILINE)


def test_server_lists_model_and_tensor_parallel_size(tmp_path: Path) -> None:
    log = HERE.parent / "tests/incident/logs/vllm-seat-limit.log"
    evidence = read_source(log)
    setup = infer_setup(evidence, UserSettings(tp=2))
    text = render_diagnosis([], ObservedComparison((), pd.DataFrame()), setup, evidence, [], [])
    assert "- model org/chat-8b (vllm-seat-limit.log:2)\n" in text
    assert "- tensor_parallel_size 2 (as given)\n" in text
    write_scenario(tmp_path, setup, "unit-step", ())
    assert "tensor_parallel_size" not in (tmp_path / "scenario.yaml").read_text()


def test_sampled_requests_are_no_victims(
    incident: tuple[RunResult, IncidentAnswer, Path],
) -> None:
    result, found, folder = incident
    assert "## Victims" in found.text
    rebuilt, setup = diagnose_stages.rebuild_stage(folder, UserSettings())
    lines = HERE.parent / "tests/incident/logs/vllm-seat-limit.log"
    likeness = ObservedComparison((), pd.DataFrame())
    beside = pd.DataFrame()
    sampled = explain_incident(
        result, rebuilt.observed, likeness, None, setup, read_source(lines), (), beside
    )
    assert "inputs do not identify requests" in sampled.summary_lines[1]
    assert "## Victims" not in sampled.text


def test_progress_begins_before_the_first_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    @contextmanager
    def progress(what: str) -> Iterator[object]:
        events.append(what)
        yield lambda *_, **__: None
        events.append("end")

    monkeypatch.setattr("simkv.cli.diagnose.progress", progress)
    monkeypatch.setattr(
        diagnose_stages, "rebuild_stage", lambda *_: events.append("rebuild") or (None, None)
    )
    assert _simulated(tmp_path, UserSettings(), 2, 1, False, lambda: None) is None
    assert events == ["rebuilding the workload", "rebuild", "end"]


def test_edited_file_is_used(incident: tuple[RunResult, IncidentAnswer, Path]) -> None:
    _, _, folder = incident
    before = (folder / "profile.json").read_text()
    assert diagnose_stages.calibrate_stage(
        folder, UserSettings()
    ).model_dump_json()  # at once, from the stored file
    assert (folder / "profile.json").read_text() == before
    lines = (folder / "workload.csv").read_text().splitlines()
    (folder / "workload.csv").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(InputError, match=r"workload.csv: has 59 requests, but 60 were observed"):
        diagnose_stages.explain_stage(folder, UserSettings())


def test_healthy_server_has_no_fault(tmp_path: Path) -> None:
    found = diagnosed(planted(2000, 2.0), tmp_path)
    assert found.healthy, found.text
    assert found.summary_lines[0].startswith("Result: healthy")


def test_irreproducible_incident_is_not_explained(tmp_path: Path) -> None:
    files = emit(tmp_path / "server", {"run": planted(180, 8.0)}, ("vllm-log", "otel"))
    diagnose_stages.read_stage(files, tmp_path / "out")
    found = diagnose_stages.explain_stage(
        tmp_path / "out", UserSettings(overrides={"num_gpu_blocks": 4000})
    )
    assert not found.explained
    assert not (tmp_path / "out" / "report.html").exists()
    # The log alone shows the cause.
    result, affected, cause, fix, confidence = found.summary_lines
    assert result.startswith("Result: the simulation does not reproduce ")
    assert affected == "Affected: none waited."  # at the times of the lines
    assert cause.startswith("Cause: preemptions: 13 preemptions")
    assert fix.startswith("Fix: more KV blocks")
    assert "simulated" in confidence
    assert found.cause == "preemptions"


def test_irreproducible_times_of_requests_have_no_known_cause(tmp_path: Path) -> None:
    files = emit(tmp_path / "server", {"run": planted(180, 8.0)}, ("otel",))
    diagnose_stages.read_stage(files, tmp_path / "out")
    asked = UserSettings(engine="vllm", overrides={"num_gpu_blocks": 4000})
    found = diagnose_stages.explain_stage(tmp_path / "out", asked)
    assert not found.explained
    assert found.summary_lines[0].startswith("Result: no explanation")
    assert found.cause == "not reproduced"


def test_slow_requests_without_waiting_are_a_fault(tmp_path: Path) -> None:
    small = planted(2000, 2.0)
    assert compute_slowdown(small.record) < 1.5
    engine = dict(ENGINE) | {"long_prefill_token_threshold": 16, "num_gpu_blocks": 2000}
    document = {
        "name": "chunks",
        "workload": {"requests": [{"prompt_tokens": 1600, "output_tokens": 10}]},
        "engine": engine,
        "profile": "assumed-costs.json",
    }
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "planted.yaml", document)).values()))
    chunks = run_scenario(scenario, HERE, intervals=False)
    assert compute_slowdown(chunks.record) > 3
    assert not is_healthy(chunks)
    assert [c.field for c, _ in _to_defaults(scenario, HERE)] == [
        "max_num_seqs",
        "long_prefill_token_threshold",
    ]


def test_calibrate_fits_a_log_and_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = emit(tmp_path / "server", {"run": planted(600, 4.0)}, ("vllm-log", "otel"))
    log, spans = sorted(files, key=lambda path: path.suffix != ".log")
    simkv = Simkv(tmp_path, monkeypatch, capsys)
    done = simkv("calibrate", "--log", log, "--otel", spans, "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    assert max(error["median"] for error in answer["held_out"].values()) < 0.05
    fitted = load_profile("calibrated.json", tmp_path)
    truth = StepCost(load_profile("assumed-costs.json", HERE))
    load = StepLoad(0, 0, 0, 8, 4000, 0, 8)
    assert StepCost(fitted)(load) == pytest.approx(truth(load), rel=0.05)
    assert "sampled from the log" not in done.err
    assert simkv("calibrate").code == 2
    done = simkv("calibrate", "--log", log)
    assert done.code == 0
    assert "sampled from the log" in done.err
