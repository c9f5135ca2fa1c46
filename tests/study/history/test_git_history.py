from __future__ import annotations

import stat
from pathlib import Path

import pytest

from simkv.core.errors import InputError
from simkv.study.history import git_history
from simkv.study.history.change_search import SkippedRevision
from simkv.study.history.git_history import Commit
from simkv.study.history.history_bisection import Bisection, bisect_commits
from simkv.study.history.revision_run import DIED, RevisionResult
from simkv.study.whatif.trial_evaluation import RunFigures
from tests.study.history.toy_history import git


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    folder = tmp_path / "clone"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    return folder


def commit(clone: Path, verdict: str, subject: str) -> Commit:
    """Commit a file that contains the verdict of the run on this revision, or ``broken``."""
    (clone / "engine.py").write_text(f"{verdict}  # {subject}\n")
    git(clone, "add", ".")
    git(clone, "commit", "--quiet", "--allow-empty", "-m", subject)
    return git_history.find_commit(clone, "HEAD")


def bisect(clone: Path, good: str, bad: str) -> Bisection[Commit]:
    def run(revision: Commit) -> RevisionResult | SkippedRevision:
        verdict = git(clone, "show", f"{revision.hash}:engine.py").split("  #")[0]
        if verdict == "broken":
            return SkippedRevision("syntax error")
        return RevisionResult(RunFigures(verdict, "", {}, ()), ())

    ends = (git_history.find_commit(clone, name) for name in (good, bad))
    return bisect_commits(clone, *ends, run, None, 0.05)


def subjects(found: Bisection[Commit]) -> list[str]:
    """Return the subjects of the commits that may have made the change."""
    return [found.revisions[i].subject for change in found.changes for i in change.candidates]


def test_commit_with_changed_verdict(clone: Path) -> None:
    for number in range(12):
        commit(clone, "starved" if number >= 5 else "served", f"change {number}")
    assert subjects(bisect(clone, "HEAD~11", "HEAD")) == ["change 5"]
    # Search for the commit that fixed a defect: GOOD is the newer end.
    assert subjects(bisect(clone, "HEAD", "HEAD~11")) == ["change 5"]


def test_commit_on_either_branch(clone: Path) -> None:
    commit(clone, "served", "base")
    git(clone, "branch", "release")
    for number in range(4):
        commit(clone, "starved" if number >= 2 else "served", f"main {number}")
    git(clone, "checkout", "--quiet", "release")
    for number in range(4):
        commit(clone, "starved" if number >= 1 else "served", f"release {number}")
    commit(clone, "served", "release fix")
    assert subjects(bisect(clone, "release", "main")) == ["main 2"]
    assert subjects(bisect(clone, "main~3", "release~1")) == ["release 1"]


def test_merge_is_one_step(clone: Path) -> None:
    commit(clone, "served", "base")
    git(clone, "checkout", "--quiet", "-b", "topic")
    commit(clone, "starved", "topic")
    git(clone, "checkout", "--quiet", "main")
    (clone / "other.py").write_text("")
    git(clone, "add", ".")
    git(clone, "commit", "--quiet", "-m", "main")
    git(clone, "merge", "--quiet", "--no-ff", "-m", "Merge topic", "topic")
    found = bisect(clone, "HEAD~2", "HEAD")
    assert subjects(found) == ["Merge topic"]
    assert found.revisions[-1].parents == 2
    assert subjects(bisect(clone, "HEAD^1", "HEAD^2")) == ["topic"]


def test_unusable_and_dying_commits_are_skipped(clone: Path) -> None:
    for verdict in ("served", "served", DIED, "broken", "starved", "starved"):
        commit(clone, verdict, verdict)
    found = bisect(clone, "HEAD~5", "HEAD")
    assert subjects(found) == [DIED, "broken", "starved"]
    assert {one.reason for one in found.search.skipped.values()} == {
        "syntax error",
        "the engine died: ",
    }
    with pytest.raises(InputError, match="BAD cannot be run: syntax error"):
        bisect(clone, "HEAD~5", "HEAD~2")


def test_worktree_leaves_clone_alone(clone: Path) -> None:
    first = commit(clone, "served", "first")
    commit(clone, "starved", "second")
    hook = clone / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {clone}/hook-ran\n")
    hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    (clone / "engine.py").write_text("uncommitted\n")
    with git_history.temporary_worktree(clone) as worktree:
        worktree.check_out(first)
        assert (worktree.folder / "engine.py").read_text() == "served  # first\n"
    assert not worktree.folder.exists()
    assert (clone / "engine.py").read_text() == "uncommitted\n"
    assert not (clone / "hook-ran").exists()
    assert len(git(clone, "worktree", "list").splitlines()) == 1
    assert git(clone, "branch", "--list").strip() == "* main"


@pytest.mark.parametrize(
    ("name", "message"),
    [("nowhere", "nowhere: no such commit"), ("--all", "--all: no such commit")],
)
def test_unknown_commit(clone: Path, name: str, message: str) -> None:
    commit(clone, "served", "first")
    with pytest.raises(InputError, match=message):
        git_history.find_commit(clone, name)


def test_range_and_clone(tmp_path: Path, clone: Path) -> None:
    assert git_history.parse_range("v1..") == ("v1", "HEAD")
    for text in ("v1", "v1...v2", ".."):
        with pytest.raises(InputError, match="expected a range of commits"):
            git_history.parse_range(text)
    with pytest.raises(InputError, match="no such directory"):
        git_history.find_repository(tmp_path / "missing")
    (tmp_path / "plain").mkdir()
    with pytest.raises(InputError, match="not a clone"):
        git_history.find_repository(tmp_path / "plain")
    assert git_history.find_repository(clone) == clone
