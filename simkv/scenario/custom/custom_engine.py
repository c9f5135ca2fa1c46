"""Configs and specifications of custom schedulers, and their transfer to worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, field, is_dataclass, make_dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_type_hints

from simkv.core.engine_spec import EngineSpec, TabledScheduler
from simkv.core.errors import InputError
from simkv.core.execution_settings import ExecutionSettings
from simkv.core.recording_format import RecordingFormat
from simkv.core.scheduler_protocol import Variant
from simkv.scenario.custom import code_source as sources
from simkv.scenario.custom.code_source import CustomCode
from simkv.scenario.custom.scheduler_guard import GuardedScheduler
from simkv.scenario.custom.scheduler_template import CustomConfig
from simkv.schedulers.engine_registry import ENGINES

#: Name of the only variant of a custom scheduler.
CUSTOM_VARIANT = "own"


def build_custom_spec(name: str, file: str | None, folder: Path) -> EngineSpec:
    """Return the specification of the custom scheduler ``name``.

    Its code is in ``file``, or in an installed package if ``file`` is None. Raises InputError if
    the code is not trusted or does not define a scheduler.
    """
    if file is None:
        of, source = sources.load_from_package(name)
        return _spec(name, None, of, source)
    of, source = sources.load_from_file(folder / file, name)
    return _spec(name, source.path, of, source)


def find_custom_code(config: Any) -> CustomCode | None:
    """Return the code of a config's custom scheduler, or None for a packaged engine."""
    found: CustomCode | None = getattr(config, "own_source", None)
    return found


@lru_cache(maxsize=64)
def _spec(name: str, file: str | None, of: Any, source: CustomCode) -> EngineSpec:
    own = _config_of(of, source)
    engine = next((one for one in ENGINES.values() if issubclass(own, one.config)), None)
    more: list[Any] = [] if engine else [("variant", Literal["own"], field(default=CUSTOM_VARIANT))]
    config = make_dataclass(
        own.__name__,
        [
            ("name", Literal[name], field(default=name)),
            *more,
            ("file", str | None, field(default=file)),
        ],
        bases=(own,),
        frozen=True,
        namespace={
            "__reduce__": _reduce,
            "own_source": source,
            "own_class": of,
            "__doc__": own.__doc__,
        },
    )
    config.__module__ = own.__module__

    def build(config: Any) -> GuardedScheduler:
        return GuardedScheduler(lambda: of(config), of, source)

    spec = _changed(engine, build) if engine else _new(of, source, build)
    spec = replace(spec, name=name, config=config)
    config.own_spec = spec  # type: ignore[attr-defined]
    return spec


def _new(of: type[Any], source: CustomCode, build: Callable[[Any], GuardedScheduler]) -> EngineSpec:
    """Return the specification of a custom scheduler that is not based on a packaged engine."""
    return EngineSpec(
        name=CUSTOM_VARIANT,
        config=CustomConfig,
        variants={
            CUSTOM_VARIANT: Variant(
                source.path, (of.__doc__ or CUSTOM_VARIANT).strip().splitlines()[0]
            )
        },
        build=build,
        build_with_tables=_no_tables,
        recording=RecordingFormat(
            config=_nowhere, prompt=_nowhere, knobs=asdict, shown=lambda _: {}
        ),
        setting=_setting,
        cache_lines=(),
        cache_example="",
        memory="num_blocks",
    )


def _changed(engine: EngineSpec, build: Callable[[Any], GuardedScheduler]) -> EngineSpec:
    """Return the specification of a packaged engine with a custom policy."""
    return replace(
        engine,
        build=build,
        build_with_tables=_no_tables,
        setting=lambda config: replace(engine.setting(config), engine=engine.name),
        rules={},
        transfer=None,
        has_threads=False,
        published_cache=None,
    )


def _config_of(of: type[Any], source: CustomCode) -> type[Any]:
    """Return the config class of a scheduler class: the type annotation of its attribute
    ``config``.
    """
    try:
        own = get_type_hints(of).get("config", CustomConfig)
    except Exception as error:
        raise InputError(f"{source.shown}:1: {of.__name__}.config: {error}") from error
    if not (isinstance(own, type) and is_dataclass(own)):
        raise InputError(
            f"{source.shown}:1: {of.__name__}.config: its type must be a frozen dataclass"
        )
    if any(issubclass(own, engine.config) for engine in ENGINES.values()):
        return own
    needed = {"num_blocks", "block_size", "max_num_seqs", "max_num_batched_tokens"}
    if missing := sorted(needed - own.__dataclass_fields__.keys()):
        raise InputError(
            f"{source.shown}:1: {own.__name__} has no {', '.join(missing)}; derive the class "
            "from CustomConfig"
        )
    return own


def _reduce(config: Any) -> tuple[Any, ...]:
    return _again, (config.name, config.file, config.own_source, asdict(config))


def _again(name: str, file: str | None, source: CustomCode, knobs: Mapping[str, Any]) -> Any:
    """Build the config in another process from the same code, without another check of trust."""
    of = sources.load_scheduler_class(source, name) if file else sources.load_from_package(name)[0]
    return _spec(name, file, of, source).config(**knobs)


def _setting(config: Any) -> ExecutionSettings:
    return ExecutionSettings(
        engine=config.name,
        release=CUSTOM_VARIANT,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        asynchronous=False,
        block_size=config.block_size,
    )


def _no_tables(config: Any) -> TabledScheduler:
    raise InputError(
        f"engine {config.name}: custom schedulers run only in simulations, not on a device"
    )


def _nowhere(_: Any) -> Any:
    raise InputError("custom schedulers have no recordings")
