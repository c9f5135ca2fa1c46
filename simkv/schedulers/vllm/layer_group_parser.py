# mypyc: compile
"""Parser for the entries of ``kv_cache_groups``."""

from __future__ import annotations

from typing import NamedTuple

STATES, CHUNKED = "mamba", "chunked-"


class LayerKind(NamedTuple):
    """Kind of the layers in a group.

    - ``window``: length of the sliding window in tokens, or 0.
    - ``chunk``: chunk size of chunked attention in tokens, or 0.
    - ``states``: whether the layers have a recurrent state instead of KV.
    - ``block_size``: tokens per KV block.
    """

    window: int
    chunk: int
    states: bool
    block_size: int


def parse_layer_group(group: int | str, block_size: int) -> LayerKind:
    """Parse an entry of ``kv_cache_groups``, such as 1024, ``mamba`` or ``0/32``.

    ``block_size`` is the default number of tokens per block. Raises ValueError for an invalid
    entry.
    """
    name, told, size = str(group).partition("/")
    chunked = name.startswith(CHUNKED)
    number = name.removeprefix(CHUNKED)
    block_size = _number(size) if told else block_size
    if name == STATES:
        return LayerKind(0, 0, states=True, block_size=block_size)
    tokens = _number(number)
    if (tokens == 1 and not chunked) or (tokens == 0 and chunked) or not block_size:
        raise ValueError(group)
    chunk, window = (tokens, 0) if chunked else (0, tokens)
    return LayerKind(window, chunk, states=False, block_size=block_size)


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)
