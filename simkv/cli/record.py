"""``simkv record`` and ``follow``: what a release's scheduler decides, and by which rules."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from simkv.cli.common import progress

if TYPE_CHECKING:
    from simkv.proof.conform.trace import DecisionTrace
    from simkv.proof.record.case import DrawnCase

Driven = Annotated[Literal["vllm", "sglang", "trtllm"], typer.Argument(help="Engine name.")]
Followed = Annotated[Literal["vllm", "sglang"], typer.Argument(help="Engine name.")]
Version = Annotated[str, typer.Argument(help="Engine version, such as 0.33.0, or newest.")]
Source = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        exists=True,
        help="Wheel or unpacked wheel (default: the installed package, or a download by pip).",
    ),
]
Cases = Annotated[int, typer.Option(min=1, help="Number of random cases.")]


def record(
    engine: Driven,
    version: Version,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Write the recordings to this directory.")
    ],
    cases: Cases = 200,
    source: Source = None,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Keep only the smallest recordings that cover every rule, and hand-made ones.",
        ),
    ] = False,
) -> None:
    """Record the decisions of an engine's own scheduler.

    Exit 1 if the simulation decides differently.
    """
    from simkv.core.errors import InputError
    from simkv.core.files import make_folder, write_bytes
    from simkv.proof.record.engines import DRIVEN
    from simkv.proof.record.follow import died
    from simkv.proof.record.keep import choose, packed
    from simkv.proof.record.rules import difference
    from simkv.proof.record.wheel import sources

    driven = DRIVEN[engine]
    with (
        sources(driven.package, version, source) as (folder, found),
        driven.hollowed(folder),
    ):
        names = [*driven.names_of(found, cases), *driven.by_hand(found)]
        traces = {}
        with progress("cases", len(names)) as advance:
            for name in names:
                case = driven.case_of(found, name)
                try:
                    traces[name] = driven.record(case, found, name)
                except Exception as error:  # a release may have changed in any way
                    raise InputError(
                        f"{engine} {found} cannot be driven: {died(name, error)}"
                    ) from error
                advance()
    base = driven.base_of(found)
    rules = driven.rules_of(base)
    different = [name for name, trace in traces.items() if difference(trace, rules)]
    if keep and not different:
        kept = [*driven.by_hand(found), *choose(rules, driven.seen(base), traces, driven.knobs)]
        traces = {name: traces[name] for name in dict.fromkeys(kept)}
    make_folder(out)
    for name, trace in traces.items():
        write_bytes(out / f"{name}.jsonl.gz", packed(trace))
    steps = sum(len(trace.steps) for trace in traces.values())
    print(f"{engine} {found}: {len(traces)} recordings of {steps:,} steps in {out}")
    print(f"the rules of {base} make {len(names) - len(different)} of {len(names)}")
    if different:
        raise typer.Exit(1)


def follow(
    engine: Followed,
    version: Version,
    cases: Cases = 200,
    source: Source = None,
    report: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write the result as a Markdown page.")
    ] = None,
) -> None:
    """Determine which rules a new engine release uses.

    Exit 1 if they are not those of any earlier release.
    """
    from simkv.core.files import write_bytes
    from simkv.proof.record import report as words
    from simkv.proof.record.engines import DRIVEN
    from simkv.proof.record.follow import follow as follow_release
    from simkv.proof.record.rules import releases
    from simkv.proof.record.wheel import sources

    driven = DRIVEN[engine]
    with (
        sources(driven.package, version, source) as (folder, found),
        driven.hollowed(folder),
    ):
        drawn = {name: driven.case_of(found, name) for name in driven.names_of(found, cases)}
        with progress("cases", len(drawn)) as advance:

            def recorded(case: DrawnCase, name: str) -> DecisionTrace:
                advance()
                return driven.record(case, found, name)

            followed = follow_release(engine, driven.form, drawn, recorded)
    newest = next(iter(releases(engine)))
    page = words.report(f"{driven.title} {found}", newest, driven.form, followed)
    if report is not None:
        write_bytes(report, page.encode())
    print(page.removeprefix("# "), end="")
    if not followed.known:
        raise typer.Exit(1)
