"""Tests that replies without a length limit have output lengths from the scenario."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path

import pytest

from simkv.serve.live_simulation import LiveSimulation
from simkv.serve.request_bodies import COMPLETION_BODY, decode
from simkv.serve.request_handler import RequestHandler, ServedModel
from simkv.serve.served_scenario import answer_lengths, load_served_scenario
from simkv.serve.text_tokenizers import load_tokenizer
from simkv.sim.simulation import build_replica_specs
from tests.conftest import ROOT
from tests.serve.running_server import COSTS, inside, scenario

SECTION = "serve: {output_tokens: {distribution: uniform, low: 3, high: 5}}\n"
TRACE = "arrival,prompt_tokens,output_tokens\n0,9,7\n1,9,7\n2,9,11\n"
DRAWN = "workload: {burst: {num_prompts: 2, prompt_tokens: 4, output_tokens: 6}}\n"
EMPIRICAL = "serve: {output_tokens: {distribution: empirical, trace: came.csv}}\n"


def drawn(folder: Path, text: str, **asked: object) -> set[int | None]:
    """Return the lengths of a hundred replies from a server of this scenario."""
    path = folder / "served.yaml"
    path.write_text(scenario() + text)
    (folder / COSTS.name).write_text(COSTS.read_text())
    (folder / "came.csv").write_text(TRACE)
    served = load_served_scenario(path, [])[1]["run"]
    front = ServedModel("vllm", "0.33.0", "m", load_tokenizer(None), 4096, answer_lengths(served))
    handler = RequestHandler(LiveSimulation(served, build_replica_specs(served, folder)), front)
    body = decode(COMPLETION_BODY, json.dumps({"prompt": "x", "max_tokens": 99, **asked}).encode())
    return {handler._ask(body, array("q", [1]), 99, None).output_tokens for _ in range(100)}


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("", {99}),
        (SECTION, {3, 4, 5}),
        (DRAWN, {6}),
        (SECTION + DRAWN, {3, 4, 5}),
        ("workload: {trace: came.csv}\n", {7, 11}),
        ("workload: {trace: came.csv, start: 1.5}\n", {11}),
        (EMPIRICAL + DRAWN, {7, 11}),
    ],
)
def test_replies_have_scenario_lengths(tmp_path: Path, text: str, lengths: set[int]) -> None:
    assert drawn(tmp_path, text) == lengths


def test_client_sets_output_length(tmp_path: Path) -> None:
    assert drawn(tmp_path, SECTION, ignore_eos=True) == {99}
    assert drawn(tmp_path, SECTION, simkv={"output_tokens": 8}) == {8}
    assert drawn(tmp_path, SECTION, min_tokens=5) == {5}


def test_seed_determines_reply_lengths(tmp_path: Path) -> None:
    text = scenario() + "serve: {output_tokens: {distribution: uniform, low: 1, high: 1000}}\n"

    async def visit(seed: int) -> list[int]:
        async with inside(tmp_path, text, seed=seed, speed=1000) as (house, client):
            for _ in range(5):
                asked = {"prompt": "x", "max_tokens": 1000}
                answer = (await client.post("/v1/completions", json=asked)).json()
                tokens = answer["usage"]["completion_tokens"]
                assert tokens == house.live.journal[-1].output_tokens
            return [request.output_tokens or 0 for request in house.live.journal]

    first, second, again = (asyncio.run(visit(seed)) for seed in (1, 2, 1))
    assert first == again != second


def test_docs_name_served_model(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "serve.md").read_text()
    text = page.split('title="chat.yaml"\n')[1].split("```")[0]

    async def visit() -> int:
        async with inside(tmp_path, text, speed=100) as (_, client):
            named = page.split("--base-url http://localhost:8000 --model ")[1].split()[0]
            asked = {"model": named, "prompt": "Once upon a time", "max_tokens": 20}
            return (await client.post("/v1/completions", json=asked)).status_code

    assert asyncio.run(visit()) == 200
