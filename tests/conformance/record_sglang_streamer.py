"""Record when SGLang's own ``accept`` sends tokens to a streaming client.

    pip download --no-deps sglang==0.5.23 && unzip sglang-0.5.23-*.whl -d SOURCE
    python -m tests.conformance.record_sglang_streamer SOURCE tests/conformance/streamer.json

Only this method is run, not the scheduler. A request emits one token per step. Each recording
consists of a stream interval, a number of tokens, and the token counts at which a message is sent.
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = "sglang/srt/managers/scheduler_components/output_streamer.py"


def accept_of(source: Path) -> Any:
    """Return the method ``accept`` as a function of ``self`` and a request."""
    tree = ast.parse((source / FILE).read_text())
    method = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and node.name == "accept"
        and "stream_interval" in ast.unparse(node)
    )
    # The code after the update of the offset only copies values of the request.
    last = next(
        i for i, s in enumerate(method.body) if "req.send_token_offset = len" in ast.unparse(s)
    )
    method.body = method.body[: last + 1]
    space: dict[str, Any] = {}
    exec(ast.unparse(ast.Module([method], [])).replace("Req", "object"), space)
    return space["accept"]


def record(source: Path, interval: int, tokens: int) -> list[int]:
    """Return the numbers of emitted tokens at which a message is sent."""
    accept = accept_of(source)
    collected: defaultdict[str, list[Any]] = defaultdict(list)

    class Streamer:
        default_stream_interval = interval
        default_force_stream_interval = 50

        def __getattr__(self, name: str) -> list[Any]:
            return collected[name]

    req = SimpleNamespace(
        beam_group=None,
        finished_output=False,
        finished_len=None,
        finished_reason=None,
        stream=True,
        sampling_params=SimpleNamespace(stream_interval=None),
        output_ids=[],
        send_token_offset=0,
        send_output_token_logprobs_offset=0,
        rid="",
        check_match_stop_str_prefix=lambda: False,
        finished=lambda: len(req.output_ids) == tokens,
    )
    sent = []
    for count in range(1, tokens + 1):
        req.output_ids.append(count)
        req.output_ids_through_stop = req.output_ids
        before = len(collected["rids"])
        accept(Streamer(), req=req)
        if len(collected["rids"]) > before:
            sent.append(count)
    return sent


def main(source: Path, out: Path) -> None:
    """Record with the stream intervals of SGLang's recipes, and with small intervals."""
    rows = [
        [interval, tokens, record(source, interval, tokens)]
        for interval in (1, 2, 3, 10, 30, 50)
        for tokens in (1, 2, 3, 31, 32, 100)
    ]
    out.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
