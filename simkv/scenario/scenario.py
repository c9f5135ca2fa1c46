"""Scenario files: YAML in, checked and typed scenarios out; every error names its place."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, fields
from functools import reduce
from math import inf
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    PlainSerializer,
    Tag,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)
from pydantic_core import CoreSchema, ErrorDetails

from simkv.core.errors import InputError, nearest
from simkv.core.figures import FIGURES
from simkv.costs.profile import load_profile
from simkv.scenario.document import Document, find_key, read_document
from simkv.scenario.expect import Expectations
from simkv.scenario.fleet import Count, FleetRules, Outage
from simkv.scenario.pacing import Pacing
from simkv.scenario.plan import PlanSection
from simkv.scenario.roles import About, Engine, World
from simkv.schedulers.fastdeploy.scheduler import FastDeployConfig
from simkv.schedulers.mistralrs.scheduler import MistralrsConfig
from simkv.schedulers.sglang.scheduler import SglangConfig
from simkv.schedulers.vllm.scheduler import VllmConfig
from simkv.workload.workload import Time, Workload, fields_of_others


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


#: Variants of vLLM that can send and load KV here.
TRANSFERS = ("0.33.0", "0.19.0", "0.11.0")

EngineConfig = MistralrsConfig | VllmConfig | SglangConfig | FastDeployConfig
CONFIGS: tuple[type[EngineConfig], ...] = (
    MistralrsConfig,
    VllmConfig,
    SglangConfig,
    FastDeployConfig,
)


def _strict_model(config: type[EngineConfig]) -> type[BaseModel]:
    """A pydantic model with the fields of an engine's config, which is a plain dataclass."""
    hints = get_type_hints(config, include_extras=True)
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
        configs = {_strict_model(config): config for config in CONFIGS}

        def build(model: BaseModel) -> EngineConfig:
            return configs[type(model)](**dict(model))

        choice: Any = reduce(or_, configs)
        if len(configs) > 1:
            choice = Annotated[choice, Field(discriminator="name")]
        return handler.generate_schema(Annotated[choice, AfterValidator(build)])


#: The config of an engine, as a mapping in the file and when it is dumped.
AnyEngine = Annotated[EngineConfig, _CheckedByModel(), PlainSerializer(asdict)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
Span = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Provenance(_Model):
    """What the scenario's numbers rest on, one sentence each."""

    given: list[str] = []
    fitted: list[str] = []
    assumed: list[str] = []


def _known_figure(name: str) -> str:
    if name not in FIGURES:
        raise ValueError(
            f"{name!r} is not a figure of summary.json{nearest(name, FIGURES)}; "
            f"expected one of {', '.join(FIGURES)}"
        )
    return name


Figure = Annotated[str, AfterValidator(_known_figure)]


class Published(_Model):
    """Figures of the public report for one variant, to be shown beside the simulated ones.

    ``figures`` are named as in ``summary.json`` (``e2e_ms.mean``); ``at_least`` are lower bounds;
    ``e2e_s`` and ``finish_s`` are single requests by id, in seconds.
    """

    figures: dict[Figure, float] = {}
    at_least: dict[Figure, float] = {}
    e2e_s: dict[int, float] = {}
    finish_s: dict[int, float] = {}
    note: str = ""


class ReplicaGroup(_Model):
    """``count`` equal replicas.

    ``engine`` says what differs from the scenario's engine, ``profile`` what their steps cost if
    not what the scenario says. With the ``role`` of ``prefill`` or ``decode`` they do only that.
    """

    count: Count = 1
    role: Literal["both", "prefill", "decode"] = "both"
    engine: AnyEngine | None = None
    profile: str | None = None


class FleetSection(FleetRules):
    """Replicas behind a router: a number of equal ones, or a list of groups."""

    replicas: Annotated[
        Annotated[Count, Tag("number")]
        | Annotated[list[ReplicaGroup], Field(min_length=1), Tag("list")],
        Discriminator(lambda value: "list" if isinstance(value, list) else "number"),
    ] = 1

    @property
    def groups(self) -> list[ReplicaGroup]:
        """The groups of replicas, of which there is one if all are equal."""
        if isinstance(self.replicas, int):
            return [ReplicaGroup(count=self.replicas)]
        return self.replicas

    @property
    def size(self) -> int:
        """Replicas at the start."""
        return sum(group.count for group in self.groups)

    @property
    def disaggregated(self) -> bool:
        """Whether some replicas prefill and others decode."""
        return any(group.role != "both" for group in self.groups)

    def _check_roles(self) -> None:
        roles = {group.role for group in self.groups}
        if not self.disaggregated:
            if self.kv_transfer:
                raise ValueError("kv_transfer: there are no replicas of roles prefill and decode")
            return
        if roles != {"prefill", "decode"}:
            raise ValueError(
                f"replicas: roles {', '.join(sorted(roles))}; expected prefill and decode, or none"
            )
        if not self.kv_transfer:
            raise ValueError("kv_transfer: missing; replicas of roles prefill and decode need it")
        for name in ("failures", "drains", "autoscale", "start_cold", "lockstep"):
            if getattr(self, name):
                raise ValueError(f"{name}: not with replicas of roles prefill and decode")

    @field_validator("failures", "drains")
    @classmethod
    def _one_at_a_time(cls, outages: list[Outage]) -> list[Outage]:
        until: dict[int, float] = {}
        for outage in sorted(outages, key=lambda outage: outage.at):
            if outage.at < until.get(outage.replica, 0.0):
                raise ValueError(f"two at one time of replica {outage.replica}; expected one")
            until[outage.replica] = inf if outage.back_at is None else outage.back_at
        return outages

    @model_validator(mode="after")
    def _of_replicas_that_are_there(self) -> Self:
        most = self.size if self.autoscale is None else self.autoscale.max_replicas
        for name in ("failures", "drains"):
            for outage in getattr(self, name):
                if outage.replica >= most:
                    raise ValueError(
                        f"{name}: there is no replica {outage.replica}; expected one from 0 to "
                        f"{most - 1}"
                    )
        if self.lockstep and (self.failures or self.drains or self.autoscale or self.start_cold):
            raise ValueError("lockstep: replicas in lock-step are there from the start to the end")
        self._check_roles()
        if self.autoscale is None:
            return self
        if not isinstance(self.replicas, int):
            raise ValueError("autoscale needs equal replicas; expected a number for replicas")
        least = self.autoscale.min_replicas
        if not least <= self.replicas <= most:
            raise ValueError(
                f"replicas: {self.replicas} must be from min_replicas {least} to max_replicas "
                f"{most} of autoscale"
            )
        return self


Factor = Annotated[float, Field(gt=0, le=1000)]


class StepScale(_Model):
    """How many times as long as in the profile a step takes, by what it does."""

    decode: Factor = 1.0
    prefill: Factor = 1.0
    mixed: Factor = 1.0


def _check_kv_connector(engines: Sequence[EngineConfig]) -> None:
    """Raise ValueError if KV cannot go from one of these engines to another."""
    for engine in engines:
        if not isinstance(engine, VllmConfig) or engine.variant not in TRANSFERS:
            raise ValueError(
                f"fleet: roles prefill and decode are for engine vllm ({', '.join(TRANSFERS)}); "
                f"found {engine.name} {engine.variant}"
            )
    if len({engine.block_size for engine in engines if isinstance(engine, VllmConfig)}) > 1:
        raise ValueError("fleet: replicas that prefill and decode need one block_size")


class Scenario(_Model):
    """One experiment: a workload, an engine with its knobs, and what its steps cost.

    ``timeout`` (s) is how long a client waits for its last token, ``horizon`` (s) ends the run,
    ``engine_ready`` (s) is when the engine looks at its queue for the first time. ``profile`` is a
    packaged cost profile or a JSON file beside the scenario, whose steps take ``step_scale`` times
    as long. With ``pipeline`` the three threads of ``fastdeploy`` run side by side, without in
    lockstep. With ``fleet`` the engine is one of several replicas behind a router. ``published``
    and ``expect`` go by the name of the variant; that of a file without variants is ``run``.
    """

    name: About[Name]
    report: About[str | None] = None
    summary: About[str] = ""
    workload: World[Workload]
    engine: Engine[AnyEngine]
    profile: World[str]
    step_scale: World[StepScale | None] = None
    timeout: World[Span | None] = None
    horizon: World[Span | None] = None
    engine_ready: World[Time] = 0.0
    pipeline: Engine[Pacing | None] = None
    fleet: Engine[FleetSection | None] = None
    provenance: About[Provenance] = Provenance()
    published: About[dict[str, Published]] = {}
    expect: About[dict[str, Expectations]] = {}

    @model_validator(mode="before")
    @classmethod
    def _complete_engines(cls, data: Any) -> Any:
        """The engines of replica groups are the scenario's with what the groups change."""
        fleet = data.get("fleet") if isinstance(data, dict) else None
        if not isinstance(fleet, dict) or not isinstance(fleet.get("replicas"), list):
            return data
        own = {"engine": data.get("engine")}
        whole = [
            {**group, **merge(own, {"engine": group["engine"]})}
            if isinstance(group, dict) and isinstance(group.get("engine"), dict)
            else group
            for group in fleet["replicas"]
        ]
        return {**data, "fleet": {**fleet, "replicas": whole}}

    @model_validator(mode="after")
    def _pipelines_go_on(self) -> Self:
        if self.pipeline and self.fleet and (self.fleet.failures or self.fleet.autoscale):
            raise ValueError("fleet: replicas with a pipeline cannot fail or be scaled")
        if self.fleet and self.fleet.disaggregated:
            engines = [group.engine or self.engine for group in self.fleet.groups]
            _check_kv_connector(engines)
        return self

    @field_validator("pipeline")
    @classmethod
    def _has_threads(cls, pacing: Pacing | None, info: ValidationInfo) -> Pacing | None:
        engine = info.data.get("engine")
        if pacing and engine and not isinstance(engine, FastDeployConfig):
            raise ValueError(f"engine {engine.name} has no pipeline; only fastdeploy does")
        return pacing

    @field_validator("fleet")
    @classmethod
    def _can_step_together(
        cls, fleet: FleetSection | None, info: ValidationInfo
    ) -> FleetSection | None:
        if fleet and fleet.lockstep and len(fleet.groups) > 1:
            raise ValueError("lockstep: replicas step together only if they are all of one group")
        if fleet and fleet.lockstep and info.data.get("pipeline"):
            raise ValueError("lockstep: an engine with a pipeline does not step together")
        return fleet


class ScenarioFile(Scenario):
    """A scenario with named overrides, which run side by side.

    An override has the shape of the scenario; what it does not mention stays as it is. ``plan`` is
    what ``simkv plan`` looks for, and means nothing to the others.
    """

    variants: dict[Name, dict[str, Any]] = {}
    plan: PlanSection | None = None


def json_schema() -> dict[str, Any]:
    """The JSON schema of scenario files, for editors."""
    schema = TypeAdapter(ScenarioFile).json_schema()
    whole = schema["$defs"]
    part = {f"Part{name}": _partial(definition) for name, definition in whole.items()}
    part["PartScenario"] = _partial(TypeAdapter(Scenario).json_schema())
    del part["PartScenario"]["$defs"]
    names = schema["properties"]["variants"]["patternProperties"]
    names.update({name: {"$ref": "#/$defs/PartScenario"} for name in names})
    return {**schema, "$defs": {**whole, **part}}


def _partial(node: Any) -> Any:
    """A JSON schema with nothing required, as a variant mentions only what it changes.

    Items of lists stay whole, for a variant replaces a list as a whole.
    """
    if isinstance(node, list):
        return [_partial(value) for value in node]
    if not isinstance(node, dict):
        return node
    result = {
        "anyOf" if key == "oneOf" else key: value if key == "items" else _partial(value)
        for key, value in node.items()
        if key not in ("required", "discriminator", "default")
    }
    if "$ref" in result:
        result["$ref"] = result["$ref"].replace("#/$defs/", "#/$defs/Part")
    return result


def load(path: Path, overrides: Sequence[str] = ()) -> dict[str, Scenario]:
    """The variants of a scenario file by name; a file without any has one, named ``run``.

    ``overrides`` are ``path=value`` assignments that apply to the file before its variants do.
    Raises InputError with file, line and field, what is wrong and what would be right.
    """
    return resolve(read_document(path), overrides)


def resolve(document: Document, overrides: Sequence[str] = ()) -> dict[str, Scenario]:
    """The variants of a scenario file that has been read, which ``overrides`` change; see load."""
    for assignment in overrides:
        document.override(assignment)
        _replace_form(document, assignment)
    _check(document, document.tree, ScenarioFile)
    base = {k: value for k, value in document.tree.items() if k not in ("variants", "plan")}
    variants = document.tree.get("variants") or {"run": {}}
    scenarios: dict[str, Scenario] = {
        str(name): _check(document, merge(base, override), Scenario, ("variants", str(name)))
        for name, override in variants.items()
    }
    _check_profiles(document, scenarios)
    _check_published(document, scenarios)
    _check_expectations(document, scenarios)
    return scenarios


def plan_section(document: Document) -> PlanSection:
    """What a scenario file that has been read says about planning. Raises InputError."""
    checked: ScenarioFile = _check(document, document.tree, ScenarioFile)
    return checked.plan or PlanSection()


def _check_profiles(document: Document, scenarios: Mapping[str, Scenario]) -> None:
    """Raise InputError if a cost profile is not there or cannot be used."""
    for name, scenario in scenarios.items():
        groups = scenario.fleet.groups if scenario.fleet else []
        named: list[tuple[tuple[str | int, ...], str]] = [(("profile",), scenario.profile)]
        named += [
            (("fleet", "replicas", index, "profile"), group.profile)
            for index, group in enumerate(groups)
            if group.profile is not None
        ]
        for field, profile in named:
            try:
                load_profile(profile, document.path.parent)
            except InputError as error:
                own = ("variants", name, *field)
                location = own if _key_path(document.tree, own) else field
                raise InputError(f"{document.place(location)}: {error}") from error


def _check_published(document: Document, scenarios: Mapping[str, Scenario]) -> None:
    """Raise InputError if ``published`` names a variant that there is not."""
    for scenario in scenarios.values():
        for name in scenario.published:
            if name not in scenarios:
                raise InputError(
                    f"{document.place(('published', name))}: published.{name}: there is no such "
                    f"variant{nearest(name, scenarios)}; expected one of {', '.join(scenarios)}"
                )


def _replace_form(document: Document, assignment: str) -> None:
    """``--set workload.trace=FILE``, or another form as a whole, takes the place of the former."""
    keys = assignment.partition("=")[0].strip().split(".")
    workload = document.tree.get("workload")
    if keys[0] == "workload" and len(keys) == 2 and isinstance(workload, dict):
        for key in fields_of_others({keys[1]: None}):
            workload.pop(key, None)


def _check_expectations(document: Document, scenarios: Mapping[str, Scenario]) -> None:
    """Raise InputError if ``expect`` names a variant or a request that there is not."""
    for scenario in scenarios.values():
        for name, expected in scenario.expect.items():
            place = document.place(("expect", name))
            if name not in scenarios:
                raise InputError(
                    f"{place}: expect.{name}: there is no such variant{nearest(name, scenarios)}; "
                    f"expected one of {', '.join(scenarios)}"
                )
            size = scenarios[name].workload.size
            for number in expected.request:
                if number >= size:
                    place = document.place(("expect", name, "request", number))
                    raise InputError(
                        f"{place}: expect.{name}.request.{number}: there is no such request; "
                        f"expected an id from 0 to {size - 1}"
                    )


def merge(base: Any, override: Any) -> Any:
    """``override`` on top of ``base``: mappings by key, everything else replaced.

    Another form of workload, another engine or another distribution replaces the former one as a
    whole.
    """
    if not isinstance(base, dict) or not isinstance(override, dict):
        return deepcopy(override)
    result = {key: deepcopy(value) for key, value in base.items()}
    for key in fields_of_others(override):
        result.pop(key, None)
    for key, value in override.items():
        former = result.get(key)
        if _other_kind(former, value, "name" if key in ("engine", "router") else "distribution"):
            former = None
        result[key] = merge(former, value)
    return result


def _other_kind(former: Any, new: Any, tag: str) -> bool:
    if not isinstance(former, dict) or not isinstance(new, dict):
        return False
    return tag in new and new[tag] != former.get(tag)


def _check(
    document: Document, data: Any, model: type[Scenario], prefix: tuple[str, ...] = ()
) -> Any:
    try:
        return model.model_validate(_plain(data), context={"folder": document.path.parent})
    except ValidationError as error:
        details = error.errors(include_url=False)
        raise InputError("\n".join(_messages(document, data, details, prefix))) from error


def _plain(node: Any) -> Any:
    """The data without the YAML reader's own types."""
    if isinstance(node, dict):
        return {_scalar(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    return _scalar(node)


def _scalar(value: Any) -> Any:
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


#: Errors of pydantic about a field that is not there, or should not be.
NAMES_A_FIELD = ("missing", "missing_argument", "extra_forbidden", "unexpected_keyword_argument")


def _messages(
    document: Document, data: Any, details: list[ErrorDetails], prefix: tuple[str, ...]
) -> list[str]:
    """One line per error, each place once: ``file:line: field: what is wrong; what is right``."""
    lines: dict[str, str] = {}
    for detail in details:
        location = _location(data, detail["loc"], detail["type"] in NAMES_A_FIELD)
        if discriminator := detail.get("ctx", {}).get("discriminator"):
            name = discriminator.strip("'")
            location.append("distribution" if name.endswith("()") else name)
        place = document.place((*prefix, *location))
        if prefix and _key_path(document.tree, (*prefix, *location)) is None:
            place = document.place(location)
        field = ".".join(str(part) for part in location) or "scenario"
        variant = f" (variant {prefix[1]})" if prefix else ""
        lines.setdefault(field, f"{place}: {field}{variant}: {_explain(detail, location, data)}")
    return list(lines.values())


def _key_path(tree: Any, location: Sequence[str | int]) -> Any:
    node = tree
    for part in location:
        key = find_key(node, part)
        if key is None:
            return None
        node = node[key]
    return location


def _location(data: Any, loc: tuple[str | int, ...], names_a_field: bool) -> list[str | int]:
    """Pydantic's location without the tags of unions, which are not in the file.

    The last part is kept if it ``names_a_field`` that may be missing there.
    """
    location: list[str | int] = []
    node = data
    for index, part in enumerate(loc):
        key = find_key(node, part)
        if key is not None:
            location.append(part)
            node = node[key]
        elif names_a_field and index == len(loc) - 1:
            location.append(part)
    return location


def _explain(detail: ErrorDetails, location: list[str | int], data: Any) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    found = context.get("tag", detail.get("input"))
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_fields(location[:-1], data)
        return f"unknown field{nearest(str(location[-1]), known)}; known here: {', '.join(known)}"
    if kind in ("missing", "missing_argument", "union_tag_not_found"):
        return "missing; this field is needed"
    if kind in ("value_error", "assertion_error"):
        return re.sub(r"^Value error, ", "", detail["msg"])
    if kind in ("union_tag_invalid", "literal_error"):
        known = re.findall(r"'([^']*)'", str(context.get("expected", context.get("expected_tags"))))
        if location[-1] == "distribution":  # of which a plain number is none
            known = [name for name in known if name != "number"]
            if find_key(detail.get("input"), "distribution") is None:
                return f"missing; expected one of {', '.join(known)}"
        return f"{found!r} is not known{nearest(str(found), known)}; expected {', '.join(known)}"
    message = detail["msg"][0].lower() + detail["msg"][1:]
    message = message.replace("input should be", "should be")
    shown = type(found).__name__ if isinstance(found, dict | list) else repr(found)
    return f"{message}; found {shown if len(shown) <= 60 else shown[:57] + '...'}"


def _known_fields(location: Sequence[str | int], data: Any) -> list[str]:
    """Fields that the schema knows at ``location`` of ``data``, whose values choose in unions."""
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
    """The nodes with references resolved, and unions by what ``value`` says that it is."""
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
