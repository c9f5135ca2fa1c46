"""Nothing that the program does depends on the wording of a docstring."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

#: Reports what a run, a diagnosis, its fixes and a help page say, to compare it.
SAID = """
import contextlib, io, json, re, sys
from pathlib import Path

from simkv.core import told

if sys.argv[2] == "bare":
    assert sys.flags.optimize == 2 and told.__doc__ is None
    told._classes = lambda module: {}

from simkv.cli import main
from simkv.ingest.bounds import bounds
from simkv.ingest.emit.files import emit
from simkv.ingest.engine import Asked, _flags, set_up
from simkv.ingest.mend import _as_typed, mend
from simkv.ingest.read import read
from simkv.ingest.waiting import waiting
from simkv.measure.simulate import run_scenario
from simkv.scenario.document import Document
from simkv.scenario.load import resolve
from simkv.schedulers.registry import ENGINES
from simkv.search.whatif.changes import Change
from simkv.search.whatif.evaluate import Evaluator

folder = Path(sys.argv[1])


said = {"flags": {name: dict(_flags(spec)) for name, spec in ENGINES.items()}}
load = {"burst": {"num_prompts": 10, "prompt_tokens": 100, "output_tokens": 30}}
for name, spec in ENGINES.items():
    document = {"name": name, "workload": load, "engine": {"name": name}, "profile": "unit-step"}
    scenario = next(iter(resolve(Document(folder / "none.yaml", document)).values()))
    said[name] = {
        field: [_as_typed(scenario, Change("knob", field, 1, new)) for new in (8, True, False)]
        for field in spec.config.__dataclass_fields__
        if field != "variant"
    }
few = {"name": "vllm", "variant": "0.11.0", "max_num_seqs": 2}
document = {"name": "few", "workload": load, "engine": few, "profile": "unit-step"}
scenario = next(iter(resolve(Document(folder / "few.yaml", document)).values()))
result = run_scenario(scenario, folder, intervals=False)
said["run"] = result.summary
(log,) = emit(folder, {"run": result}, ("vllm-log",))
said["log"] = (folder / log).read_text()
said["read"] = str(set_up(read(folder / log), Asked(gpu="H100", model="llama-3.1-8b")))
with Evaluator(folder) as evaluator:
    found = mend(scenario, evaluator, bounds(result, waiting(result).lost))
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


def test_without_docstrings_everything_is_the_same(
    with_texts: dict[str, object], tmp_path: Path
) -> None:
    bare = said(tmp_path, "-OO", texts="bare")
    for part, text in with_texts.items():
        assert bare[part] == text, part


def test_what_is_compared_is_there(with_texts: dict[str, object]) -> None:
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
