"""Queue limits: 503 in the engine's words, counted as it counts, and the same in a run of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simkv.core.outcome import Outcome
from simkv.measure.simulate import run_file
from tests.serve.house import Served, scenario, serving

SGLANG = """\
name: served
engine: {name: sglang, max_total_num_tokens: 8000, max_running_requests: 1, max_queued_requests: 1}
profile: assumed-costs.json
"""
LONG = {"prompt": [1, 2, 3], "max_tokens": 2000}
TRY_AGAIN = "and cannot accept new requests. Please try again later or on a different instance."


@contextmanager
def under_way(served: Served, count: int, tokens: int = 3) -> Iterator[None]:
    """So many streams that do not end before this does, with prompts of so many tokens."""
    over = threading.Event()
    body = {"prompt": [1] * tokens, "max_tokens": 2000, "stream": True}

    def stream() -> None:
        with served.client.stream("POST", "/v1/completions", json=body) as got:
            for _ in got.iter_lines():
                if over.is_set():
                    return

    def wait_for(load: int) -> None:
        deadline = time.monotonic() + 20
        while served.get("/load").json() != {"server_load": load}:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    clients = [threading.Thread(target=stream) for _ in range(count)]
    for number, client in enumerate(clients, 1):
        client.start()
        wait_for(number)
    yield
    over.set()
    for client in clients:
        client.join()
    wait_for(0)


def counted(served: Served, reason: str) -> float:
    labels = f'model_name="served",reason="{reason}"'
    lines = served.get("/metrics").text.splitlines()
    (line,) = [x for x in lines if x.startswith(f"vllm:admission_rejections_total{{{labels}}}")]
    return float(line.split()[-1])


def test_vllm_is_busy(tmp_path: Path) -> None:
    limits = "  max_num_queued_reqs: 3\n  max_num_queued_tokens: 2000\n"
    text = scenario().replace("profile:", f"{limits}profile:")
    with serving(tmp_path, text, "--record", "came.csv", "--speed", "0.2") as served:
        with under_way(served, 3):
            refused = served.post("/v1/completions", {**LONG, "request_id": "mine"})
            assert refused.status_code == 503
            error = refused.json()["error"]
            assert error["message"].startswith(f"The engine is currently busy {TRY_AGAIN}")
            assert (error["type"], error["code"]) == ("Service Unavailable", 503)
            streamed = served.post("/v1/completions", {**LONG, "stream": True})
            assert streamed.status_code == 503  # before the stream begins
        with under_way(served, 2):
            several = served.post("/v1/completions", {"prompt": [[1], [2]], "max_tokens": 5})
            assert several.status_code == 503  # one would have had room
            assert served.get("/load").json() == {"server_load": 2}
        with under_way(served, 1, tokens=2000):  # their prefill takes a second of ours
            full = served.post("/v1/completions", {"prompt": "x"})
            assert full.status_code == 503
            assert "prefill token backlog limit" in full.json()["error"]["message"]
        assert counted(served, "max_num_queued_reqs") == 3
        assert counted(served, "max_num_queued_tokens") == 1
        assert "rejected after 0" in served.get("/explain/mine").text
        assert "Traceback" not in served.end()
    (tmp_path / "again.yaml").write_text(text + "workload: {trace: came.csv}\n")
    lives = run_file(tmp_path / "again.yaml")["run"].record.lives
    assert [i for i, life in lives.items() if life.outcome is Outcome.REJECTED] == [3, 4, 8, 10]


def test_sglang_s_queue_is_full(tmp_path: Path) -> None:
    with serving(tmp_path, SGLANG) as served, under_way(served, 2):
        whole = served.post("/v1/completions", LONG)
        assert whole.status_code == 503
        assert whole.json()["error"]["message"] == "The request queue is full."
        lines = served.post("/v1/completions", {**LONG, "stream": True}).text.split("\n\n")
        assert "The request queue is full." in lines[0]
        assert lines[1] == "data: [DONE]"
