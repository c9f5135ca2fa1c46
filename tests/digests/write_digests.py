"""Digests of the files that simkv writes: moving code must not change a byte of a result.

``python -m tests.digests.write_digests`` writes ``digests.json``; do this only in a change that
explains why results differ. ``--results DIR`` writes the result files to a directory instead, for
``tests.digests.compare_results``.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import shutil
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

from simkv.cli import main

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("digests.json")
#: Commands by name, each with the files that it writes.
RUNS = {
    path.stem: path
    for folder in ("scenarios", "examples")
    for path in sorted((ROOT / folder).glob("*.yaml"))
}
SWEEP = (
    "sweep",
    "vllm-37307-partial-admission",
    "--over",
    "engine.num_gpu_blocks=700..1100:100",
    "--jobs",
    "1",
)
PLAN = (
    "plan",
    str(Path(__file__).with_name("chat.yaml")),
    "--smallest",
    "fleet.replicas=1..4",
    "--slo",
    "ttft_ms.p90<=2000",
    "--repeats",
    "2",
    "--jobs",
    "1",
)
NAMES = (*RUNS, "sweep", "plan")
TABLES = {
    "sweep": ("table.csv",),
    "plan": ("evaluations.csv", "cliff.csv", "plan.json"),
}
#: Metrics that were added after the digests; they are excluded from the digests. Empty this list
#: when the digests are written again.
ADDED = ("ttft_all_ms", "e2e_all_ms", "prefix_cache", "sessions", "cancelled")
OF_A_RUN = ("requests.csv", "steps.csv", "ledger.csv", "preemptions.csv", "summary.json")


def digests(name: str, results: Path | None = None) -> dict[str, str]:
    """Return the SHA-256 of each result file of a run; copy the files to ``results`` if given."""
    with TemporaryDirectory() as scratch:
        out = Path(scratch) / "out"
        command = {"sweep": SWEEP, "plan": PLAN}.get(
            name, ("run", str(RUNS.get(name)), "--steps", "--ledger", "--no-plots")
        )
        _call(*command, "--out", str(out))
        files = TABLES.get(name, OF_A_RUN)
        if results is not None:
            (results / name).mkdir(parents=True)
            for file in files:
                shutil.copy(out / file, results / name / file)
        return {file: _digest(out / file) for file in files}


def _call(*words: str) -> None:
    """Run simkv in this process and discard its output. Raises RuntimeError if it fails."""
    said = io.StringIO()
    with (
        chdir(ROOT),
        patch.object(sys, "argv", ["simkv", *words]),
        redirect_stdout(said),
        redirect_stderr(said),
    ):
        try:
            main()
        except SystemExit as end:
            if end.code:
                raise RuntimeError(f"simkv {' '.join(words)}: {said.getvalue()}") from None


def _digest(file: Path) -> str:
    content = file.read_bytes()
    if file.suffix == ".json":
        whole = json.loads(content)
        del whole["version"]
        for variant in whole.get("variants", {}).values():
            for name in ADDED:
                variant.pop(name, None)
            assert variant["fidelity"].pop("not_bounded") == {}
            for name in ("saturated", "error_sources"):
                variant["fidelity"].pop(name)
        content = json.dumps(whole, indent=1).encode()
    elif file.suffix == ".csv":
        content = _without_added(content.decode())
    return hashlib.sha256(content).hexdigest()


def _without_added(table: str) -> bytes:
    head, *rows = csv.reader(io.StringIO(table, newline=""))
    kept = [i for i, name in enumerate(head) if name.partition(".")[0] not in ADDED]
    if len(kept) == len(head):
        return table.encode()
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([row[i] for i in kept] for row in (head, *rows))
    return text.getvalue().encode()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--results"]:
        for name in NAMES:
            digests(name, Path(sys.argv[2]).resolve())
    else:
        FILE.write_text(json.dumps({name: digests(name) for name in NAMES}, indent=1) + "\n")
