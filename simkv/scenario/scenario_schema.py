"""JSON schema of scenario files, for editors and for the field names in error messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from simkv.core.engine_flags import sources
from simkv.core.field_docs import read_field_docs
from simkv.scenario.engine_section import CUSTOM_ENGINE_SCHEMA
from simkv.scenario.scenario import Scenario, ScenarioFile
from simkv.scenario.yaml_document import find_key
from simkv.schedulers.engine_registry import ENGINES


@cache
def json_schema() -> dict[str, Any]:
    """Return the JSON schema of scenario files, with a description of each field.

    Callers must not modify the result, which is cached.
    """
    schema = TypeAdapter(ScenarioFile).json_schema(schema_generator=_DescribedSchema)
    whole = schema["$defs"]
    part = {f"Part{name}": _partial(definition) for name, definition in whole.items()}
    part["PartScenario"] = _partial(
        TypeAdapter(Scenario).json_schema(schema_generator=_DescribedSchema)
    )
    del part["PartScenario"]["$defs"]
    names = schema["properties"]["variants"]["patternProperties"]
    names.update({name: {"$ref": "#/$defs/PartScenario"} for name in names})
    costs = [{"required": [name]} for name in ("profile", "hardware")]
    return {**schema, "allOf": [{"anyOf": costs}], "$defs": {**whole, **part}}


class _DescribedSchema(GenerateJsonSchema):
    """Schema generator that adds field docstrings and command-line flags to the descriptions."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        described = super().model_schema(schema)
        config = _CONFIGS.get(schema["cls"].__name__)
        texts, flags = read_field_docs(config or schema["cls"]), sources(config) if config else {}
        for name, field in described.get("properties", {}).items():
            if name in texts:
                flag = f" [{flags[name]}]" if name in flags else ""
                field["description"] = texts[name] + flag
        return described


_CONFIGS: dict[str, type[Any]] = {spec.config.__name__: spec.config for spec in ENGINES.values()}


def _partial(node: Any) -> Any:
    """Return a JSON schema without required fields, as for variants.

    List items keep their required fields, because a variant replaces a list as a whole.
    """
    if isinstance(node, list):
        return [_partial(value) for value in node]
    if not isinstance(node, dict) or node == CUSTOM_ENGINE_SCHEMA:  # identified only by name
        return node
    result = {
        "anyOf" if key == "oneOf" else key: value if key == "items" else _partial(value)
        for key, value in node.items()
        if key not in ("required", "discriminator", "default")
    }
    if "$ref" in result:
        result["$ref"] = result["$ref"].replace("#/$defs/", "#/$defs/Part")
    return result


def known_fields(location: Sequence[str | int], data: Any) -> list[str]:
    """Return the fields that the schema allows at ``location`` of ``data``."""
    schema = json_schema()
    definitions = schema["$defs"]
    nodes = _alternatives([schema], definitions, data)
    for part in location:
        children = [child for node in nodes for child in _children(node, part)]
        key = find_key(data, part)
        data = None if key is None else data[key]
        nodes = _alternatives(children, definitions, data)
    fields: dict[str, None] = {}
    for node in nodes:
        fields.update(dict.fromkeys(node.get("properties", {})))
    return list(fields)


def _children(node: Mapping[str, Any], part: str | int) -> list[dict[str, Any]]:
    if part in node.get("properties", {}):
        return [node["properties"][part]]
    if isinstance(node.get("additionalProperties"), dict):
        return [node["additionalProperties"]]
    return [node["items"]] if "items" in node else []


def _alternatives(
    nodes: Sequence[Mapping[str, Any]], definitions: Mapping[str, Any], value: Any
) -> list[Mapping[str, Any]]:
    """Resolve references in the nodes. Replace each union by the member that matches ``value``."""
    flat: list[Mapping[str, Any]] = []
    for node in nodes:
        if "$ref" in node:
            target = definitions[node["$ref"].rsplit("/", 1)[1]]
            flat += _alternatives([target], definitions, value)
        elif options := node.get("anyOf") or node.get("oneOf"):
            if (by := node.get("discriminator")) and isinstance(value, dict):
                tag = value.get(by["propertyName"])
                if isinstance(tag, str) and tag in by["mapping"]:
                    options = [{"$ref": by["mapping"][tag]}]
            flat += _alternatives(options, definitions, value)
        else:
            flat.append(node)
    return flat
