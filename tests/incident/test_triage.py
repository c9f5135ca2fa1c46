"""Tests of the triage of logs: ten logs in the formats of the engines, with invented values."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from simkv.incident.evidence import UndeterminedError
from simkv.incident.log_summary import summarize_log
from simkv.incident.measured_answer import check_age, read_inputs, triage_lines, with_inferred
from tests.cli.test_imports import CODE

LOGS = Path(__file__).parent / "logs"
#: The expected first finding of each log, and a part of its line.
EXPECTED = {
    "sglang-cache-full": ("KV cache full", "up to 99 % full"),
    "sglang-seat-limit": ("admission limit", "all 48 slots were busy (max_running_requests=48)"),
    "vllm-0.4-too-old": (
        "admission limit",
        "vLLM 0.4.2 (vllm-0.4-too-old.log:1), which is too old",
    ),
    "vllm-arrivals-exceed": ("queue grows", "30 requests per minute arrived beyond"),
    "vllm-cache-full": ("KV cache full", "preemptions (24.2 per minute)"),
    "vllm-hang": ("hang", "no token was computed for 90 s while 20 requests ran"),
    "vllm-hit-rate-falls": ("hit rate falls", "fell from 82 to 23 %"),
    "vllm-seat-limit": ("admission limit", "all 32 slots were busy (max_num_seqs=32)"),
    "vllm-seat-limit-without-start": ("admission limit", "max_num_seqs=32, inferred"),
    "vllm-v0-cache-full": ("KV cache full", "up to 99 % full"),
}
#: Packages and modules that a triage must not import.
SIMULATOR = {"simpy", "scipy", "matplotlib", "ruamel", "jinja2", "rich"}
SIMULATOR |= {"simkv.sim", "simkv.metrics", "simkv.scenario", "simkv.costs", "simkv.study"}
SIMULATOR |= {"simkv.schedulers.engine_registry"}
#: Maximum ratio of the CPU time of a triage to the CPU time of importing pandas and the
#: command-line library, measured in the same run. Absolute times differ by a factor of four between
#: machines.
MAX_CPU_RATIO = 2.0


def triage(name: str) -> tuple[str, list[str]]:
    evidence = read_inputs([LOGS / f"{name}.log"])
    summary = summarize_log(evidence)
    assert summary is not None
    return summary.problems[0].name, list(triage_lines(evidence, summary))


def test_every_fixture_is_expected() -> None:
    assert {path.stem for path in LOGS.glob("*.log")} == EXPECTED.keys()


@pytest.mark.parametrize("name", EXPECTED)
def test_log_alone_gives_the_expected_triage(name: str) -> None:
    first, lines = triage(name)
    problem, text = EXPECTED[name]
    assert first == problem
    assert text in "\n".join(lines)
    assert (problem == "hang") <= ("admission limit" not in "\n".join(lines))


def test_hang_has_no_second_cause() -> None:
    """In a hang, no request is admitted, whether or not the first one fits."""
    lines = triage("vllm-hang")[1]
    assert any(line.startswith("- hang: ") and "py-spy" in line for line in lines)
    assert not any("blocked queue" in line for line in lines)


def test_log_without_start_lines_gets_the_same_triage() -> None:
    whole = [line.partition(":")[0] for line in triage("vllm-seat-limit")[1][1:]]
    part = [line.partition(":")[0] for line in triage("vllm-seat-limit-without-start")[1][1:]]
    assert whole == part


def test_slot_limit_is_inferred_from_flat_running() -> None:
    evidence = read_inputs([LOGS / "vllm-seat-limit-without-start.log"])
    stated = with_inferred(evidence, summarize_log(evidence)).settings["max_num_seqs"]
    assert (stated.value, stated.where) == (32, "inferred from the statistics lines")


def test_slots_of_all_ranks_count_together(tmp_path: Path) -> None:
    text = (LOGS / "vllm-seat-limit.log").read_text()
    ranks = text.splitlines(keepends=True)
    both = "".join(line + line.replace("Engine 000", "Engine 001") for line in ranks)
    (tmp_path / "two.log").write_text(both)
    summary = summarize_log(read_inputs([tmp_path / "two.log"]))
    assert summary is not None
    assert "all 64 slots were busy" in summary.problems[0].text


def cpu_s(run: Callable[[], object]) -> float:
    """Return the CPU time of the processes that ``run`` starts; the shorter of two runs."""
    spent = []
    for _ in range(2):  # the first run may compile modules
        before = os.times()
        run()
        after = os.times()
        spent.append(after.children_user + after.children_system)
        spent[-1] -= before.children_user + before.children_system
    return min(spent)


@pytest.fixture(scope="module")
def import_s() -> float:
    """Return the CPU time of importing pandas and the command-line library."""
    command = [sys.executable, "-c", "import pandas, typer.main, pydantic.types"]
    return cpu_s(lambda: subprocess.run(command, check=True))


@pytest.mark.parametrize("name", [*EXPECTED][::3])
def test_triage_costs_little_more_than_its_imports(
    name: str, tmp_path: Path, import_s: float
) -> None:
    runs: list[subprocess.CompletedProcess[str]] = []

    def run_triage() -> None:
        command = [sys.executable, "-c", CODE, "diagnose", "-", "--fast", "--out", str(len(runs))]
        with (LOGS / f"{name}.log").open() as log:
            runs.append(
                subprocess.run(
                    command, stdin=log, cwd=tmp_path, capture_output=True, text=True, check=False
                )
            )

    ratio = cpu_s(run_triage) / import_s
    assert ratio < MAX_CPU_RATIO
    assert runs[-1].stdout.startswith("Triage of stdin")
    loaded = set(max(runs[-1].stderr.split("\n"), key=len).split())
    assert {"pandas", "simkv.incident.log_summary"} <= loaded
    assert not {module for module in loaded if module in SIMULATOR}
    assert (tmp_path / "1" / "diagnosis.md").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT")
def test_interrupt_leaves_the_triage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "simkv", "diagnose", str(LOGS / "vllm-cache-full.log")]
    run = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts background jobs, including these tests, with interrupts ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert run.stdout is not None
    assert run.stdout.readline().startswith("Triage of vllm-cache-full.log")
    folder = tmp_path / "diagnosis"
    while not (folder / "diagnosis.md").is_file():
        time.sleep(0.02)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    # Python ends with the signal itself if it is interrupted during ``exec``, for example in the
    # definition of a dataclass during an import. A shell reports 130 in both cases.
    assert run.returncode in (130, -signal.SIGINT)
    assert "the triage above is the result" in errors
    assert "KV cache full" in (folder / "diagnosis.md").read_text()
    assert {path.name for path in folder.iterdir()} <= {
        *("diagnosis.md", "evidence.json", "observed.csv", "workload.csv", "scenario.yaml")
    }


def test_old_release_is_named_and_not_simulated(tmp_path: Path) -> None:
    log = str(LOGS / "vllm-0.4-too-old.log")
    command = [sys.executable, "-m", "simkv", "diagnose", log]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 3
    assert "supported versions: 0.5 and later" in run.stdout.splitlines()[-3]


def test_lines_of_the_oldest_releases_are_too_old_without_start_lines(tmp_path: Path) -> None:
    line = (
        "INFO 03-04 06:36:05 llm_engine.py:921] Avg prompt throughput: 300.5 tokens/s, Avg "
        "generation throughput: 90.5 tokens/s, Running: 3 reqs, Swapped: 0 reqs, Pending: 9 reqs, "
        "GPU KV cache usage: 98.5%, CPU KV cache usage: 0.0%\n"
    )
    (tmp_path / "old.log").write_text(line)
    with pytest.raises(UndeterminedError, match=r"vLLM 0.3 .* too old"):
        check_age(read_inputs([tmp_path / "old.log"]))
