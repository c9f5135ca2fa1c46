"""Commands import only the modules that they use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from simkv.cli import COMMANDS

CODE = """
import sys
from simkv.__main__ import main
sys.argv[0] = "simkv"
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
finally:
    print(*sorted(sys.modules), file=sys.stderr)
"""
#: Installed packages that are slow to import.
HEAVY = {"junitparser", "matplotlib", "numpy", "pandas", "pyarrow", "pydantic", "rich"}
HEAVY |= {"jinja2", "ruamel", "scipy", "simpy", "torch"}
SIMULATING = {"numpy", "pydantic", "ruamel", "simpy"}
#: Modules that a run of one engine without trace, hardware or fleet threads does not need.
UNUSED = (
    "numpy.ma",
    "rich.progress",
    "simkv.costs.operators",
    "simkv.workload.formats",
    "simkv.sim.actor_pipeline",
    "simkv.schedulers.fastdeploy.scheduler",
    "simkv.schedulers.mistralrs.scheduler",
    "simkv.schedulers.sglang.scheduler",
    "simkv.schedulers.trtllm.scheduler",
    "simkv.schedulers.vllm.transfer_scheduler",
)
SCENARIO = """
name: tiny
engine: {name: vllm, num_gpu_blocks: 1000, max_model_len: 8192}
profile: unit-step
workload: {requests: [{arrival: 0, prompt_tokens: 100, output_tokens: 10}]}
"""


@pytest.mark.parametrize(
    ("words", "allowed"),
    [
        ("run tiny.yaml --no-plots --steps --ledger", SIMULATING | {"rich"}),
        ("explain tiny.yaml", SIMULATING),
        ("report tiny.yaml --out tiny.html --no-whatif", SIMULATING | {"jinja2", "rich"}),
        ("blocks --help", {"pydantic"}),  # typer imports these modules
        ("policies", SIMULATING),
    ],
)
def test_commands_import_only_what_they_use(words: str, allowed: set[str], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(SCENARIO)
    command = [sys.executable, "-c", CODE, *words.split()]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    imported = set(run.stderr.split())
    assert HEAVY & {name.split(".")[0] for name in imported} <= allowed
    assert words == "policies" or not imported.intersection(UNUSED)
    commands = {f"simkv.cli.{module}" for module in COMMANDS.values()}
    if words == "--help":
        assert commands <= imported
    else:
        assert commands & imported == {f"simkv.cli.{COMMANDS[words.split()[0]]}"}
