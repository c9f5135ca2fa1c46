"""Tests that a router that follows the published events knows the content of the cache."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from simkv.core.errors import InputError
from simkv.serve.served_scenario import build_scenario
from simkv.serve.server_assembly import Deployment, ServerOptions
from tests.serve.running_server import PATIENCE, scenario, serving


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def context() -> Any:
    with zmq.Context() as context:
        yield context


class Router:
    """A router's view of the events: for each block hash, the tokens of the block and the hash of
    the previous block.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[tuple[int, ...], int | None]] = {}
        self.removed = 0

    def take(self, payload: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank == 0
        for event in events:
            assert event["medium"] == "GPU"
            if event["type"] == "BlockStored":
                assert event["block_size"] == len(event["token_ids"]) == 16
                (name,) = event["block_hashes"]
                parent = event["parent_block_hash"]
                assert parent is None or parent in self.blocks
                self.blocks[name] = tuple(event["token_ids"]), parent
            else:
                assert event["type"] == "BlockRemoved"
                for name in event["block_hashes"]:
                    self.removed += 1
                    self.blocks.pop(name, None)

    def hits(self, prompt: list[int]) -> int:
        """Return the number of cached blocks at the start of a prompt."""
        known = {(parent, tokens): name for name, (tokens, parent) in self.blocks.items()}
        above, count = None, 0
        for start in range(0, len(prompt) - 15, 16):
            above = known.get((above, tuple(prompt[start : start + 16])))
            if above is None:
                break
            count += 1
        return count


def test_events_match_simulated_cache(tmp_path: Path, context: Any) -> None:
    events, replay = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
    options = ("--kv-events", events, "--kv-replay", replay, "--speed", "20")
    text = scenario(40, 512).replace("profile:", "  enable_lora: true\nprofile:")
    with serving(tmp_path, text + "lora: {modules: [sql]}\n", *options) as served:
        listener = context.socket(zmq.SUB)
        listener.rcvtimeo = context.rcvtimeo = int(1000 * PATIENCE)
        listener.connect(events)
        listener.subscribe("")
        prompt = list(range(200))
        router = Router()
        received = []

        def receive() -> None:
            topic, number, _ = listener.recv_multipart()
            assert topic == b""
            received.append(int.from_bytes(number, "big"))

        while not listener.poll(100):  # wait until the subscription has arrived
            served.post("/v1/completions", {"prompt": prompt, "max_tokens": 20})
            prompt = [token + 1000 for token in prompt]
        for number in range(3):
            other = [token + 100_000 * (number + 1) for token in prompt]
            served.post("/v1/completions", {"prompt": other, "max_tokens": 20})
        asker = context.socket(zmq.DEALER)
        asker.connect(replay)
        asker.send_multipart([b"", (0).to_bytes(8, "big")])
        replayed = []
        while True:
            _, _, number, payload = asker.recv_multipart()
            if int.from_bytes(number, "big", signed=True) == -1:
                break
            replayed.append(int.from_bytes(number, "big"))
            router.take(payload)
        assert replayed == list(range(len(replayed)))
        receive()
        while received[-1] < replayed[-1]:
            receive()
        assert received == list(range(received[0], len(replayed)))
        assert router.removed > 0  # 39 blocks are too few for four replies
        cached = router.hits(other)
        assert cached == 12  # all full blocks of the last prompt
        body = {"prompt": [*other, 5], "max_tokens": 1}
        name = served.post("/v1/completions", body).json()["id"]
        (found,) = served.get(f"/explain/{name}?format=json").json()["requests"]
        computed = round((found["intervals"][0]["seconds"] - 0.01) / 1e-4)
        assert computed == len(other) + 1 - 16 * cached
        served.post("/v1/completions", {**body, "model": "sql"})
        adapted: list[dict[str, Any]] = []
        while len(adapted) < cached:
            told = msgspec.msgpack.decode(listener.recv_multipart()[2])[1]
            adapted += [event for event in told if event.get("lora_name")]
        for event in adapted:  # the same tokens with another adapter are different blocks
            assert (event["lora_name"], event["lora_id"]) == ("sql", 1)
            assert event["extra_keys"] == [["sql"]]
            assert event["block_hashes"][0] not in router.blocks
        listener.close(0)
        asker.close(0)


def test_rejects_engines_without_kv_events() -> None:
    options = ServerOptions(port=0, kv_events="tcp://127.0.0.1:*")
    scenario = build_scenario("sglang", "llama-3.1-8b", "H100-SXM", [])
    with pytest.raises(InputError, match="--kv-events: this engine does not publish events"):
        Deployment(scenario, Path(), options, print)
