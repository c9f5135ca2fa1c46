"""``simkv bisect --git`` and ``--releases``: find the commit or release that changes a result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simkv.cli.command_support import (
    STORE,
    Interrupted,
    check_store,
    check_variant,
    print_json,
    progress,
    show,
)
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.scenario.yaml_document import YamlDocument
    from simkv.study.history.change_search import SkippedRevision
    from simkv.study.history.git_history import Commit, TemporaryWorktree
    from simkv.study.history.history_bisection import Bisection
    from simkv.study.history.revision_run import RevisionResult, ScenarioRunner


@dataclass(frozen=True)
class HistoryOptions:
    """Options of ``simkv bisect`` for a search over commits or releases.

    ``tolerance`` is the smallest relative change of a metric that counts as a change. The search
    starts with runs of ``samples`` evenly spaced revisions. ``out`` is the directory that stores
    the results of runs, or None for the default directory.
    """

    variant: str | None
    overrides: list[str]
    when: str | None
    tolerance: float
    samples: int
    out: Path | None
    as_json: bool


def bisect_git(scenario: Path, folder: Path, span: str | None, options: HistoryOptions) -> None:
    """Find the commit that changes the result, and print it with its changed lines.

    ``span`` is the range of commits, such as ``GOOD..BAD``.
    """
    from simkv.report.history_text import render_bisection, shorten_diff
    from simkv.study.history import git_history as git
    from simkv.study.history.history_bisection import bisect_commits

    if span is None:
        raise InputError(
            "--git: missing range of commits; expected GOOD..BAD, such as v0.19.0..main"
        )
    names = git.parse_range(span)
    repository = git.find_repository(folder)
    good, bad = (git.find_commit(repository, name) for name in names)

    def arguments(tree: Path) -> list[str]:
        return ["--set", f"engine.file={tree / file}"] if file else ["--source", str(tree)]

    with (
        _runner(scenario, options, repository) as runner,
        git.temporary_worktree(repository) as worktree,
        progress("commits") as advance,
    ):
        file = _custom_file(runner.document, repository)
        engine = None if file else _engine_of(runner.document)

        def run(commit: Commit) -> RevisionResult | SkippedRevision:
            advance(now=f"{commit.short} {commit.subject[:40]}")
            if not runner.is_stored(commit.hash):
                worktree.check_out(commit)
            return runner.run(commit.hash, arguments(worktree.folder), worktree.folder)

        found = bisect_commits(
            repository, good, bad, run, options.when, options.tolerance, options.samples
        )

        made = {found.revisions[change.after] for change in found.changes}
        lines = {commit: _changed_lines(worktree, commit, engine, file) for commit in made}

    def describe(commit: Commit) -> Iterator[str]:
        yield f"Commit:      {commit.hash}"
        yield f"Author date: {commit.date} ({commit.author})"
        yield f"Subject:     {commit.subject}"
        if commit.parents > 1:
            yield (
                "This commit is a merge. To search the merged branch, use the range "
                f"{commit.short}^1..{commit.short}^2"
            )
        yield "Changed lines:"
        yield from shorten_diff(lines[commit])

    _print(
        runner,
        options,
        found,
        render_bisection(found, "commits", lambda one: f"{one.short} {one.subject[:60]}", describe),
        lambda one: {"commit": one.hash, "date": one.date, "subject": one.subject},
    )


def bisect_releases(scenario: Path, span: str, folder: Path, options: HistoryOptions) -> None:
    """Find the release in ``span`` that changes the result, and print it.

    ``folder`` contains the Python files of releases. Missing releases are downloaded to it.
    """
    from simkv.native.native_engines import NATIVE_ENGINES
    from simkv.report.history_text import render_bisection
    from simkv.study.history.change_search import SkippedRevision
    from simkv.study.history.history_bisection import bisect_revisions
    from simkv.study.history.release_history import fetch_release, parse_releases

    with _runner(scenario, options) as runner, progress("releases") as advance:
        engine = _engine_of(runner.document)
        package = NATIVE_ENGINES[engine].package
        releases = parse_releases(span, engine, package, folder)

        def run(release: str) -> RevisionResult | SkippedRevision:
            advance(now=f"{engine} {release}")
            if runner.is_stored(release):
                return runner.run(release, [], folder)
            try:
                source = fetch_release(package, release, folder)
            except InputError as error:
                return SkippedRevision(str(error))
            return runner.run(release, ["--source", str(source)], folder)

        found = bisect_revisions(releases, run, options.when, options.tolerance, options.samples)

    def describe(release: str) -> Iterator[str]:
        yield f"Release:     {engine} {release}"

    _print(
        runner,
        options,
        found,
        render_bisection(found, "releases", lambda release: release, describe),
        lambda release: {"release": release},
    )


def _engine_of(document: YamlDocument) -> str:
    """Return the engine name of a scenario. Raises InputError if simkv cannot run the engine's
    code.
    """
    from simkv.native.native_engines import NATIVE_ENGINES, describe_unsupported

    engine = document.tree.get("engine")
    name = str(engine.get("name")) if isinstance(engine, dict) else ""
    if name not in NATIVE_ENGINES:
        raise InputError(
            f"{document.path}: engine.name: {describe_unsupported(name or 'no engine')}"
        )
    return name


@contextmanager
def _runner(
    scenario: Path, options: HistoryOptions, ignored: Path | None = None
) -> Iterator[ScenarioRunner]:
    """Yield the runner of the scenario. After an interrupt, finished runs stay stored."""
    from simkv.scenario.custom.code_source import is_trusted
    from simkv.scenario.packaged_scenarios import find_scenario
    from simkv.scenario.scenario_loader import list_variant_names
    from simkv.scenario.yaml_document import read_document
    from simkv.study.history.criterion import parse_when
    from simkv.study.history.revision_run import ScenarioRunner
    from simkv.study.job_runner import ResultFile

    if not is_trusted():
        raise InputError(
            "this command runs the code of each tested revision; pass --trust to allow it"
        )
    parse_when(options.when)
    document = read_document(find_scenario(scenario))
    variants = list_variant_names(document)
    check_variant(options.variant, variants)
    out = options.out or Path("runs") / f"{document.path.stem}-bisect"
    check_store(out, "results of simkv bisect")
    try:
        with ResultFile(out / STORE) as store:
            yield ScenarioRunner(
                document, options.variant or variants[0], options.overrides, store, ignored
            )
    except KeyboardInterrupt:
        raise Interrupted(out / STORE) from None


def _changed_lines(
    worktree: TemporaryWorktree, commit: Commit, engine: str | None, file: Path | None
) -> str:
    """Return the diff of a commit in the scheduler's files. If it changes none of them, return its
    diff in all Python files.
    """
    from simkv.study.history import git_history as git

    paths = [str(file)] if file else []
    if engine:
        from simkv.native.native_engines import NATIVE_ENGINES
        from simkv.native.native_source import locate

        worktree.check_out(commit)
        folder = locate(engine, str(worktree.folder))
        tree = worktree.folder.resolve()
        files = NATIVE_ENGINES[engine].files(folder)
        paths = [str(path.resolve().relative_to(tree)) for path in files]
    changed = git.changed_lines(worktree.folder, commit, paths) if paths else ""
    return changed or git.changed_lines(worktree.folder, commit, ["*.py"])


def _custom_file(document: YamlDocument, repository: Path) -> Path | None:
    """Return the path of a scenario's custom scheduler, relative to the clone.

    The result is None if the scenario uses an engine instead of a custom scheduler.

    Raises InputError if the file is elsewhere.
    """
    engine = document.tree.get("engine")
    name = engine.get("file") if isinstance(engine, dict) else None
    if name is None:
        return None
    file = (document.path.parent / str(name)).resolve()
    if not file.is_relative_to(repository.resolve()):
        raise InputError(
            f"{document.path}: engine.file: {name} is not in the clone {repository}; "
            f"expected a scheduler file inside the clone"
        )
    return file.relative_to(repository.resolve())


def _print(
    runner: ScenarioRunner,
    options: HistoryOptions,
    found: Bisection[Any],
    lines: Iterator[str],
    describe: Callable[[Any], dict[str, Any]],
) -> None:
    from simkv.report.history_text import bisection_json
    from simkv.report.json_answers import BisectAnswer

    if options.as_json:
        told = {
            "scenario": runner.document.path.stem,
            "variant": runner.variant,
            "when": options.when,
            **bisection_json(found, describe),
        }
        print_json(BisectAnswer.model_validate(told))
    else:
        show(*lines)
