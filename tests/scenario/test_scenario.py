"""Tests of scenario files: variants, overrides, error messages and the JSON schema."""

from __future__ import annotations

import contextlib
import copy
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruamel.yaml import YAML

from simkv.core.errors import InputError
from simkv.scenario.overrides import merge
from simkv.scenario.scenario import Scenario
from simkv.scenario.scenario_loader import load
from simkv.scenario.scenario_schema import json_schema
from simkv.schedulers.engine_registry import ENGINES
from simkv.schedulers.mistralrs.config import MistralrsConfig
from simkv.schedulers.vllm.config import VllmConfig
from tests.conftest import ROOT

PLAIN = """\
name: t
workload:
  burst: {num_prompts: 4, prompt_tokens: 5, output_tokens: 3}
engine:
  name: mistralrs
  variant: bucketed
profile: unit-step
"""
FILES = sorted((ROOT / "scenarios").glob("*.yaml"))


def loaded(folder: Path, text: str, *overrides: str) -> dict[str, Scenario]:
    (folder / "s.yaml").write_text(text)
    return load(folder / "s.yaml", overrides)


def complaints(folder: Path, text: str, *overrides: str) -> list[str]:
    with pytest.raises(InputError) as raised:
        loaded(folder, text, *overrides)
    return str(raised.value).replace(f"{folder}/", "").splitlines()


def changed(old: str, new: str) -> str:
    assert PLAIN.count(old) == 1
    return PLAIN.replace(old, new)


# Variants and overrides


def test_file_without_variants_has_one_named_run(tmp_path: Path) -> None:
    found = loaded(tmp_path, PLAIN)
    assert list(found) == ["run"]
    assert found["run"].engine == MistralrsConfig(variant="bucketed")
    assert found["run"].workload.size == 4
    assert found["run"].timeout is None


def test_variants_override_only_the_fields_they_set(tmp_path: Path) -> None:
    text = PLAIN + (
        "timeout: 9.0\n"
        "variants:\n"
        "  same: {}\n"
        "  small: {engine: {block_size: 8}, timeout: null}\n"
        "  slow: {workload: {burst: {interval: 2.0}}, profile: l4-mistralrs-pr2031}\n"
    )
    found = loaded(tmp_path, text)
    assert list(found) == ["same", "small", "slow"]
    assert found["same"] == loaded(tmp_path, PLAIN + "timeout: 9.0\n")["run"]
    assert found["small"].engine == MistralrsConfig(variant="bucketed", block_size=8)
    assert found["small"].timeout is None
    assert found["slow"].timeout == 9.0
    burst = found["slow"].workload.burst
    assert burst is not None
    assert (burst.num_prompts, burst.interval) == (4, 2.0)
    assert found["slow"].profile == "l4-mistralrs-pr2031"


def test_other_engine_replaces_the_whole_section(tmp_path: Path) -> None:
    text = changed("variant: bucketed", "max_num_seqs: 3") + (
        "variants:\n  v: {engine: {name: vllm}}\n  m: {engine: {name: mistralrs}}\n"
    )
    found = loaded(tmp_path, text)
    assert found["v"].engine == VllmConfig()
    assert found["m"].engine == MistralrsConfig(max_num_seqs=3)


def test_other_workload_form_replaces_the_section(tmp_path: Path) -> None:
    rows = "[{prompt_tokens: 1, output_tokens: 2}]"
    text = PLAIN + f"variants:\n  listed: {{workload: {{requests: {rows}}}}}\n"
    workload = loaded(tmp_path, text)["listed"].workload
    assert workload.burst is None
    assert workload.size == 1


def test_lists_are_replaced_not_joined() -> None:
    assert merge({"a": [1, 2], "b": 1}, {"a": [3]}) == {"a": [3], "b": 1}
    assert merge({"a": {"b": 1}}, {"a": 5}) == {"a": 5}
    assert merge(1, {"a": 5}) == {"a": 5}


def test_merged_data_shares_no_objects_with_its_inputs() -> None:
    base: dict[str, Any] = {"a": {"b": [1]}}
    result = merge(base, {"c": base["a"]})
    result["a"]["b"].append(2)
    result["c"]["b"].append(3)
    assert base == {"a": {"b": [1]}}


def test_overrides_apply_before_variants(tmp_path: Path) -> None:
    text = PLAIN + "variants:\n  a: {}\n  b: {engine: {block_size: 8}}\n"
    found = loaded(tmp_path, text, "engine.block_size=64", "timeout=3.5")
    assert [s.engine.block_size for s in found.values()] == [64, 8]  # type: ignore[union-attr]
    assert {s.timeout for s in found.values()} == {3.5}


def test_override_can_add_a_variant(tmp_path: Path) -> None:
    found = loaded(tmp_path, PLAIN, "variants.new.engine.variant=seed")
    assert list(found) == ["new"]
    assert found["new"].engine.variant == "seed"


def test_accepts_integers_for_floats_but_no_strings(tmp_path: Path) -> None:
    assert loaded(tmp_path, PLAIN + "timeout: 5\n")["run"].timeout == 5.0
    assert complaints(tmp_path, PLAIN + 'timeout: "5"\n') == [
        "s.yaml:8: timeout: should be a number; found '5'"
    ]


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_all_scenarios_of_the_repository_are_valid(path: Path) -> None:
    found = load(path)
    assert found
    assert {scenario.name for scenario in found.values()} == {path.stem}


# Error messages: line, field, problem, expected value

MISTRALRS = "seed, bucketed, pr2031a, pr2031, pr2034, pr2034july, merged2250"
DRAWN = """\
name: drawn
workload:
  arrivals:
    num_prompts: 4
    prompt_tokens: 9
    output_tokens: {DRAW}
engine: {name: mistralrs, block_size: 32, num_gpu_blocks: 9}
profile: unit-step
"""
BROKEN: list[tuple[str, str]] = [
    (
        changed("variant:", "varient:"),
        "s.yaml:6: engine.varient: unknown field (did you mean 'variant'?); expected one of name, "
        "variant, block_size",
    ),
    (
        changed("bucketed", "buckted"),
        "s.yaml:6: engine.variant: unknown value 'buckted' (did you mean 'bucketed'?); expected "
        + MISTRALRS,
    ),
    (
        changed("mistralrs", "mistral"),
        "s.yaml:5: engine.name: unknown value 'mistral' (did you mean 'mistralrs'?); expected "
        "mistralrs, vllm, sglang, fastdeploy, trtllm",
    ),
    (changed("  name: mistralrs\n", ""), "s.yaml:4: engine.name: missing; this field is required"),
    (
        DRAWN.replace("DRAW", "distribution: lognormul, mean: 9"),
        "s.yaml:6: workload.arrivals.output_tokens.distribution: unknown value 'lognormul' (did "
        "you mean 'lognormal'?); expected uniform, random, lognormal, zipf, empirical",
    ),
    (
        DRAWN.replace("DRAW", "mean: 9"),
        "s.yaml:6: workload.arrivals.output_tokens.distribution: missing; expected one of uniform, "
        "random, lognormal, zipf, empirical",
    ),
    (
        changed("  variant: bucketed", "  num_blocks: 100"),
        "s.yaml:6: engine.num_blocks: unknown field (did you mean 'num_gpu_blocks'?); expected",
    ),
    (
        changed("num_prompts: 4", "num_prompts: -4"),
        "s.yaml:3: workload.burst.num_prompts: should be greater than 0; found -4",
    ),
    (
        changed("num_prompts: 4", "num_prompts: 1000000000"),
        "s.yaml:3: workload.burst.num_prompts: should be less than or equal to 10000000; found "
        "1000000000",
    ),
    (
        changed("num_prompts: 4", "num_prompts: " + "9" * 400),
        "s.yaml:3: num_prompts: should be a whole number of at most 18 digits; found a number "
        "with about 401",
    ),
    (
        changed("variant: bucketed", "num_gpu_blocks: 1000000000"),
        "s.yaml:6: engine.num_gpu_blocks: should be less than or equal to 10000000",
    ),
    (
        changed("variant: bucketed", "block_size: 0"),
        "s.yaml:6: engine.block_size: should be greater than 0; found 0",
    ),
    (
        changed("variant: bucketed", "block_size: 1.5"),
        "s.yaml:6: engine.block_size: should be a whole number",
    ),
    (
        changed("variant: bucketed", "variant: seed\n  prefix_caching: true"),
        "s.yaml:4: engine: prefix_caching: variant 'seed' has no prefix cache; use false",
    ),
    (
        changed("unit-step", "unit-stp"),
        "s.yaml:7: profile: unknown profile 'unit-stp' (did you mean 'unit-step'?); expected",
    ),
    (changed("unit-step", "my.json"), "s.yaml:7: profile: file my.json does not exist"),
    (changed("profile: unit-step\n", ""), "s.yaml:1: profile: missing; set profile or"),
    (changed("name: t", "name: ../t"), "s.yaml:1: name: should have only letters, digits"),
    (PLAIN + "tiemout: 3\n", "s.yaml:8: tiemout: unknown field (did you mean 'timeout'?)"),
    (PLAIN + "timeout: -3\n", "s.yaml:8: timeout: should be greater than 0; found -3"),
    (PLAIN + "timeout: .nan\n", "s.yaml:8: timeout: should be a finite number; found nan"),
    (PLAIN + "horizon: .inf\n", "s.yaml:8: horizon: should be a finite number; found inf"),
    (PLAIN + "timeout: true\n", "s.yaml:8: timeout: should be a number; found True"),
    (PLAIN + "engine_ready: 1.0e+12\n", "s.yaml:8: engine_ready: should be less than or equal to"),
    (PLAIN + "1: 2\n", "s.yaml:8: 1: keys should be text; found 1"),
    (PLAIN + "? [1]\n: 2\n", "s.yaml:8: (1,): keys should be text"),
    (PLAIN + "timeout: !x 5\n", "s.yaml:8: timeout: should be a number"),
    (PLAIN + 'report: "javascript:alert(1)"\n', "s.yaml:8: report: must begin with"),
    (PLAIN + "report: data:text/html,x\n", "s.yaml:8: report: must begin with"),
    (PLAIN + 'report: " javascript:alert(1)"\n', "s.yaml:8: report: must begin with"),
    (PLAIN + 'report: "https:alert(1)"\n', "s.yaml:8: report: must begin with"),
    (PLAIN + 'report: "http://[x"\n', "s.yaml:8: report: "),
    (PLAIN + "summary: 2020-01-01\n", "s.yaml:8: summary: should be text"),
    (PLAIN + "variants: [a]\n", "s.yaml:8: variants: should be a mapping of fields; found list"),
    (
        PLAIN + "variants:\n  a:\n",
        "s.yaml:9: variants.a: should be a mapping of fields;",
    ),
    (PLAIN + "variants:\n  a/b: {}\n", "s.yaml:9: variants.a/b: should have only letters"),
    (
        PLAIN + "variants:\n  a: {}\n  b:\n    engine: {blok_size: 3}\n",
        "s.yaml:11: engine.blok_size (variant b): unknown field (did you mean 'block_size'?)",
    ),
    (
        PLAIN + "variants:\n  b: {engine: {variant: x}}\n",
        "s.yaml:9: engine.variant (variant b): unknown value 'x'; expected " + MISTRALRS,
    ),
    (
        PLAIN + "variants:\n  b: {engine: {name: vllm, variant: bucketed}}\n",
        "s.yaml:9: engine.variant (variant b): unknown version 'bucketed'",
    ),
    (
        PLAIN + "variants:\n  b: {engine: {name: vllm, variant: '0.99'}}\n",
        "s.yaml:9: engine.variant (variant b): unknown version '0.99'; expected a release of vLLM ",
    ),
    (
        PLAIN + "variants:\n  b: {engine: {name: vllm, variant: 0.30}}\n",
        "s.yaml:9: engine.variant (variant b): YAML reads 0.3 as a number; put it in quotes",
    ),
    (
        changed("mistralrs", "vllm").replace("bucketed", "'0.25'\n  max_num_scheduled_tokens: 9"),
        "s.yaml:4: engine: max_num_scheduled_tokens: not available in vLLM 0.25, added in 0.26; "
        "remove it",
    ),
    (PLAIN + "variants:\n  b: {profile: x}\n", "s.yaml:9: profile: unknown profile 'x'"),
    (PLAIN + "variants:\n  b: {variants: {}}\n", "s.yaml:9: variants (variant b): unknown field"),
    (
        PLAIN + "published:\n  rnu: {figures: {makespan_s: 3}}\n",
        "s.yaml:9: published.rnu: unknown variant (did you mean 'run'?); expected one of",
    ),
    (
        PLAIN + "published:\n  run: {figures: {makespan: 3}}\n",
        "s.yaml:9: published.run.figures.makespan: unknown metric 'makespan' of summary.json "
        "(did you mean 'makespan_s'?)",
    ),
    (
        PLAIN + "published:\n  run: {figures: {makespan_s: .nan}}\n",
        "s.yaml:9: published.run.figures.makespan_s: should be a finite number; found nan",
    ),
    (
        changed("  burst", "  requests: []\n  burst"),
        "s.yaml:3: workload.requests: should have at least 1 item",
    ),
    (
        changed("  burst", "  requests: [{prompt_tokens: 1, output_tokens: 1}]\n  burst"),
        "s.yaml:2: workload: must have exactly one of ",
    ),
]


@pytest.mark.parametrize(("text", "complaint"), BROKEN, ids=lambda x: x[-40:])
def test_invalid_scenario_gets_a_one_line_message(
    tmp_path: Path, text: str, complaint: str
) -> None:
    lines = complaints(tmp_path, text)
    assert lines[0].startswith(complaint), lines
    assert len(lines) == 1


def test_each_invalid_field_has_one_message_with_its_line(tmp_path: Path) -> None:
    text = changed("num_prompts: 4", "num_prompts: -4").replace("bucketed", "x") + "timeout: x\n"
    assert [line.split(": ")[:2] for line in complaints(tmp_path, text)] == [
        ["s.yaml:3", "workload.burst.num_prompts"],
        ["s.yaml:6", "engine.variant"],
        ["s.yaml:8", "timeout"],
    ]


def test_error_in_a_listed_request_names_its_line(tmp_path: Path) -> None:
    rows = (
        "requests:\n"
        "    - {prompt_tokens: 1, output_tokens: 1}\n"
        "    - {prompt_tokens: 1, output_tokens: 0}\n"
        "    - {prompt_tokens: 1, output_tokens: 1, timeout: .inf}\n"
        "    - {prompt_tokens: 1}"
    )
    text = changed("burst: {num_prompts: 4, prompt_tokens: 5, output_tokens: 3}", rows)
    assert complaints(tmp_path, text) == [
        "s.yaml:5: workload.requests.1.output_tokens: should be greater than 0; found 0",
        "s.yaml:6: workload.requests.2.timeout: should be a finite number; found inf",
        "s.yaml:7: workload.requests.3.output_tokens: missing; this field is required",
    ]


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("engine.blok_size=5", "engine.blok_size: unknown field (did you mean 'block_size'?)"),
        ("engine.block_size=x", "engine.block_size: should be a whole number; found 'x'"),
        ("engine.block_size=", "engine.block_size: should be a whole number; found None"),
        ("engine=5", "engine: should be a mapping of fields"),
        ("variants.a.engine.block_size=0", "engine.block_size (variant a): should be greater"),
        ("profile=nope", "profile: unknown profile 'nope'"),
    ],
)
def test_error_in_an_override_names_the_override(
    tmp_path: Path, assignment: str, complaint: str
) -> None:
    (line,) = complaints(tmp_path, PLAIN, assignment)
    assert line.startswith(f"--set {assignment}: {complaint}")


def test_long_values_are_shortened_in_messages(tmp_path: Path) -> None:
    (line,) = complaints(tmp_path, PLAIN + "timeout: " + "x" * 5000 + "\n")
    assert len(line) < 200


# Fuzzing: every scenario loads or is rejected with a message

WEIRD: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3.5,
    10**30,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "mistralrs",
    "vllm",
    "burst",
    [],
    [1],
    {},
    {"name": "vllm"},
    {"a": {"b": [1, {"c": None}]}},
    [[[[]]]],
    "\ud83d\ude00",
]


def nodes(tree: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values of a tree."""
    children = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    return [path, *(found for key, child in children for found in nodes(child, (*path, key)))]


def mutate(tree: Any, rng: random.Random) -> Any:
    """Return the tree after one value was dropped, renamed, replaced, doubled or swapped."""
    tree = copy.deepcopy(tree)
    path = rng.choice(nodes(tree)[1:] or [()])
    if not path:
        return rng.choice(WEIRD)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key = path[-1]
    move = rng.choice(["drop", "rename", "replace", "replace", "graft", "add"])
    if move == "drop":
        del parent[key]
    elif move == "rename" and isinstance(parent, dict):
        parent[rng.choice([f"{key}x", str(key)[1:], 5, None, "name"])] = parent.pop(key)
    elif move == "graft":
        source = tree
        for part in rng.choice(nodes(tree)):
            source = source[part]
        parent[key] = copy.deepcopy(source)
    elif move == "add" and isinstance(parent[key], dict):
        parent[key][rng.choice(["extra", "seed", 1])] = rng.choice(WEIRD)
    else:
        parent[key] = rng.choice(WEIRD)
    return tree


@pytest.mark.parametrize("path", FILES[:: max(1, len(FILES) // 5)], ids=lambda p: p.stem)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), times=st.integers(1, 3))
def test_mutated_scenario_is_valid_or_rejected(
    path: Path, seed: int, times: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    rng = random.Random(seed)
    tree = YAML(typ="safe", pure=True).load(path.read_text())
    for _ in range(times):
        tree = mutate(tree, rng)
    folder = tmp_path_factory.mktemp("mutant")
    for neighbour in path.parent.glob("*.json"):
        (folder / neighbour.name).write_bytes(neighbour.read_bytes())
    with (folder / "s.yaml").open("w") as file:
        YAML(typ="safe", pure=True).dump(tree, file)
    try:
        load(folder / "s.yaml")
    except InputError as error:
        for line in str(error).splitlines():
            assert line.startswith(f"{folder}/s.yaml:"), line
            assert len(line) < 2000


@given(junk=st.text(max_size=60), value=st.text(max_size=20))
def test_any_text_is_valid_or_rejected(
    junk: str, value: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("text") / "s.yaml"
    for content in (junk, PLAIN + junk, PLAIN.replace("unit-step", junk)):
        path.write_text(content, encoding="utf-8", errors="surrogatepass")
        with contextlib.suppress(InputError):
            load(path)
    path.write_text(PLAIN)
    for assignment in (value, f"engine.block_size={value}", f"{value}=3", f"{value}.x={value}"):
        with contextlib.suppress(InputError):
            load(path, [assignment])


# The JSON schema


def test_schema_accepts_all_scenarios_of_the_repository() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for path in FILES:
        tree = json.loads(json.dumps(YAML(typ="safe", pure=True).load(path.read_text())))
        assert list(validator.iter_errors(tree)) == [], path


@pytest.mark.parametrize(
    "text",
    [
        changed("variant:", "varient:"),
        changed("bucketed", "buckted"),
        changed("num_prompts: 4", "num_prompts: -4"),
        changed("profile: unit-step\n", ""),
        PLAIN + "variants:\n  a: {engine: {blok_size: 3}}\n",
    ],
)
def test_schema_rejects_scenarios_that_the_loader_rejects(text: str) -> None:
    validator = jsonschema.Draft202012Validator(json_schema())
    assert list(validator.iter_errors(YAML(typ="safe", pure=True).load(text)))


def test_schema_describes_the_fields_of_every_engine() -> None:
    text = json.dumps(json_schema())
    for engine in ENGINES:
        assert f'"{engine}"' in text
    assert "Tokens per KV block." in text


@pytest.mark.parametrize(("old", "new"), [("cheaper", "faster"), ("dearer", "slower")])
def test_old_error_side_is_accepted_with_a_warning(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(PLAIN + f"step_scale: {{error: {old}}}\n")
    with pytest.warns(FutureWarning, match=f"'{old}' was renamed; use '{new}'"):
        (scenario,) = load(path).values()
    assert scenario.step_scale is not None
    assert scenario.step_scale.error == new


def test_names_the_section_of_a_field_that_is_one_level_too_deep(tmp_path: Path) -> None:
    text = (
        "name: deep\nengine: {name: vllm}\nprofile: unit-step\nworkload:\n  arrivals:\n"
        "    {num_prompts: 5, prompt_tokens: 10, output_tokens: 5, request_rate: .inf,\n"
        "     max_concurrency: 4}\n"
    )
    (tmp_path / "deep.yaml").write_text(text)
    with pytest.raises(
        InputError,
        match=r"max_concurrency: this field belongs one level higher, "
        r"in workload$",
    ):
        load(tmp_path / "deep.yaml")
