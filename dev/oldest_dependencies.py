"""Check that simkv gives the same results with the oldest dependencies that it allows.

python -m dev.oldest_dependencies build/oldest

Creates a virtual environment with the lower bounds of pyproject.toml, runs all packaged scenarios
with it and with this Python, and compares all metrics. Exits with 1 if a metric differs.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def oldest(dependencies: list[str]) -> list[str]:
    """Return constraints to the lower bound of each dependency, such as ``numpy>=1.26``."""
    found = []
    for text in dependencies:
        match = re.match(r"([\w.-]+)>=([\d.]+)", text)
        if match is None:
            raise ValueError(f"{text}: has no lower bound")
        found.append(f"{match[1]}=={match[2]}")
    return found


def main(folder: Path) -> int:
    """Create the environment in ``folder``, run the scenarios and compare; return the exit code."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    constraints = folder / "constraints.txt"
    venv.create(folder / "venv", clear=True, with_pip=True)
    constraints.write_text("\n".join(oldest(project["dependencies"])) + "\n", encoding="utf-8")
    old = str(folder / "venv" / "bin" / "python")
    install = [old, "-m", "pip", "install", "-q", "-c", str(constraints), str(ROOT)]
    subprocess.run(install, check=True)
    results = [str(folder / "results-oldest"), str(folder / "results")]
    for python, out in zip((old, sys.executable), results, strict=True):
        command = [python, "-m", "tests.digests.write_digests", "--results", out]
        subprocess.run(command, cwd=ROOT, check=True)
    compare = [sys.executable, "-m", "tests.digests.compare_results", *results]
    return subprocess.run(compare, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
