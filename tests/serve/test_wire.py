"""What no server that sleeps can do: its pauses have reasons, and its order is the engine's."""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from simkv.measure.simulate import run_file
from tests.serve.house import Served, scenario, serving


def stream(served: Served, body: dict[str, Any], into: list[tuple[float, str]]) -> None:
    """Note when each chunk came, and the id of the answer."""
    body = {**body, "stream": True, "ignore_eos": True}
    with served.client.stream("POST", "/v1/completions", json=body) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                into.append((time.monotonic(), json.loads(line.removeprefix("data: "))["id"]))


def together(served: Served, bodies: list[dict[str, Any]]) -> list[list[tuple[float, str]]]:
    """Send some requests, one shortly after the other."""
    chunks: list[list[tuple[float, str]]] = [[] for _ in bodies]
    threads = []
    for body, into in zip(bodies, chunks, strict=True):
        threads.append(threading.Thread(target=stream, args=(served, body, into)))
        threads[-1].start()
        time.sleep(0.03)
    for thread in threads:
        thread.join()
    return chunks


def test_a_preempted_stream_pauses_for_as_long_as_its_explanation_says(tmp_path: Path) -> None:
    """A cache of 16 blocks holds one answer of 200 tokens, not two."""
    with serving(tmp_path, scenario(17, 256)) as served:
        bodies = [{"prompt": [n] * 16, "max_tokens": 150} for n in (1, 2)]
        chunks = together(served, bodies)
        found = [
            served.get(f"/explain/{each[0][1]}?format=json").json()["requests"][0]
            for each in chunks
        ]
        pauses = [max(b - a for (a, _), (b, _) in pairwise(x)) for x in chunks]
        words = [{interval["what"] for interval in each["intervals"]} for each in found]
        (victim,) = (i for i in (0, 1) if "preempted" in words[i])
        said = [i for i in found[victim]["intervals"] if i["what"] in ("preempted", "recompute")]
        expected = sum(interval["seconds"] for interval in said) + 0.01
        assert expected > 0.3
        assert pauses[victim] == pytest.approx(expected, abs=0.1)
        assert found[victim]["blockers"][0]["request"] == 1 - victim
        text = served.get(f"/explain/{chunks[victim][0][1]}").text
        assert f"held above all by request {1 - victim}" in text


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_the_order_is_that_of_the_record_under_the_same_policy(tmp_path: Path, policy: str) -> None:
    """The same arrivals come in another order under another policy, as a run of them has it."""
    text = scenario(40, 512).replace("max_num_seqs: 64", f"max_num_seqs: 1\n  policy: {policy}")
    urgency = [0, 5, 1] if policy == "priority" else [0, 0, 0]
    with serving(tmp_path, text, "--record", "came.csv") as served:
        bodies = [
            {"prompt": [n] * 10, "max_tokens": 20 if n else 60, "priority": p}
            for n, p in enumerate(urgency)
        ]
        chunks = together(served, bodies)
        served.end()
    order = sorted(range(3), key=lambda n: chunks[n][0][0])
    assert order == ([0, 2, 1] if policy == "priority" else [0, 1, 2])
    (tmp_path / "again.yaml").write_text(text + "workload: {trace: came.csv}\n")
    lives = run_file(tmp_path / "again.yaml")["run"].record.lives
    assert sorted(lives, key=lambda n: lives[n].first_token or 0.0) == order
