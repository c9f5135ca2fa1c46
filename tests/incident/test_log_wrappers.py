"""Tests of logs as written by log collectors: each is read like the plain log."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from simkv.incident.evidence import Evidence
from simkv.incident.source_reader import read_source

MESSAGES = [
    (
        0,
        "INFO 03-04 08:00:00 [utils.py:233] non-default args: {'model': 'm', 'max_num_seqs': 64, "
        "'compilation_config': {'max_num_seqs': 8, 'level': <Mode: 3>}}",
    ),
    (10, 'INFO:     10.0.0.1:5000 - "POST /v1/chat/completions HTTP/1.1" 200 OK'),
    (10, 'INFO:     10.0.0.1:5001 - "POST /v1/completions?x=1 HTTP/1.1" 400 Bad Request'),
    (10, 'INFO:     10.0.0.1:5002 - "POST /tokenize HTTP/1.1" 200 OK'),
    *(
        (
            at,
            f"INFO 03-04 08:00:{at:02d} [loggers.py:259] Engine 000: Avg prompt throughput: 50.0 "
            f"tokens/s, Avg generation throughput: 20.5 tokens/s, Running: {at // 10} reqs, "
            "Waiting: 4 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 0.0%",
        )
        for at in (20, 30)
    ),
]


def iso(at: int) -> str:
    """Return the time on the collector's clock, which is an hour ahead of the server's clock."""
    return f"2026-03-04T09:00:{at:02d}.123456789Z"


def lines(form: Callable[[int, str], str]) -> str:
    return "".join(form(at, message) + "\n" for at, message in MESSAGES)


def entries(form: Callable[[int, str], object]) -> list[object]:
    return [form(at, message) for at, message in MESSAGES]


def dump(at: int, message: str, key: str, when: str) -> str:
    return json.dumps({key: message, when: iso(at)})


LOKI = {
    "status": "success",
    "data": {
        "resultType": "streams",
        "result": [
            {
                "stream": {"app": "vllm"},
                "values": [[str(1772614800 + at) + "0" * 9, line] for at, line in MESSAGES],
            }
        ],
    },
}
WRAPPED = {
    "docker json-file": lines(
        lambda at, m: json.dumps({"log": m + "\n", "stream": "stderr", "time": iso(at)})
    ),
    "cri": lines(lambda at, m: f"{iso(at)} stderr F {m}"),
    "kubectl --timestamps": lines(lambda at, m: f"{iso(at)} {m}"),
    "kubectl --prefix": lines(lambda _, m: f"[pod/vllm-0/vllm] {m}"),
    "journald": lines(lambda at, m: f"Mar 04 09:00:{at:02d} gpu01 vllm[77]: {m}"),
    "journald json": lines(
        lambda at, m: json.dumps(
            {"__REALTIME_TIMESTAMP": str((1772614800 + at) * 10**6), "MESSAGE": m}
        )
    ),
    "journald bytes": lines(lambda _, m: json.dumps({"MESSAGE": list(m.encode())})),
    "compose": lines(lambda _, m: f"vllm-1  | {m}"),
    "ray": lines(lambda _, m: f"(ServeReplica:default:VLLM pid=77, ip=10.0.0.2) {m}"),
    "gcp lines": lines(lambda at, m: dump(at, m, "textPayload", "timestamp")),
    "gcp export": json.dumps(
        entries(lambda at, m: {"textPayload": m, "timestamp": iso(at)}), indent=2
    ),
    "gcp array in one line": json.dumps(
        entries(lambda at, m: {"jsonPayload": {"message": m}, "timestamp": iso(at)})
    ),
    "loki lines": lines(lambda at, m: dump(at, m, "line", "timestamp")),
    "loki answer": json.dumps(LOKI),
    "ansi": lines(lambda _, m: f"\x1b[36m(APIServer pid=1)\x1b[0;0m \x1b[32m{m}\x1b[0m"),
    "json with commas": "[\n" + lines(lambda at, m: dump(at, m, "message", "time") + ",") + "]\n",
    "first line in brackets": "[entrypoint] start {x}\n" + lines(lambda _, m: m),
    "first line in braces": '{"level": "info", "event": "pull"}\n' + lines(lambda _, m: m),
    "nested json": lines(
        lambda at, m: json.dumps({"log": json.dumps({"message": m}) + "\n", "time": iso(at)})
    ),
}


def read(tmp_path: Path, text: str) -> Evidence:
    path = tmp_path / "server.log"
    path.write_text(text)
    return read_source(path)


@pytest.mark.parametrize("form", WRAPPED)
def test_reads_wrapped_log_like_plain_log(tmp_path: Path, form: str) -> None:
    found = read(tmp_path, WRAPPED[form])
    assert found.engine == "vllm"
    assert found.series is not None
    assert found.series["running"].tolist() == [2, 3]
    assert found.series["t_s"].diff().iloc[1] == 10
    assert found.settings["max_num_seqs"].value == 64
    assert found.access is not None
    assert found.access[["accepted", "rejected", "failed"]].sum().tolist() == [1, 1, 0]
    assert (found.access["t_s"] <= found.series["t_s"].iloc[0]).all()
    assert found.series["t_s"].iloc[0] - found.access["t_s"].iloc[-1] < 60


def test_line_numbers_match_grep_despite_progress_bars(tmp_path: Path) -> None:
    bar = "\r".join(f"Loading: {n}%|#   | {n}/100" for n in range(100))
    plain = lines(lambda _, m: m)
    found = read(tmp_path, f"{bar}\r\n{bar}\r{plain}")
    assert found.settings["max_num_seqs"].where == "server.log:2"
