"""The ``engine`` of a scenario: the config of any engine, checked as strictly as the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields
from functools import reduce
from operator import or_
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    create_model,
)
from pydantic_core import CoreSchema

from simkv.core.engine import EngineConfig
from simkv.schedulers.registry import ENGINES, spec_of

#: In place of the size of the cache, for an editor; the reader of files has put a number there.
Auto = Literal["auto"]


def _strict_model(config: type[EngineConfig]) -> type[BaseModel]:
    """A pydantic model with the fields of an engine's config, which is a plain dataclass."""
    hints = get_type_hints(config, include_extras=True)
    spec = next(engine for engine in ENGINES.values() if engine.config is config)
    hints[spec.memory] = Annotated[
        hints[spec.memory],
        BeforeValidator(lambda size: size, json_schema_input_type=hints[spec.memory] | Auto),
    ]
    definitions: dict[str, Any] = {
        field.name: (hints[field.name], field.default) for field in fields(config)
    }
    strict = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    return create_model(config.__name__, __doc__=config.__doc__, __config__=strict, **definitions)


class _CheckedByModel:
    """Checks the fields of ``engine`` strictly, picks the config by ``name`` and builds it."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        configs = {_strict_model(engine.config): engine.config for engine in ENGINES.values()}

        def build(model: BaseModel) -> EngineConfig:
            config: EngineConfig = configs[type(model)](**dict(model))
            return config

        choice: Any = reduce(or_, configs)
        if len(configs) > 1:
            choice = Annotated[choice, Field(discriminator="name")]
        return handler.generate_schema(Annotated[choice, AfterValidator(build)])


#: The config of an engine, as a mapping in the file and when it is dumped.
AnyEngine = Annotated[EngineConfig, _CheckedByModel(), PlainSerializer(asdict)]


def check_kv_connector(engines: Sequence[EngineConfig]) -> None:
    """Raise ValueError if KV cannot go from one of these engines to another."""
    able = {name: spec.transfer.variants for name, spec in ENGINES.items() if spec.transfer}
    for engine in engines:
        if spec_of(engine).naming.variant_of(engine.variant) not in able.get(engine.name, ()):
            listed = " or ".join(f"{name} ({', '.join(known)})" for name, known in able.items())
            raise ValueError(
                f"fleet: roles prefill and decode are for engine {listed}; "
                f"found {engine.name} {engine.variant}"
            )
    if len({(engine.name, spec_of(engine).block_size(engine)) for engine in engines}) > 1:
        raise ValueError("fleet: replicas that prefill and decode need one block_size")
