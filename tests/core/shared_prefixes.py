"""Length of the common prefix of two token contents, computed without keys or trees."""

from __future__ import annotations

from simkv.core.block_keys import TokenContent
from simkv.core.request import Segment


def common_prefix(a: TokenContent, b: TokenContent, limit: int) -> int:
    """Return the number of equal leading tokens of ``a`` and ``b``, at most ``limit``."""
    shared = 0
    left, right = list(a.slices(0, limit)), list(b.slices(0, limit))
    while left and right:
        x, y = left.pop(0), right.pop(0)
        if x.stream != y.stream or x.start != y.start:
            break
        same = min(x.end, y.end) - x.start
        shared += same
        if x.end - x.start > same:
            left.insert(0, Segment(x.stream, x.start + same, x.end))
        if y.end - y.start > same:
            right.insert(0, Segment(y.stream, y.start + same, y.end))
    return shared
