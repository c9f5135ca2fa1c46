"""Tests that any request is answered in the format of the API, and that nothing remains in the
engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.running_server import Served, scenario, serving

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=12,
)
NUMBERS = st.integers(-5, 40) | st.sampled_from([2**31, 2**63, 10**30, -1, None, 1.5, "7", True])
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(max_size=50) | st.lists(st.integers(-2, 2**66), max_size=9) | JSON,
    "messages": st.lists(
        st.fixed_dictionaries({"role": st.text(max_size=9), "content": st.text() | JSON}) | JSON,
        max_size=3,
    )
    | JSON,
    "max_tokens": NUMBERS,
    "min_tokens": NUMBERS,
    "max_completion_tokens": NUMBERS,
    "n": NUMBERS,
    "priority": NUMBERS,
    "ignore_eos": st.booleans() | JSON,
    "stream": st.booleans() | JSON,
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}) | JSON,
    "simkv": st.fixed_dictionaries({"output_tokens": NUMBERS}) | JSON,
    "model": st.just("m") | JSON,
    "tokens": st.lists(st.integers(-1, 2**64), max_size=9) | JSON,
    "request_id": st.text(max_size=9) | JSON,
}
BODIES = st.fixed_dictionaries({}, optional=FIELDS) | JSON
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(
        folder, scenario(200, 2048), "--served-model-name", "m", "--speed", "1000"
    ) as server:
        yield server
        server.wait_for_load(0)
        text = server.get("/metrics").text
        assert "vllm:num_requests_running" in text
        for line in text.splitlines():
            if line.startswith(("vllm:num_requests_", "vllm:kv_cache_usage_perc")):
                assert line.endswith(" 0.0"), line
        assert "Traceback" not in server.end()


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(path=st.sampled_from(PATHS), body=BODIES)
def test_answers_every_body(served: Served, path: str, body: Any) -> None:
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    response = served.client.post(path, content=content, headers=headers)
    assert response.status_code in (200, 400, 404, 413), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error["code"] == response.status_code
        assert isinstance(error["message"], str)
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert response.text.rstrip().endswith("data: [DONE]")


def test_answers_every_name(served: Served) -> None:
    for name in ("none", "-1", "9" * 40, "%00", "%ff", "%F0%9F%92%A9", "..%2f..%2fetc", "cmpl-"):
        response = served.client.get(f"/explain/{name}")
        assert response.status_code == 404, name
        assert response.json()["error"]["code"] == 404
