"""``simkv diagnose``: find affected requests, cause and fix from the logs of a server."""

from __future__ import annotations

import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from simkv.cli.command_support import AsJson, Interrupted, Trust, print_json, progress, show_lines
from simkv.core.errors import InputError

if TYPE_CHECKING:
    from simkv.incident.evidence import Evidence
    from simkv.incident.measured_answer import IncidentAnswer
    from simkv.incident.server_setup import UserSettings

#: Name of the standard input as INPUT.
STDIN = Path("-")


def diagnose(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            metavar="INPUT...",
            help="Server logs, OpenTelemetry spans, Prometheus data or benchmark results (- "
            "reads standard input), or the directory of an earlier diagnosis.",
        ),
    ],
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Engine name, if the inputs do not identify it (e.g. vllm)."
        ),
    ] = None,
    version: Annotated[
        str | None,
        typer.Option(help="Engine version, such as 0.11.0, if the inputs do not identify it."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="GPU name, such as H100-SXM, if the inputs do not identify it."
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Model name, if the inputs do not identify it."),
    ] = None,
    tp: Annotated[int | None, typer.Option(min=1, help="Tensor parallel size.")] = None,
    dp: Annotated[int | None, typer.Option(min=1, help="Data parallel size.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="engine.NAME=VALUE",
            help="Engine setting that the inputs do not contain; may be repeated.",
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="OURS=THEIRS,...",
            help="Columns of a CSV or JSON lines file with one row per request, such as "
            "arrival=ts,prompt_tokens=in,output_tokens=out,ttft_ms=ttft,e2e_ms=total.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write results to this directory (default: diagnosis/)."),
    ] = None,
    until: Annotated[
        int,
        typer.Option(
            min=1,
            max=4,
            metavar="STAGE",
            help="Last stage to run: 1 (read the inputs), 2 (rebuild the workload), 3 "
            "(calibrate step times) or 4 (explain).",
        ),
    ] = 4,
    fast: Annotated[
        bool,
        typer.Option(
            "--fast", help="Print the triage of the log lines and stop, without a simulation."
        ),
    ] = False,
    try_flags: Annotated[
        bool, typer.Option(help="Simulate changes of the server's flags to find a fix.")
    ] = True,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of processes (default: one per core).")
    ] = None,
    _trusted: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Diagnose an incident from a server's logs.

    First, print a triage: findings that follow from the log lines alone. Then rebuild the incident
    as a simulation, and report the affected requests, the cause and a fix. If you interrupt the
    simulation, only the triage remains. All results are files in one directory. You may edit the
    files and pass the directory as INPUT: simkv then uses these files instead of creating them
    again. Exit 0 if no problem was found, 3 if a problem was found, 1 if the simulation does not
    reproduce the incident, 2 for bad input.
    """
    from simkv.incident import incident_folder as files

    set_values = parse_engine_overrides(set_ or [])
    resumed = len(inputs) == 1 and files.is_incident(inputs[0])
    target = out or (inputs[0] if resumed else Path("diagnosis"))
    if resumed:
        if target != inputs[0]:
            raise InputError(
                f"--out {target}: cannot be combined with a resumed run; "
                f"results stay in {inputs[0]}"
            )
        evidence = files.read_evidence(target)
    else:
        files.check_incident_folder(target)
        evidence = _read(inputs, columns)
    with _finished_stages(target) as finished:
        answer, triage = _triage(evidence, target, resumed=resumed)
        finished()
        if not as_json:
            show_lines(*triage)
            if not fast:
                show_lines(
                    "Simulating the incident. If you interrupt it (Ctrl-C), the triage above "
                    "is the result."
                )
            sys.stdout.flush()
        if not fast:
            from simkv.incident.server_setup import UserSettings

            asked = UserSettings(engine, version, gpu, model, tp, dp, set_values)
            answer = _simulated(target, asked, until, jobs, try_flags, finished)
    if not fast and answer is not None and not as_json:
        show_lines("", *answer.summary_lines)
    written = sorted(path.name for path in target.iterdir())
    if as_json:
        from simkv.report.json_answers import DiagnoseAnswer

        print_json(
            DiagnoseAnswer(
                triage=triage,
                answer=[] if answer is None or fast else list(answer.summary_lines),
                healthy=None if answer is None else answer.healthy,
                explained=None if answer is None else answer.explained,
                cause="" if answer is None else answer.cause,
                folder=str(target),
                files=written,
            )
        )
    else:
        show_lines(f"\nWritten to {target}: {', '.join(written)}")
    if answer is not None and not answer.healthy:
        raise typer.Exit(3 if answer.explained else 1)


def _triage(
    evidence: Evidence, target: Path, *, resumed: bool
) -> tuple[IncidentAnswer | None, list[str]]:
    """Write the preliminary answer from the log lines alone; also return the triage as lines."""
    from simkv.core.atomic_files import write_text
    from simkv.incident import incident_folder as files
    from simkv.incident.log_summary import summarize_log
    from simkv.incident.measured_answer import summarize_measured, triage_lines, with_inferred
    from simkv.incident.worst_part import select_worst_part

    summary = summarize_log(evidence)
    lines = list(triage_lines(evidence, summary))
    if not resumed:
        files.write_evidence(target, select_worst_part(with_inferred(evidence, summary)))
    if summary is None or (target / files.DIAGNOSIS).is_file():
        return None, lines
    answer = summarize_measured(summary, evidence, "only the log lines were evaluated")
    write_text(target / files.DIAGNOSIS, answer.text)
    return answer, lines


def _simulated(
    target: Path,
    asked: UserSettings,
    until: int,
    jobs: int | None,
    try_flags: bool,
    finished: Callable[[], None],
) -> IncidentAnswer | None:
    """Run the stages after reading. Return the answer of stage 4, or None if ``until`` is below 4.

    ``finished`` is called after stages 2 and 3. If the inputs do not suffice to simulate the
    incident, return a summary of the measurements instead.
    """
    with progress("rebuilding the workload") as advance:
        # imported below the bar because these modules are slow to import
        from simkv.incident import diagnose_stages
        from simkv.incident.evidence import UndeterminedError
        from simkv.study.worker_pool import cores

        try:
            if until >= 2:
                diagnose_stages.rebuild_stage(target, asked)
                finished()
            if until >= 3:
                advance(0, now="fitting step times")
                diagnose_stages.calibrate_stage(
                    target, asked, lambda done, total: advance(done, total)
                )
                finished()
            if until < 4:
                return None
            advance(0, now="runs")
            return diagnose_stages.explain_stage(
                target,
                asked,
                workers=jobs or cores(),
                tell=lambda done, expected: advance(done, expected),
                try_flags=try_flags,
            )
        except UndeterminedError as reason:
            return diagnose_stages.summarize_stage(target, reason)


@contextmanager
def _finished_stages(target: Path) -> Iterator[Callable[[], None]]:
    """Yield a function that marks all files in the directory as finished.

    On an interrupt, files that are not marked are removed. If the triage is finished, Interrupted
    is raised.
    """
    from simkv.incident import incident_folder as files

    before = set(target.iterdir()) if target.is_dir() else set()
    stored = set(before)
    try:
        yield lambda: stored.update(target.iterdir())
    except KeyboardInterrupt:
        for number in ("SIGINT", "SIGALRM"):  # another interrupt would leave files behind
            if hasattr(signal, number):  # Windows has no SIGALRM
                signal.signal(getattr(signal, number), signal.SIG_IGN)
        if stored == before and target / files.DIAGNOSIS not in before:
            if not (target / files.DIAGNOSIS).is_file():
                raise
            stored.update(target.iterdir())  # the triage writes this file last
        for path in set(target.iterdir()) - stored:
            path.unlink(missing_ok=True)
        raise Interrupted(
            target,
            f"the triage above is the result; `simkv diagnose {target}` resumes the simulation",
        ) from None


def _read(inputs: list[Path], columns: str | None) -> Evidence:
    """Read the inputs; standard input is stored in a temporary file."""
    from simkv.incident.mapped_records import parse_record_columns
    from simkv.incident.measured_answer import read_inputs

    mapped = None if columns is None else parse_record_columns(columns)
    with tempfile.TemporaryDirectory() as folder:
        stored = Path(folder) / "stdin"
        if STDIN in inputs:
            if inputs.count(STDIN) > 1:
                raise InputError("-: standard input can be given only once")
            with stored.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
            inputs = [stored if path == STDIN else path for path in inputs]
        try:
            with progress("reading", file=max(inputs, key=_size)) as advance:
                return read_inputs(inputs, lambda done: advance(done), mapped)
        except InputError as error:
            raise InputError(str(error).replace(str(stored), "standard input")) from error


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def parse_engine_overrides(assignments: list[str]) -> dict[str, Any]:
    """Parse assignments ``engine.NAME=VALUE`` to a dict of values by setting name."""
    found: dict[str, Any] = {}
    for text in assignments:
        path, sign, value = text.partition("=")
        head, _, name = path.strip().partition(".")
        if not sign or head != "engine" or not name:
            raise InputError(f"--set {text}: expected engine.NAME=VALUE")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found
