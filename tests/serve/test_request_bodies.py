"""Tests of request bodies: the structure is checked before the elements, the first invalid element
is reported, and checks are cheap.
"""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.json import Decoder

from simkv.serve.error_responses import RequestError
from simkv.serve.request_bodies import (
    CHAT_BODY,
    COMPLETION_BODY,
    DETOKENIZE_BODY,
    MOST_PROMPTS,
    TOKENIZE_BODY,
    CompletionBody,
    decode,
)
from tests.serve.running_server import Served, scenario, serving

MILLION = 1_000_000
MESSAGE = b'{"messages": [{"role": "user", "content": %s}]}'
JSON = {"content-type": "application/json"}


def many(element: bytes, form: bytes = b"[%s]", count: int = MILLION) -> bytes:
    return form % b",".join([element] * count)


def read(decoder: Decoder[Any], data: bytes) -> object:
    body = decode(decoder, data)
    if isinstance(body, CompletionBody):
        body.check_stop()
        return body.prompts()
    return body


def refused(decoder: Decoder[Any], data: bytes) -> RequestError:
    with pytest.raises(RequestError) as found:
        read(decoder, data)
    assert found.value.status == 400
    return found.value


@pytest.mark.parametrize(
    ("text", "prompts"),
    [
        (b'"x"', ["x"]),
        (b" [ 1 , 2 ]", [[1, 2]]),
        (b"[7.0]", [[7]]),
        (b'["a", "b"]', ["a", "b"]),
        (rb'["a\\", "\"b\\\""]', ["a\\", '"b\\"']),
        (b"[[1], [ 2, 3 ]]", [[1], [2, 3]]),
        (many(b'"a"', count=MOST_PROMPTS), ["a"] * MOST_PROMPTS),
        (many(rb'"\\\""', count=MOST_PROMPTS), ['\\"'] * MOST_PROMPTS),
        (many(b"[1]", count=MOST_PROMPTS), [[1]] * MOST_PROMPTS),
    ],
)
def test_accepts_four_prompt_forms(text: bytes, prompts: object) -> None:
    assert read(COMPLETION_BODY, b'{"prompt": %s}' % text) == prompts


@pytest.mark.parametrize(
    ("text", "param"),
    [
        (b"{}", "prompt"),
        (b'{"prompt": 5}', "prompt"),
        (b'{"prompt": []}', "prompt"),
        (b'{"prompt": [[]]}', "prompt[0]"),
        (b'{"prompt": ["a", 1]}', "prompt[1]"),
        (b'{"prompt": [[1], ["a"]]}', "prompt[1][0]"),
        (b'{"prompt": [1, -1]}', "prompt[1]"),
        (b'{"prompt": %s}' % many(b'""', count=MOST_PROMPTS + 1), "prompt"),
        (b'{"prompt": %s}' % many(b"[1]", count=MOST_PROMPTS + 1), "prompt"),
        (b'{"prompt": "x", "stop": 5}', "stop"),
        (b'{"prompt": "x", "stop": ["a", 5]}', "stop[1]"),
        (b'{"prompt": "x", "stop": [5]}', "stop[0]"),
        (b'{"prompt": "x", "simkv": {"output_tokens": 0}}', "simkv.output_tokens"),
        (b'{"prompt": "x", "max_tokens": %s}' % (b"9" * 100_000), "max_tokens"),
    ],
)
def test_reports_first_invalid_value(text: bytes, param: str) -> None:
    found = refused(COMPLETION_BODY, text)
    assert found.param == param
    assert found.message.startswith(f"{param}: ")


@pytest.mark.parametrize(
    ("decoder", "form"),
    [
        (COMPLETION_BODY, b'{"prompt": %s}'),
        (COMPLETION_BODY, b'{"prompt": [%s]}'),
        (COMPLETION_BODY, b'{"prompt": {"a": %s}}'),
        (COMPLETION_BODY, b'{"prompt": "x", "stop": %s}'),
        (COMPLETION_BODY, b'{"n": 0, "tools": %s}'),
        (COMPLETION_BODY, b'{"n": 0, "logit_bias": %s}'),
        (CHAT_BODY, b'{"messages": %s}'),
        (CHAT_BODY, MESSAGE),
        (TOKENIZE_BODY, b'{"messages": %s}'),
        (DETOKENIZE_BODY, b'{"tokens": %s}'),
    ],
)
@pytest.mark.parametrize("element", [b"{}", b"[]", b'{"a": 1}', b"[[1.5]]"])
def test_does_not_store_invalid_elements(
    decoder: Decoder[Any], form: bytes, element: bytes
) -> None:
    body = many(element, form.replace(b"%s", b"[%s]"), 20_000)
    tracemalloc.start()
    try:
        refused(decoder, body)
        assert tracemalloc.get_traced_memory()[1] < 3 * len(body)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", [b'{"prompt": %s', b'{"n": 0, "zz": %s', MESSAGE])
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
def test_rejects_deep_nesting(form: bytes, opening: bytes) -> None:
    decoder = CHAT_BODY if form is MESSAGE else COMPLETION_BODY
    refused(decoder, form % (opening * 100_000))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(folder, scenario(), "--served-model-name", "m") as server:
        yield server


def status_of(served: Served, key: str) -> int:
    """Return a field of the process status in bytes."""
    lines = Path(f"/proc/{served.process.pid}/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def cpu_seconds(served: Served) -> float:
    fields = Path(f"/proc/{served.process.pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc of Linux")
def test_million_invalid_elements_cost_little(served: Served) -> None:
    assert served.post("/v1/completions", {"prompt": []}).status_code == 400
    before = status_of(served, "VmRSS")
    for path, body in [
        ("/v1/completions", many(b"[]", b'{"prompt": [%s]}')),
        ("/v1/completions", many(b"{}", b'{"prompt": "x", "stop": [%s]}')),
        ("/v1/chat/completions", many(b'{"a": 1}', b'{"messages": [%s]}')),
        ("/v1/chat/completions", many(b"{}", MESSAGE.replace(b"%s", b"[%s]"))),
        ("/detokenize", many(b'"a"', b'{"tokens": [%s]}')),
    ]:
        began = cpu_seconds(served)
        response = served.client.post(path, content=body, headers=JSON)
        assert response.status_code == 400, body[:40]
        assert cpu_seconds(served) - began < 1.0, body[:40]
        assert status_of(served, "VmHWM") - before < 100e6, body[:40]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", rb'{"prompt": "x", "model": "\ud800"}'),
        ("/v1/completions", rb'{"prompt": "x", "model": "\udc00m"}'),
        ("/v1/completions", rb'{"prompt": "x", "user": "\ud800"}'),
        ("/v1/completions", rb'{"prompt": "x", "request_id": "\ud800"}'),
        ("/v1/completions", rb'{"prompt": "x", "stop": ["\ud800"]}'),
        ("/v1/completions", rb'{"prompt": ["x", "\ud800"]}'),
        ("/v1/chat/completions", rb'{"messages": [{"role": "\ud800", "content": "x"}]}'),
        ("/v1/chat/completions", rb'{"messages": [{"role": "user", "content": "\ud800"}]}'),
        ("/tokenize", rb'{"prompt": "\ud800"}'),
        ("/detokenize", rb'{"tokens": [1], "model": "\ud800"}'),
    ],
)
def test_rejects_lone_surrogate(served: Served, path: str, body: bytes) -> None:
    response = served.client.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    assert "lone surrogate" in response.json()["error"]["message"]


def test_rejects_other_media_types(served: Served) -> None:
    headers = {"content-type": "text/plain"}
    response = served.client.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
    assert response.status_code == 400
    assert "application/json" in response.json()["error"]["message"]


def test_shortens_unknown_model_name(served: Served) -> None:
    response = served.post("/v1/completions", {"prompt": "x", "model": "a" * MILLION})
    assert response.status_code == 404
    assert len(response.content) < 1000
