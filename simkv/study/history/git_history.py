"""Commits of a local clone, and a temporary worktree to check them out.

No git command changes the user's files or uses the network. Missing objects of a partial clone lead
to an error.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from simkv.core.errors import InputError

_SAFE = ("-c", "core.hooksPath=/dev/null", "-c", "protocol.allow=never", "-c", "core.fsmonitor=")
_ENVIRONMENT = {"GIT_TERMINAL_PROMPT": "0", "GIT_LFS_SKIP_SMUDGE": "1", "GIT_NO_LAZY_FETCH": "1"}


@dataclass(frozen=True)
class Commit:
    """A commit: full hash, author, author date (ISO 8601), subject and number of parents."""

    hash: str
    author: str
    date: str
    subject: str
    parents: int

    @property
    def short(self) -> str:
        return self.hash[:10]


def find_repository(folder: Path) -> Path:
    """Return the top directory of the clone. Raises InputError if ``folder`` is not in a clone."""
    if not folder.is_dir():
        raise InputError(f"--git {folder}: no such directory; expected a local clone")
    try:
        return Path(_git(folder, "rev-parse", "--show-toplevel").strip())
    except InputError as error:
        raise InputError(f"--git {folder}: not a clone with a worktree: {error}") from error


def parse_range(text: str) -> tuple[str, str]:
    """Return both ends of ``GOOD..BAD``. A missing end means HEAD."""
    ends = text.split("..")
    if len(ends) != 2 or ends[1].startswith(".") or ends == ["", ""]:
        raise InputError(f"{text}: expected a range of commits such as v0.19.0..main")
    return ends[0] or "HEAD", ends[1] or "HEAD"


def find_commit(repository: Path, name: str) -> Commit:
    """Return the commit of a name, tag or hash. Raises InputError if there is no such commit."""
    try:
        found = _git(
            repository, "rev-parse", "--verify", "--quiet", "--end-of-options", name + "^{commit}"
        )
    except InputError:
        raise InputError(f"{name}: no such commit in {repository}") from None
    return _commits(repository, "--no-walk", found.strip())[0]


def merge_base(repository: Path, one: Commit, other: Commit) -> Commit:
    """Return the newest common ancestor. Raises InputError if there is none."""
    try:
        found = _git(repository, "merge-base", one.hash, other.hash)
    except InputError:
        raise InputError(
            f"{one.short} and {other.short} have no common history in {repository}; a shallow "
            "clone needs `git fetch --unshallow`"
        ) from None
    return _commits(repository, "--no-walk", found.strip())[0]


def list_commits(repository: Path, old: Commit, new: Commit) -> list[Commit]:
    """Return the commits from ``old`` to its descendant ``new``.

    If the first parents lead from ``new`` to ``old``, only these commits are returned.
    """
    span = f"{old.hash}..{new.hash}"
    found = _commits(repository, "--reverse", "--first-parent", span)
    line = _git(repository, "rev-list", "--first-parent", new.hash).split()
    if old.hash not in line:
        found = _commits(repository, "--reverse", "--topo-order", "--ancestry-path", span)
    return [old, *found]


def changed_lines(repository: Path, commit: Commit, paths: Sequence[str]) -> str:
    """Return the diff between a commit and its first parent, in files that match ``paths``."""
    shown = ["show", "--first-parent", "-m", "--format=", "--no-ext-diff", "--no-textconv"]
    return _git(repository, *shown, "--no-color", "--unified=1", commit.hash, "--", *paths)


def changed_files(repository: Path, commit: Commit) -> list[str]:
    """Return the files that a commit changes, compared with its first parent."""
    shown = ["show", "--first-parent", "-m", "--format=", "--no-ext-diff", "--name-only"]
    return _git(repository, *shown, commit.hash).split("\n")[:-1]


@contextmanager
def temporary_worktree(repository: Path) -> Iterator[TemporaryWorktree]:
    """Yield a worktree outside of the clone, and remove it at the end."""
    with TemporaryDirectory(prefix="simkv-bisect-") as room:
        folder = Path(room) / "worktree"
        _git(repository, "worktree", "add", "--detach", "--no-checkout", str(folder), "HEAD")
        try:
            yield TemporaryWorktree(folder)
        finally:
            _git(repository, "worktree", "remove", "--force", "--force", str(folder))


@dataclass(frozen=True)
class TemporaryWorktree:
    """A worktree in ``folder`` that has the files of one commit at a time."""

    folder: Path

    def check_out(self, commit: Commit) -> None:
        """Check out a commit. Raises InputError if its files are unavailable."""
        _git(self.folder, "checkout", "--quiet", "--force", "--detach", commit.hash)
        _git(self.folder, "clean", "--quiet", "-ffdx")


def _commits(repository: Path, *words: str) -> list[Commit]:
    fields = "%H%x1f%an%x1f%aI%x1f%s%x1f%P%x1e"
    text = _git(
        repository, "log", "--no-color", "--no-show-signature", f"--format={fields}", *words
    )
    commits = []
    for line in text.split("\x1e"):
        if line.strip():
            name, author, date, subject, parents = line.strip("\n").split("\x1f")
            commits.append(Commit(name, author, date, subject, len(parents.split())))
    return commits


def _git(folder: Path, *words: str) -> str:
    """Return the output of a git command. Raises InputError if it fails."""
    # A hook sets variables such as GIT_DIR, which would select another repository.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        ran = subprocess.run(
            ["git", *_SAFE, "-C", str(folder), *words],
            env=kept | _ENVIRONMENT,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise InputError("--git needs the program git, which is not installed") from None
    if ran.returncode:
        why = ran.stderr.strip().splitlines() or [f"exit code {ran.returncode}"]
        raise InputError(f"git {words[0]}: {why[-1].removeprefix('fatal: ')}")
    return ran.stdout
