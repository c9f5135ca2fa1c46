"""Tests of the command ``simkv serve``: missing packages, scenario list, one port per replica."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from simkv.cli import main
from simkv.serve.served_scenario import build_scenario
from simkv.serve.server_assembly import Deployment, ServerOptions
from tests.serve.running_server import COSTS, scenario, serving

FLEET = "fleet: {replicas: 2, router: round_robin}\n"
#: Code that runs simkv while no package of the extra can be imported.
BARE = """\
import importlib.util, sys
find = importlib.util.find_spec
lacking = ("fastapi", "uvicorn", "starlette", "httptools", "prometheus_client", "zmq", "msgspec")
importlib.util.find_spec = lambda name, *a: None if name in lacking else find(name, *a)
sys.modules.update(dict.fromkeys(lacking))
from simkv.cli import main
sys.argv = ["simkv", *sys.argv[1:]]
main()
"""


def test_reports_missing_extra() -> None:
    command = [sys.executable, "-c", BARE, "serve"]
    helped = subprocess.run([*command, "--help"], capture_output=True, text=True)
    assert helped.returncode == 0
    assert "--speed" in helped.stdout
    refused = subprocess.run([*command, "mistralrs-six"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "pip install 'simkv[serve]'" in refused.stderr
    assert refused.stderr.count("\n") == 1


EXTREMES = ("nan", "inf", "-inf", "-1", "1e300", "")
UNUSABLE = {
    "--speed": (*EXTREMES, "0", "-0.0", "1e-300", "1e-7", "2e6"),
    "--grace": (*EXTREMES, "2e6"),
    "--seed": (*EXTREMES, "1e-300"),
    "--port": (*EXTREMES, "1e-300", "65536"),
    "--api-key": ("", " ", "a b", "é", "\udcff"),
    "--host": ("", " ", "no such host", "\udcff"),
    "--served-model-name": ("", " ", "a\nb", "\udcff"),
    "--variant": ("",),
    "--set": ("",),
    "--tokenizer": ("",),
    "--record": ("",),
    "--kv-events": ("", "x", "tcp://*:65536"),
    "--kv-replay": ("", "tcp://*:5558"),
    "--kv-events=tcp://127.0.0.1:* --kv-replay": ("", "x", "tcp://*:65536"),
}


@pytest.mark.parametrize(
    ("option", "value"), [(option, value) for option in UNUSABLE for value in UNUSABLE[option]]
)
def test_rejects_invalid_options(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    option: str,
    value: str,
) -> None:
    path = tmp_path / "served.yaml"
    path.write_text(scenario().replace(COSTS.name, str(COSTS)))
    *before, option = option.split()
    words = [*before, f"{option}={value}"]
    monkeypatch.setattr(sys, "argv", ["simkv", "serve", str(path), *words])
    monkeypatch.setattr(Deployment, "serve", lambda *_: pytest.fail("it serves"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    refused = capsys.readouterr().err
    assert refused.startswith("simkv: ")
    assert option in refused
    assert refused.count("\n") == 1


@pytest.mark.parametrize("option", ["--engine", "--model", "--gpu"])
def test_rejects_empty_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    words = [] if option == "--engine" else ["--engine", "vllm"]
    monkeypatch.setattr(sys, "argv", ["simkv", "serve", *words, f"{option}="])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_rejects_empty_key_in_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SIMKV_API_KEY", "")
    monkeypatch.setattr(sys, "argv", ["simkv", "serve", "mistralrs-six"])
    monkeypatch.setattr(Deployment, "serve", lambda *_: pytest.fail("it serves"))
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "SIMKV_API_KEY" in capsys.readouterr().err


def test_accepts_options_at_bounds() -> None:
    for speed in (1e-6, 1e6):
        assert ServerOptions(speed=speed).speed == speed
    for grace in (0.0, 1e-300, 1e6):
        assert ServerOptions(grace=grace).grace == grace


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["mistralrs-six", "--speed", "0"], "--speed 0: expected"),
        (["mistralrs-six", "--variant", "none"], "the scenario has no such variant"),
        (["mistralrs-six", "--port", "99999"], "--port 99999"),
        (["mistralrs-six", "--port-per-replica"], "requires a fleet"),
        (["mistralrs-six", "--tokenizer", "none.json"], "no such file"),
        (["nowhere.yaml"], "neither a file nor a packaged scenario"),
        ([], "expected a scenario or --engine"),
        (["--engine", "vlm"], "did you mean 'vllm'?"),
    ],
)
def test_rejects_unservable_scenarios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["simkv", "serve", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    refused = capsys.readouterr().err
    assert said in refused
    assert refused.startswith("simkv: ")


def test_lists_scenarios(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["simkv", "serve", "--list"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    listed = capsys.readouterr().out.splitlines()
    assert any(re.match(r"mistralrs-forty +mistralrs", line) for line in listed)


def test_serves_engine_by_name() -> None:
    made = build_scenario("sglang", "llama-3.1-8b", "L40S", ["engine.page_size=16"])
    assert made.engine.name == "sglang"
    assert made.engine.page_size == 16
    assert made.engine.max_total_num_tokens > 100_000


def test_port_per_replica(tmp_path: Path) -> None:
    (tmp_path / COSTS.name).write_text(COSTS.read_text())
    options = ("--port-per-replica", "--record", "came.csv", "--served-model-name", "m")
    with serving(tmp_path, scenario() + FLEET, *options) as served:
        assert served.process.stdout is not None
        lines = [served.process.stdout.readline() for _ in range(2)]
        found = re.search(r"on (http://\S+)", lines[1])
        assert found
        other = httpx.Client(base_url=found[1], trust_env=False)
        assert found[1] != served.url
        for _ in range(2):
            assert served.post("/v1/completions", {"prompt": "a", "max_tokens": 2}).is_success
        assert other.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).is_success
        other.close()
        said = served.end()
    assert "2 requests written to came-0.csv" in said
    assert "1 requests written to came-1.csv" in said
