"""Random valid scenarios over the whole schema of scenario files.

A scenario begins with a small engine and a small workload. Options of the JSON schema are then set
one by one to sampled values. A value is kept only if the scenario is still valid with it, so each
generated scenario runs. Each seed targets one option, which is tried first, also together with
options that it may require.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from simkv.core.errors import InputError
from simkv.scenario.custom.code_source import override_trust
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.scenario_schema import json_schema
from simkv.scenario.yaml_document import YamlDocument
from simkv.schedulers.engine_registry import ENGINES
from simkv.sim.simulation import build_replica_specs
from simkv.workload.workload_section import build_clients
from tests.conftest import ROOT

Node = dict[str, Any]
#: Paths of field names from the root to a section, each with the section's name in the schema.
Way = tuple[tuple[str, str], ...]

#: Settings for small caches, by engine.
SMALL: dict[str, dict[str, Any]] = {
    "mistralrs": {"num_gpu_blocks": 30, "block_size": 4, "max_num_seqs": 6},
    "vllm": {"num_gpu_blocks": 60, "block_size": 4, "max_model_len": 160, "max_num_seqs": 8},
    "sglang": {"max_total_num_tokens": 240, "page_size": 4, "chunked_prefill_size": 16},
    "fastdeploy": {"num_blocks": 30, "block_size": 4, "max_num_seqs": 6},
    "trtllm": {
        "max_tokens_in_paged_kv_cache": 160,
        "tokens_per_block": 4,
        "max_batch_size": 6,
        "max_num_tokens": 64,
    },
}
CUSTOM = "custom"
WORKLOADS: list[dict[str, Any]] = [
    {"burst": {"num_prompts": 6, "prompt_tokens": 20, "output_tokens": 8}},
    {"arrivals": {"num_prompts": 9, "request_rate": 2, "prompt_tokens": 24, "output_tokens": 9}},
    {"sessions": {"num_sessions": 3, "turns": 3, "request_rate": 1, "prompt_tokens": 9,
                  "output_tokens": 5}},
    {"requests": [{"arrival": 0.0, "prompt_tokens": 12, "output_tokens": 4},
                  {"arrival": 0.5, "prompt_tokens": 30, "output_tokens": 9},
                  {"arrival": 0.6, "prompt_tokens": 7, "output_tokens": 2}]},
    {"trace": "spikes.csv", "limit": 8},
]  # fmt: skip
#: Sections that some options require.
COMPANIONS: list[dict[str, Any]] = [
    {},
    {},
    {"fleet": {"replicas": 2}},
    {"fleet": {"replicas": 2, "autoscale": {"metric": "waiting", "target": 2.0,
                                            "min_replicas": 1, "max_replicas": 3}}},
    {"fleet": {"replicas": [{"count": 1, "role": "prefill"}, {"count": 2, "role": "decode"}],
               "kv_transfer": {"bytes_per_token": 1000, "bandwidth": 1e6}}},
    {"fleet": {"replicas": 2, "lockstep": True}},
    {"engine": {"enable_lora": True}, "workload": {"arrivals": {"lora_modules": ["a", "b"]}}},
    {"engine": {"num_speculative_tokens": 2}, "workload": {"acceptance": 0.6}},
    {"engine": {"num_cpu_blocks": 40, "enable_prefix_caching": True}},
    {"engine": {"num_cpu_blocks": 40, "secondary_tiers": ["fs"], "enable_prefix_caching": True}},
    {"engine": {"kv_cache_groups": [0, "mamba"], "num_gpu_blocks": 200}},
    {"engine": {"kv_cache_groups": [0, 24], "num_gpu_blocks": 200}},
    {"engine": {"policy": "priority"}},
    {"engine": {"enable_priority_scheduling": True}},
    {"engine": {"enable_prefill_delayer": True}},
    {"engine": {"disable_radix_cache": True}},
    {"engine": {"enable_dp_attention": True, "dp_size": 2},
     "fleet": {"replicas": 2, "lockstep": True}},
    {"engine": {"variant": "ratio"}},
    {"pipeline": {}},
    {"hardware": {"gpu": "H100", "model": "llama-3.1-8b"}, "profile": None},
    {"hardware": {"gpu": "L40S", "model": "qwen3-30b-a3b", "dp": 2}, "profile": None},
    {"workload": {"sessions": {"num_sessions": 2, "turns": 3, "prompt_tokens": 9, "request_rate": 1,
                               "output_tokens": 5, "compact_at": 60, "compact_to": 8,
                               "sub_agents": {"count": 2, "turns": 2, "prompt_tokens": 6,
                                              "output_tokens": 3, "first_wins": True}}}},
    {"workload": {"sessions": {"num_sessions": 2, "request_rate": 1, "graph": [
        {"turn": "a", "prompt_tokens": 9, "output_tokens": 5},
        {"turn": "b", "prompt_tokens": 9, "output_tokens": 5, "wait_for": ["a"], "count": 2,
         "context": "own", "prefix_group": "p", "prefix_tokens": 4},
        {"turn": "c", "prompt_tokens": 9, "output_tokens": 5, "wait_for": ["b"], "each": True},
        {"turn": "d", "prompt_tokens": 9, "output_tokens": 5, "wait_for": ["c"], "context": "a",
         "first_wins": True, "think_time": 0.5},
    ]}}},
    {"workload": {"arrivals": {"num_prompts": 9, "request_rate": None, "prompt_tokens": 20,
                               "output_tokens": 6, "ramp_up_strategy": "linear",
                               "ramp_up_start_rps": 1, "ramp_up_end_rps": 5}}},
    {"workload": {"requests": [
        {"arrival": 0.0, "prompt_tokens": 12, "output_tokens": 4, "hash_ids": [1, 2, 3],
         "hash_block_size": 4},
        {"arrival": 0.2, "prompt_tokens": 12, "output_tokens": 4, "prefix_group": "a",
         "prefix_tokens": 8, "timeout": 9.0},
    ]}},
    {"workload": {"requests": [
        {"prompt_tokens": 12, "output_tokens": 4},
        {"prompt_tokens": 20, "output_tokens": 4, "wait_for": [0], "think_time": 0.5},
        {"prompt_tokens": 9, "output_tokens": 3, "wait_for": [0, 1], "tool_time": 1.0},
    ]}},
]  # fmt: skip
#: Values of text fields, and small values of numbers, by field name.
VALUES: dict[str, list[Any]] = {
    "name": ["round_robin", "random", "least_loaded", "power_of_two", "session", "cache_aware"],
    "router": ["round_robin", "random", "least_loaded", "session", "cache_aware"],
    "decode_router": ["round_robin", "least_loaded"],
    "gpu": ["H100", "A100", "L40S", "B200"],
    "model": ["llama-3.1-8b", "qwen3-30b-a3b", "gpt-oss-20b"],
    "weights": ["bf16", "fp8"], "attention": ["bf16", "fp8"], "experts": ["bf16", "fp8"],
    "kv": ["bf16", "fp8"], "interconnect": ["NVLink", "PCIe"],
    "profile": ["unit-step", "l4-mistralrs-pr2034"],
    "rule": ["waiting_order = prompt_tokens - age", "admit = free > 0.1"],
    "lora": ["a", "b"], "lora_modules": [["a"], ["a", "b", "c"]], "modules": [["a"], ["a", "b"]],
    "routing_key": ["x", "y"], "client": ["p", "q"],
    "prefix_group": ["p", "q"], "format": ["auto"],
    "trace": ["spikes.csv"], "of": ["prompt_tokens", "output_tokens"],
    "tables": [], "source": [], "source_state": [], "native_options": [], "file": [],
    "kv_cache_groups": [[0], [0, 24], [16], [0, "mamba"], ["chunked-8"], [0, "chunked-16"]],
    "segments": [[["u0", 0, 8], ["z", 0, 4]]],
    "num_prompts": [1, 3, 8, 14], "num_sessions": [1, 2, 4], "turns": [1, 2, 4],
    "count": [1, 2], "replicas": [1, 2, 3], "replica": [0, 1],
    "prompt_tokens": [1, 8, 20, 40], "output_tokens": [1, 2, 6, 12], "max_tokens": [4, 16, 30],
    "prefix_tokens": [0, 4, 12], "request_rate": [0.5, 2, 20, float("inf")],
    "num_gpu_blocks": [20, 40, 60, 200, "auto"], "num_blocks": [20, 30, 60],
    "max_total_num_tokens": [80, 160, 240, 400], "max_tokens_in_paged_kv_cache": [80, 160, 400],
    "block_size": [1, 2, 4, 8, 16], "page_size": [1, 2, 4], "tokens_per_block": [2, 4, 8],
    "max_model_len": [60, 100, 160, "auto"], "max_seq_len": [40, 100, 160],
    "max_num_batched_tokens": [8, 32, 160, 512], "max_num_tokens": [16, 64, 160],
    "chunked_prefill_size": [-1, 4, 8, 16, 64], "max_prefill_tokens": [8, 64],
    "limit": [3, 8], "sample": [3, 0.5], "duration": [0.5, 30.0], "start": [0.0, 0.1],
    "low": [1, 2, 4], "high": [6, 10, 30], "mean": [3, 8, 16], "len": [4, 10], "max": [12, 30],
    "timeout": [0.5, 5.0, 60.0], "horizon": [0.4, 5.0, 60.0], "every": [1, 2, 5.0],
    "at": [0.0, 0.5, 3.0], "back_at": [1.0, 6.0], "dp": [1, 2], "tp": [1, 2], "ep": [1, 2],
    "pp": [1], "gpus_per_node": [1, 8], "num_cpu_blocks": [0, 10, 80], "max_concurrency": [1, 4],
    "bytes_per_token": [100, 131072], "bandwidth": [1e5, 1e9], "period": [5.0, 60.0],
    "verdict": ["served"], "outcome": ["finished"], "metric": ["waiting", "running", "in_flight"],
    "kv_offloading_size": [0.5, 8.0], "compact_at": [60, 90], "compact_to": [5, 10],
    "hash_ids": [[1, 2, 3]], "hash_block_size": [4], "acceptance_seed": [1, 5],
    "wait_for": [[0]],
}  # fmt: skip
#: Names of the engines' sections in the schema.
SECTIONS = {
    "mistralrs": "MistralrsConfig",
    "vllm": "VllmConfig",
    "sglang": "SglangConfig",
    "fastdeploy": "FastDeployConfig",
    "trtllm": "TrtllmConfig",
}
RAMP = {
    "ramp_up_strategy": "linear",
    "ramp_up_start_rps": 1,
    "ramp_up_end_rps": 5,
    "request_rate": None,
    "diurnal": None,
}
#: Fields of the same section that a field requires; null removes a field.
REQUIRES: dict[str, dict[str, Any]] = {
    "prefix_group": {"prefix_tokens": 4, "prefix_groups": None, "hash_ids": None, "segments": None},
    "prefix_groups": {"prefix_tokens": 4, "prefix_group": None},
    "prefix_zipf": {"prefix_tokens": 4, "prefix_group": None, "prefix_groups": 3},
    "hash_ids": {"prompt_tokens": 12, "hash_block_size": 4, "prefix_group": None,
                 "prefix_tokens": None, "segments": None},
    "segments": {"prompt_tokens": 12, "hash_ids": None, "prefix_group": None,
                 "prefix_tokens": None},
    "ramp_up_strategy": RAMP,
    "ramp_up_start_rps": RAMP,
    "ramp_up_end_rps": RAMP,
    "diurnal": {"request_rate": 2.0},
    "kv_offloading_size": {"num_cpu_blocks": None},
    "wait_for": {"arrival": None},
    "event_delay": {"prefix_knowledge": "events"},
}  # fmt: skip
#: Fields that always have a small value, because they determine the size of the workload.
COUNTS = {
    "turns", "count", "num_sessions", "num_prompts", "low", "high", "mean", "len", "max",
}  # fmt: skip
#: Fields that are lists of sections.
LISTS = {"requests", "replicas", "failures", "drains"}
#: Sections that do not change a simulation, and fields that other fields of the section replace.
LEFT_OUT = {
    "provenance", "published", "expect", "plan", "serve", "variants", "name", "report",
    "summary",
}  # fmt: skip
#: Sections that every scenario has.
ALWAYS = {"Scenario.workload", "Scenario.engine"}
#: Maximum number of attempts to make a targeted option valid.
MAX_ATTEMPTS = 200
#: Maximum number of requests of a scenario.
MAX_REQUESTS = 200
#: Number of options that are set in addition to the targeted option.
MAX_OPTIONS = 6
TRACE = ROOT / "traces" / "spikes.csv"


@dataclass
class Option:
    """A field of a section, its schema, and the paths to sections of this kind."""

    section: str
    field: str
    node: Node
    ways: list[Way] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The section and the field, such as ``VllmConfig.watermark``."""
        return f"{self.section}.{self.field}"


@dataclass
class GeneratedScenario:
    """A valid scenario as plain data, and the options that it sets.

    ``target`` is the option that the seed targets; it is absent from ``options`` if no valid
    scenario with this option was found.
    """

    data: dict[str, Any]
    target: str
    options: list[str] = field(default_factory=list)


@cache
def load_schema() -> Node:
    """Return the JSON schema of scenario files."""
    return json_schema()


def list_alternatives(node: Node) -> list[Node]:
    """Return the alternatives of a node without references, except null."""
    while "$ref" in node:
        node = load_schema()["$defs"][node["$ref"].rsplit("/", 1)[1]]
    found = node.get("anyOf") or node.get("oneOf")
    if found and "enum" not in node:
        return [one for inner in found for one in list_alternatives(inner)]
    return [] if node.get("type") == "null" else [node]


@cache
def list_options() -> dict[str, Option]:
    """Return the options of the schema by name, such as ``VllmConfig.watermark``."""
    found: dict[str, Option] = {}
    _add_options(load_schema(), "Scenario", (), found)
    return found


def _add_options(node: Node, section: str, way: Way, found: dict[str, Option]) -> None:
    for name, inner in node.get("properties", {}).items():
        if name in LEFT_OUT or VALUES.get(name) == [] or "const" in inner:
            continue
        if (option := Option(section, name, inner)).name not in ALWAYS:
            found.setdefault(option.name, option).ways.append(way)
        shapes = list_alternatives(inner)
        items = [one for shape in shapes for one in list_alternatives(shape.get("items", {}))]
        for one in [*shapes, *items]:
            title = one.get("title", "")
            if one.get("properties") and title and title not in [step[1] for step in way]:
                _add_options(one, title, (*way, (name, title)), found)


def sample_value(name: str, node: Node, draw: random.Random) -> Any:
    """Return a value of a field that its schema allows."""
    if VALUES.get(name) and (name in COUNTS or draw.random() < 0.9):
        return copy.deepcopy(draw.choice(VALUES[name]))
    one = draw.choice(list_alternatives(node))
    if "const" in one:
        return one["const"]
    if "enum" in one:
        return draw.choice(one["enum"])
    return SAMPLERS.get(one.get("type", "string"), _text)(name, one, draw)


def _whole(name: str, node: Node, draw: random.Random) -> int:
    low = node.get("minimum", node.get("exclusiveMinimum", -1) + 1)
    return draw.randint(low, min(low + draw.choice([1, 4, 40]), node.get("maximum", low + 40)))


def _number(name: str, node: Node, draw: random.Random) -> float:
    low = max(node.get("minimum", node.get("exclusiveMinimum", 0.0)), 0.0)
    high = node.get("maximum", node.get("exclusiveMaximum", low + 10.0))
    return round(low + (high - low) * draw.choice([0.01, 0.1, 0.5, 0.9]), 6)


def _text(name: str, node: Node, draw: random.Random) -> str:
    return draw.choice(["a", "b"])


def _array(name: str, node: Node, draw: random.Random) -> list[Any]:
    return [sample_value(name, node.get("items", {}), draw) for _ in range(draw.choice([1, 2]))]


def _object(name: str, node: Node, draw: random.Random) -> dict[str, Any]:
    kind = next((name for name, title in SECTIONS.items() if title == node.get("title")), None)
    if kind:
        return {"name": kind, **SMALL[kind]}
    needed, found = node.get("required", []), {}
    for inner, what in node.get("properties", {}).items():
        wanted = inner in needed or "const" in what or draw.random() < 0.2
        if VALUES.get(inner) == [] or not wanted:
            continue
        found[inner] = what["const"] if "const" in what else sample_value(inner, what, draw)
    return found


SAMPLERS: dict[str, Callable[[str, Node, random.Random], Any]] = {
    "integer": _whole,
    "number": _number,
    "boolean": lambda _name, _node, draw: draw.random() < 0.5,
    "string": _text,
    "array": _array,
    "object": _object,
}


def is_valid(data: dict[str, Any], folder: Path) -> bool:
    """Return whether a scenario is valid and small, and its costs can be determined."""
    document = YamlDocument(folder / "generated.yaml", copy.deepcopy(data))
    with override_trust(yes=True), contextlib.suppress(InputError):
        scenario = resolve_variants(document)["run"]
        build_replica_specs(scenario, folder)
        clients = build_clients(scenario.workload, scenario.timeout)
        return len(clients.requests) <= MAX_REQUESTS
    return False


def set_option(data: dict[str, Any], option: Option, draw: random.Random) -> dict[str, Any]:
    """Return a copy of the scenario with an option set to a sampled value.

    Sections that are missing, or of another kind, are added.
    """
    data = copy.deepcopy(data)
    inner: Any = data
    near = [way for way in option.ways if _exists(data, way)]
    for name, section in draw.choice(near or option.ways):
        found = inner.get(name)
        if isinstance(found, list) and found and isinstance(found[0], dict):
            found = draw.choice(found)
        if not isinstance(found, dict) or not _is_kind(found, section):
            found = _object(name, load_schema()["$defs"][section], draw)
            inner[name] = [found] if name in LISTS else found
        inner = found
    for name, value in REQUIRES.get(option.field, {}).items():
        inner.pop(name, None) if value is None else inner.setdefault(name, value)
    inner[option.field] = sample_value(option.field, option.node, draw)
    return data


def _exists(data: Any, way: Way) -> bool:
    """Return whether the scenario has the section at the end of the path ``way``."""
    for name, section in way:
        data = data.get(name)
        data = data[0] if isinstance(data, list) and data else data
        if not isinstance(data, dict) or not _is_kind(data, section):
            return False
    return True


def _is_kind(data: dict[str, Any], section: str) -> bool:
    """Return whether the data have the constant fields of a section."""
    properties = load_schema()["$defs"][section]["properties"]
    return all(
        data.get(name, what.get("default")) == what["const"]
        for name, what in properties.items()
        if "const" in what
    )


def merge(data: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Return ``data`` with the fields of ``more``; null removes a field."""
    data = copy.deepcopy(data)
    for name, value in more.items():
        if value is None:
            data.pop(name, None)
        elif isinstance(value, dict) and isinstance(data.get(name), dict):
            data[name] = merge(data[name], value)
        else:
            data[name] = copy.deepcopy(value)
    if len(set(data) & {"requests", "burst", "arrivals", "sessions", "trace"}) > 1:
        form = next(iter(set(more) & {"requests", "burst", "arrivals", "sessions", "trace"}))
        data = {k: v for k, v in data.items() if k in (form, "acceptance", "max_concurrency")}
    return data


def generate_scenario(seed: int, folder: Path) -> GeneratedScenario:
    """Return the valid scenario of a seed.

    ``folder`` has the trace and the custom scheduler.
    """
    draw = random.Random(seed)
    options = list(list_options().values())
    target = options[seed % len(options)]
    engine = next((name for name, title in SECTIONS.items() if title == target.section), None)
    if target.section == "Pacing" or target.field == "pipeline":
        engine = "fastdeploy"
    if target.section == "KvTransfer" or target.field == "kv_transfer":
        engine = "vllm"
    engine = engine or draw.choice([*ENGINES, CUSTOM])
    found = GeneratedScenario(_start(engine, draw), target.name)
    start = found.data
    for _ in range(MAX_ATTEMPTS):
        base = merge(start, draw.choice(COMPANIONS))
        forms = {field for way in target.ways for field, _ in way if way[0][0] == "workload"}
        base["workload"] = copy.deepcopy(draw.choice(_with_form(forms)))
        if _add(found, base, target, folder, draw):
            break
    for _ in range(draw.randint(0, MAX_OPTIONS)):
        option = draw.choice(options)
        if option.section in SECTIONS.values() and option.section != SECTIONS.get(engine):
            continue
        _add(found, found.data, option, folder, draw)
    return found


def _add(
    found: GeneratedScenario,
    base: dict[str, Any],
    option: Option,
    folder: Path,
    draw: random.Random,
) -> bool:
    """Set an option of ``base`` and return whether the result is valid; if so, store it."""
    tried = set_option(base, option, draw)
    if not is_valid(tried, folder):
        return False
    found.data = tried
    found.options.append(option.name)
    return True


def _with_form(forms: set[str]) -> list[dict[str, Any]]:
    """Return workloads of one of the ``forms``, or all workloads."""
    companions = [one["workload"] for one in COMPANIONS if "workload" in one]
    return [one for one in [*WORKLOADS, *companions] if forms & set(one)] or WORKLOADS


def _start(engine: str, draw: random.Random) -> dict[str, Any]:
    data: dict[str, Any] = {
        "name": "generated",
        "workload": copy.deepcopy(draw.choice(WORKLOADS)),
        "profile": draw.choice(VALUES["profile"]),
    }
    if engine == CUSTOM:
        return data | {"engine": {"name": "mine", "file": "mine.py", "num_blocks": 30}}
    spec = ENGINES[engine]
    variant = draw.choice([spec.config().variant, draw.choice(list(spec.variants))])
    return data | {"engine": {"name": engine, "variant": variant, **SMALL[engine]}}
