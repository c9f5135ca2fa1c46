"""Read the number of KV blocks or tokens from an engine's log."""

from __future__ import annotations

import re
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import IO, cast

from simkv.core.errors import InputError
from simkv.core.input_files import BoundedLines, open_bytes
from simkv.schedulers.engine_registry import ENGINES


@dataclass(frozen=True)
class LoggedCacheSize:
    """The KV cache size in a log, in ``blocks``, in ``tokens``, or both. Unknown numbers are None.

    ``line`` is the line number in the log. ``block_size`` is the number of tokens per block.
    """

    engine: str
    blocks: int | None
    tokens: int | None
    line: int
    block_size: int | None = None


#: Pairs of an engine name and a pattern of its log line about the cache size.
_LINES = [
    (name, re.compile(line)) for name, engine in ENGINES.items() for line in engine.cache_lines
]


def read_cache_size(log: Path, block_size: int | None = None) -> LoggedCacheSize:
    """Read the last KV cache size that an engine reported in a log.

    ``block_size`` is used if the log contains no block size. Raises InputError if the file cannot
    be read or contains no cache size of a known engine.
    """
    found: LoggedCacheSize | None = None
    with open_bytes(log, pipes=True) as raw:
        lines = TextIOWrapper(
            cast(IO[bytes], BoundedLines(raw, log)), encoding="utf-8", errors="replace"
        )
        for number, line in enumerate(lines, start=1):
            for engine, pattern in _LINES:
                if match := pattern.search(line):
                    told = {k: int(v.replace(",", "")) for k, v in match.groupdict().items()}
                    counts = told.get("blocks"), told.get("tokens")
                    found = LoggedCacheSize(engine, *counts, number, told.get("size"))
                    break
    if found is None:
        examples = ", ".join(engine.cache_example for engine in ENGINES.values())
        raise InputError(f"{log}: no line with the KV cache size found, such as {examples}")
    block_size = found.block_size or block_size
    if block_size:
        blocks = found.blocks if found.blocks is not None else (found.tokens or 0) // block_size
        tokens = found.tokens if found.tokens is not None else blocks * block_size
        found = LoggedCacheSize(found.engine, blocks, tokens, found.line, block_size)
    return found
