"""Measure the speed of a release: the engine loop alone, and the whole run, each in a new process.

    python benchmarks/release_speed.py [--keep] [--compiled PYTHON] [w1 w2 w3-azure w3-mooncake w4
        fleet startup]

Times are CPU seconds, the minimum of a few rounds; they cannot be compared between machines.
Instead, compare the ratios to the floor (SimPy timeouts) and to the yardstick (a fixed loop of
plain Python), which are measured in the same run. A whole run is ``simkv run --no-plots`` with
ledger, verdicts and files. ``--compiled`` names a Python with the compiled wheel (``make compiled``
creates ``build/compiled/bin/python``); its results are printed below the others. ``--keep`` appends
a line to ``history.jsonl``. For W4, only the loop is run, and only once, unless W4 is named.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import simpy
from speed_workloads import CASES, HERE, Case, make_fleet, poisson

from simkv.core.version import __version__, is_compiled
from simkv.sim.client_loop import run_clients
from simkv.workload.workload_section import Workload, generate_requests

HISTORY = HERE / "history.jsonl"
USUAL = ("w1", "w2", "w3-azure", "w3-mooncake", "w4", "fleet", "startup")
#: Times that are compared between builds: the loop and, if it was run, the whole run.
TIMES = ("loop_s", "whole_s")
TINY = {"requests": [{"prompt_tokens": 100, "output_tokens": 10}]}
#: Each time is measured in a new process, so that nothing is cached and peak memory is separate.
ONE = "import sys; sys.path.insert(0, sys.argv[1]); import release_speed as r; r.one(sys.argv[2])"


def one(name: str) -> None:
    """Print the number of requests, the CPU seconds of the loop, the peak memory (MiB) and the
    build, for one case.
    """
    case = next((case for case in CASES if case.name == name), None)
    if case is None:  # fleet-N
        requests = generate_requests(Workload.model_validate(poisson(10_000, 34)), None)
        server = make_fleet(int(name.partition("-")[2]))
    else:
        requests, server = case.requests(), case.engine()
    before = time.process_time()
    run_clients(server, requests, None)
    cpu = time.process_time() - before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    line = {"requests": len(requests), "loop_s": cpu, "peak_mib": round(peak)}
    print(json.dumps({**line, "compiled": is_compiled()}))


def loop(name: str, rounds: int, python: str = sys.executable) -> dict[str, float]:
    """Return the result of the fastest of ``rounds`` new processes."""
    command = [python, "-P", "-c", ONE, str(HERE), name]
    found = [json.loads(subprocess.check_output(command, text=True)) for _ in range(rounds)]
    return min(found, key=lambda line: float(line["loop_s"]))


def whole(case: Case, folder: Path, rounds: int, python: str = sys.executable) -> float:
    """Return the CPU seconds of ``simkv run`` on the case."""
    engine = {name: value for name, value in vars(case.config).items() if value is not None}
    profile = str(HERE / "llama3-8b-class.json")
    scenario = {"name": "bench", "engine": engine, "profile": profile, "workload": case.workload}
    (folder / "bench.yaml").write_text(json.dumps(scenario))
    words = ["run", "--no-plots", "--exit-zero", "--out", str(folder / "out")]
    words = ["-P", "-m", "simkv", *words, str(folder / "bench.yaml")]
    return cpu_of(*words, rounds=rounds, python=python)


def cpu_of(*words: str, rounds: int, python: str = sys.executable) -> float:
    """Return the minimum CPU seconds, over the rounds, of a Python process with these arguments."""

    def spent() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    # bytecode as after an installation, which the first round may have to write
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    found = []
    for _ in range(rounds):
        before = spent()
        subprocess.run([python, *words], check=True, capture_output=True, env=environment)
        found.append(spent() - before)
    return min(found)


def rate(work: Callable[[int], None], count: int) -> float:
    """Return the number of calls per CPU second, the best of three rounds."""
    found = []
    for _ in range(3):
        before = time.process_time()
        work(count)
        found.append(time.process_time() - before)
    return count / min(found)


def timeouts(count: int) -> None:
    """Process SimPy timeouts, which is the floor for any simulator based on SimPy."""
    env = simpy.Environment()

    def process() -> Iterator[simpy.Event]:
        for _ in range(count):
            yield env.timeout(1)

    env.process(process())
    env.run()


def yardstick(count: int) -> None:
    """Run plain Python code that is typical of simulators: dicts, lists, calls, sums. It must not
    change.
    """
    table: dict[int, list[float]] = {}
    for i in range(count):
        row = table.setdefault(i % 1000, [])
        row.append(i * 0.5)
        if len(row) > 8:
            table[i % 1000] = [sum(row)]


def measured(case: Case, folder: Path, python: str, *, alone: bool) -> dict[str, float]:
    """Return the costs of a case with one Python: the costs of the loop if ``alone``, else of the
    whole run.
    """
    rounds = 1 if case.name == "w4" else 3
    found = loop(case.name, rounds, python)
    speed = found["requests"] / found["loop_s"]
    line = {**found, "per_s": round(speed)}
    said = ""
    if not alone:
        run_s = line["whole_s"] = whole(case, folder, rounds, python)
        said = f"{run_s:>8.2f} s whole run,{run_s / found['loop_s']:>5.1f} times the loop"
    print(
        f"{case.name:<12}{found['requests']:>10,} requests{found['loop_s']:>8.2f} s loop"
        f"{speed:>8,.0f} req/s{found['peak_mib']:>7,} MiB{said}",
        flush=True,
    )
    return line


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--compiled") if "--compiled" in words else len(words)
    other = words[at + 1] if at < len(words) else None
    words[at : at + 2] = []
    names = [word for word in words if not word.startswith("-")] or USUAL
    line: dict[str, object] = {
        "version": __version__,
        "python": platform.python_version(),
        "timeouts_per_s": round(rate(timeouts, 300_000)),
        "yardstick_per_s": round(rate(yardstick, 1_000_000)),
    }
    print(json.dumps(line))
    with tempfile.TemporaryDirectory() as scratch:
        for case in CASES:
            if case.name not in names or case.missing:
                continue
            alone = case.name == "w4" and names is USUAL
            pure = line[case.name] = measured(case, Path(scratch), sys.executable, alone=alone)
            if other is not None:
                quick = measured(case, Path(scratch), other, alone=alone)
                if not quick["compiled"]:
                    sys.exit(f"--compiled {other}: the simkv that it has is not compiled")
                line[f"{case.name}-compiled"] = quick
                faster = [f"{pure[key] / quick[key]:.2f}" for key in TIMES if key in quick]
                print(f"{'':<12}compiled: {' and '.join(faster)} times as fast")
        if "fleet" in names:
            single, many = loop("fleet-1", 3)["loop_s"], loop("fleet-100", 1)["loop_s"]
            line["fleet_of_100"] = {"loop_s": many, "of_one": many / single}
            print(f"fleet of 100{many:>8.2f} s, {many / single:.1f} times one replica")
        if "startup" in names:
            line["startup_s"] = startup(Path(scratch))
            print("startup", line["startup_s"])
    if "--keep" in sys.argv:
        with HISTORY.open("a") as file:
            file.write(json.dumps(line) + "\n")


def startup(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of Python itself, of the help and of the smallest run."""
    tiny = {"name": "tiny", "engine": {"name": "vllm", "num_gpu_blocks": 1000}, "workload": TINY}
    tiny["engine"] |= {"max_model_len": 8192}  # type: ignore[operator]
    (folder / "tiny.yaml").write_text(json.dumps({**tiny, "profile": "unit-step"}))
    run = ("run", "--no-plots", "--out", str(folder / "tiny"), str(folder / "tiny.yaml"))
    return {
        "python": cpu_of("-c", "pass", rounds=5),
        "help": cpu_of("-m", "simkv", "--help", rounds=5),
        "tiny_run": cpu_of("-m", "simkv", *run, rounds=5),
    }


if __name__ == "__main__":
    main()
