"""How many KV blocks or tokens an engine found room for, read from its log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from simkv.core.errors import InputError
from simkv.core.files import disk_errors


@dataclass(frozen=True)
class Cache:
    """What the log says: ``blocks`` or ``tokens`` (None where it does not), and in which line.

    ``block_size`` is the log's own where it tells one.
    """

    engine: str
    blocks: int | None
    tokens: int | None
    line: int
    block_size: int | None = None


_NUMBER = r"([\d,]+)"
#: Engine, what is counted, and the line that tells it.
_LINES = (
    ("vllm", "blocks", re.compile(rf"# (?:GPU|cuda) blocks: {_NUMBER}")),
    ("vllm", "blocks", re.compile(rf"num_gpu_blocks_override[=: ]+{_NUMBER}\b")),
    ("vllm", "blocks", re.compile(rf"num_gpu_blocks[=: ]+{_NUMBER}\b")),
    ("vllm", "tokens", re.compile(rf"GPU KV cache size: {_NUMBER} tokens")),
    ("sglang", "tokens", re.compile(rf"max_total_num_tokens=\s*{_NUMBER}")),
    ("sglang", "tokens", re.compile(rf"KV Cache is allocated.*#tokens: {_NUMBER}")),
    ("fastdeploy", "blocks", re.compile(rf"total_block_num[=: ]+{_NUMBER}")),
    (
        "mistralrs",
        "blocks",
        re.compile(r"with block size (?P<size>\d+) and (?P<count>[\d,]+) GPU blocks"),
    ),
)


def cache_size(log: Path, block_size: int | None = None) -> Cache:
    """The last size of the KV cache that a log tells.

    With ``block_size``, or the log's own, the count that is not told is worked out. Raises
    InputError if the file cannot be read or no known engine tells its cache in it.
    """
    with disk_errors(log, "read"):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    found: Cache | None = None
    for number, line in enumerate(lines, start=1):
        for engine, what, pattern in _LINES:
            if match := pattern.search(line):
                told = match.groupdict()
                count = int(told.get("count", match[1]).replace(",", ""))
                blocks, tokens = (count, None) if what == "blocks" else (None, count)
                size = int(told["size"]) if "size" in told else None
                found = Cache(engine, blocks, tokens, number, size)
                break
    if found is None:
        raise InputError(
            f"{log}: no line tells the size of the KV cache, such as vLLM's '# GPU blocks: 2588' "
            f"or 'GPU KV cache size: 41,408 tokens', SGLang's 'max_total_num_tokens=41408', "
            f"FastDeploy's 'total_block_num:2588', mistral.rs's 'and 2588 GPU blocks'"
        )
    block_size = found.block_size or block_size
    if block_size:
        blocks = found.blocks if found.blocks is not None else (found.tokens or 0) // block_size
        tokens = found.tokens if found.tokens is not None else blocks * block_size
        found = Cache(found.engine, blocks, tokens, found.line, block_size)
    return found
