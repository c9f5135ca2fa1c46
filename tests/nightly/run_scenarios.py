"""Check generated scenarios for a given CPU time, and resume where the last call ended.

python -m tests.nightly.run_scenarios [--hours 4] [--jobs 2] [--out build/nightly.jsonl]

The output file has one line per seed. The command prints the number of scenarios per engine and
option. It exits with 1 if a scenario failed, or if an option had too few scenarios after the full
time.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from simkv.schedulers.engine_registry import ENGINES
from tests.nightly.scenario_checks import CheckedScenario, check_seed, prepare_folder
from tests.nightly.scenario_generator import CUSTOM, list_options

#: Minimum number of scenarios per engine and option.
MIN_REACHED = 100
#: Number of seeds per process and round.
ROUND = 40


def check_seeds(seeds: Iterable[int]) -> tuple[list[str], float]:
    """Check seeds in a temporary folder; return the lines and the CPU time in seconds."""
    import time

    start = time.process_time()
    with tempfile.TemporaryDirectory() as name:
        folder = prepare_folder(Path(name))
        lines = [check_seed(seed, folder).to_json() for seed in seeds]
    return lines, time.process_time() - start


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the results of earlier calls; a damaged last line is ignored."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def describe(lines: list[dict[str, Any]]) -> tuple[list[str], bool]:
    """Return the summary as lines of text, and whether every scenario passed and every option had
    enough scenarios.
    """
    engines = Counter(_engine(line["engine"]) for line in lines)
    options = Counter(name for line in lines for name in set(line["options"]))
    verdicts = Counter(line["verdict"] for line in lines)
    failed = [line for line in lines if line["problem"]]
    rare = {name: options[name] for name in list_options() if options[name] < MIN_REACHED}
    few = {name for name in [*ENGINES, CUSTOM] if engines[name] < MIN_REACHED}
    text = [
        f"{len(lines)} scenarios, {len(failed)} failed, "
        f"slowest {max((line['cpu_s'] for line in lines), default=0):.1f} CPU s",
        "engines: " + ", ".join(f"{name} {count}" for name, count in engines.most_common()),
        "verdicts: " + ", ".join(f"{name} {count}" for name, count in verdicts.most_common()),
        f"options: {len(list_options())}, reached fewer than {MIN_REACHED} times: {len(rare)}",
        *(f"  {name} {count}" for name, count in sorted(rare.items(), key=lambda one: one[1])),
    ]
    text += [f"failed: seed {line['seed']}\n{line['problem']}" for line in failed[:10]]
    return text, not (failed or rare or few)


def _engine(name: str) -> str:
    return name if name in ENGINES else CUSTOM


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--hours", type=float, default=4.0, help="CPU time (default: 4)")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--out", type=Path, default=Path("build/nightly.jsonl"))
    asked = parser.parse_args()
    done = read_lines(asked.out)
    seed = 1 + max((line["seed"] for line in done), default=-1)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    spent = 0.0
    with ProcessPoolExecutor(asked.jobs) as pool, asked.out.open("a", encoding="utf-8") as out:
        while spent < 3600 * asked.hours:
            starts = [seed + ROUND * i for i in range(asked.jobs)]
            seed += ROUND * asked.jobs
            for lines, cpu in pool.map(check_seeds, [range(s, s + ROUND) for s in starts]):
                out.write("".join(f"{line}\n" for line in lines))
                out.flush()
                spent += cpu
    text, fine = describe(read_lines(asked.out))
    print("\n".join(text))
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())


__all__ = ["CheckedScenario", "main"]
