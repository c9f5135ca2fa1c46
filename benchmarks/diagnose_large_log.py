"""Measure the memory and the time needed to read a log of one gigabyte.

python -m benchmarks.diagnose_large_log [GIGABYTES] [vllm|sglang]

The log is written by a simulated server, with lines for requests and iterations. It is repeated
with later times, and lines of another program are added. One process reads a quarter of the log and
another the whole log, with a progress bar on a terminal. Prints the lines per CPU second, compared
with an empty loop over the same file, and the peak memory, compared with the first process.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from simkv.incident.emit.log_dates import format_time
from simkv.incident.emit.sglang_log_writer import sglang_log_lines
from simkv.incident.emit.vllm_log_writer import LogOptions, vllm_log_lines
from simkv.metrics.run_result import RunResult
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.yaml_document import YamlDocument

HERE = Path(__file__).parents[1] / "scenarios"
ENGINES: dict[str, dict[str, Any]] = {
    "vllm": {"name": "vllm", "variant": "0.33.0", "num_gpu_blocks": 4000},
    "sglang": {"name": "sglang", "max_total_num_tokens": 64000},
}
#: Format of the times in a line, and their position in the line.
FORMS = {"vllm": ("%m-%d %H:%M:%S", 23), "sglang": ("%Y-%m-%d %H:%M:%S", 1)}
ACCESS = 'INFO:     10.0.0.{0}:51234 - "POST /v1/completions HTTP/1.1" 200 OK'


def ran(engine: str) -> RunResult:
    """Simulate a server under load for some minutes."""
    load = {"num_prompts": 1000, "request_rate": 3.0, "prompt_tokens": 500, "output_tokens": 100}
    document = {"name": "long", "workload": {"arrivals": load}, "engine": ENGINES[engine]}
    document["profile"] = "assumed-costs.json"
    scenario = next(iter(resolve_variants(YamlDocument(HERE / "long.yaml", document)).values()))
    return run_scenario(scenario, HERE, intervals=False)


def lines(engine: str) -> Iterator[str]:
    """Yield the lines of the log of such a server, without end."""
    result = ran(engine)
    config: Any = result.scenario.engine
    if engine == "vllm":
        told = list(
            vllm_log_lines([result.record], config, LogOptions(requests=True, iterations=True))
        )
    else:
        told = list(sglang_log_lines(result.record, config))
    form, place = FORMS[engine]
    width, period = len(format_time(0, form)), result.record.end + 60.0
    times = {line[place : place + width]: None for line in told}
    first = {format_time(second, form): second for second in range(-120, int(period) + 120)}
    yield from told
    for turn in range(1, 1 << 30):
        moved = {text: format_time(first[text] + turn * period, form) for text in times}
        for number, line in enumerate(told):
            if "args" in line or "version" in line or "KV cache size" in line:
                continue
            yield line[:place] + moved[line[place : place + width]] + line[place + width :]
            if number % 4 == 0:
                yield ACCESS.format(number % 250)


def write(path: Path, size: int, engine: str) -> int:
    """Write a log of the given number of bytes; return its number of lines."""
    count = written = 0
    with path.open("w") as file:
        for line in lines(engine):
            file.write(line + "\n")
            count, written = count + 1, written + len(line) + 1
            if written >= size:
                return count
    return count


def read_in_a_process(path: Path) -> tuple[float, float]:
    """Return the CPU seconds and the peak memory (MiB) of a separate process that reads the log."""
    command = [sys.executable, "-m", "benchmarks.diagnose_large_log", "--read", str(path)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    cpu, peak = done.stdout.split()
    return float(cpu), float(peak)


def read_here(path: Path) -> None:
    """Read the log in this process and print the cost."""
    from simkv.cli.command_support import progress
    from simkv.incident.source_reader import read_source

    with progress("reading", file=path) as advance:
        found = read_source(path, lambda done: advance(done))
    assert found.series is not None
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, used.ru_maxrss / 1024)


def loop(path: Path) -> float:
    """Return the CPU seconds of an empty loop over the lines."""
    begun = time.process_time()
    with path.open(encoding="utf-8") as file:
        for _ in file:
            pass
    return time.process_time() - begun


def main() -> None:
    """Write a log, read it in separate processes, and print the cost."""
    if "--read" in sys.argv:
        read_here(Path(sys.argv[-1]))
        return
    size = int(float(sys.argv[1] if len(sys.argv) > 1 else 1) * 1e9)
    for engine in sys.argv[2:] or ENGINES:
        with tempfile.TemporaryDirectory() as folder:
            quarter, whole = Path(folder) / "quarter.log", Path(folder) / "whole.log"
            write(quarter, size // 4, engine)
            count = write(whole, size, engine)
            _, low = read_in_a_process(quarter)
            cpu, high = read_in_a_process(whole)
            floor = loop(whole)
        print(
            f"{engine}: {size / 1e9:g} GB, {count:,} lines to the end in {cpu:.0f} CPU s "
            f"({count / cpu:,.0f} lines per CPU s, {cpu / floor:.0f} times a loop that does "
            f"nothing); peak {high:.0f} MiB, {high / low:.2f} times the peak of the quarter",
            flush=True,
        )


if __name__ == "__main__":
    main()
