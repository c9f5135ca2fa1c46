"""Tests that program behavior never depends on the wording of a docstring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: Code that prints the output of a run, a diagnosis, its fixes and a help page, for comparison.
SAID = """
import contextlib, io, json, re, sys
from pathlib import Path

from simkv.core import field_docs

if sys.argv[2] == "bare":
    assert sys.flags.optimize == 2 and field_docs.__doc__ is None
    field_docs._classes = lambda module: {}

from simkv.cli import main
from simkv.incident.trial_bounds import bounds
from simkv.incident.emit.emitted_files import emit
from simkv.incident.server_setup import UserSettings, infer_setup
from simkv.scenario.launch_line import option_fields
from simkv.incident.remedies import _as_typed, find_remedies
from simkv.incident.source_reader import read_source
from simkv.incident.wait_summary import summarize_waits
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.yaml_document import YamlDocument
from simkv.scenario.scenario_loader import resolve_variants
from simkv.schedulers.engine_registry import ENGINES
from simkv.study.whatif.candidate_changes import Change
from simkv.study.whatif.trial_evaluation import Evaluator

folder = Path(sys.argv[1])


said = {"flags": {name: option_fields(spec) for name, spec in ENGINES.items()}}
load = {"burst": {"num_prompts": 10, "prompt_tokens": 100, "output_tokens": 30}}
for name, spec in ENGINES.items():
    document = {"name": name, "workload": load, "engine": {"name": name}, "profile": "unit-step"}
    scenario = next(iter(resolve_variants(YamlDocument(folder / "none.yaml", document)).values()))
    said[name] = {
        field: [_as_typed(scenario, Change("knob", field, 1, new)) for new in (8, True, False)]
        for field in spec.config.__dataclass_fields__
        if field != "variant"
    }
few = {"name": "vllm", "variant": "0.11.0", "max_num_seqs": 2}
document = {"name": "few", "workload": load, "engine": few, "profile": "unit-step"}
scenario = next(iter(resolve_variants(YamlDocument(folder / "few.yaml", document)).values()))
result = run_scenario(scenario, folder, intervals=False)
said["run"] = result.summary
(log,) = emit(folder, {"run": result}, ("vllm-log",))
said["log"] = (folder / log).read_text()
settings = UserSettings(gpu="H100", model="llama-3.1-8b")
said["read"] = str(infer_setup(read_source(folder / log), settings))
with Evaluator(folder) as evaluator:
    found = find_remedies(scenario, evaluator, bounds(result, summarize_waits(result).lost))
said["fixes"] = [remedy.typed for remedy in found.remedies]
sys.argv, shown = ["simkv", "plan", "--help"], io.StringIO()
with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
    main()
said["help"] = sorted(set(re.findall(r"--[a-z][a-z-]+", shown.getvalue())))
print(json.dumps(said, default=str))
"""


def said(folder: Path, *options: str, texts: str) -> dict[str, object]:
    command = [sys.executable, *options, "-c", SAID, str(folder), texts]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def with_texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return said(tmp_path_factory.mktemp("with"), texts="texts")


def test_behavior_is_independent_of_docstrings(
    with_texts: dict[str, object], tmp_path: Path
) -> None:
    bare = said(tmp_path, "-OO", texts="bare")
    for part, text in with_texts.items():
        assert bare[part] == text, part


def test_compared_output_is_not_empty(with_texts: dict[str, object]) -> None:
    assert with_texts["vllm"]["max_num_seqs"] == [  # type: ignore[index]
        "--max-num-seqs 8",
        "--max-num-seqs",
        "--no-max-num-seqs",
    ]
    assert "--max-num-seqs 256" in with_texts["fixes"]  # type: ignore[operator]
    assert "'variant': '0.11.0'" in str(with_texts["read"])
    assert "--slo" in str(with_texts["help"])
    for part in ("log", "run"):
        assert with_texts[part], part
