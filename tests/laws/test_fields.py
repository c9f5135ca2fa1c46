"""Tests that every scenario field round-trips through the saved file, affects the digest, and is
documented.

The fields are taken from the models, so that new fields are tested, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from ruamel.yaml import YAML

from simkv.core.errors import InputError
from simkv.scenario.field_roles import FieldRole, roles
from simkv.scenario.run_fields import find_differences, run_fields
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.scenario_schema import json_schema
from simkv.scenario.scenario_writer import to_yaml
from simkv.scenario.yaml_document import YamlDocument
from simkv.study.run_digest import compute_digest
from tests.laws.random_fleets import fleets
from tests.laws.random_scenarios import ENGINES, scenarios

Tree = dict[str, Any]
HERE = Path(__file__).resolve()
LENGTHS = {"prompt_tokens": {"distribution": "lognormal", "mean": 64}, "output_tokens": 9}
BARE: Tree = {
    "name": "t",
    "workload": {"arrivals": {"num_prompts": 6, "request_rate": 2.0, "seed": 3, **LENGTHS}},
    "engine": {"name": "vllm", "num_gpu_blocks": 512, "max_model_len": 4096}
    | {"max_num_batched_tokens": 8192},
    "profile": "unit-step",
}
ROLES = {"bytes_per_token": 1, "bandwidth": 1000.0}
OUTAGE = [{"replica": 0, "at": 1.0, "back_at": 2.0}]
DRAIN = [{"replica": 1, "at": 1.0, "back_at": 2.0}]
SCALE = {"metric": "running", "target": 2.0, "min_replicas": 1, "max_replicas": 4}
#: Scenarios that contain every section with compatible other fields.
WHOLE: dict[str, Tree] = {
    "about": {
        "report": "https://example.org/here",
        "summary": "all",
        "serve": {"output_tokens": {"distribution": "uniform", "low": 2, "high": 9}},
        "provenance": {"given": ["a"], "fitted": ["b"], "assumed": ["c"]},
        "published": {
            "run": {"figures": {"steps": 3.0}, "e2e_s": {1: 2.0}, "finish_s": {0: 1.0}}
            | {"at_least": {"starved": 1.0}, "note": "n"}
        },
        "expect": {
            "run": {"verdict": "served", "finished": {"le": 3.0}}
            | {"request": {0: {"ttft_s": {"within": [0.0, 1.0]}}}}
        },
    },
    "costs": {"step_scale": {"decode": 2.0}, "timeout": 9.0, "horizon": 60.0, "engine_ready": 1.0},
    "adapters": {
        "lora": {"adapter_mib": 40.0, "host_gb_s": 10.0, "disk_gb_s": 0.5, "modules": ["a", "b"]},
        "workload": {
            "arrivals": {"num_prompts": 6, "request_rate": 2.0, "seed": 3, **LENGTHS}
            | {"lora_modules": ["a", "b"], "lora_assignment": "round-robin"}
        },
        "engine": {"name": "vllm", "num_gpu_blocks": 512, "max_model_len": 4096}
        | {"max_num_batched_tokens": 8192, "enable_lora": True, "max_loras": 2},
    },
    "drafts": {
        "drafter": {"share": 0.1},
        "workload": {"acceptance": 0.7, "requests": [{"prompt_tokens": 9, "output_tokens": 4}]},
        "engine": {"name": "vllm", "num_gpu_blocks": 512, "max_model_len": 4096}
        | {"max_num_batched_tokens": 8192, "num_speculative_tokens": 2},
    },
    "tiers": {
        "offload": {"bytes_per_token": 65536.0, "host_gb_s": 10.0, "latency_us": 20.0}
        | {"disk_read_gb_s": 3.0, "disk_write_gb_s": 2.0, "disk_latency_us": 90.0},
        "engine": {"name": "vllm", "num_gpu_blocks": 512, "max_model_len": 4096}
        | {"max_num_batched_tokens": 8192, "num_cpu_blocks": 64, "eviction_policy": "arc"}
        | {"secondary_tiers": ["fs"]},
    },
    "hardware": {"profile": None, "hardware": {"gpu": "L40S", "model": "llama-3.1-8b"}},
    "experts": {
        "profile": None,
        "hardware": {"gpu": "H100-SXM", "model": "qwen3-30b-a3b", "tp": 2, "gpus_per_node": 4}
        | {"interconnect": {"latency_us": 20.0, "bandwidth_gb_s": 16.0}}
        | {"weights": "fp8", "attention": "bf16", "experts": "fp8", "kv": "fp8"},
    },
    "ramp": {
        "workload": {
            "arrivals": {"num_prompts": 6, "ramp_up_strategy": "linear"}
            | {"ramp_up_start_rps": 1, "ramp_up_end_rps": 3, **LENGTHS}
        }
    },
    "diurnal": {
        "workload": {
            "arrivals": {"num_prompts": 6, "request_rate": 2.0, **LENGTHS}
            | {"diurnal": {"period": 9.0, "amplitude": 0.5}}
        }
    },
    "burst": {"workload": {"burst": {"num_prompts": 3, "prompt_tokens": 9, "output_tokens": 4}}},
    "requests": {"workload": {"requests": [{"prompt_tokens": 9, "output_tokens": 4}] * 2}},
    "sessions": {
        "workload": {
            "sessions": {"num_sessions": 2, "turns": 2, "request_rate": 1.0, "think_time": 1.0}
            | LENGTHS,
            "session_deadline": 9.0,
            "warm_up_sessions": 1,
        }
    },
    "threads": {
        "engine": {"name": "fastdeploy", "num_blocks": 512},
        "pipeline": {"put_gap": 0.1},
    },
    "mistralrs": {"engine": {"name": "mistralrs", "num_gpu_blocks": 512}},
    "sglang": {"engine": {"name": "sglang", "max_total_num_tokens": 8192}},
    "trtllm": {"engine": {"name": "trtllm", "max_tokens_in_paged_kv_cache": 8192}},
    "trace": {"workload": {"trace": str(HERE.parents[2] / "traces" / "spikes.csv")}},
    "fleet": {"fleet": {"replicas": 2}},
    "outages": {
        "fleet": {"replicas": 3, "failures": OUTAGE, "drains": DRAIN}
        | {"router": {"name": "cache_aware", "prefix_knowledge": "events"}}
    },
    "scaled": {"fleet": {"replicas": 2, "autoscale": SCALE, "router": {"name": "least_loaded"}}},
    "groups": {
        "fleet": {
            "replicas": [{"role": "prefill"}, {"role": "decode", "profile": "unit-step"}],
            "kv_transfer": ROLES,
            "decode_router": {"name": "least_loaded"},
        }
    },
}
#: Fields that can be changed only together with other fields.
TIED = {
    *("requests", "burst", "arrivals", "sessions", "trace", "format", "hash_ids", "segments"),
    *("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps", "diurnal", "distribution"),
    *("prefix_group", "prefix_tokens", "prefix_groups", "name", "role", "kv_transfer", 0),
    *("sub_agents", "graph", "compact_at", "compact_to", "first_wins", "wait_for"),
    *("think_time", "tool_time"),  # of a listed request, which require wait_for
    *(
        "hardware",
        "pp",
        "tables",
        "num_cpu_blocks",
        "lpm_aging_tokens_per_pass",
        "retraction_policy",
        "enable_block_reuse",  # values that are not modelled
        "enable_dp_attention",
        "dp_size",
        "eq",
        "le",
        "ge",
        "within",
    ),
}
#: Fields that change with this setting, because ranks are simulated as replicas in lockstep.
TAKES_ALONG = {"dp": ("fleet",)}


def words(node: Any) -> Iterator[str]:
    """Yield the words that the schema permits for any field."""
    if isinstance(node, dict):
        yield from node.get("enum", ())
        yield from (node[key] for key in ("const",) if key in node)
    below: Any = node.values() if isinstance(node, dict) else node
    for value in below if isinstance(node, dict | list) else ():
        yield from words(value)


#: Values for every field: numbers, words, and minimal sections.
OTHERS: tuple[Any, ...] = (
    *(1, 2, 5, 64, 0.5, 2.5, True, False, None, {}, ["x"], "unit-step", "l4-mistralrs-pr2034"),
    *(
        {"steps": 2.0},
        {1: 3.0},
        {"le": 1.0},
        [0.0, 2.0],
        [64],
        ["marlin"],
        [],
        {0: {"preemptions": 0.0}},
        "admit = 1",
    ),
    *dict.fromkeys(word for word in words(json_schema()) if isinstance(word, str)),
)


def scenario_of(tree: Tree) -> Scenario:
    return Scenario.model_validate(deepcopy(tree))


@cache
def base(name: str) -> Scenario:
    return scenario_of({**BARE, **WHOLE[name]})


@cache
def section(field: str) -> TypeAdapter[Any]:
    """Return the validator of one field of a scenario."""
    info = Scenario.model_fields[field]
    return TypeAdapter(Annotated[(info.annotation, *info.metadata)])  # type: ignore[valid-type]


def again(*given: Scenario) -> list[Scenario]:
    """Return the scenarios after they were written to a file as variants and read again."""
    names = ["run", *(f"v{i}" for i in range(1, len(given)))]
    text = to_yaml(dict(zip(names, given, strict=True)))
    return list(
        resolve_variants(YamlDocument(HERE, YAML(typ="safe", pure=True).load(text))).values()
    )


def digest(scenario: Scenario) -> str:
    return compute_digest(scenario, HERE.parent)


def paths(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field in a tree: sections and their fields; for a list, its first
    entry.
    """
    if path:
        yield path
    items: Any = node.items() if isinstance(node, dict) else ()
    if isinstance(node, list) and node and isinstance(node[0], dict):
        items = [(0, node[0])]
    for key, value in items:
        yield from paths(value, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    """Return the value at a path of a tree, or None."""
    for key in path:
        known = (
            key in tree if isinstance(tree, dict) else isinstance(tree, list) and key < len(tree)
        )
        tree = tree[key] if known else None
    return tree


def other(name: str, path: tuple[Any, ...]) -> Scenario | None:
    """Return the scenario with another value in one field: the first value that the field
    accepts.
    """
    elsewhere = [found for tree in WHOLE.values() if (found := at(tree, path)) is not None]
    tree: Any = base(name).model_dump(exclude_unset=True)
    node = tree
    for key in path[:-1]:
        if isinstance(node, dict):
            node.setdefault(key, {})
        node = node[key]
    for value in (*elsewhere, *OTHERS):
        node[path[-1]] = value
        try:
            if path[0] != "fleet":  # the engine of a replica depends on the scenario's engine
                section(path[0]).validate_python(tree[path[0]])  # rejects most values faster
            changed = Scenario.model_validate(tree)  # the original tree is unchanged
            digest(changed)  # also opens the named files
        except (ValidationError, InputError):
            continue
        if changed != base(name):
            return changed
    return None


PATHS: dict[tuple[Any, ...], list[str]] = {}
for _name in WHOLE:
    for _path in paths(base(_name).model_dump()):
        PATHS.setdefault(_path, []).append(_name)


@pytest.mark.parametrize("field", Scenario.model_fields)
def test_field_round_trips_and_has_its_role(field: str) -> None:
    mine = [path for path in PATHS if path[0] == field]
    assert mine
    for path in mine:
        found = ((name, other(name, path)) for name in PATHS[path])
        name, changed = next((one for one in found if one[1]), ("", None))
        if changed is None:
            assert path[-1] in TIED, f"no other value is known for {path}"
            continue
        said = {"name": "t", **run_fields(changed, defaults=False)}
        assert find_differences(scenario_of(said), changed) == [], path
        assert again(base(name), changed) == [base(name), changed], path
        told = {found.field.split(".")[0] for found in find_differences(base(name), changed)}
        if roles(Scenario)[field] is FieldRole.ABOUT:
            assert (digest(changed), told) == (digest(base(name)), set()), path
        else:
            assert digest(changed) != digest(base(name)), path
            assert told == {field, *TAKES_ALONG.get(path[-1], ())}, path


@pytest.mark.parametrize("make", [scenarios, fleets])
@given(data=st.data())
def test_random_scenarios_round_trip(make: Any, data: st.DataObject) -> None:
    pair = [data.draw(make(*data.draw(st.sampled_from(ENGINES)))) for _ in range(2)]
    assert again(*pair) == pair
    assert again(*pair[:1]) == pair[:1]
    same = digest(pair[0]) == digest(pair[1])
    assert same == (not find_differences(*pair))
