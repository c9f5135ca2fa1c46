"""Engines that run their own code: ``engine: {name: vllm, source: ../vllm}``.

The config is that of the engine's model in simkv, plus the path of the source. The version of the
source determines ``variant``, and thereby the defaults and the accepted settings.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import asdict, field, fields, make_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from simkv.core.engine_spec import EngineSpec, TabledScheduler
from simkv.core.errors import InputError, spelling_hint
from simkv.native.native_engines import NATIVE_ENGINES
from simkv.native.native_scheduler import NativeScheduler
from simkv.native.native_source import INSTALLED, SourceError, find_source, locate
from simkv.scenario.custom.code_source import is_trusted
from simkv.schedulers.engine_registry import ENGINES

__all__ = ["SourceError", "build_native_spec", "describe_source", "resolve_sources", "set_source"]

#: Source of all engines for which the scenario names no source; set by ``--source``.
_SOURCE: ContextVar[str | None] = ContextVar("source", default=None)


def set_source(path: str | None) -> None:
    """Set the default source of all engines in this process."""
    _SOURCE.set(path if path in (None, INSTALLED) else str(Path(str(path)).resolve()))


def resolve_sources(tree: Any, folder: Path) -> None:
    """Complete the engines of a scenario's plain data that have a ``source``.

    Sets the absolute path, the variant and a description of the source. Raises InputError if a
    source cannot be found.
    """
    if not isinstance(tree, dict):
        return
    groups = tree["fleet"].get("replicas") if isinstance(tree.get("fleet"), dict) else None
    groups = groups if isinstance(groups, list) else []
    for section in (tree, *(group for group in groups if isinstance(group, dict))):
        engine = section.get("engine")
        if not isinstance(engine, dict):
            continue
        if engine.get("source") is None and _SOURCE.get() and "file" not in engine:
            engine["source"] = _SOURCE.get()
        if engine.get("source") is not None:
            name = str(engine.get("name", tree.get("engine", {}).get("name", "")))
            found = find_source(name, str(engine["source"]), folder)
            engine |= {"source": found.path, "source_state": found.state}
            if found.version or "variant" not in engine:
                engine["variant"] = NATIVE_ENGINES[name].variant_of(found.version)


def build_native_spec(data: dict[str, Any]) -> EngineSpec:
    """Return the specification of an engine with a source.

    ``data`` must be completed by ``resolve_sources``. Raises InputError if the source is not
    trusted, or if an option is unknown.
    """
    name, source = str(data["name"]), str(data["source"])
    if not is_trusted():
        raise InputError(
            f"source: the scenario would run the code in {source}; review it, then pass --trust "
            "(in Python: trust=True)"
        )
    spec = _spec(name)
    given = data.get("native_options") or {}
    if given:
        _check_options(name, locate(name, source), given)
    return spec


def describe_source(config: Any) -> str | None:
    """Return one line about the source of a native engine, or None for other engines."""
    source = getattr(config, "source", None)
    if not source:
        return None
    notes = ["reasons for waiting are inferred from the scheduler's state"]
    if stubbed := NATIVE_ENGINES[config.name].stubbed:
        notes.append(stubbed)
    return "; ".join([f"{source} ({config.source_state})", *notes])


@lru_cache
def _spec(name: str) -> EngineSpec:
    engine = ENGINES[name]
    config = make_dataclass(
        f"Native{engine.config.__name__}",
        [
            ("source", str, field(default="")),
            ("source_state", str, field(default="")),
            ("native_options", dict[str, Any], field(default_factory=dict, hash=False)),
        ],
        bases=(engine.config,),
        frozen=True,
        namespace={"__reduce__": _reduce, "__doc__": engine.config.__doc__},
    )
    config.__module__ = engine.config.__module__
    spec = replace(
        engine,
        config=config,
        build=_build,
        build_with_tables=_no_tables,
        transfer=engine.transfer and replace(engine.transfer, build=_build),
        published_cache=None,
    )
    config.own_spec = spec  # type: ignore[attr-defined]
    return spec


def _reduce(config: Any) -> tuple[Any, ...]:
    return _again, (config.name, asdict(config))


def _again(name: str, knobs: dict[str, Any]) -> Any:
    return _spec(name).config(**knobs)


def _build(config: Any) -> NativeScheduler:
    name, folder = config.name, locate(config.name, config.source)
    if knob := NATIVE_ENGINES[name].refused(config):
        raise InputError(
            f"engine.{knob}: not supported with engine.source; remove {knob}, or remove source "
            f"to run simkv's reimplementation of {NATIVE_ENGINES[name].title}"
        )
    declared = NATIVE_ENGINES[name].options(folder)
    native: dict[str, dict[str, Any]] = {}
    for option, value in config.native_options.items():
        native.setdefault(declared[option], {})[option] = value
    knobs = {one.name: getattr(config, one.name) for one in fields(ENGINES[name].config)}
    return NativeScheduler(name, folder, knobs, native)


def _check_options(name: str, folder: Path, given: dict[str, Any]) -> None:
    declared = NATIVE_ENGINES[name].options(folder)
    known = {one.name for one in fields(ENGINES[name].config)}
    for option in given:
        if option in known:
            raise InputError(f"native_options.{option}: set engine.{option} instead")
        if option not in declared:
            classes = " or ".join(sorted(set(declared.values()))) or "config class"
            raise InputError(
                f"native_options.{option}: no {classes} in {folder} declares it"
                f"{spelling_hint(option, declared)}"
            )


def _no_tables(config: Any) -> TabledScheduler:
    raise InputError(
        f"engine.source: {config.name} with a source runs only in simulations, not on a device"
    )
