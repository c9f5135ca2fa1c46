"""Launch command of a scenario's server, to copy into a shell."""

from __future__ import annotations

import shlex
from collections.abc import Collection

from simkv.core.engine_flags import Flag, sources
from simkv.core.errors import InputError
from simkv.core.server_options import LaunchOptions
from simkv.costs.hardware.model_gpu_catalog import find_architecture
from simkv.scenario.fleet_section import ReplicaGroup
from simkv.scenario.hardware_section import HardwareSection
from simkv.scenario.launch_line import LaunchLine, OptionUse
from simkv.scenario.scenario import Scenario
from simkv.schedulers.engine_registry import find_engine_spec

#: Options of the weight format and of the KV format, by field of the hardware section.
_FORMATS = {"kv": "--kv-cache-dtype", "weights": "--quantization"}


def build_launch_command(
    scenario: Scenario, line: LaunchLine | None = None, ranks: int = 1
) -> str | None:
    """Return the command that starts one server, or None if simkv cannot write it.

    Settings that the launcher chooses by default are left out. Options of ``line`` are repeated.
    The model and its parallelism come from the scenario. ``ranks`` is the number of data-parallel
    ranks of the server that the scenario simulates as replicas.
    """
    spec, hardware = find_engine_spec(scenario.engine), scenario.hardware
    server = spec.server_options
    if server is None or hardware is None:
        return None
    words = shlex.split(server.start.format(model=shlex.quote(_model(hardware.model, line))))
    if hardware.dp > 1:
        tp = hardware.tp * hardware.dp if spec.ranks else hardware.tp
        words += [server.tp, str(tp), server.dp, str(hardware.dp)]
    elif hardware.tp > 1:
        words += [server.tp, str(hardware.tp)]
    if ranks > 1:
        words += [server.dp, str(ranks)]
    if line is None:
        words += _online_quantization(hardware)
        formats = ((option, getattr(hardware, name)) for name, option in _FORMATS.items())
        words += [word for option, value in formats if value for word in (option, str(value))]
    own = _own_options(line, server, scenario) if line else []
    settings = _settings(scenario, {path for one in own for path in one.fields})
    named = {*words, *(one.name for one in own)}
    settings = [one for one in settings if one.split()[0] not in named]
    return " ".join([shlex.join(words), *(one.text for one in own), *settings])


def describe_launch(scenario: Scenario, line: LaunchLine | None, label: str = "") -> list[str]:
    """Return lines of text with the launch command of each group of replicas.

    The result is empty if simkv cannot write the command. ``label`` is the name of the deployment.
    """
    command = build_launch_command(scenario, line)
    if command is None:
        return []
    what = f" for {label}" if label else ""
    groups = scenario.fleet.groups if scenario.fleet else [ReplicaGroup()]
    server = find_engine_spec(scenario.engine).server_options
    lines = []
    for group in groups:
        role, more = "", ""
        if group.role != "both":
            role, more = f" ({group.role})", f" {server.transfer if server else ''}"
        lines += [f"Launch command{what}{role}, {group.count} x:", f"  {command}{more}"]
    return lines


def _own_options(line: LaunchLine, server: LaunchOptions, scenario: Scenario) -> list[OptionUse]:
    """Return the options of a launch line that the scenario does not override.

    Options for the model and its parallelism are left out.
    """
    placed = (*server.model, server.tp, server.dp)
    return [
        one
        for one in line.options
        if one.text.startswith("-")
        and one.name not in placed
        and not _overruled(one, line, scenario)
    ]


def _overruled(option: OptionUse, line: LaunchLine, scenario: Scenario) -> bool:
    """Return whether the scenario sets another number than an option of the launch line."""
    numbers = {
        path.removeprefix("engine."): line.fields.get(path)
        for path in option.fields
        if path.startswith("engine.")
    }
    return any(
        isinstance(value, int) and getattr(scenario.engine, name, value) != value
        for name, value in numbers.items()
    )


def _model(name: str, line: LaunchLine | None) -> str:
    """Return the name of the model in the launch line, or else its published name with the
    organization.
    """
    if line and line.model:
        return line.model
    if "/" in name or name.endswith(".json"):
        return name
    try:
        return find_architecture(name).name
    except InputError:
        return name


def _online_quantization(hardware: HardwareSection) -> list[str]:
    """Return the option that quantizes the model when it is loaded, or no option."""
    if "/" in hardware.model or hardware.model.endswith(".json") or hardware.weights:
        return []
    asked = find_architecture(hardware.model)
    same = asked.published == find_architecture(asked.name).published
    return [] if same else [_FORMATS["weights"], asked.published.weights]


def _settings(scenario: Scenario, stated: Collection[str]) -> list[str]:
    """Return the arguments for engine settings that differ from the launcher's choices.

    ``stated`` contains the fields that other arguments set.
    """
    spec, origins = find_engine_spec(scenario.engine), scenario.origins.engine
    given = list(origins.given) if origins else []
    if spec.longest and spec.longest not in given and _is_shorter(scenario):
        given.append(spec.longest)
    marks = sources(spec.config)
    found = []
    for name in given:
        mark, value = marks.get(name), getattr(scenario.engine, name, None)
        same = value == spec.config.__dataclass_fields__[name].default
        is_off = same and (value is None or isinstance(value, bool))
        if isinstance(mark, Flag) and not is_off and f"engine.{name}" not in stated:
            found.append(mark.to_argument(name, value, negatable=spec.has_negatable_flags))
    return found


def _is_shorter(scenario: Scenario) -> bool:
    """Return whether the maximum sequence length is smaller than the model's."""
    limit = find_engine_spec(scenario.engine).length_limit(scenario.engine)
    try:
        model = find_architecture(scenario.hardware.model) if scenario.hardware else None
    except InputError:
        return False
    return bool(model and limit and limit < model.max_model_len)
