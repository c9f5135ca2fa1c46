"""Recipes of published benchmarks as options of a command."""

from __future__ import annotations

import pytest

from simkv.core.errors import InputError
from simkv.scenario.recipes import find_recipe, recipes
from simkv.scenario.scenario_builder import build_scenario
from simkv.scenario.scenario_loader import resolve_variants
from simkv.scenario.scenario_options import ScenarioOptions
from simkv.workload.workload_section import build_clients


@pytest.mark.parametrize("name", recipes())
def test_each_recipe_is_a_valid_scenario_with_sources(name: str) -> None:
    recipe = find_recipe(name)
    built = build_scenario(ScenarioOptions(recipe=name))
    scenario = resolve_variants(built.document)["run"]
    assert {"command", "version", "tp"} <= set(recipe.sources)
    assert not [note for note in built.notes if "not modelled" in note]
    assert built.document.tree["hardware"]["tp"] == recipe.tp
    assert scenario.workload.max_concurrency == recipe.concurrency


def test_lengths_are_those_of_the_client() -> None:
    built = build_scenario(ScenarioOptions(recipe="llama-3.3-70b-fp8-h200"))
    scenario = resolve_variants(built.document)["run"]
    requests = build_clients(scenario.workload, None).requests
    lengths = [request.prompt_tokens for request in requests]
    assert len(lengths) == 640
    assert 0.79 * 1024 < min(lengths) < 0.82 * 1024
    assert 0.98 * 1024 < max(lengths) <= 1025


def test_options_override_a_recipe() -> None:
    asked = ScenarioOptions(recipe="gpt-oss-120b-h200", tp=8, max_concurrency=16, output_len=100)
    tree = build_scenario(asked).document.tree
    assert tree["hardware"]["tp"] == 8
    assert tree["engine"]["max_num_seqs"] == 16
    assert tree["workload"]["max_concurrency"] == 16
    assert tree["workload"]["arrivals"]["num_prompts"] == 160
    assert tree["workload"]["arrivals"]["output_tokens"]["len"] == 100


def test_another_load_replaces_that_of_a_recipe() -> None:
    load = "vllm bench serve --random-input-len 200 --random-output-len 20 --request-rate 3"
    tree = build_scenario(ScenarioOptions(recipe="kimi-k2.5-fp4-b200", load=load)).document.tree
    assert tree["workload"]["arrivals"]["request_rate"] == 3.0
    assert tree["hardware"]["experts"] == "nvfp4"


def test_unknown_recipe_lists_the_names() -> None:
    with pytest.raises(InputError, match=r"--recipe gpt-oss: unknown recipe.*gpt-oss-120b-h100"):
        build_scenario(ScenarioOptions(recipe="gpt-oss"))
