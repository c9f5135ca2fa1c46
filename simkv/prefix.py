"""Identity of token contents, so that prefix caching is exact and not a hit-rate knob."""

from __future__ import annotations

from bisect import bisect_right

from simkv.request import Prompt, Segment


class Content:
    """The tokens of one request, prompt first and then its own outputs, by identity."""

    def __init__(self, prompt: Prompt) -> None:
        segments = prompt.segments or (Segment(f"u{prompt.id}", 0, prompt.prompt_tokens),)
        self._segments = (*segments, Segment(f"o{prompt.id}", 0, 1 << 62))
        self._starts: list[int] = []
        position = 0
        for segment in self._segments:
            self._starts.append(position)
            position += segment.end - segment.start

    def slices(self, start: int, end: int) -> tuple[Segment, ...]:
        """Tokens ``start`` to ``end`` as segments; equal tuples mean equal tokens.

        Neighbouring pieces of one stream are merged, so that the same tokens always give the
        same tuple, however the prompt was cut.
        """
        pieces: list[Segment] = []
        index = bisect_right(self._starts, start) - 1
        while start < end:
            segment, origin = self._segments[index], self._starts[index]
            first = segment.start + (start - origin)
            last = min(segment.end, segment.start + (end - origin))
            if last > first:
                if pieces and pieces[-1].stream == segment.stream and pieces[-1].end == first:
                    pieces[-1] = Segment(segment.stream, pieces[-1].start, last)
                else:
                    pieces.append(Segment(segment.stream, first, last))
                start += last - first
            index += 1
        return tuple(pieces)


def common_prefix(a: Content, b: Content, limit: int) -> int:
    """How many leading tokens ``a`` and ``b`` share, at most ``limit``."""
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


class BlockKeys:
    """Names full blocks by their own tokens and all the tokens before them.

    Block ``i`` has the key of (key of block ``i - 1``, its tokens), as real engines chain their
    hashes, but numbered instead of hashed, so that two contents never collide.
    """

    ROOT = 0

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[int, tuple[Segment, ...]], int] = {}

    def child(self, parent: int, content: Content, index: int) -> int:
        """Key of block ``index`` of ``content``, whose predecessor has the key ``parent``."""
        start = index * self.block_size
        name = (parent, content.slices(start, start + self.block_size))
        return self._numbers.setdefault(name, len(self._numbers) + 1)

    def extend(self, keys: list[int], content: Content, tokens: int) -> None:
        """Append to ``keys`` until it names every full block of the first ``tokens`` tokens."""
        for index in range(len(keys), tokens // self.block_size):
            keys.append(self.child(keys[-1] if keys else self.ROOT, content, index))
