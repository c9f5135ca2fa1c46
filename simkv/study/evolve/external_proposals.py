"""Try schedulers written by an external program, one proposal at a time.

The program is started once for each proposal. On stdin, it receives the objectives, the earlier
candidates and their results. On stdout, it writes the file of a custom scheduler (see
docs/how-to/custom-scheduler.md), as plain text or in a Markdown code block. simkv then executes
this file.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simkv.core.atomic_files import write_text
from simkv.core.errors import InputError
from simkv.metrics.purity_check import check_scheduler_run
from simkv.metrics.scenario_runner import run_scenario
from simkv.scenario.custom.custom_engine import build_custom_spec
from simkv.study.evolve.tournament import (
    Candidate,
    CandidateScore,
    Tournament,
    make_failed_score,
)
from simkv.study.evolve.trial_split import TrialScenario
from simkv.study.job_runner import ProgressCallback

#: Maximum time for one proposal in seconds.
PROPOSAL_TIMEOUT_S = 600.0
#: Engine name of a proposed scheduler.
PROPOSED_NAME = "proposed"
#: Maximum number of earlier candidates in the text for the program; the best candidates are
#: included.
MAX_REPORTED_CANDIDATES = 8
#: Settings that a custom scheduler does not inherit from the engine.
EXCLUDED_KNOBS = ("name", "file", "rule")
_FENCED = re.compile(r"^```(?:python)?\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Proposer:
    """External program ``command``. Its outputs are stored in ``folder``."""

    command: str
    folder: Path

    def request(self, told: str, number: int) -> Path:
        """Run the command with the text ``told`` on stdin, and return the path of a file with its
        output.

        Raises InputError if the command fails or prints nothing.
        """
        try:
            answer = subprocess.run(
                shlex.split(self.command),
                input=told,
                capture_output=True,
                text=True,
                timeout=PROPOSAL_TIMEOUT_S,
                check=False,
            )
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            raise InputError(f"--propose {self.command}: {error}") from error
        if answer.returncode or not answer.stdout.strip():
            last = (answer.stderr.strip().splitlines() or ["no output on standard error"])[-1]
            raise InputError(
                f"--propose {self.command}: the command ended with exit code "
                f"{answer.returncode}: {last}"
            )
        found = _FENCED.search(answer.stdout)
        file = self.folder / f"{number:04}.py"
        self.folder.mkdir(parents=True, exist_ok=True)
        write_text(file, found[1] if found else answer.stdout)
        return file.resolve()


def propose(
    tournament: Tournament, proposer: Proposer, budget: int, advance: ProgressCallback | None = None
) -> None:
    """Request and try ``budget`` proposals, one after the other."""
    last: CandidateScore | None = None
    for number in range(1, budget + 1):
        told = "\n".join(_letter(tournament, last, number, budget))
        file = proposer.request(told, number)
        candidate = make_code_candidate(file, tournament.trials[0])
        if isinstance(candidate, Candidate) and (broken := _broken_law(candidate, tournament)):
            candidate = broken
        if isinstance(candidate, str):
            last = make_failed_score(
                _refused(file), len(tournament.goals), len(tournament.trials), candidate
            )
            tournament.standings[last.candidate.key] = last
        else:
            (last,) = tournament.add([candidate])
        if advance:
            advance(number, budget)


def make_code_candidate(file: Path, trial: TrialScenario) -> Candidate | str:
    """Return a candidate with the scheduler in ``file``. If the file is invalid, return the error
    message.
    """
    try:
        config = build_custom_spec(PROPOSED_NAME, str(file), file.parent).config
    except InputError as error:
        return str(error)
    knobs = config.__dataclass_fields__
    engine = trial.scenario.engine
    given = {k: v for k, v in asdict(engine).items() if k in knobs and k not in EXCLUDED_KNOBS}
    size = next((k for k in ("num_blocks", "num_gpu_blocks") if k in knobs), None)
    if size and size not in given and (held := _blocks(engine)) is not None:
        given[size] = held
    if not issubclass(config, type(engine)):
        given.pop("variant", None)
    change = {"name": PROPOSED_NAME, "file": str(file), **given}
    return Candidate((("engine", change),), len(file.read_text().splitlines()))


def _broken_law(candidate: Candidate, tournament: Tournament) -> str:
    """Return a text about the scheduler law that a proposal violates in the first trial, or ""."""
    trial = tournament.trials[0]
    try:
        scenario = candidate.apply_to(trial)
        if scenario.fleet is None:
            check_scheduler_run(scenario, trial.folder)
    except InputError as error:
        return str(error)
    return ""


def _blocks(engine: Any) -> int | None:
    found = getattr(engine, "num_gpu_blocks", None)
    return None if found is None else int(found) - 1


def _refused(file: Path) -> Candidate:
    return Candidate((("engine", {"name": PROPOSED_NAME, "file": str(file)}),))


def _file(candidate: Candidate) -> Path:
    return Path(candidate.change[0][1]["file"])


def _letter(
    tournament: Tournament, last: CandidateScore | None, number: int, budget: int
) -> list[str]:
    """Return the text for the external program, as lines."""
    lines = [
        f"# Proposal {number} of {budget}",
        "Write one Python file with a scheduler class for simkv (from simkv.custom import",
        "CustomScheduler, or CustomVllmScheduler to change single decisions of its engine).",
        "Reply with the file and nothing else.",
        "Objectives: "
        + "; ".join(map(str, tournament.goals))
        + "; all requests served; short code.",
        "",
        "## Scenario of the first trial",
        *_told_of(tournament.trials[0]),
        "",
        "## Candidates so far, best first",
        "Losses are relative to the engine's own policy; negative values are better.",
    ]
    tried = [one for one in tournament.standings.values() if one.candidate.change]
    for one in sorted(tried, key=lambda one: one.score)[:MAX_REPORTED_CANDIDATES]:
        lines += _line(tournament, one)
    if last is not None:
        lines += ["", "## Last proposal", *_line(tournament, last)]
        if not last.why:
            lines += _why(
                last.candidate.apply_to(tournament.trials[0]), tournament.trials[0].folder
            )
        lines += ["```python", _file(last.candidate).read_text().rstrip(), "```"]
    return lines


def _told_of(trial: TrialScenario) -> list[str]:
    scenario = trial.scenario
    knobs = ", ".join(f"{k}={v}" for k, v in asdict(scenario.engine).items() if v is not None)
    return [f"engine: {knobs}", *_why(scenario, trial.folder)]


def _line(tournament: Tournament, one: CandidateScore) -> list[str]:
    if one.why:
        return [f"- {_file(one.candidate).name}: rejected: {one.why}"]
    losses = ", ".join(
        f"{goal.figure} {loss:+.1%}" for goal, loss in zip(tournament.goals, one.loss, strict=True)
    )
    return [f"- {_file(one.candidate).name}: {losses}, unserved {one.unserved:+.1%}"]


def _why(scenario: Any, folder: Path) -> list[str]:
    """Run a scenario and return its verdicts and wait ledger as lines."""
    found = run_scenario(scenario, folder, intervals=False)
    seconds = sorted(found.diagnosis.totals.items(), key=lambda one: -one[1])
    ledger = ", ".join(f"{kind} {spent:.4g}" for kind, spent in seconds if spent)
    verdicts = [f"verdict: {one.text}" for one in found.diagnosis.verdicts]
    return [found.short_summary, *verdicts, f"wait ledger, seconds over all requests: {ledger}"]
