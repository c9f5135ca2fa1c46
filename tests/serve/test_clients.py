"""Tests that unmodified clients accept the process as the real server."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from urllib.parse import quote, unquote

import httpx
import openai
import pytest

from tests.serve.running_server import Served, scenario, serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, scenario(), "--record", "came.csv", "--served-model-name", "m") as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def test_streams_completion_one_chunk_per_token(client: openai.OpenAI) -> None:
    chunks = list(
        client.completions.create(
            model="m",
            prompt=[1, 2, 3],
            max_tokens=7,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [len(chunk.choices) for chunk in chunks] == [1] * 7 + [0]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:7]] == [None] * 6 + ["length"]
    assert all(chunk.choices[0].text for chunk in chunks[:7])
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 7, 10)


def test_streams_chat_with_role_first(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hello"}],
            max_completion_tokens=3,
            stream=True,
        )
    )
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas] == ["assistant", None, None, None]
    assert sum(bool(delta.content) for delta in deltas) == 3


def test_unstreamed_replies(client: openai.OpenAI) -> None:
    body = {"simkv": {"output_tokens": 2}}
    whole = client.completions.create(
        model="m", prompt=["one prompt", "another"], max_tokens=5, extra_body=body
    )
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 3 + 2
    assert whole.usage.completion_tokens == 4
    said = client.chat.completions.create(
        model="m", messages=[{"role": "user", "content": "Hello"}], max_tokens=4
    )
    assert said.choices[0].message.content
    assert said.choices[0].finish_reason == "length"


def test_models_and_health(served: Served, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["m"]
    assert served.get("/health").status_code == 200
    assert served.get("/version").json()["version"] == "0.33.0"
    assert served.get("/load").json() == {"server_load": 0}
    assert served.get("/health").headers["x-simkv-speed"] == "1"


def test_tokenize_and_detokenize(served: Served) -> None:
    found = served.post("/tokenize", {"prompt": "Hello, world!"}).json()
    assert found["count"] == len(found["tokens"]) == 4
    back = served.post("/detokenize", {"tokens": found["tokens"]}).json()
    assert back == {"prompt": "Hello, world!"}


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v1/completions", {"prompt": "x", "model": "other"}, 404, "`other` does not exist"),
        ("/v1/completions", {"prompt": "x", "n": 2}, 400, "parallel sampling"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 0}, 400, "at least 1, got 0"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 9999}, 400, "max_model_len=4096"),
        ("/v1/completions", {"prompt": [1] * 5000}, 400, "maximum context length is 4096"),
        ("/v1/completions", {"prompt": "x", "priority": 3}, 400, "not enabled"),
        ("/v1/completions", {"prompt": "x", "min_tokens": 20}, 400, "max_tokens=16"),
        ("/v1/completions", {"prompt": ""}, 400, "empty"),
        ("/v1/completions", {"prompt": [["a"]]}, 400, "prompt"),
        ("/v1/completions", {}, 400, "prompt"),
        ("/v1/chat/completions", {"messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"messages": "hi"}, 400, "messages"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/nowhere", {}, 404, "Not Found"),
    ],
)
def test_errors_match_api(served: Served, path: str, body: object, status: int, words: str) -> None:
    response = served.post(path, body)
    assert response.status_code == status
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert words in error["message"]


@pytest.mark.parametrize("content", [b"{", b"[1,", b'{"prompt": NaN}', b"\xff", b"[" * 9999, b""])
def test_rejects_invalid_json(served: Served, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    response = served.client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == 400


def test_rejects_large_bodies(served: Served) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(served.url.removeprefix("http://").split(":")) as raw:
        raw.sendall(f"{head}content-length: 99999999\r\n\r\n".encode())
        assert raw.recv(100).startswith(b"HTTP/1.1 413")

    def pieces() -> Iterator[bytes]:
        for _ in range(17 * 16):
            yield b" " * 65536

    headers = {"content-type": "application/json"}
    response = served.client.post("/v1/completions", content=pieces(), headers=headers)
    assert response.status_code == 413


def test_explanation_sums_to_request_time(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": "x" * 400, "max_tokens": 10})
    name = response.json()["id"]
    (found,) = served.get(f"/explain/{name}?format=json").json()["requests"]
    total = sum(interval["seconds"] for interval in found["intervals"])
    assert total == pytest.approx(found["e2e_s"], rel=1e-9)
    assert found["lasted_s"] == pytest.approx(total, rel=1e-9)
    assert found["e2e_s"] == pytest.approx(0.11)  # ten steps, and a prefill of a hundred tokens
    assert "prefill: 100 tokens" in served.get(f"/explain/{name}").text
    assert served.get("/explain/nobody").status_code == 404
    assert "served" in served.get("/explain").text


def test_disconnect_aborts_request(served: Served) -> None:
    with served.client.stream(
        "POST",
        "/v1/completions",
        json={"prompt": "y", "max_tokens": 3000, "stream": True},
    ) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert served.get("/load").json() == {"server_load": 1}
    served.wait_for_load(0)
    assert "timed out" in served.get("/explain").text


def prefill_seconds(served: Served, name: str) -> float:
    """Return the duration of a request's prefill, which may begin after a step of an earlier
    request."""
    (found,) = served.get(f"/explain/{name}?format=json").json()["requests"]
    prefills = (each for each in found["intervals"] if each["what"] == "prefill")
    return float(next(prefills)["seconds"])


def test_shared_prefixes_hit_cache(served: Served) -> None:
    prompt = list(range(2000))

    def first_token(tail: int) -> float:
        body = {"prompt": [*prompt, tail], "max_tokens": 2, "stream": True}
        name = served.post("/v1/completions", {**body, "stream": False}).json()["id"]
        return prefill_seconds(served, name)

    cold, warm = first_token(7777), first_token(8888)
    assert cold == pytest.approx(0.01 + 2001e-4)
    assert warm == pytest.approx(0.01 + 1e-4)


def test_next_turn_hits_cache(served: Served) -> None:
    messages = [{"role": "user", "content": "a" * 1000}]
    first = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 200}).json()
    messages.append(first["choices"][0]["message"])
    messages.append({"role": "user", "content": "go on"})
    second = served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1}).json()
    computed = round((prefill_seconds(served, second["id"]) - 0.01) / 1e-4)
    assert second["usage"]["prompt_tokens"] > 450
    assert computed < 40  # the last block of the first turn, and the new words


def test_scenario_and_openapi_endpoints(served: Served) -> None:
    text = served.get("/scenario").text
    assert "num_gpu_blocks: 1000" in text
    assert "per four bytes" in text
    paths = json.loads(served.get("/openapi.json").text)["paths"]
    assert "/v1/chat/completions" in paths


@pytest.mark.parametrize(
    "name",
    [
        r"\u0000",
        r"a\u0000b\u0000",
        "\0",
        'quotes " and \\ backslashes \\\\"',
        "line\r\nx-other: 1",
        "é💩",
        "a/b",
        "data: [DONE]",
        "x" * 16_384,
    ],
)
def test_repeats_any_request_id(served: Served, name: str) -> None:
    body = {"prompt": "x", "max_tokens": 5, "stream": True, "request_id": name}
    response = served.post("/v1/completions", body)
    assert response.status_code == 200
    *events, last, _ = response.text.split("\n\n")
    assert last == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [chunk["id"] for chunk in chunks] == [f"cmpl-{name}"] * 5
    assert all(chunk["choices"][0]["text"] for chunk in chunks)
    assert "x-other" not in response.headers
    if len(name) < 1000:
        assert unquote(response.headers["x-request-id"]) == name
    if len(name) < 1000 and name.isprintable():
        assert served.get(f"/explain/{quote(name, safe='')}").status_code == 200
    whole = served.post("/v1/completions", {**body, "stream": False}).json()
    assert whole["id"] == f"cmpl-{name}"


def test_request_ids_in_headers(served: Served) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    for name in (r"\u0000", 'a"b\\', "é", "x" * 10_000):
        headers = {"x-request-id": name.encode()}
        response = httpx.post(f"{served.url}/v1/completions", json=body, headers=headers)
        assert response.text.endswith("data: [DONE]\n\n")
        assert json.loads(response.text.split("\n\n")[0][6:])["id"] == f"cmpl-{name}"
    too_long = served.post("/v1/completions", {**body, "request_id": "x" * 16_385})
    assert too_long.status_code == 400
    assert too_long.json()["error"]["param"] == "request_id"
