"""The output of commands fits a terminal of 80 columns; commands to copy are one line each."""

from __future__ import annotations

from pathlib import Path

import pytest

from simkv.cli.command_support import wrap_lines
from tests.cli.test_cli import Simkv
from tests.cli.test_scenario_flags import LINE, LOAD, SERVER

PLAN = ("--smallest", "fleet.replicas=1..2", "--slo", "ttft_ms.p95<=60000", "--repeats", 2)
COMMANDS = {
    "run": ("run", *SERVER, *LOAD, "--no-plots", "--seeds", 2, "--gpu-price", "L4=0.5"),
    "run of variants": ("run", "vllm-37307-partial-admission", "--no-plots", "--exit-zero"),
    "plan": ("plan", *SERVER, *LOAD, *PLAN, "--jobs", 1, "--gpu-price", "L4=0.5"),
    "compare": (
        *("compare", "--from-command", LINE, "--from-command", f"{LINE} --max-num-seqs 1"),
        *("--gpu", "L4", *LOAD, "--seeds", 2, "--jobs", 1),
    ),
}


@pytest.fixture
def simkv(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Simkv:
    monkeypatch.setenv("COLUMNS", "80")
    return Simkv(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize("words", COMMANDS.values(), ids=list(COMMANDS))
def test_output_fits_80_columns(simkv: Simkv, words: tuple[object, ...]) -> None:
    done = simkv(*words)
    assert done.code in (0, 1), done.err
    long = [line for line in done.out.splitlines() if len(line) > 80]
    assert [line for line in long if "vllm serve " not in line] == []


def test_launch_commands_are_not_wrapped(simkv: Simkv) -> None:
    more = "--max-num-seqs 100 --max-num-batched-tokens 4096 --long-prefill-token-threshold 512"
    line = f"{LINE} {more}"
    for words in (("run", "--no-plots"), ("plan", *PLAN, "--no-cliff", "--jobs", 1)):
        done = simkv(*words, "--gpu", "L4", "--from-command", line, *LOAD)
        assert done.code == 0, done.err
        (command,) = [text for text in done.out.splitlines() if "vllm serve " in text]
        assert command.endswith("--long-prefill-token-threshold 512")


def test_further_lines_are_indented_and_words_stay_whole() -> None:
    path = "/" + "x" * 50
    wrapped = wrap_lines(f"  Answer:  a b {path} c --max-num-seqs 8\nshort", 20)
    assert wrapped.split("\n") == [
        *("  Answer:  a b", f"    {path}", "    c --max-num-seqs", "    8", "short")
    ]
    assert wrap_lines("", 10) == ""
