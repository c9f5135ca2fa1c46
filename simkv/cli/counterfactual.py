"""``simkv shrink``, ``simkv bisect`` and ``simkv whatif``: runs of changed scenarios."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.command_support import (
    STORE,
    AsJson,
    Interrupted,
    Jobs,
    Overrides,
    Overwrite,
    ScenarioArgument,
    Source,
    Trust,
    VariantOption,
    check_store,
    check_variant,
    print_json,
    progress,
    show,
    warn_overruled,
)
from simkv.core.atomic_files import check_new_file
from simkv.core.errors import InputError, spelling_hint

if TYPE_CHECKING:
    from simkv.scenario.scenario import Scenario
    from simkv.study.whatif.outcome_predicate import RunCondition
    from simkv.study.whatif.trial_evaluation import Evaluator


MaxRuns = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Stop after this number of runs (default: no limit)."),
]


def shrink(
    scenario: ScenarioArgument,
    keep: Annotated[
        str,
        typer.Option(
            metavar="CONDITION",
            help="Condition that the reduced workload must still meet: a verdict such as "
            "stalled, or a bound on a metric such as preemptions>=1.",
        ),
    ],
    variant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Variant of the scenario (default: the first variant that meets the condition).",
        ),
    ] = None,
    set_: Overrides = None,
    _source: Source = None,
    _trusted: Trust = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help="Write the scenario to this file (default: print it).",
        ),
    ] = None,
    overwrite: Overwrite = False,
    knobs: Annotated[
        bool, typer.Option(help="Also reduce engine settings such as the number of KV blocks.")
    ] = True,
    max_runs: MaxRuns = None,
    jobs: Jobs = None,
) -> None:
    """Find a smaller workload that still meets a condition.

    The result is a new scenario file.
    """
    from simkv.study.whatif.outcome_predicate import parse_condition
    from simkv.study.whatif.shrunk_scenario import header, write_shrunk
    from simkv.study.whatif.workload_shrinking import shrink as smallest

    wanted = parse_condition(keep)
    path, variants = _load(scenario, set_)
    if out:
        check_new_file("--out", out, path, overwrite)
    with _evaluator(path, jobs, max_runs) as (evaluator, tell):
        name = variant or _first_that_shows(wanted, variants, evaluator)
        check_variant(name, variants)
        chosen = variants[name]
        found = smallest(chosen, wanted, evaluator, knobs=knobs, tell=tell)
        command = f"simkv shrink {scenario} --keep {shlex.quote(keep)} --variant {name}"
        text = write_shrunk(found, wanted, command, path.parent, out)
    if out:
        print("\n".join(header(found, wanted, command)))
        print(f"Written to {out}")
    else:
        print(text, end="")


def bisect(
    scenario: ScenarioArgument,
    commits: Annotated[
        str | None,
        typer.Argument(metavar="[GOOD..BAD]", help="Range of commits for --git."),
    ] = None,
    over: Annotated[
        str | None,
        typer.Option(
            metavar="PATH=LOW..HIGH",
            help="Setting to search, with its range (PATH=LOW..HIGH) or its values (PATH=A,B,C).",
        ),
    ] = None,
    variants: Annotated[
        bool,
        typer.Option(
            "--variants",
            help="Search all variants of the engine (default if --over, --git and --releases are "
            "omitted).",
        ),
    ] = False,
    when: Annotated[
        str | None,
        typer.Option(
            metavar="BOUND",
            help="Search for the value at which this condition becomes true or false, such as "
            "preemptions>=1 (default: a change of the verdict). With --git, the name of a metric "
            "is also accepted.",
        ),
    ] = None,
    git: Annotated[
        Path | None,
        typer.Option(
            metavar="CLONE",
            help="Search the commits GOOD..BAD of this local clone. It must contain an engine, or "
            "the custom scheduler of the scenario. Requires --trust.",
        ),
    ] = None,
    releases: Annotated[
        str | None,
        typer.Option(
            metavar="LOW..HIGH",
            help="Search these releases of the engine with their own scheduler code: a range "
            "GOOD..BAD, or a list such as 0.9.2,0.19.1. Requires --trust.",
        ),
    ] = None,
    release_dir: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Directory with one subdirectory per release, such as vllm-0.33.0/, that "
            "contains its unpacked Python files. If a release is missing, pip downloads its wheel.",
        ),
    ] = Path("runs/releases"),
    tolerance: Annotated[
        float,
        typer.Option(
            min=0,
            help="With --git or --releases, if the verdicts are equal: smallest relative change "
            "of a metric that counts as a difference.",
        ),
    ] = 0.05,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Store the results of --git or --releases in this directory; a repeated "
            "command resumes from it (default: runs/<scenario>-bisect/).",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="Number of evenly spaced values to try before the search (default: 17; 2 for "
            "commits and releases).",
        ),
    ] = None,
    step: Annotated[
        float | None,
        typer.Option(
            help="Smallest distance between tested values (default: 1, or 1/1000 of the range if "
            "LOW or HIGH is not an integer)."
        ),
    ] = None,
    variant: VariantOption = None,
    set_: Overrides = None,
    _source: Source = None,
    _trusted: Trust = False,
    as_json: AsJson = False,
    max_runs: MaxRuns = None,
    jobs: Jobs = None,
) -> None:
    """Find the value or version at which the verdict changes.

    The verdict names the problems of a run, such as stalled. The search covers one of these: the
    range of a setting (--over), all variants of the engine (--variants), the commits of a local
    clone (--git CLONE GOOD..BAD), or releases of the engine (--releases).
    """
    if sum(map(bool, (over, variants, git, releases))) > 1:
        raise InputError("expected exactly one of --over, --variants, --git and --releases")
    if git is not None or releases is not None:
        from simkv.cli.bisect_history import HistoryOptions, bisect_git, bisect_releases

        options = HistoryOptions(variant, set_ or [], when, tolerance, samples or 2, out, as_json)
        if git is not None:
            bisect_git(scenario, git, commits, options)
            return
        if releases is not None and commits is None:
            bisect_releases(scenario, releases, release_dir, options)
            return
    if commits is not None:
        raise InputError(f"{commits}: a range of commits requires --git CLONE")
    from simkv.report.json_answers import BisectAnswer
    from simkv.report.whatif_tables import flips_json, render_flips
    from simkv.study.whatif.outcome_predicate import parse_condition
    from simkv.study.whatif.verdict_bisection import (
        find_flips,
        find_variant_flips,
        parse_bisect_values,
    )

    field = parse_bisect_values(over, step) if over else None
    shown = parse_condition(when, "--when") if when else None
    path, choice = _load(scenario, set_)
    name = variant or next(iter(choice))
    check_variant(name, choice)
    chosen = choice[name]
    with _evaluator(path, jobs, max_runs) as (evaluator, tell):
        if field:
            found = find_flips(chosen, *field, evaluator, shown, samples or 17, tell)
        else:
            found = find_variant_flips(chosen, evaluator, shown)
    if as_json:
        told = {"scenario": chosen.name, "variant": name, "when": when, **flips_json(found)}
        print_json(BisectAnswer(**told))
        return
    show(_title(chosen, name), *render_flips(found, shown))


def whatif(
    scenario: ScenarioArgument,
    variant: VariantOption = None,
    rank_by: Annotated[
        str | None,
        typer.Option(
            "--rank-by",
            metavar="METRIC",
            help="Metric of summary.json to rank by, such as ttft_ms.p99 (default: number of "
            "finished requests, then latency).",
        ),
    ] = None,
    everything: Annotated[
        bool,
        typer.Option(
            "--all", help="Show every tested value, not only the best value of each field."
        ),
    ] = False,
    set_: Overrides = None,
    _source: Source = None,
    _trusted: Trust = False,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="DIR",
            help="Store finished runs in this directory. If you interrupt the command, run it "
            "again to continue it.",
        ),
    ] = None,
    as_json: AsJson = False,
    jobs: Jobs = None,
) -> None:
    """Rank single changes that improve the result.

    The command changes one rule or setting at a time, runs the scenario, and compares the results.
    If you interrupt it, it ranks the changes that have a result.
    """
    from simkv.core.figure_registry import FIGURE_NAMES
    from simkv.report.json_answers import WhatIfAnswer
    from simkv.report.whatif_tables import render_whatif, whatif_json
    from simkv.study.whatif.whatif import run_whatif as ask

    if rank_by is not None and rank_by not in FIGURE_NAMES:
        raise InputError(
            f"--rank-by {rank_by}: not a metric of "
            f"summary.json{spelling_hint(rank_by, FIGURE_NAMES)}; "
            f"expected one of {', '.join(FIGURE_NAMES)}"
        )
    path, variants = _load(scenario, set_)
    name = variant or next(iter(variants))
    check_variant(name, variants)
    chosen = variants[name]
    if out:
        check_store(out, "stored runs")
    with _evaluator(path, jobs, store=out and out / STORE) as (evaluator, tell):
        found = ask(chosen, evaluator, rank_by, tell)
    if as_json:
        told = {"scenario": chosen.name, "variant": name, **whatif_json(found)}
        print_json(WhatIfAnswer(**told))
    else:
        show(_title(chosen, name), *render_whatif(found, everything))
    if found.unfinished:
        raise Interrupted(out and out / STORE)


def _load(scenario: Path, overrides: list[str] | None) -> tuple[Path, dict[str, Scenario]]:
    from simkv.scenario.packaged_scenarios import find_scenario
    from simkv.scenario.scenario_loader import load

    path = find_scenario(scenario)
    found = load(path, overrides or [])
    warn_overruled(path, overrides or [])
    return path, found


def _first_that_shows(
    wanted: RunCondition, variants: dict[str, Scenario], evaluator: Evaluator
) -> str:
    told = []
    for name, scenario in variants.items():
        figures = evaluator.evaluate(evaluator.job(scenario))
        if wanted.is_met(figures):
            return name
        told.append(f"{name} is {wanted.describe(figures)}")
    raise InputError(f"no variant meets {wanted.text!r}: {'; '.join(told)}")


def _title(scenario: Scenario, variant: str) -> str:
    engine = scenario.engine
    had = scenario.hardware
    costs = scenario.profile if had is None else f"{had.model} on {had.tp * had.dp} x {had.gpu}"
    return f"{scenario.name}, {variant}: {engine.name} {engine.variant}, {costs}"


@contextmanager
def _evaluator(
    path: Path, jobs: int | None, most_runs: int | None = None, store: Path | None = None
) -> Iterator[tuple[Evaluator, Callable[[str], None]]]:
    """Yield an evaluator of runs and a function that sets the label of its progress bar."""
    from simkv.study.job_runner import ResultFile
    from simkv.study.whatif.trial_evaluation import Evaluator
    from simkv.study.worker_pool import cores

    done, about = 0, "runs"
    with progress("runs", most_runs) as advance:

        def ticked() -> None:
            nonlocal done
            done += 1
            advance(done, evaluator.expected, about)

        def tell(line: str) -> None:
            nonlocal about
            about = line

        with (
            ResultFile(store) as file,
            Evaluator(path.parent, jobs or cores(), most_runs, ticked, file) as evaluator,
        ):
            yield evaluator, tell
