"""Tests of the old names of commands and options: each works and prints one notice on standard
error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from simkv.cli import app, main, plan
from simkv.cli.renamed_options import (
    COMMANDS,
    OPTIONS,
    REMOVED_IN,
    use_new_names,
)
from tests.scenario.test_scenario import PLAIN


class Ran:
    """Exit code, output and errors of a command."""

    def __init__(
        self,
        arguments: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(sys, "argv", ["simkv", *arguments])
        capsys.readouterr()
        self.code: Any = 0
        try:
            main()
        except SystemExit as stop:
            self.code = stop.code or 0
        self.out, self.err = capsys.readouterr()


def find_command(words: str) -> Any:
    """Return the click command with this name, or None."""
    plan.select_options(all_of_them=True)
    found = typer.main.get_command(app)
    for word in words.split():
        found = getattr(found, "commands", {}).get(word)
    return found


def flags_of(command: Any) -> set[str]:
    """Return the options of a command and of all commands below it."""
    own = {flag for one in command.params for flag in (*one.opts, *one.secondary_opts)}
    return own.union(*map(flags_of, getattr(command, "commands", {}).values()))


@pytest.mark.parametrize(("old", "new"), COMMANDS.items())
def test_an_old_command_is_replaced_by_one_that_exists(old: str, new: str) -> None:
    assert find_command(old) is None
    assert find_command(new) is not None
    assert use_new_names([*old.split(), "OUT", "--x"])[0] == [*new.split(), "OUT", "--x"]


@pytest.mark.parametrize(
    ("command", "old", "new"),
    [(command, *names) for command, table in OPTIONS.items() for names in table.items()],
)
def test_an_old_option_is_replaced_by_one_that_exists(command: str, old: str, new: str) -> None:
    flags = flags_of(find_command(command))
    assert new in flags
    assert old not in flags
    words = [*command.split(), "FILE", old, "x", f"{old}=y", "--", old]
    found, notice = use_new_names(words)
    assert found == [*command.split(), "FILE", new, "x", f"{new}=y", "--", old]
    assert notice == f"{old} is now {new}; version {REMOVED_IN} removes the old name"


def test_new_names_give_no_notice() -> None:
    for command in ("run", "gpu calibrate", "profile list", "explain"):
        assert use_new_names([*command.split(), "--layout-x", "--model-name"])[1] == ""


#: Calls with old names, and the equivalent calls with new names. They need no GPU.
CALLS = {
    "whatif s.yaml --workers 1 --by e2e_ms.mean --json": (
        "whatif s.yaml --jobs 1 --rank-by e2e_ms.mean --json"
    ),
    "bisect s.yaml --over engine.num_gpu_blocks=20..22 --workers=1 --json": (
        "bisect s.yaml --over engine.num_gpu_blocks=20..22 --jobs=1 --json"
    ),
    "sweep s.yaml --over timeout=50 --address x": "sweep s.yaml --over timeout=50 --ray-address x",
    "profiles mistralrs": "profile list mistralrs",
    "profile build sync": "profile build single-request",
    "validate gpu out --profile p.json --only-plan": (
        "gpu validate out --profile p.json --plan-only"
    ),
    "validate none --steps --calibration k": "validate none --host-times --kernel-tables k",
    "trace inspect none.csv --picture p.png": "trace inspect none.csv --plot p.png",
    "diagnose none.log --no-flags": "diagnose none.log --no-try-flags",
    "serve mistralrs-six --ports --model-name=": (
        "serve mistralrs-six --port-per-replica --served-model-name="
    ),
}


@pytest.mark.parametrize(("old", "new"), CALLS.items())
def test_an_old_call_gives_the_same_result_and_one_notice(
    old: str,
    new: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "s.yaml").write_text(PLAIN.replace("bucketed", "bucketed\n  num_gpu_blocks: 22"))
    monkeypatch.chdir(tmp_path)
    wanted = Ran(new.split(), monkeypatch, capsys)
    found = Ran(old.split(), monkeypatch, capsys)
    assert "note:" not in wanted.err
    assert (found.code, found.out) == (wanted.code, wanted.out)
    notice, *rest = found.err.splitlines()
    assert notice.startswith("simkv: note: ")
    assert notice.endswith("removes the old name")
    assert rest == wanted.err.splitlines()


# Help


def test_help_lists_each_command_once_under_a_heading(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from simkv.cli import COMMANDS as ALL
    from simkv.cli import HEADINGS

    monkeypatch.setenv("COLUMNS", "80")
    lines = Ran(["--help"], monkeypatch, capsys).out.splitlines()
    listed: dict[str, list[str]] = {}
    heading = ""
    for line in lines:
        if line.endswith(":") and not line.startswith(" "):
            heading = line[:-1]
        elif line.startswith("  ") and heading in HEADINGS:
            listed.setdefault(heading, []).append(line.split()[0])
            assert not line.endswith("..."), line
    assert {name: sorted(group) for name, group in HEADINGS.items()} == {
        name: sorted(group) for name, group in listed.items()
    }
    assert len(ALL) == sum(map(len, HEADINGS.values()))


def walk(command: Any, name: str = "simkv") -> list[tuple[str, Any]]:
    """Return all commands with their full names."""
    below = getattr(command, "commands", {})
    return [(name, command), *(two for k, v in below.items() for two in walk(v, f"{name} {k}"))]


def test_every_line_of_help_is_complete() -> None:
    plan.select_options(all_of_them=True)
    for name, command in walk(typer.main.get_command(app))[1:]:
        line = command.get_short_help_str(62)
        assert line.endswith("."), (name, line)
        assert not line.endswith("..."), (name, line)
        for param in command.params:
            if "--help" not in param.opts:
                assert (param.help or "").endswith((".", "\n")), (name, param.opts)


def test_gpu_validate_makes_the_plan_of_validate_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from simkv.validation.gpu_runs import validation_suite
    from simkv.validation.gpu_runs.load_sizing import Trial, with_prediction
    from tests.laws.pressure_scenarios import plain_scenario
    from tests.validation.gpu_runs.test_comparison_levels import PROFILE

    def plan_one_trial(*_: object, **__: object) -> list[Trial]:
        trial = Trial("one", "a short run", plain_scenario("vllm", "0.33.0"), {})
        return [with_prediction(trial, PROFILE)]

    monkeypatch.setattr(validation_suite, "plan_trials", plan_one_trial)  # a real plan takes 8 s
    features = ("decode_seqs", "decode_context", "decode_tail", "prefill_tokens")
    known = {"model": "tiny", "gpu": "H100-SXM", "range": dict.fromkeys(features, (1, 256))}
    tiny = PROFILE.model_copy(update=known)
    (tmp_path / "p.json").write_text(tiny.model_dump_json(exclude_none=True))
    monkeypatch.chdir(tmp_path)
    options = ["--profile", "p.json", "--budget", "110s"]
    old = Ran(["validate", "gpu", "old", *options, "--only-plan"], monkeypatch, capsys)
    new = Ran(["gpu", "validate", "new", *options, "--plan-only"], monkeypatch, capsys)
    assert (old.code, new.code) == (0, 0), new.err
    assert new.err == ""
    assert len(old.err.splitlines()) == 1
    assert old.out.replace("old/plan", "new/plan") == new.out
    assert json.loads(Path("old/plan/plan.json").read_text()) == json.loads(
        Path("new/plan/plan.json").read_text()
    )


@pytest.mark.parametrize(
    ("folder", "option", "complaint"),
    [
        ("run", ["--budget", "5s"], "--budget: cannot be used with a recorded run (run)"),
        ("new", ["--repeat-run", "run"], "--repeat-run: requires a recorded run; new is not"),
        ("run", [], "run: not a directory written by `simkv gpu run`"),
    ],
)
def test_gpu_validate_rejects_options_without_effect(
    folder: str,
    option: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from tests.validation.gpu_runs.test_comparison_levels import PROFILE

    (tmp_path / "p.json").write_text(PROFILE.model_dump_json(exclude_none=True))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "passes.csv").write_text("variant\n")
    monkeypatch.chdir(tmp_path)
    ran = Ran(["gpu", "validate", folder, "--profile", "p.json", *option], monkeypatch, capsys)
    assert ran.code == 2
    assert ran.err.startswith(f"simkv: {complaint}")
    assert not Path("new").exists()
