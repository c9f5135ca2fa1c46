"""``simkv evolve``: search for a better scheduler."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from simkv.cli.command_support import (
    Address,
    ExecutorOption,
    Jobs,
    Overrides,
    Trust,
    check_store,
    open_job_runner,
    show,
    warn_overruled,
)


def evolve(
    scenario: Annotated[
        list[Path],
        typer.Argument(
            metavar="SCENARIO…", help="Scenario files (YAML), or names of packaged scenarios."
        ),
    ],
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="METRIC[:min|:max]",
            help="Metric to improve, such as e2e_ms.p99, jain_index or recompute_tax. If repeated, "
            "the Pareto front of these metrics is reported.",
        ),
    ] = None,
    budget: Annotated[int, typer.Option(min=1, help="Number of candidates to try.")] = 200,
    over: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH=VALUES",
            help="Search the values of a setting instead of policies. Write values as for "
            "'simkv sweep', or a range LOW..HIGH[:log]. May be repeated.",
        ),
    ] = None,
    propose: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Search scheduler files instead of policies. COMMAND reads the results of the "
            "last candidate from standard input and prints the next scheduler file, which "
            "simkv executes. Requires --trust.",
        ),
    ] = None,
    random_search: Annotated[
        bool,
        typer.Option(
            "--random-search", help="Sample all policies at random, as a baseline for the search."
        ),
    ] = False,
    goodput: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME:MS",
            help="Latency limit in milliseconds that a request must meet to count as goodput, "
            "such as ttft:500; may be repeated.",
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Variant of the scenarios (default: the first of each)."),
    ] = None,
    set_: Overrides = None,
    train: Annotated[
        int,
        typer.Option(
            min=1, help="Number of random seeds (for a trace: time windows) for the search."
        ),
    ] = 3,
    validation: Annotated[
        int,
        typer.Option(
            min=1,
            help="Number of additional seeds or time windows for the selection of the winner.",
        ),
    ] = 6,
    test: Annotated[
        int,
        typer.Option(
            min=1, help="Number of held-out seeds or time windows for the final evaluation."
        ),
    ] = 6,
    profile_error: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            min=0,
            max=0.9,
            help="Relative error of step times, such as 0.1 (default: the error stated in the "
            "cost profile).",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the search.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Write results to this directory (default: runs/<scenario>-evolve/). Existing "
            "results are reused.",
        ),
    ] = None,
    jobs: Jobs = None,
    executor: ExecutorOption = "local",
    address: Address = None,
    _trusted: Trust = False,
) -> None:
    """Search for a better scheduling policy.

    The search covers policies written as short expressions, values of settings (--over), or
    scheduler files (--propose). The winner is then evaluated on held-out seeds or time windows,
    with other cache sizes, at other request rates, and with step times that are faster or slower by
    the error of the cost profile. Exit 1 if no candidate is better than the baseline in all
    evaluations.
    """
    from simkv.scenario.packaged_scenarios import find_scenario
    from simkv.scenario.scenario_loader import load
    from simkv.study.evolve.evolution import EvolutionRequest
    from simkv.study.evolve.evolution import run_evolution as look
    from simkv.study.evolve.evolution_result import summarize_evolution, write_evolution

    files = tuple(find_scenario(file) for file in scenario)
    asked = EvolutionRequest(
        files,
        tuple(objective or ()),
        budget,
        tuple(over or ()),
        propose,
        random_search,
        tuple(goodput or ()),
        variant,
        tuple(set_ or ()),
        train,
        validation,
        test,
        seed,
        profile_error,
    )
    warn_overruled(files[0], asked.overrides)
    name = next(iter(load(files[0], asked.overrides).values())).name
    folder = out or Path("runs") / f"{name}-evolve"
    check_store(folder, "search")
    with open_job_runner(folder, jobs, executor, address, "candidates", budget) as (
        runner,
        advance,
    ):
        found = look(asked, runner, folder, advance)
    show(*summarize_evolution(found))
    show(f"Written to {folder}: {', '.join(write_evolution(found, folder))}")
    if not found.holds:
        raise typer.Exit(1)
