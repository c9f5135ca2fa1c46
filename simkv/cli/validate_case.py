"""``simkv validate CASE``: recorded runs of real engines, simulated and compared."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from simkv.cli.common import complain, progress, show
from simkv.core.errors import InputError
from simkv.core.files import check_folder, make_folder

if TYPE_CHECKING:
    from simkv.costs.profile import Profile
    from simkv.proof.validation.cases.score import Score
    from simkv.proof.validation.cases.sensitivity import Otherwise
    from simkv.proof.validation.cases.steps import HostTimes


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
    steps: Annotated[
        bool,
        typer.Option(help="Also measure what steps took above their kernels, by kind of step."),
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
    else its own requests that were alone, which then are not compared. Nothing is tuned. Of several
    cases those that cannot be used are named at the end, and the command ends with 2.
    """
    from simkv.proof.validation.cases.case import find_cases
    from simkv.proof.validation.cases.crossed import others_load
    from simkv.proof.validation.cases.show import all_parts, case_parts

    _check_options(out, docs, calibration)
    folders = [folder for named in cases for folder in find_cases(named)]
    found = _judged(folders, profile, calibration, varied=sensitivity or docs is not None)
    for scored in found.scores:
        show(*case_parts(scored, found.changed[scored.case.name] if sensitivity else []))
    crossed = [] if profile else list(others_load(found.scores, found.costs))
    if len(found.scores) > 1:
        show(*all_parts(found.scores, crossed))
    above, untold = _above_kernels(found) if steps or docs else ([], [])
    if steps:
        from simkv.proof.validation.cases.show import steps_parts

        show(*steps_parts(above, untold))
    if out:
        from simkv.proof.validation.cases.files import write_scores

        make_folder(out)
        written = write_scores(out, found.scores, found.changed, above)
        show(f"\nWritten to {out}: {', '.join(written)}")
    if docs:
        from simkv.proof.validation.budgets.pairs import made
        from simkv.proof.validation.cases.docs import write_docs

        make_folder(docs.parent)
        pairs = list(made(_tables(folders, calibration)))
        names = write_docs(docs, found.scores, found.changed, crossed, pairs, above)
        show(f"\nWritten to {docs.parent}: {', '.join(names)}")
    for reason in found.unusable:
        complain(reason)
    if found.unusable:
        raise typer.Exit(2)


def _check_options(out: Path | None, docs: Path | None, calibration: Path | None) -> None:
    for option, folder in (("--out", out), ("--docs", docs and docs.parent)):
        if folder:
            check_folder(option, folder)
    if docs and docs.is_dir():
        raise InputError(f"--docs {docs}: is a folder; expected a file")
    if calibration and not calibration.is_dir():
        raise InputError(f"--calibration {calibration}: there is no such folder")


@dataclass
class _Judged:
    """Cases that were simulated, their costs and what they would be otherwise, by name; and why
    others were not."""

    scores: list[Score] = field(default_factory=list)
    costs: dict[str, Profile] = field(default_factory=dict)
    changed: dict[str, list[Otherwise]] = field(default_factory=dict)
    unusable: list[InputError] = field(default_factory=list)


def _judged(
    folders: list[Path], profile: Path | None, calibration: Path | None, *, varied: bool
) -> _Judged:
    """All cases that can be used. Raises InputError if the only one, or none, can be."""
    from simkv.proof.validation.cases.calibration import calibrate
    from simkv.proof.validation.cases.case import read_case
    from simkv.proof.validation.cases.score import judge
    from simkv.proof.validation.cases.sensitivity import otherwise
    from simkv.proof.validation.cases.simulate import engine_of

    found = _Judged()
    with progress("cases", len(folders)) as advance:
        for folder in folders:
            try:
                case = read_case(folder)
                if case.name in found.costs:
                    raise InputError(f"{case.name}: two cases have this name; give each once")
                costs = calibrate(case, profile, calibration)
                scored = judge(case, costs, *engine_of(case))
                found.changed[case.name] = otherwise(case, costs) if varied else []
                found.scores.append(scored)
                found.costs[case.name] = costs
            except InputError as error:
                if len(folders) == 1:
                    raise
                found.unusable.append(error)
            advance()
    return found


def _above_kernels(found: _Judged) -> tuple[list[HostTimes], list[str]]:
    """What the steps of the cases took above their kernels, and why some do not tell."""
    from simkv.proof.validation.cases.steps import host_times

    told, untold = [], []
    for scored in found.scores:
        try:
            told.append(host_times(scored.case, found.costs[scored.case.name]))
        except InputError as error:
            untold.append(str(error))
    return told, untold


def _tables(folders: list[Path], given: Path | None) -> list[Path]:
    """Folders of kernel tables: beside the cases, and the one that was given."""
    beside = [folder.resolve().parent / "calibration" for folder in folders]
    return [path for path in dict.fromkeys([*beside, *([given] if given else [])]) if path.is_dir()]
