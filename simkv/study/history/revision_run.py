"""Run a scenario on one revision of an engine's code, in a separate process.

The process runs ``simkv run``, so that module globals of one revision never affect the next.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from junitparser import JUnitXml

from simkv.core.errors import InputError
from simkv.scenario.yaml_document import YamlDocument
from simkv.study.history.change_search import SkippedRevision
from simkv.study.job_runner import ResultFile
from simkv.study.run_digest import hash_code
from simkv.study.whatif.trial_evaluation import RunFigures, parse_run_figures

#: Time limit of a run in seconds; a slower revision is skipped.
LONGEST_S = 1800.0
#: Verdict of a run in which the scheduler raised an error or violated a law.
DIED = "engine died"


@dataclass(frozen=True)
class RevisionResult:
    """Metrics of a run, and its expectations. Each expectation is paired with a flag: whether it is
    met.
    """

    figures: RunFigures
    expectations: tuple[tuple[str, bool], ...]

    @property
    def missed(self) -> tuple[str, ...]:
        """Expectations that the run does not meet."""
        return tuple(text for text, ok in self.expectations if not ok)


@dataclass(frozen=True)
class ScenarioRunner:
    """Runner of one variant of a scenario. It runs the variant at most once on each revision.

    ``store`` contains earlier results. Changes in the directory ``ignored`` do not cause another
    run.
    """

    document: YamlDocument
    variant: str
    overrides: Sequence[str]
    store: ResultFile
    ignored: Path | None = None

    def run(
        self, revision: str, arguments: Sequence[str], folder: Path
    ) -> RevisionResult | SkippedRevision:
        """Return the result on a revision, or the reason why the revision cannot be run.

        ``revision`` identifies the code. ``arguments`` are the options of `simkv run` that load the
        code.
        """
        digest = self._digest(revision)
        if digest not in self.store.done:
            try:
                summary = self._summary(arguments)
            except _CannotRun as error:
                return SkippedRevision(str(error).replace(f"{folder}/", ""))
            self.store.add(digest, summary)
        summary = dict(self.store.done[digest])
        checks = tuple((text, bool(ok)) for text, ok in summary.pop("expectations"))
        return RevisionResult(parse_run_figures(summary), checks)

    def is_stored(self, revision: str) -> bool:
        """Return whether the result of a revision is stored from an earlier run."""
        return self._digest(revision) in self.store.done

    def _summary(self, arguments: Sequence[str]) -> dict[str, Any]:
        with TemporaryDirectory(prefix="simkv-bisect-") as room:
            out, junit = Path(room) / "results", Path(room) / "junit.xml"
            overrides = [word for one in self.overrides for word in ("--set", one)]
            ran = _simkv(
                ["run", str(self.document.path), "--variant", self.variant, *overrides],
                [*arguments, "--trust", "--no-plots", "--exit-zero"],
                ["--out", str(out), "--junit", str(junit)],
            )
            if ran.returncode:
                raise _CannotRun(_reason(ran.stderr, ran.returncode))
            results = json.loads((out / "summary.json").read_bytes())
            summary: dict[str, Any] = results["variants"][self.variant]
            return summary | {"endings": [], "expectations": _expectations(junit)}

    def _digest(self, revision: str) -> str:
        whole = [hash_code(), revision, self.variant, list(self.overrides), sorted(self._files())]
        return hashlib.sha256(json.dumps(whole).encode()).hexdigest()[:32]

    def _files(self) -> Iterator[tuple[str, str]]:
        """Yield the scenario file and the files that it names, each with a hash of its content."""
        path = self.document.path
        named = {path.parent / text for text in _strings(self.document.tree)}
        for file in {path, *named}:
            if _is_file(file) and not (
                self.ignored and file.resolve().is_relative_to(self.ignored) and file != path
            ):
                yield file.name, hashlib.sha256(file.read_bytes()).hexdigest()


class _CannotRun(InputError):
    """Raised if the scheduler of a revision cannot be loaded or run."""


def _simkv(*words: list[str]) -> subprocess.CompletedProcess[str]:
    # Python identifies compiled files by time and size, which can be equal after two checkouts
    # within a second.
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-m", "simkv.cli", *(word for part in words for word in part)]
    try:
        return subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _CannotRun(f"no result after {LONGEST_S:g} s") from None


def _reason(stderr: str, code: int) -> str:
    """Return the error message of a failed run."""
    lines = [line for line in stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("simkv: ") and "note: " not in line]
    last = (errors or lines or [f"exit code {code}"])[-1]
    return last.removeprefix("simkv: ")


def _expectations(junit: Path) -> list[tuple[str, bool]]:
    found = JUnitXml.fromfile(str(junit))
    return [(case.name, not case.result) for suite in found for case in suite]


def _is_file(path: Path) -> bool:
    """Return whether a text in the scenario is the path of a file."""
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _strings(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _strings(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _strings(value)
