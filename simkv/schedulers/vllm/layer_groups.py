"""What a group of layers in ``kv_cache_groups`` is called, and what that says."""

from __future__ import annotations

from typing import NamedTuple

STATES, CHUNKED = "mamba", "chunked-"


class LayerKind(NamedTuple):
    """What layers of a group see: the tokens of a ``window``, those behind the last multiple of
    ``chunk``, or with both 0 everything; or they keep ``states``. Blocks are of ``block_size``
    tokens."""

    window: int
    chunk: int
    states: bool
    block_size: int


def parse_layer_group(group: int | str, block_size: int) -> LayerKind:
    """What a group is that is called so, where ``block_size`` is not told.

    Raises ValueError for what is no name of a group.
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
