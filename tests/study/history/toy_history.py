"""Git history of a toy scheduler: 40 commits, including a commit that starves short requests."""

from __future__ import annotations

import subprocess
from pathlib import Path

COMMITS = 40
#: Number of the commit that orders waiting requests by length, longest first.
PLANTED = 27
#: Numbers of commits with a syntax error, which the next commit repairs.
BROKEN = (24, 25, 31)

_CODE = '''"""Toy scheduler, revision {number}."""

from simkv.custom import Batch, CustomScheduler


class Toy(CustomScheduler):
    """Admit requests in order; preempt the newest request if blocks run out."""

    def decide(self, batch: Batch) -> None:
        budget = self.config.max_num_batched_tokens
{order}        for r in list(self.running):
            tokens = min(r.left, budget)
            while r in self.running and not self.fits(r, tokens):
                self.preempt(batch, self.running[-1], r)
            if r in self.running and tokens:
                self.compute(batch, r, tokens)
                budget -= tokens
        while self.waiting and budget and not batch.preempted:
            r = self.waiting[0]
            tokens = min(r.left, budget)
            if len(self.running) == self.config.max_num_seqs or not self.fits(r, tokens):
                break
            self.compute(batch, r, tokens)
            budget -= tokens
{broken}'''
_REGRESSION = "        self.waiting.sort(key=lambda r: -r.length)\n"

SCENARIO = """
name: toy
summary: {summary}
workload:
  requests:
{requests}
engine: {{name: toy, file: toy.py, num_blocks: 60, max_num_seqs: 1}}
profile: unit-step
timeout: 400
"""


def write_history(folder: Path) -> Path:
    """Create the clone in ``folder`` and return the scenario, which is outside the clone."""
    clone = folder / "clone"
    clone.mkdir(parents=True)
    git(clone, "init", "--quiet", "--initial-branch=main")
    for number in range(1, COMMITS + 1):
        write_commit(clone, number)
    rows = [(300, 100, 0)] + [(20, 5, 1)] + [(300, 100, 90 * i) for i in range(1, 7)]
    listed = "\n".join(
        f"    - {{prompt_tokens: {p}, output_tokens: {o}, arrival: {a}}}" for p, o, a in rows
    )
    scenario = folder / "toy.yaml"
    text = SCENARIO.format(requests=listed, summary="A long text. " * 50).replace(
        "file: toy.py", "file: clone/toy.py"
    )
    scenario.write_text(text)
    return scenario


def write_commit(clone: Path, number: int) -> None:
    """Write and commit revision ``number`` of the scheduler."""
    code = _CODE.format(
        number=number,
        order=_REGRESSION if number >= PLANTED else "",
        broken="def broken(:\n" if number in BROKEN else "",
    )
    (clone / "toy.py").write_text(code)
    git(clone, "add", "toy.py")
    subject = "Admit long requests first" if number == PLANTED else f"Change {number}"
    date = f"2026-01-{number % 28 + 1:02d}T12:00:00+00:00"
    git(clone, "commit", "--quiet", "-m", subject, f"--date={date}")
    git(clone, "tag", f"r{number}")


def git(clone: Path, *words: str) -> str:
    """Return the output of a git command."""
    who = ("-c", "user.name=Toy", "-c", "user.email=toy@example.org", "-c", "gc.auto=0")
    command = ["git", "-C", str(clone), *who, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
