"""Engine settings derived from the ``hardware`` section of a scenario.

    engine: {name: vllm, max_num_seqs: 64, kv_offloading_size: 64}
    hardware: {gpu: H100-SXM, model: llama-3.1-8b}

With ``hardware``, each setting that is missing or ``auto`` gets the value that the engine's
launcher chooses for that GPU and model (``EngineSpec.launch``). The size of the KV cache is
computed from the remaining GPU memory. Sizes of host memory in GiB are converted to numbers of
blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from simkv.core.engine_spec import EngineConfig, EngineSpec
from simkv.core.engine_version import is_since
from simkv.core.errors import InputError
from simkv.core.execution_settings import ExecutionSettings
from simkv.core.launcher_rules import LaunchError, LaunchTarget, ModelFacts
from simkv.core.scheduler_protocol import MAX_BLOCKS
from simkv.costs.hardware.execution_settings_lookup import find_execution_settings
from simkv.costs.hardware.kv_capacity import (
    KvCapacity,
    can_checkpoint_states,
    compute_kv_capacity,
    kv_groups,
)
from simkv.costs.hardware.model_architecture import Architecture, Mla
from simkv.costs.hardware.model_gpu_catalog import Gpu, find_architecture
from simkv.costs.hardware.replica_hardware import Hardware
from simkv.scenario.engine_section import AnyEngine
from simkv.scenario.hardware_section import HardwareSection, build_hardware
from simkv.scenario.offloading_size import BACKEND, CACHE_BYTES, SIZE, host_blocks
from simkv.scenario.overrides import merge
from simkv.schedulers.engine_registry import ENGINES

AUTO = "auto"
#: Error of the memory computed for the KV cache, as a fraction of the GPU's memory. A start is
#: refused only if it would also fail with this amount of additional memory.
MEMORY_ERROR = 0.03
#: Path of a section or field in a scenario.
FieldPath = tuple[str | int, ...]
#: Function from a field's name in an engine section to its path.
FieldLocator = Callable[[str], FieldPath]


@dataclass(frozen=True)
class EngineSettings:
    """Names of the settings in an engine section, by origin.

    The user set the settings in ``given``. The engine's launcher chose the settings in ``default``,
    and ``source`` describes their origin.
    """

    given: tuple[str, ...]
    default: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class SettingOrigins:
    """Origins of the settings of each engine section of a scenario, by path of the section."""

    sections: Mapping[FieldPath, EngineSettings] = field(default_factory=dict, compare=False)

    @property
    def engine(self) -> EngineSettings | None:
        """Origins of the ``engine`` section; None without hardware."""
        return self.sections.get(("engine",))


class UnknownSetting(InputError):
    """Raised for a setting that cannot be determined. ``field`` is the path of the setting."""

    def __init__(self, field: FieldPath, why: str) -> None:
        super().__init__(why)
        self.field = field


def resolve_defaults(
    data: Any, folder: Path, *, incomplete: bool = False
) -> tuple[Any, SettingOrigins]:
    """Return a scenario as plain data, with the engine settings that follow from its hardware.

    Raises UnknownSetting if a setting is ``auto`` without hardware, if the weights do not fit into
    memory, or if the engine would not start. With ``incomplete``, no such error is raised, because
    variants will complete the data.
    """
    if not isinstance(data, dict):
        return data, SettingOrigins()
    found, origins = {**data}, dict[FieldPath, EngineSettings]()
    engine = data.get("engine")
    spec = _spec(engine)
    if spec and isinstance(engine, dict):
        place: FieldPath = ("engine",)
        found["engine"] = _completed(
            spec, engine, data, folder, lambda knob: (*place, knob), incomplete
        )
        _note(origins, place, spec, engine, found["engine"], data)
    fleet = data.get("fleet")
    if isinstance(fleet, dict) and isinstance(fleet.get("replicas"), list):
        common = found.get("engine")
        groups = _groups(data, common, fleet["replicas"], folder, incomplete, origins)
        found["fleet"] = {**fleet, "replicas": list(groups)}
    return _with_bytes(found, folder), SettingOrigins(origins)


def _note(
    origins: dict[FieldPath, EngineSettings],
    place: FieldPath,
    spec: EngineSpec,
    given: dict[str, Any],
    whole: dict[str, Any],
    data: dict[str, Any],
) -> None:
    """Record the origins of the settings of an engine section with hardware."""
    hardware = data.get("hardware")
    if not isinstance(hardware, dict | HardwareSection):
        return
    told = [name for name, value in given.items() if value != AUTO and whole.get(name) == value]
    names = [one for one in spec.config.__dataclass_fields__ if one not in ("name", "variant")]
    gpu = hardware.get("gpu") if isinstance(hardware, dict) else hardware.gpu
    raised = "" if spec.memory in told else _raised_memory(spec, whole, data)
    raised += _fitted_length(spec, given, whole, hardware)
    origins[place] = EngineSettings(
        tuple(name for name in names if name in told),
        tuple(name for name in names if name in whole and name not in told),
        f"default of {spec.name} {whole.get('variant', spec.config().variant)} on {gpu}{raised}",
    )


def _raised_memory(spec: EngineSpec, whole: dict[str, Any], data: dict[str, Any]) -> str:
    """Return a note if the KV cache is larger than computed, so that the engine starts."""
    size = whole.get(spec.memory)
    try:
        section = HardwareSection.model_validate(data["hardware"])
        room = _capacity(spec, whole, build_hardware(section)) if data.get("hardware") else None
    except (ValueError, InputError):
        return ""
    if room is None or spec.memory_in_tokens or not isinstance(size, int):
        return ""
    if not room.num_gpu_blocks < min(size, MAX_BLOCKS):
        return ""
    return (
        f"; {spec.memory} is raised from {room.num_gpu_blocks:,} to {size:,} so that "
        f"{spec.longest} fits, within the error of the computed memory; the server may refuse to "
        "start"
    )


def _fitted_length(
    spec: EngineSpec,
    given: dict[str, Any],
    whole: dict[str, Any],
    hardware: dict[str, Any] | HardwareSection,
) -> str:
    """Return a note if the maximum sequence length was reduced to what fits into the KV cache."""
    model = hardware.get("model") if isinstance(hardware, dict) else hardware.model
    length = whole.get(str(spec.longest))
    if given.get(str(spec.longest)) != AUTO or not isinstance(length, int):
        return ""
    try:
        most = find_architecture(str(model)).max_model_len
    except InputError:
        return ""
    if length >= most:
        return ""
    return (
        f"; {spec.longest} is reduced from the model's {most:,} to {length:,}, because a longer "
        "request does not fit into the KV cache"
    )


def _with_bytes(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Add the KV bytes per token and GPU to ``offload`` if the engine copies KV to host memory."""
    engine, offload = data.get("engine"), data.get("offload", {})
    if not isinstance(engine, dict) or not isinstance(offload, dict):
        return data
    spec = ENGINES.get(str(engine.get("name")))
    copies = spec and spec.host_blocks and engine.get(spec.host_blocks)
    if not copies or "bytes_per_token" in offload or data.get("hardware") is None:
        return data
    room = _room(engine, data, folder)
    told = {"bytes_per_token": room.block_bytes / room.block_size} if room else {}
    return {**data, "offload": {**told, **offload}}


def _groups(
    data: dict[str, Any],
    common: Any,
    groups: list[Any],
    folder: Path,
    incomplete: bool,
    origins: dict[FieldPath, EngineSettings],
) -> Iterator[Any]:
    """Yield the groups of replicas with the settings that follow from their hardware and engine.

    A group inherits the ``common`` engine section, but not the settings that a launcher chose.
    """
    for index, group in enumerate(groups):
        if not isinstance(group, dict):
            yield group
            continue
        own = {name: group[name] for name in ("engine", "hardware", "profile") if name in group}
        whole = merge({name: data.get(name) for name in own.keys() | {"engine", "hardware"}}, own)
        spec = _spec(whole["engine"]) if own else None
        if spec is None:
            yield group
            continue
        told = group["engine"] if isinstance(group.get("engine"), dict) else {}
        at: FieldPath = ("fleet", "replicas", index, "engine")
        section = {**whole, "offload": data.get("offload")}
        place = partial(_place, told, at)
        found = _completed(spec, whole["engine"], section, folder, place, incomplete)
        _note(origins, at, spec, whole["engine"], found, section)
        if _spec(common) is spec:
            fields = spec.config.__dataclass_fields__
            gone = {k: fields[k].default for k in common if k in fields and k not in found}
            found = {k: v for k, v in found.items() if k in told or common.get(k, AUTO) != v} | gone
        yield {**group, "engine": found} if found or told else group


def _place(told: dict[str, Any], at: FieldPath, knob: str) -> FieldPath:
    """Return the path of a setting: in the group's section ``at`` if set there, or in the common
    section.
    """
    return (*(at if knob in told else ("engine",)), knob)


def _spec(engine: Any) -> EngineSpec | None:
    """Return the spec of the packaged engine of a section."""
    return ENGINES.get(str(engine.get("name"))) if isinstance(engine, dict) else None


def _in_blocks(spec: EngineSpec, engine: dict[str, Any]) -> dict[str, Any]:
    """Return an engine section without its sizes in GiB or bytes."""
    sizes = (SIZE, BACKEND, CACHE_BYTES) if spec.host_blocks else ()
    return {knob: value for knob, value in engine.items() if knob not in sizes}


def _cache_bytes(
    spec: EngineSpec, engine: dict[str, Any], data: dict[str, Any], place: FieldLocator
) -> int | None:
    """Return the size of the KV cache in bytes if the engine section states it."""
    size = engine.get(CACHE_BYTES) if spec.host_blocks else None
    if size is None:
        return None
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UnknownSetting(
            place(CACHE_BYTES), f"must be a number of bytes greater than 0, got {size!r}"
        )
    if data.get("hardware") is None:
        raise UnknownSetting(
            place(CACHE_BYTES),
            f"requires hardware with gpu and model; add them, or set {spec.memory} instead",
        )
    return size


@lru_cache(maxsize=1)
def _checked() -> TypeAdapter[EngineConfig]:
    return TypeAdapter(AnyEngine)


def _completed(
    spec: EngineSpec,
    engine: dict[str, Any],
    data: dict[str, Any],
    folder: Path,
    place: FieldLocator,
    incomplete: bool,
) -> dict[str, Any]:
    """Return an engine section with settings that follow from hardware, and with sizes in
    blocks.
    """
    plain = _in_blocks(spec, engine)
    try:
        size = _cache_bytes(spec, engine, data, place)
        found = _launched(spec, plain, data, folder, place, size)
        if spec.host_blocks and SIZE in engine:
            found |= _host(spec, {**engine, **found}, data, folder, place)
    except UnknownSetting:
        if not incomplete:
            raise
        fits_all = {spec.memory: _fits_all(spec, plain)} if plain.get(spec.memory) == AUTO else {}
        given = {knob: value for knob, value in plain.items() if value != AUTO}
        return {**given, **fits_all, **({"startup_check": False} if spec.longest else {})}
    return found


def _host(
    spec: EngineSpec,
    engine: dict[str, Any],
    data: dict[str, Any],
    folder: Path,
    place: FieldLocator,
) -> dict[str, Any]:
    """Return the number of host blocks for a size in GiB."""
    given = data.get("hardware") is not None
    room = _room(_in_blocks(spec, engine), data, folder) if given else None
    if given and room is None:  # validation reports the error
        return {str(spec.host_blocks): 1}
    try:
        return dict(host_blocks(spec, engine, data.get("offload"), room))
    except InputError as error:
        raise UnknownSetting(place(SIZE), str(error)) from error


def _launched(
    spec: EngineSpec,
    engine: dict[str, Any],
    data: dict[str, Any],
    folder: Path,
    place: FieldLocator,
    cache_bytes: int | None,
) -> dict[str, Any]:
    """Return the section with the launcher's values for missing settings."""
    launch = spec.launch
    asked = [knob for knob in (spec.memory, *launch.fields) if engine.get(knob) == AUTO]
    given = {knob: value for knob, value in engine.items() if knob not in asked}
    if data.get("hardware") is None:
        defaults = spec.config.__dataclass_fields__
        for knob in asked:
            if defaults[knob].default is not None:
                raise UnknownSetting(
                    place(knob),
                    "auto requires hardware with gpu and model; add them, or set a number",
                )
        return given
    try:
        spec.naming.variant_of(str(given.get("variant", spec.config().variant)))
        section = HardwareSection.model_validate(data["hardware"], context={"folder": folder})
        hardware = None if data.get("profile") else build_hardware(section)
    except (ValueError, InputError):
        hardware = None
    if hardware is None or _has_invalid_field(spec, given):  # validation reports the error
        return {spec.memory: _fits_all(spec, given), **given}
    try:
        fitted = [k for k in asked if k in launch.fitted]
        return launch_defaults(spec, given, hardware, fitted, cache_bytes)
    except LaunchError as error:
        raise UnknownSetting(place(error.field), str(error)) from error


def _has_invalid_field(spec: EngineSpec, given: dict[str, Any]) -> bool:
    """Return whether a single setting is invalid, whatever the other settings are."""
    try:
        _checked().validate_python({spec.memory: _fits_all(spec, given), **given})
    except ValidationError as error:
        return any(one["type"] != "value_error" for one in error.errors())
    return False


def launch_defaults(
    spec: EngineSpec,
    given: Mapping[str, Any],
    hardware: Hardware,
    auto: list[str] | None = None,
    cache_bytes: int | None = None,
) -> dict[str, Any]:
    """Return the settings of the engine ``spec`` when it starts on ``hardware``.

    ``given`` are the user's settings. ``auto`` lists settings that the engine adapts to its memory.
    ``cache_bytes`` is the size of the KV cache of a GPU if the user states it in bytes.
    Raises LaunchError if the weights leave no memory for KV or if the engine would not start.
    """
    machine, asked = target_of_hardware(hardware), dict.fromkeys(auto or (), AUTO)
    found = {**given, **spec.launch.before(given, machine)}

    def complete(section: dict[str, Any]) -> dict[str, Any]:
        whole = {**section, **spec.launch.after({**section, **asked}, machine)}
        length = whole.get(spec.longest) if spec.longest else None
        if isinstance(length, int) and spec.launch.longest and whole.get("startup_check", True):
            fitting = spec.launch.longest(whole, length)
            if fitting < length:
                raise LaunchError(
                    str(spec.longest), f"the KV cache has room for only {fitting:,} tokens"
                )
        return whole

    found |= _size(spec, found, hardware, cache_bytes)
    if spec.memory in given:
        return {**found, **spec.launch.after({**found, **asked}, machine)}
    try:
        return complete(found)
    except LaunchError:
        if cache_bytes is not None:
            raise
        enough = _enough_blocks(spec, found, hardware, complete)
        if enough is None:
            room = _capacity(spec, found, hardware)
            if room is not None and room.num_gpu_blocks < 2:
                raise LaunchError(spec.memory, room.refusal) from None
            return {**found, **spec.launch.after({**found, **asked}, machine)}
        return complete({**found, spec.memory: enough})


def _enough_blocks(
    spec: EngineSpec,
    found: dict[str, Any],
    hardware: Hardware,
    complete: Callable[[dict[str, Any]], dict[str, Any]],
) -> int | None:
    """Return the size of the smallest KV cache with which the engine starts, in the unit of
    ``spec.memory``.

    Return None if the engine does not start even with ``MEMORY_ERROR`` more memory.
    """
    room = _capacity(spec, found, hardware)
    if room is None or spec.memory_in_tokens:
        return None
    least: int = found[spec.memory]
    most = _most_blocks(room)
    if not _starts({**found, spec.memory: most}, complete):
        return None
    while most - least > 1:
        middle = (least + most) // 2
        if _starts({**found, spec.memory: middle}, complete):
            most = middle
        else:
            least = middle
    return most


def _most_blocks(room: KvCapacity) -> int:
    """Return the number of blocks if the real memory is larger than computed by
    ``MEMORY_ERROR``.
    """
    error = int(MEMORY_ERROR * room.hardware.gpu.memory_bytes)
    return max((room.rest + error) // room.block_bytes, 0)


def _starts(section: dict[str, Any], complete: Callable[[dict[str, Any]], dict[str, Any]]) -> bool:
    try:
        complete(section)
    except LaunchError:
        return False
    return True


def _capacity(spec: EngineSpec, engine: Mapping[str, Any], hardware: Hardware) -> KvCapacity | None:
    """Return the computed KV capacity; None if the engine section is invalid."""
    loose = {"startup_check": False} if spec.longest else {}
    try:
        whole = {"name": spec.name, **engine, spec.memory: _fits_all(spec, engine), **loose}
        setting = find_execution_settings(_checked().validate_python(whole))
        return compute_kv_capacity(hardware, setting)
    except (ValidationError, InputError):
        return None


def target_of_hardware(hardware: Hardware) -> LaunchTarget:
    """Return the properties of hardware from which the launcher chooses settings."""
    return target_of_gpu(hardware.gpu, hardware.architecture, hardware.kv)


def target_of_gpu(gpu: Gpu, model: Architecture | None = None, kv: str = "bf16") -> LaunchTarget:
    """Return the properties of a GPU, and of a model if given, from which the launcher chooses
    settings.
    """
    facts = None
    if model:
        latent = [p.attention for p in model.layers if isinstance(p.attention, Mla)]
        rope = model.rope
        facts = ModelFacts(
            model.name,
            model.max_model_len,
            model.model_type,
            rope.kind if rope else "",
            rope.factor if rope else 1.0,
            rope.original if rope else None,
            latent_width=bool(latent),
            sparse=any(layer.sparse for layer in latent),
        )
    return LaunchTarget(gpu.name, gpu.memory_bytes, gpu.capability, kv, facts)


def _room(engine: dict[str, Any], data: dict[str, Any], folder: Path) -> KvCapacity | None:
    """Return the KV capacity of a GPU; None if the hardware or the engine section is invalid."""
    try:
        section = HardwareSection.model_validate(data["hardware"], context={"folder": folder})
        return compute_kv_capacity(
            build_hardware(section), find_execution_settings(_checked().validate_python(engine))
        )
    except (ValidationError, InputError):
        return None


def _fits_all(spec: EngineSpec, engine: Mapping[str, Any]) -> int:
    """Return a size of the KV cache in which any sequence fits."""
    page = engine.get(spec.block, 1) if spec.memory_in_tokens else 1
    size: int = MAX_BLOCKS * (page if isinstance(page, int) else 1)
    return size


def _size(
    spec: EngineSpec, engine: dict[str, Any], hardware: Hardware, cache_bytes: int | None
) -> dict[str, Any]:
    """Return the settings for the size of the KV cache.

    For a model with several kinds of layers, the result may include the layer groups and the tokens
    per block. If the engine section is invalid, the cache is large enough for any sequence. A
    number of blocks in the section takes precedence over ``cache_bytes``.
    """
    fits_all = {spec.memory: _fits_all(spec, engine)}
    given = {spec.memory: engine[spec.memory]} if spec.memory in engine else {}
    if given and (spec.groups is None or spec.groups in engine):
        return given
    loose = {"startup_check": False} if spec.longest else {}
    try:
        whole = {"name": spec.name, **engine, **fits_all, **loose}
        setting = find_execution_settings(_checked().validate_python(whole))
        room = compute_kv_capacity(hardware, setting)
    except (ValidationError, InputError):
        return given or fits_all
    size = room.num_gpu_blocks
    if cache_bytes is not None:
        size = cache_bytes // room.block_bytes
        if size < 2 and not given:
            raise LaunchError(spec.memory, f"{cache_bytes:,} bytes are less than two blocks of KV")
    elif not given and (_most_blocks(room) < 2 or (spec.memory_in_tokens and size < 2)):
        raise LaunchError(spec.memory, room.refusal)
    blocks = min(max(size, 2), MAX_BLOCKS)
    told = group_knobs(spec, engine.get("variant", spec.config().variant), room, setting)
    if told and (spec.groups in engine or _accepts(spec, {**whole, **told}, setting.release)):
        kept = (spec.block,) if spec.groups in engine else tuple(told)
        stated = {knob: engine[knob] for knob in (spec.checkpoints,) if knob in engine}
        grouped = {knob: told[knob] for knob in kept if knob in told}
        return {spec.memory: blocks, **grouped, **stated, **given}
    return given or {spec.memory: blocks * (setting.block_size if spec.memory_in_tokens else 1)}


def _accepts(spec: EngineSpec, engine: dict[str, Any], release: str) -> bool:
    """Return whether a release supports the layer groups of an engine section."""
    if spec.all_groups_since is None or is_since(release, spec.all_groups_since):
        return True
    try:
        _checked().validate_python(engine)
    except ValidationError:
        return False
    return True


def group_knobs(
    spec: EngineSpec, variant: str, room: KvCapacity, setting: ExecutionSettings
) -> dict[str, Any]:
    """Return the settings that a model with several kinds of layers requires; empty for other
    models.

    The settings are the groups of layers, the tokens per block if the configured value is too
    small, and whether states are also saved inside a chunk. The result is empty if the engine
    variant does not support layer groups.
    """
    lacks = spec.lacks.get(spec.naming.variant_of(variant), ())
    groups = kv_groups(room.hardware, room.block_size)
    if spec.groups is None or spec.groups in lacks or len(groups) < 2:
        return {}
    told: dict[str, Any] = {spec.groups: groups}
    if room.block_size != setting.block_size:
        told[spec.block] = room.block_size
    if spec.checkpoints and spec.checkpoints not in lacks and can_checkpoint_states(room.hardware):
        told[spec.checkpoints] = True
    return told
