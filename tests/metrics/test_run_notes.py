"""Notes on replicas and on the origin of step costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import simkv
from simkv.costs.cost_profile import load_profile

CONTENTS: dict[str, Any] = {
    "name": "notes",
    "workload": {"burst": {"num_prompts": 4, "prompt_tokens": 60, "output_tokens": 5}},
    "engine": {"name": "vllm", "block_size": 16, "num_gpu_blocks": 100, "max_model_len": 256},
    "profile": "unit-step",
}


def notes(**changes: Any) -> list[str]:
    return simkv.run({**CONTENTS, **changes}).results["run"].notes


@pytest.mark.parametrize(("output", "fits"), [(5, True), (6, False)])
def test_last_output_token_needs_no_block(output: int, fits: bool) -> None:
    """Four blocks hold the prompt of 60 tokens and four output tokens."""
    engine = CONTENTS["engine"] | {"num_gpu_blocks": 5, "startup_check": False}
    burst = {"num_prompts": 1, "prompt_tokens": 60, "output_tokens": output}
    expected = (
        "1 requests do not fit into the KV cache: request 0 needs 5 blocks of 16 tokens, "
        "the cache has 4"
    )
    found = notes(engine=engine, workload={"burst": burst})
    assert [note for note in found if "do not fit" in note] == [expected] * (not fits)


@pytest.mark.parametrize(("small", "named"), [((1,), "replica 1: "), ((0, 2), "replica 0, 2: ")])
def test_note_names_its_replicas(small: tuple[int, ...], named: str) -> None:
    engine = {"num_gpu_blocks": 4, "startup_check": False}
    replicas = [{"engine": engine if i in small else {}} for i in range(3)]
    (note,) = notes(fleet={"replicas": replicas})
    assert note.startswith(f"{named}4 requests do not fit into the KV cache: request 3 needs 4")


def test_note_on_the_release_is_first() -> None:
    engine = CONTENTS["engine"] | {"num_gpu_blocks": 4, "startup_check": False}
    first, second = notes(engine=engine | {"variant": "0.27.4"})
    assert first == "vLLM 0.27.4 was not recorded; simulated with the rules of 0.27.0"
    assert second.startswith("4 requests do not fit")


def test_note_of_all_replicas_names_none() -> None:
    engine = CONTENTS["engine"] | {"num_gpu_blocks": 4, "startup_check": False}
    (note,) = notes(engine=engine, fleet={"replicas": 2})
    assert note.startswith("4 requests do not fit into the KV cache")


@pytest.mark.parametrize(
    ("engine", "noted"), [("vLLM 0.33.0", False), ("vLLM 0.19.0", True), ("SGLang 0.5.23", True)]
)
def test_notes_costs_of_another_engine_or_release(engine: str, noted: bool, tmp_path: Path) -> None:
    profile = load_profile("unit-step").model_dump(mode="json") | {"engine": engine}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    release = CONTENTS["engine"] | {"variant": "0.33.0"}
    found = notes(engine=release, profile=str(tmp_path / "p.json"))
    told = f"was made for {engine}; step times of vllm 0.33.0 may differ"
    assert [note.partition(" ")[2].partition(" ")[2] for note in found] == [told] * noted
