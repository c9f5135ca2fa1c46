"""Tests that every command that reads a scenario either rejects its code or runs it only with
--trust.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.scenario.custom.code_source import set_trust
from tests.custom.sample_scheduler import DECIDES, GOOD, write

NOT_TRUSTED = "the scenario would run this code; review it, then pass --trust"
LOUD = GOOD + "\nopen(__file__ + '.ran', 'w').close()\n"


def invoke(*words: object) -> Any:
    set_trust(False)
    return CliRunner().invoke(app, list(map(str, words)))


def refused(*words: object) -> str:
    done = invoke(*words)
    assert isinstance(done.exception, InputError), (words, done.output, done.exception)
    assert "\n" not in str(done.exception)
    return str(done.exception)


def recorded(folder: Path) -> Path:
    """Create a folder of `simkv gpu run` with a scenario that names code."""
    (folder / "passes.csv").write_text("variant,kind,seconds\n")
    (folder / "summary.json").write_text("{}")
    write(folder, LOUD).rename(folder / "scenario.yaml")
    return folder


def test_gpu_serve_rejects_custom_schedulers(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    path = write(tmp_path, LOUD)
    options = ["--device", "cpu", "--model", "tiny", "--out", tmp_path / "out"]
    assert NOT_TRUSTED in refused("gpu", "run", path, *options)
    assert not (tmp_path / "mine.py.ran").exists()
    assert "run only in simulations" in refused("gpu", "run", path, *options, "--trust")


@pytest.mark.parametrize("command", ["replay", "validate"])
def test_recorded_runs_reject_code(command: str, tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    profile = ["--profile", Path("simkv/costs/profiles/unit-step.json").resolve()]
    words = ["gpu", command, folder, *(profile if command == "validate" else [])]
    assert NOT_TRUSTED in refused(*words)
    assert not (tmp_path / "mine.py.ran").exists()
    assert "not a directory written by `simkv gpu run`" in refused(*words, "--trust")


def test_validation_plan_rejects_code(tmp_path: Path) -> None:
    from simkv.costs.cost_profile import load_profile
    from simkv.validation.gpu_runs.validation_plan_file import profile_hash

    (tmp_path / "plan").mkdir()
    write(tmp_path / "plan", LOUD).rename(tmp_path / "plan" / "one.yaml")
    profile = load_profile("unit-step")
    one = {"name": "one", "stresses": "", "predicted": {}, "beside": None, "profile": "profile"}
    about = {"profiles": {"profile": profile_hash(profile)}, "trials": [one]}
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(about))
    file = Path("simkv/costs/profiles/unit-step.json").resolve()
    words = ["gpu", "validate", tmp_path, "--profile", file, "--plan-only"]
    assert NOT_TRUSTED in refused(*words)
    assert not (tmp_path / "plan" / "mine.py.ran").exists()


def test_resumed_diagnosis_requires_trust(tmp_path: Path) -> None:
    """The rebuilt scenario was edited and now uses a custom scheduler."""
    incident = tmp_path / "incident"
    seen = write(tmp_path, engine={"name": "vllm", "num_gpu_blocks": 520})
    assert invoke("run", seen, "--emit", "vllm-log,bench", "--out", tmp_path / "out").exit_code == 0
    written = [p for p in (tmp_path / "out").rglob("*") if p.suffix in (".log", ".json")]
    sources = [p for p in written if "emit" in str(p) or p.suffix == ".log" or "bench" in p.name]
    done = invoke("diagnose", *sources, "--until", 3, "--out", incident)
    assert done.exit_code == 0, (done.output, done.exception, sources)
    lines = (incident / "scenario.yaml").read_text()
    (incident / "mine.py").write_text(LOUD)
    start = lines.index("engine:")
    end = next(i for i in range(start + 8, len(lines)) if lines[i - 1] == "\n" and lines[i] != " ")
    (incident / "scenario.yaml").write_text(
        f"{lines[:start]}engine: {{name: mine, file: mine.py, num_blocks: 519}}\n{lines[end:]}"
    )
    assert NOT_TRUSTED in refused("diagnose", incident, "--no-try-flags")
    assert not (incident / "mine.py.ran").exists()
    assert invoke("diagnose", incident, "--no-try-flags", "--trust").exit_code in (0, 1, 3)
    assert (incident / "mine.py.ran").exists()


def test_serve_requires_trust(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    assert NOT_TRUSTED in refused("serve", write(tmp_path, LOUD))
    assert not (tmp_path / "mine.py.ran").exists()


def test_serve_reports_scheduler_failure(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from tests.serve.running_server import serving

    broken = DECIDES + "        if self.waiting:\n            {}[3]\n"
    (tmp_path / "mine.py").write_text(GOOD.replace(DECIDES, broken))
    text = "name: own\nengine: {name: mine, file: mine.py, num_blocks: 20}\nprofile: unit-step\n"
    with serving(tmp_path, text, "--speed", "1000", "--trust") as served:
        body = {"model": "own", "prompt": [1, 2, 3], "max_tokens": 2}
        served.post("/v1/completions", body)
        answer = served.post("/v1/completions", body)
        assert answer.status_code == 503
        assert "raised KeyError: 3; run simkv check-scheduler" in answer.json()["error"]["message"]
        assert "raised KeyError: 3" in served.get("/explain").text
        out = served.end()
    assert "Traceback" not in out
