"""Mutation testing: change one expression of a module and check whether the module's tests fail.

python -m dev.mutants [--count 200] [--seed 0] [--group NAME] [--again]

``dev/mutants.toml`` lists the groups of modules with their tests, and mutants that do not change
the behavior. Each mutant runs in a temporary copy of the tracked files. A further call continues
after the last result of ``build/mutants.jsonl`` (``--out FILE``); with ``--again``, it repeats
mutants that survived. The exit code is 1 if a mutant survived.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

from dev.mutation_operators import Mutant, find_mutants

ROOT = Path(__file__).resolve().parent.parent
TABLE = tomllib.loads((ROOT / "dev" / "mutants.toml").read_text(encoding="utf-8"))
#: Maximum memory of a test process in bytes.
MAX_MEMORY = 8 << 30
#: Results of a mutant: its tests failed, ran too long, or passed.
KILLED, TIMEOUT, SURVIVED, EQUIVALENT = "killed", "timeout", "survived", "equivalent"
#: Exit codes of pytest for an invalid call, and for no tests.
NO_TESTS = (4, 5)


def shuffle_mutants(group: str, seed: int) -> list[Mutant]:
    """Return all mutants of a group in random order.

    The order is determined by hashes of their names, so that changes to other code do not affect
    it.
    """
    table = TABLE["groups"][group]
    found = [
        mutant
        for pattern in table["modules"]
        for path in sorted(ROOT.glob(pattern))
        if path.stem not in table.get("except", ())
        for mutant in find_mutants(path.relative_to(ROOT).as_posix(), path.read_bytes())
    ]
    return sorted(found, key=lambda one: hashlib.sha256(f"{seed} {one.key}".encode()).digest())


def copy_sources(folder: Path) -> None:
    """Copy the tracked files of the repository to a folder."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, names.stdout.decode().split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    subprocess.run([sys.executable, "-m", "compileall", "-q", "simkv"], cwd=folder, check=True)
    show = [sys.executable, "-c", "import simkv; print(simkv.__file__)"]
    found = subprocess.run(show, cwd=folder, env=_environment(folder), stdout=subprocess.PIPE)
    if not found.stdout.decode().startswith(str(folder)):
        raise RuntimeError(f"tests import {found.stdout.decode().strip()} instead of the copy")


def _environment(folder: Path) -> dict[str, str]:
    # Bytecode of the mutant must not remain.
    return {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def _limit() -> None:
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))


def run_tests(folder: Path, stages: list[list[str]], timeout: float) -> tuple[str, str]:
    """Run lists of pytest arguments in order until one fails; return the status and the failed
    test.

    ``timeout`` is in seconds for each list. Raises RuntimeError if pytest could not run any test.
    """
    for arguments in stages:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *arguments]
        with subprocess.Popen(
            command, cwd=folder, env=_environment(folder), stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, start_new_session=True, preexec_fn=_limit,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return TIMEOUT, ""
        if process.returncode in NO_TESTS:
            raise RuntimeError(output)
        if process.returncode:
            failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
            return KILLED, failed[1] if failed else ""
    return SURVIVED, ""


def run_group(group: str, mutants: list[Mutant], folder: Path, out: Path) -> None:
    """Run the tests of a group on each mutant and append the results to a file as JSON lines."""
    stages = TABLE["groups"][group]["tests"]
    start = time.monotonic()
    if run_tests(folder, stages, 600)[0] != SURVIVED:
        raise RuntimeError(f"{group}: the tests fail without a mutant")
    timeout = 20 + 3 * (time.monotonic() - start)
    for mutant in mutants:
        path = folder / mutant.key.partition(" ")[0]
        source, times = path.read_bytes(), path.stat()
        # make the source newer than its bytecode, so that the bytecode is not used
        path.write_bytes(mutant.apply(source))
        status, by = run_tests(folder, stages, timeout)
        path.write_bytes(source)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        found = {"group": group, "mutant": mutant.key, "line": mutant.line, "status": status}
        with out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found | {"by": by}) + "\n")


def read_results(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last result of each mutant."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {line["mutant"]: line for line in map(json.loads, lines)}


def main() -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200, help="number of mutants (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "mutants.jsonl")
    parser.add_argument("--again", action="store_true", help="repeat mutants that survived")
    parser.add_argument("--group", choices=TABLE["groups"], help="only this group")
    asked = parser.parse_args()
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    done = read_results(asked.out)
    found = {group: shuffle_mutants(group, asked.seed) for group in TABLE["groups"]}
    count = asked.count // len(found)
    sample = {one: found[one][:count] for one in found if asked.group in (None, one)}
    for key in TABLE["equivalent"].keys() - {one.key for group in found.values() for one in group}:
        print(f"dev/mutants.toml: no longer in the sources: {key}")
    with tempfile.TemporaryDirectory() as name:
        copy_sources(folder := Path(name))
        for group, mutants in sample.items():
            known = {
                key for key, line in done.items() if not asked.again or line["status"] != SURVIVED
            }
            known |= TABLE["equivalent"].keys()
            if left := [mutant for mutant in mutants if mutant.key not in known]:
                run_group(group, left, folder, asked.out)
    return report(sample, read_results(asked.out))


def report(sample: dict[str, list[Mutant]], done: dict[str, dict[str, Any]]) -> int:
    """Print the results by group and the mutants that survived; return the exit code."""
    survived = []
    for group, mutants in sample.items():
        found = Counter[str]()
        for mutant in mutants:
            status = EQUIVALENT if mutant.key in TABLE["equivalent"] else done[mutant.key]["status"]
            found[status] += 1
            if status == SURVIVED:
                survived.append(f"{mutant.key} (line {mutant.line})")
        print(f"{group}: {len(mutants)} mutants", *(f"{v} {k}" for k, v in found.items()), sep=", ")
    if survived:
        print(*survived, sep="\n")
    return int(bool(survived))


if __name__ == "__main__":
    sys.exit(main())
