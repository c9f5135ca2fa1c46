"""``simkv validate CASE``: recorded runs of real engines, simulated and compared."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.common import progress, show
from simkv.core.errors import InputError
from simkv.core.files import check_folder, make_folder

if TYPE_CHECKING:
    from simkv.proof.validation.cases.case import Case


def validate_case(
    cases: Annotated[
        list[Path],
        typer.Argument(metavar="CASE…", help="Folders of recorded runs, or one that holds some."),
    ],
    profile: Annotated[
        Path | None,
        typer.Option(help="Cost profile (JSON) for all cases; else each case's own calibration."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Look for LLMServingSim's kernel tables here too."),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option(help="Also simulate with what was not recorded changed.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the figures as CSV files.")
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the report: Markdown, pictures."),
    ] = None,
) -> None:
    """Simulate recorded runs and print measured, predicted and the error.

    The costs come from the case's calibration data: kernel tables for its model and GPU near it,
    else its own requests that were alone, which then are not compared. Nothing is tuned.
    """
    from simkv.proof.validation.cases.calibration import calibrate
    from simkv.proof.validation.cases.case import find_cases, read_case
    from simkv.proof.validation.cases.score import judge
    from simkv.proof.validation.cases.sensitivity import otherwise
    from simkv.proof.validation.cases.show import all_parts, case_parts
    from simkv.proof.validation.cases.simulate import engine_of

    for option, folder in (("--out", out), ("--docs", docs and docs.parent)):
        if folder:
            check_folder(option, folder)
    if docs and docs.is_dir():
        raise InputError(f"--docs {docs}: is a folder; expected a file")
    if calibration and not calibration.is_dir():
        raise InputError(f"--calibration {calibration}: there is no such folder")
    found = _named_once([read_case(folder) for named in cases for folder in find_cases(named)])
    scores, changed = [], {}
    with progress("cases", len(found)) as advance:
        for case in found:
            costs = calibrate(case, profile, calibration)
            config, notes = engine_of(case)
            scores.append(judge(case, costs, config, notes))
            changed[case.name] = otherwise(case, costs) if sensitivity or docs else []
            advance()
    for scored in scores:
        show(*case_parts(scored, changed[scored.case.name] if sensitivity else []))
    if len(scores) > 1:
        show(*all_parts(scores))
    if out:
        from simkv.proof.validation.cases.files import write_scores

        make_folder(out)
        written = write_scores(out, scores, changed)
        show(f"\nWritten to {out}: {', '.join(written)}")
    if docs:
        from simkv.proof.validation.cases.docs import write_docs

        make_folder(docs.parent)
        names = write_docs(docs, scores, changed)
        show(f"\nWritten to {docs.parent}: {', '.join(names)}")


def _named_once(cases: list[Case]) -> list[Case]:
    """The cases, if no two have one name. Raises InputError otherwise."""
    (name, times), *_ = Counter(case.name for case in cases).most_common(1)
    if times > 1:
        raise InputError(f"{name}: two cases have this name; give each once")
    return cases
