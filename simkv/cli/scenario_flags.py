"""Options of commands that build a scenario without a file; see ``ScenarioOptions``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from simkv.cli.command_support import print_error
from simkv.core.errors import InputError
from simkv.scenario.scenario_options import ScenarioOptions, find_flag

if TYPE_CHECKING:
    from simkv.incident.log_traffic import LogTraffic
    from simkv.scenario.scenario_builder import BuiltScenario
    from simkv.scenario.yaml_document import YamlDocument


def list_parameters(several: Collection[str] = ()) -> list[inspect.Parameter]:
    """Return the fields of ``ScenarioOptions`` as parameters of a command.

    Options in ``several`` take several values, separated by commas; ``--from-command`` is repeated
    instead.
    """
    hints = get_type_hints(ScenarioOptions, include_extras=True)
    return [_parameter(one.name, hints[one.name], several) for one in fields(ScenarioOptions)]


def _parameter(name: str, hint: Any, several: Collection[str]) -> inspect.Parameter:
    kind, about = get_args(hint)
    text, metavar = about.help, about.metavar
    if name in several and name == "from_command":
        kind, text = list[str] | None, f"{text.removesuffix('.')}; may be repeated."
    elif name in several:
        kind, metavar = str | None, "VALUES"
        text = f"{text.removesuffix('.')}; several are separated by commas."
    bound = None if name in several else about.min
    option = typer.Option(find_flag(name), help=text, metavar=metavar, min=bound)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option]
    )


def add_scenario_flags(
    command: Callable[..., Any], several: Collection[str] = (), without: Collection[str] = ()
) -> None:
    """Replace the parameter ``**options`` of a command by the options that describe a scenario."""
    own = inspect.signature(command, eval_str=True)
    plain = [one for one in own.parameters.values() if one.kind is not one.VAR_KEYWORD]
    named = {one.name for one in plain} | set(without)
    more = [one for one in list_parameters(several) if one.name not in named]
    first = [one.replace(kind=one.POSITIONAL_OR_KEYWORD) for one in plain]
    later = [one.replace(kind=one.POSITIONAL_OR_KEYWORD) for one in more]
    command.__signature__ = own.replace(parameters=[*first, *later])  # type: ignore[attr-defined]


def options_of(values: Mapping[str, Any]) -> ScenarioOptions:
    """Select the options of ``ScenarioOptions`` from the values of a command's parameters."""
    names = [one.name for one in fields(ScenarioOptions)]
    return ScenarioOptions(**{name: values[name] for name in names if name in values})


def find_document(
    scenario: Path | None, options: ScenarioOptions
) -> tuple[YamlDocument, BuiltScenario | None]:
    """Return the scenario of a file, or the one that the options describe.

    The caller prints the notes on the options after it has checked the scenario (``print_notes``).
    Raises InputError if both or neither are given.
    """
    if scenario is not None:
        if options.given:
            raise InputError(
                f"{options.given[0]}: cannot be combined with a scenario file; use --set to "
                "override its fields"
            )
        from simkv.scenario.packaged_scenarios import find_scenario
        from simkv.scenario.yaml_document import read_document

        return read_document(find_scenario(scenario)), None
    if not options.given:
        raise InputError(
            "expected a scenario, or options that describe one: --gpu and --model (or "
            "--from-command), and a load"
        )
    if options.trace is not None and options.gpu is None and options.from_command is None:
        calibrated = _calibrated(options, options.trace)
        if calibrated is not None:
            return calibrated, None
    built = build_from(options)
    return built.document, built


def _calibrated(options: ScenarioOptions, trace: Path) -> YamlDocument | None:
    """Build a scenario from a server log, with step costs fitted to the log.

    The result is None if ``trace`` is not a server log.

    This function is used if ``--gpu`` is missing: the scenario then describes the server that wrote
    the log.
    """
    from simkv.cli.command_support import progress
    from simkv.incident import diagnose_stages
    from simkv.incident.incident_folder import SCENARIO, WORKLOAD, check_incident_folder
    from simkv.incident.log_traffic import is_trace
    from simkv.incident.server_setup import UserSettings
    from simkv.incident.web_access_log import is_access_log
    from simkv.scenario.trace_peak import find_peak_start, parse_duration
    from simkv.scenario.yaml_document import read_document

    if not trace.is_file() or is_trace(trace) or is_access_log(trace):
        return None
    used = {"--trace", "--engine", "--version", "--model", "--tp", "--dp", "--growth", "--peak"}
    for name in options.given:
        if name not in used:
            raise InputError(
                f"{name}: cannot be combined with a server log if --gpu is missing; add --gpu"
            )
    asked = UserSettings(
        options.engine, options.version, None, options.model, options.tp, options.dp
    )
    folder = Path("runs") / f"{trace.stem}-calibrated"
    check_incident_folder(folder)
    diagnose_stages.read_stage([trace], folder)
    diagnose_stages.rebuild_stage(folder, asked)
    with progress("simulations") as advance:
        diagnose_stages.calibrate_stage(folder, asked, lambda done, total: advance(done, total))
    document = read_document(folder / SCENARIO)
    print_error(
        f"note: step costs are fitted to {trace.name}; the scenario was written to {document.path}"
    )
    if options.growth is not None:
        document.override(f"workload.rate_scale={options.growth}", "--growth")
    if options.peak is not None:
        seconds = parse_duration(options.peak, "--peak")
        start, _ = find_peak_start(folder / WORKLOAD, seconds)
        document.override(f"workload.start={start}", "--peak")
        document.override(f"workload.duration={seconds}", "--peak")
    return document


def build_from(options: ScenarioOptions) -> BuiltScenario:
    """Build a scenario from options.

    If ``--trace`` is a server log, the scenario contains the requests of the log, and settings that
    the options do not state come from the log.
    """
    from simkv.scenario.scenario_builder import build_scenario

    traffic, notes = None, list[str]()
    if options.trace is not None:
        options, traffic = _with_log(options, options.trace, notes)
    built = build_scenario(options)
    if traffic is not None and built.line is not None:
        notes.append("the settings in the log are ignored; the command replaces them")
    elif traffic is not None:
        built.document.tree["engine"] |= traffic.settings
        names = ", ".join(f"{name} {value}" for name, value in traffic.settings.items())
        notes.append(f"settings found in the log: {names or 'none'}")
    return replace(built, notes=(*notes, *built.notes))


def print_notes(built: BuiltScenario | None, label: str = "") -> None:
    """Print the notes on a scenario built from options; each note starts with ``label``.

    Call this function after the scenario has been checked, so that an error is printed without
    notes.
    """
    for note in built.notes if built else ():
        print_error(f"note: {label}{note}")


def _with_log(
    options: ScenarioOptions, trace: Path, notes: list[str]
) -> tuple[ScenarioOptions, LogTraffic | None]:
    """If ``trace`` is a log, use its requests as the trace of the options; also return the log's
    settings. Notes for the user are added to ``notes``.
    """
    from simkv.incident.log_traffic import is_trace, read_log_traffic
    from simkv.incident.server_setup import UserSettings
    from simkv.incident.web_access_log import is_access_log

    if not trace.is_file() or is_trace(trace):
        return options, None
    if is_access_log(trace):
        return _with_access_log(options, trace, notes), None
    asked = UserSettings(options.engine, options.version, model=options.model)
    found = read_log_traffic(trace, Path("runs") / f"{trace.stem}-traffic", asked)
    notes.append(f"requests of {trace.name} written to {found.trace}")
    notes += [f"{trace.name}: {note}" for note in found.notes]
    notes.append(
        "the size of the KV cache and the step times follow from the GPU and the model, not "
        "from the log. The simulated server may be faster or slower than the server of the log. To "
        f"reproduce the server of the log: simkv diagnose {trace}"
    )
    changed: dict[str, Any] = {"trace": found.trace}
    if options.from_command is None:
        own = {"model": found.model, "version": found.version, "tp": found.tp}
        changed |= {name: value for name, value in own.items() if getattr(options, name) is None}
        changed["engine"] = found.engine
    return replace(options, **changed), found


def _with_access_log(options: ScenarioOptions, trace: Path, notes: list[str]) -> ScenarioOptions:
    """Use the arrivals of an access log as the trace; the options state the lengths of requests."""
    from simkv.incident.web_access_log import write_access_traffic

    for name in ("input_len", "output_len"):
        if getattr(options, name) is None:
            raise InputError(
                f"{find_flag(name)}: missing; give this option, because the access log {trace} "
                "does not contain the lengths of requests"
            )
    assert options.input_len
    assert options.output_len
    target = Path("runs") / f"{trace.stem}-traffic" / "traffic.csv"
    ratio = options.range_ratio or 0.0
    count = write_access_traffic(trace, target, options.input_len, options.output_len, ratio)
    notes.append(f"{count:,} requests of {trace.name} written to {target}")
    return replace(options, trace=target, input_len=None, output_len=None, range_ratio=None)
