"""Sizes in an engine's section that follow from the hardware: ``auto``, and GiB of host memory.

engine: {name: vllm, num_gpu_blocks: auto, kv_offloading_size: 64}
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from simkv.core.engine import EngineConfig, EngineSpec
from simkv.core.errors import InputError
from simkv.core.scheduler import MOST_BLOCKS
from simkv.core.setting import EngineSetting
from simkv.costs.hardware.blocks import KvRoom, checkpoints, kv_groups, kv_room
from simkv.costs.hardware.setting import setting_of
from simkv.scenario.engine import AnyEngine
from simkv.scenario.hardware import HardwareSection, hardware_of
from simkv.scenario.hostsize import BACKEND, SIZE, host_blocks
from simkv.scenario.merge import merge
from simkv.schedulers.registry import ENGINES

AUTO = "auto"
#: Where a field stands, by its name in the engine's section.
Place = Callable[[str], tuple[str | int, ...]]


class Unknown(InputError):
    """A size that cannot be found, and the ``field`` that asks for it."""

    def __init__(self, field: tuple[str | int, ...], why: str) -> None:
        super().__init__(why)
        self.field = field


def with_sizes(data: Any, folder: Path) -> Any:
    """A scenario as plain data, with numbers in place of ``auto`` and blocks in place of GiB.

    What is wrong with it in other ways is left to the check that follows. Raises Unknown where
    there is no hardware, or where the weights leave no room.
    """
    if not isinstance(data, dict):
        return data
    found = {**data}
    fleet = data.get("fleet")
    if isinstance(fleet, dict) and isinstance(fleet.get("replicas"), list):
        groups = list(_groups(data, fleet["replicas"], folder))
        found["fleet"] = {**fleet, "replicas": groups}
    engine = data.get("engine")
    spec = _asks(engine)
    if spec and isinstance(engine, dict):
        sized = _sized(spec, engine, data, folder, lambda knob: ("engine", knob))
        found["engine"] = {**_in_blocks(spec, engine), **sized}
    return _with_bytes(found, folder)


def _with_bytes(data: dict[str, Any], folder: Path) -> dict[str, Any]:
    """With the bytes that a GPU keeps of a token, where KV is copied to host memory."""
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


def _groups(data: dict[str, Any], groups: list[Any], folder: Path) -> Iterator[Any]:
    """Groups of replicas, each with the size that its own hardware and engine give."""
    for index, group in enumerate(groups):
        if not isinstance(group, dict):
            yield group
            continue
        own = {name: group[name] for name in ("engine", "hardware", "profile") if name in group}
        whole = merge({name: data.get(name) for name in own.keys() | {"engine", "hardware"}}, own)
        spec = _asks(whole["engine"]) if own else None
        if spec is None:
            yield group
            continue
        told = group["engine"] if isinstance(group.get("engine"), dict) else {}
        where: Place = partial(_place, told, ("fleet", "replicas", index, "engine"))
        sized = _sized(
            spec, whole["engine"], {**whole, "offload": data.get("offload")}, folder, where
        )
        yield {**group, "engine": {**_in_blocks(spec, told), **sized}}


def _place(told: dict[str, Any], at: tuple[str | int, ...], knob: str) -> tuple[str | int, ...]:
    """Where a group's knob stands: with the group ``at`` its own section, or with all engines."""
    return (*(at if knob in told else ("engine",)), knob)


def _asks(engine: Any) -> EngineSpec | None:
    """The engine of a section that asks for a size."""
    spec = ENGINES.get(str(engine.get("name"))) if isinstance(engine, dict) else None
    if spec and (engine.get(spec.memory) == AUTO or (spec.host_blocks and SIZE in engine)):
        return spec
    return None


def _in_blocks(spec: EngineSpec, engine: dict[str, Any]) -> dict[str, Any]:
    """An engine's section without what is told in GiB."""
    gib = (SIZE, BACKEND) if spec.host_blocks else ()
    return {knob: value for knob, value in engine.items() if knob not in gib}


@lru_cache(maxsize=1)
def _checked() -> TypeAdapter[EngineConfig]:
    return TypeAdapter(AnyEngine)


def _sized(
    spec: EngineSpec, engine: dict[str, Any], data: dict[str, Any], folder: Path, place: Place
) -> dict[str, Any]:
    """The knobs with the sizes that an engine's section asks for."""
    plain, sized = _in_blocks(spec, engine), {}
    if plain.get(spec.memory) == AUTO:
        sized = _auto(spec, plain, data, folder, place(spec.memory))
    if spec.host_blocks and SIZE in engine:
        given = data.get("hardware") is not None
        room = _room({**plain, **sized}, data, folder) if given else None
        if given and room is None:  # what is wrong with it is told by the check that follows
            return {**sized, spec.host_blocks: 1}
        try:
            sized |= host_blocks(spec, engine, data.get("offload"), room)
        except InputError as error:
            raise Unknown(place(SIZE), str(error)) from error
    return sized


def _room(engine: dict[str, Any], data: dict[str, Any], folder: Path) -> KvRoom | None:
    """The room on a GPU, None if hardware or engine are wrong."""
    try:
        section = HardwareSection.model_validate(data["hardware"], context={"folder": folder})
        return kv_room(hardware_of(section), setting_of(_checked().validate_python(engine)))
    except (ValidationError, InputError):
        return None


def _auto(
    spec: EngineSpec,
    engine: dict[str, Any],
    data: dict[str, Any],
    folder: Path,
    field: tuple[str | int, ...],
) -> dict[str, Any]:
    """The knob with the size, or one that fits anything if hardware or engine are wrong.

    With it come the groups of layers that the blocks were counted for, unless they are given, and
    the tokens in a block where these follow from the model.
    """
    if data.get("hardware") is None:
        raise Unknown(field, "auto needs hardware: with gpu and model; else give a number")
    fits_all: int = MOST_BLOCKS
    if spec.memory_in_tokens:
        page = engine.get(spec.block, 1)
        fits_all *= page if isinstance(page, int) else 1
    room = _room({**engine, spec.memory: fits_all}, data, folder)
    if room is None:
        return {spec.memory: fits_all}
    if room.num_gpu_blocks < 2:
        raise Unknown(field, f"auto: {room.refusal}")
    blocks = min(room.num_gpu_blocks, MOST_BLOCKS)
    setting = setting_of(_checked().validate_python({**engine, spec.memory: fits_all}))
    told = group_knobs(spec, engine.get("variant", spec.config().variant), room, setting)
    if told and spec.groups not in engine:
        given = {knob: engine[knob] for knob in (spec.checkpoints,) if knob in engine}
        return {spec.memory: blocks, **told, **given}
    return {spec.memory: blocks * (setting.block_size if spec.memory_in_tokens else 1)}


def group_knobs(
    spec: EngineSpec, variant: str, room: KvRoom, setting: EngineSetting
) -> dict[str, Any]:
    """Knobs that follow from a model with several kinds of layers; none in a variant without.

    The groups that its layers make, the tokens in a block where the model needs more than are set,
    and whether its kernels write states from within a chunk.
    """
    lacks = spec.lacks.get(spec.naming.variant_of(variant), ())
    groups = kv_groups(room.hardware, room.block_size)
    if spec.groups is None or spec.groups in lacks or len(groups) < 2:
        return {}
    told: dict[str, Any] = {spec.groups: groups}
    if room.block_size != setting.block_size:
        told[spec.block] = room.block_size
    if spec.checkpoints and spec.checkpoints not in lacks and checkpoints(room.hardware):
        told[spec.checkpoints] = True
    return told
