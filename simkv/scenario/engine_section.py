"""Strict validation of the ``engine`` section, which is the config of any engine."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import MISSING, asdict, fields
from functools import cache, lru_cache, partial, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    create_model,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from simkv.core.engine_spec import EngineConfig, EngineSpec
from simkv.core.errors import InputError, spelling_hint
from simkv.native.native_engines import NATIVE_ENGINES
from simkv.scenario.custom.code_source import list_installed_schedulers
from simkv.scenario.custom.custom_engine import build_custom_spec
from simkv.scenario.native_engine import build_native_spec
from simkv.scenario.offloading_size import BACKEND, CACHE_BYTES, SIZE
from simkv.schedulers.engine_registry import ENGINES, find_engine_spec

#: Value in the schema for settings that the launcher chooses. The loader replaces it by a number
#: before validation.
Auto = Literal["auto"]


def _strict_model(spec: EngineSpec) -> type[BaseModel]:
    """Return a pydantic model with the fields of an engine's config class."""
    config = spec.config
    hints = get_type_hints(config, include_extras=True)
    for knob in {spec.memory, *spec.launch.fields}:
        hints[knob] = Annotated[
            hints[knob],
            BeforeValidator(lambda value: value, json_schema_input_type=hints[knob] | Auto),
        ]
    definitions: dict[str, Any] = {
        field.name: (
            hints[field.name],
            Field(default_factory=field.default_factory)
            if field.default_factory is not MISSING
            else ...
            if field.default is MISSING
            else field.default,
        )
        for field in fields(config)
    }
    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    # These fields are for editors: the loader replaces the size by blocks, and the config if there
    # is a source.
    more = _HOST_SIZE if spec.host_blocks else {}
    if spec.name in NATIVE_ENGINES:
        more = more | _SOURCE
    strict["json_schema_extra"] = partial(_add_fields, more)
    return create_model(config.__name__, __doc__=config.__doc__, __config__=strict, **definitions)


#: Fields that ``scenario/offloading_size.py`` reads.
_HOST_SIZE: dict[str, Any] = {
    CACHE_BYTES: {
        "type": "integer",
        "exclusiveMinimum": 0,
        "description": "Size of the KV cache of each GPU in bytes, as in --kv-cache-memory-bytes. "
        "Requires `hardware`; num_gpu_blocks takes precedence.",
    },
    SIZE: {
        "type": "number",
        "exclusiveMinimum": 0,
        "description": "Host memory for KV in GiB, for all GPUs together; replaces num_cpu_blocks. "
        "[--kv-offloading-size]",
    },
    BACKEND: {
        "const": "native",
        "description": "Offloading backend. [--kv-offloading-backend]",
    },
}
#: Fields that ``scenario/native_engine.py`` reads.
_SOURCE: dict[str, Any] = {
    "source": {
        "type": "string",
        "description": "Run the engine's own scheduler code from this checkout, wheel or "
        "unpacked wheel, or from the installed package ('installed'). Requires "
        "--trust.",
    },
    "source_state": {
        "type": "string",
        "description": "Version, commit and hash of the source. simkv writes this field.",
    },
    "native_options": {
        "type": "object",
        "description": "Options that only the config classes of the engine's own source define.",
    },
}


def _add_fields(fields: dict[str, Any], schema: dict[str, Any]) -> None:
    """Add fields to the schema of a model that does not declare them."""
    schema["properties"] |= fields


@cache  # the engine appears in several places of a scenario
def _models() -> dict[type[BaseModel], type[EngineConfig]]:
    """Return the config class of each engine, by its pydantic model."""
    return {_strict_model(engine): engine.config for engine in ENGINES.values()}


class _CheckedByModel:
    """Pydantic annotation that validates ``engine`` strictly and builds the engine's config."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        configs = _models()

        def build(model: BaseModel) -> EngineConfig:
            config: EngineConfig = configs[type(model)](**dict(model))
            return config

        choice: Any = reduce(or_, configs)
        if len(configs) > 1:
            choice = Annotated[choice, Field(discriminator="name")]
        known = handler.generate_schema(Annotated[choice, AfterValidator(build)])
        return core_schema.with_info_wrap_validator_function(_own_or_known, known)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"anyOf": [handler(schema), CUSTOM_ENGINE_SCHEMA]}


#: Schema of a custom scheduler for editors; its settings are defined only in the scheduler's file.
CUSTOM_ENGINE_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "not": {"enum": sorted(ENGINES)}},
        "file": {
            "type": "string",
            "description": "Python file that defines a custom scheduler. Requires --trust.",
        },
    },
    "required": ["name"],
}


def _own_or_known(data: Any, known: ValidatorFunctionWrapHandler, info: ValidationInfo) -> Any:
    """Return the config of the custom or packaged engine that ``data`` names."""
    name = data.get("name") if isinstance(data, dict) else None
    if isinstance(name, str) and name in ENGINES and data.get("source") is not None:
        return _native(data)
    if not isinstance(name, str) or name in ENGINES:
        return known(data)
    file = data.get("file")
    if file is None and name not in list_installed_schedulers():
        return known(data)
    try:
        folder = (info.context or {}).get("folder", Path())
        spec = build_custom_spec(name, None if file is None else str(file), folder)
    except InputError as error:
        raise PydanticCustomError("own", "{why}", {"why": str(error)}) from error
    names = [field.name for field in fields(spec.config)]
    for field in data:
        if field not in names:
            hint, expected = spelling_hint(str(field), names), ", ".join(names)
            why = f"{field}: unknown field{hint}; expected one of {expected}"
            raise PydanticCustomError("own", "{why}", {"why": why})
    path = spec.config.__dataclass_fields__["file"].default
    model = _own_model(cast(Hashable, spec.config))
    checked = model.model_validate({**data, "file": path} if path else data)
    return spec.config(**dict(checked))


def _native(data: dict[str, Any]) -> EngineConfig:
    """Return the config of an engine that runs its own code from a source directory or package."""
    try:
        spec = build_native_spec(data)
    except InputError as error:
        raise PydanticCustomError("own", "{why}", {"why": str(error)}) from error
    config: EngineConfig = spec.config(
        **dict(_own_model(cast(Hashable, spec.config)).model_validate(data))
    )
    return config


@lru_cache(maxsize=64)
def _own_model(config: Any) -> type[BaseModel]:
    """Return the cached pydantic model of a custom config."""
    return _strict_model(config.own_spec)


#: Config of an engine; a mapping in the file and in serialized data.
AnyEngine = Annotated[EngineConfig, _CheckedByModel(), PlainSerializer(asdict)]


def check_no_kv_connector(engines: Sequence[EngineConfig]) -> None:
    """Raise ValueError if an engine has a setting for KV transfer without disaggregated
    replicas.
    """
    for engine in engines:
        for knob in find_engine_spec(engine).transfer_knobs:
            if getattr(engine, knob) is not None:
                raise ValueError(
                    f"engine: {knob} requires replicas with roles prefill and decode; remove {knob}"
                )


def check_kv_connector(engines: Sequence[EngineConfig], roles: Sequence[str]) -> None:
    """Raise ValueError if the engines cannot transfer KV between prefill and decode replicas."""
    if any(find_engine_spec(engine).rule_of(engine) for engine in engines):
        raise ValueError(
            "fleet: roles prefill and decode do not support custom policies; remove the policy"
        )
    able = {name: spec.transfer.variants for name, spec in ENGINES.items() if spec.transfer}
    for engine, role in zip(engines, roles, strict=True):
        if find_engine_spec(engine).naming.variant_of(engine.variant) not in able.get(
            engine.name, ()
        ):
            listed = " or ".join(f"{name} ({', '.join(known)})" for name, known in able.items())
            raise ValueError(
                f"fleet: roles prefill and decode require engine {listed}; "
                f"found {engine.name} {engine.variant}"
            )
        if transfer := find_engine_spec(engine).transfer:
            transfer.in_role(engine, role)
    if len({(engine.name, find_engine_spec(engine).block_size(engine)) for engine in engines}) > 1:
        raise ValueError(
            "fleet: replicas with roles prefill and decode must have the same block_size"
        )
