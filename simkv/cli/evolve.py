"""``simkv evolve``: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simkv.cli.common import Trust, show, tell_overruled
from simkv.cli.many import Address, Executor, Jobs, at_work, check_store


def evolve(
    scenario: Annotated[
        list[Path],
        typer.Argument(
            metavar="SCENARIO…", help="Scenario files (YAML), or the names of packaged ones."
        ),
    ],
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE[:min|:max]",
            help="A figure that is to be better, as e2e_ms.p99, jain_index or recompute_tax. May "
            "be repeated: then all are told that nothing beats in every one.",
        ),
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="How many candidates are tried.")] = 200,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=VALUES",
            help="Search knobs, not rules: as for 'simkv sweep', or a range LOW..HIGH[:log].",
        ),
    ] = None,
    propose: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Search code: a program that is told on stdin what came of the last and answers "
            "with a file of a scheduler, which is run; needs --trust.",
        ),
    ] = None,
    random: Annotated[
        bool, typer.Option("--random", help="Draw all rules by chance, to compare.")
    ] = False,
    goodput: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:MS", help="Limits per request, for goodput: ttft:500."),
    ] = None,
    variant: Annotated[
        str | None, typer.Option(help="Of the scenarios; default the first of each.")
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Override a field; may be repeated."),
    ] = None,
    train: Annotated[
        int, typer.Option(min=1, help="Seeds, or windows of a trace, to search by.")
    ] = 3,
    final: Annotated[
        int, typer.Option(min=1, help="Others, that the winner is chosen by among the best few.")
    ] = 6,
    test: Annotated[int, typer.Option(min=1, help="Others again, that it is judged by.")] = 6,
    profile_error: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE", min=0, max=0.9, help="Relative error of a step, if not the profile's."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder; default runs/<scenario>-evolve/. What it holds is not redone."),
    ] = None,
    jobs: Jobs = None,
    executor: Executor = "local",
    address: Address = None,
    _trusted: Trust = False,
) -> None:
    """Look for a better scheduler: rules of a small language, knobs (--over), code (--propose).

    The winner is judged by seeds or windows that it was not chosen by, at other cache sizes and
    rates and on both sides of the profile's error. Exit 1 if nothing better holds everywhere.
    """
    from simkv.scenario.load import load
    from simkv.scenario.packaged import find
    from simkv.search.evolve.evolve import Search
    from simkv.search.evolve.evolve import evolve as look
    from simkv.search.evolve.words import told
    from simkv.search.evolve.write import write_evolution

    files = tuple(find(file) for file in scenario)
    asked = Search(
        files,
        tuple(objective or ()),
        budget,
        tuple(over or ()),
        propose,
        random,
        tuple(goodput or ()),
        variant,
        tuple(set_ or ()),
        train,
        final,
        test,
        seed,
        profile_error,
    )
    tell_overruled(files[0], asked.overrides)
    name = next(iter(load(files[0], asked.overrides).values())).name
    folder = out or Path("runs") / f"{name}-evolve"
    check_store(folder, "search")
    with at_work(folder, jobs, executor, address, "candidates", budget) as (bench, advance):
        found = look(asked, bench, folder, advance)
    show(*told(found))
    show(f"Written to {folder}: {', '.join(write_evolution(found, folder))}")
    if not found.holds:
        raise typer.Exit(1)
