from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from simkv.cli import app
from simkv.core.errors import InputError
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import load

LOOP = "mistralrs-2043-queue-loop"


def simkv(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments, "--jobs", "1"])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_shrink_prints_scenario(tmp_path: Path) -> None:
    text = simkv("shrink", LOOP, "--keep", "engine died")
    (tmp_path / "small.yaml").write_text(text)
    small = load(tmp_path / "small.yaml")["run"]
    assert small.expect["run"].verdict == "engine died"
    assert "# Created by: simkv shrink mistralrs-2043-queue-loop --keep 'engine died'" in text
    assert "--variant before (simkv" in text  # the first variant in the file with this verdict


def test_shrink_writes_file_and_summary(tmp_path: Path) -> None:
    out = tmp_path / "small.yaml"
    said = simkv("shrink", LOOP, "--keep", "stalled", "--variant", "merged2250", "-o", str(out))
    assert said.splitlines()[-1] == f"Written to {out}"
    assert "Requests: 2 before, 2 now (originally numbers 0 to 1)." in said
    former = out.read_text()
    with pytest.raises(InputError, match="already exists; use --overwrite"):
        simkv("shrink", LOOP, "--keep", "stalled", "-o", str(out))
    assert out.read_text() == former
    simkv("shrink", LOOP, "--keep", "livelock", "-o", str(out), "--overwrite")
    assert load(out)["run"].expect["run"].verdict == "livelock"


def test_shrink_rejects_invalid_input(tmp_path: Path, root: Path) -> None:
    with pytest.raises(InputError, match="no variant meets 'lost': before-seed is livelock"):
        simkv("shrink", LOOP, "--keep", "lost")
    with pytest.raises(InputError, match=r"--variant bfore: .*did you mean 'before'"):
        simkv("shrink", LOOP, "--keep", "stalled", "--variant", "bfore")
    with pytest.raises(InputError, match="its folder does not exist"):
        simkv("shrink", LOOP, "--keep", "stalled", "-o", str(tmp_path / "no" / "x.yaml"))
    source = tmp_path / "x.yaml"
    source.write_bytes((root / "scenarios" / f"{LOOP}.yaml").read_bytes())
    with pytest.raises(InputError, match="is the input file"):
        simkv("shrink", str(source), "--keep", "stalled", "-o", str(source), "--overwrite")


def test_bisect_over_knob(root: Path) -> None:
    over = ("bisect", LOOP, "--variant", "before", "--over", "engine.waiting_timeout=0..1000")
    told = json.loads(simkv(*over, "--json"))
    (flip,) = told["flips"]
    for end in flip.values():
        override = [f"engine.waiting_timeout={end['value']}"]
        chosen = load(root / "scenarios" / f"{LOOP}.yaml", override)["before"]
        assert run_scenario(chosen, root).summary["verdict"] == end["state"]
    below, above = flip["below"]["value"], flip["above"]["value"]
    assert above == below + 1
    assert f"engine.waiting_timeout: engine died at {below}, served at {above}" in simkv(*over)
    assert told["values"] == 1001
    assert told["samples"][0]["figures"]["stalled"] == 2


def test_bisect_defaults_to_variants() -> None:
    said = simkv("bisect", LOOP, "--variant", "patient")
    assert said == simkv("bisect", LOOP, "--variant", "patient", "--variants")
    assert "no change found; served for all values" in said
    assert "All 7 values were tried." in said
    with pytest.raises(InputError, match="expected exactly one of --over, --variants"):
        simkv("bisect", LOOP, "--variants", "--over", "timeout=1..2")


def test_bisect_by_figure() -> None:
    arguments = ("bisect", LOOP, "--variant", "patient", "--over", "engine.num_gpu_blocks=25..60")
    said = simkv(*arguments, "--when", "e2e_ms.p99<=101000")
    assert "Shown" in said
    assert "e2e_ms.p99" in said
    with pytest.raises(InputError, match=r"--when e2e_ms\.p98"):
        simkv(*arguments, "--when", "e2e_ms.p98<=101000")


def test_whatif_prints_answer() -> None:
    said = simkv("whatif", LOOP, "--variant", "before")
    assert "Unchanged: engine died" in said
    best = "waiting_timeout: 64 -> 128: 2 stalled (engine died) -> 0"
    assert f"Best single change: {best}" in said
    told = json.loads(simkv("whatif", LOOP, "--variant", "before", "--json"))
    assert told["best"] == best
    assert told["variant"] == "before"
    assert "waiting_timeout: 64 -> 32" in simkv("whatif", LOOP, "--variant", "before", "--all")


def test_whatif_rejects_unknown_figures() -> None:
    with pytest.raises(InputError, match=r"--rank-by preemption: .*did you mean 'preemptions'"):
        simkv("whatif", LOOP, "--rank-by", "preemption")
    with pytest.raises(InputError, match="neither a file nor a packaged scenario"):
        simkv("whatif", "nonesuch.yaml")
