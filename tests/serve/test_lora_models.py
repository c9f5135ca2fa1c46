"""Tests that clients select LoRA adapters as separate models, as with the real servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from simkv.core.errors import InputError
from simkv.metrics.scenario_runner import run_file
from tests.serve.running_server import inside, scenario, until

LORA = scenario().replace("profile:", "  enable_lora: true\n  max_loras: 1\nprofile:")
MODULES = "lora: {modules: [sql, chat]}\n"
SGLANG = """\
name: served
engine: {name: sglang, max_total_num_tokens: 4000, enable_lora: true}
profile: assumed-costs.json
"""


def body(model: str | None, tokens: int = 3) -> dict[str, Any]:
    return {"prompt": [7] * 64, "model": model, "max_tokens": tokens}


def test_adapter_is_selected_as_model(tmp_path: Path) -> None:
    async def visit() -> str:
        async with inside(tmp_path, LORA + MODULES, model="m", speed=100) as (house, client):
            cards = (await client.get("/v1/models")).json()["data"]
            assert [(card["id"], card["parent"]) for card in cards] == [
                ("m", None),
                ("sql", "m"),
                ("chat", "m"),
            ]
            none = await client.post("/v1/completions", json=body("other"))
            assert none.status_code == 404
            assert "`other` does not exist" in none.json()["error"]["message"]
            answers = await asyncio.gather(
                *(client.post("/v1/completions", json=body(name)) for name in ("sql", "chat", "m"))
            )
            assert [answer.json()["model"] for answer in answers] == ["sql", "chat", "m"]
            assert [request.lora for request in house.live.journal] == ["sql", "chat", None]
            text = (await client.get("/metrics")).text
            families = {f.name: f for f in text_string_to_metric_families(text)}
            told = {
                sample.labels["running_lora_adapters"]: sample
                for sample in families["vllm:lora_requests_info"].samples
            }
            # One adapter slot; in the last step, no request used an adapter.
            assert set(told) == {"sql", "chat", ""}
            for name, sample in told.items():
                labels = {"max_lora": "1", "waiting_lora_adapters": name}
                assert sample.labels == labels | {"running_lora_adapters": name}
            assert told["sql"].value < told["chat"].value < told[""].value
            return (await client.get("/scenario")).text

    (tmp_path / "again.yaml").write_text(asyncio.run(visit()))
    lives = run_file(tmp_path / "again.yaml")["run"].record.requests
    assert [life.request.lora for life in lives.values()] == ["sql", "chat", None]
    first = [life.chunks[0] for life in lives.values()]
    assert [chunk.context for chunk in first] == [0, 0, 0]  # the KV differs by adapter
    assert lives[1].first_token > lives[0].last_token  # type: ignore[operator]


def test_sglang_accepts_model_colon_adapter(tmp_path: Path) -> None:
    async def visit() -> None:
        async with inside(tmp_path, SGLANG + MODULES, model="m", speed=100) as (house, client):
            for name in ("m:sql", "chat", "m"):
                answer = await client.post("/v1/completions", json=body(name))
                assert answer.status_code == 200
            assert [request.lora for request in house.live.journal] == ["sql", "chat", None]
            slow = asyncio.create_task(client.post("/v1/completions", json=body("sql", 4000)))
            (meter,) = house.metrics._all()
            await until(lambda: meter.adapters.decoding == 1)
            text = (await client.get("/metrics")).text
            slow.cancel()
            told = {
                f.name: sample.value
                for f in text_string_to_metric_families(text)
                for sample in f.samples
                if "lora" in f.name
            }
            assert told == {
                "sglang:lora_pool_slots_used": 1,
                "sglang:lora_pool_slots_total": 8,
                "sglang:lora_pool_utilization": 1 / 8,
            }

    asyncio.run(visit())


def test_rejects_adapters_without_lora_support(tmp_path: Path) -> None:
    async def visit() -> None:
        async with inside(tmp_path, scenario() + MODULES):
            pass

    said = "lora.modules: lists the LoRA adapter 'sql', but LoRA is off in the settings of "
    "engine vllm"
    with pytest.raises(InputError, match=said):
        asyncio.run(visit())
