"""Identity of token contents, so that prefix caching is exact and not a hit-rate knob."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from simkv.core.request import Prompt, Segment


class Content:
    """The tokens of one request, prompt first and then its own outputs, by identity."""

    def __init__(self, prompt: Prompt) -> None:
        segments = prompt.segments or (Segment(f"u{prompt.id}", 0, prompt.prompt_tokens),)
        own = f"o{prompt.id}"
        emitted = segments[-1].end if segments[-1].stream == own else 0  # on another replica
        self._segments = _merged((*segments, Segment(own, emitted, 1 << 62)))
        lengths = (segment.end - segment.start for segment in self._segments)
        self._starts = [0, *accumulate(lengths)][:-1]

    def slices(self, start: int, end: int) -> tuple[Segment, ...]:
        """Tokens ``start`` to ``end`` as segments; equal tuples mean equal tokens.

        The same tokens always give the same tuple, however the prompt was cut.
        """
        pieces: list[Segment] = []
        index = bisect_right(self._starts, start) - 1
        while start < end:
            segment, origin = self._segments[index], self._starts[index]
            first = segment.start + (start - origin)
            last = min(segment.end, segment.start + (end - origin))
            pieces.append(Segment(segment.stream, first, last))
            start += last - first
            index += 1
        return tuple(pieces)

    def segment_at(self, position: int) -> Segment:
        """What is left from token ``position`` on of the segment that it lies in."""
        index = bisect_right(self._starts, position) - 1
        segment = self._segments[index]
        return segment._replace(start=segment.start + position - self._starts[index])


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """The same tokens in as few segments as they can be said in."""
    merged: list[Segment] = []
    for segment in segments:
        before = merged[-1] if merged else None
        if before and before.stream == segment.stream and before.end == segment.start:
            merged[-1] = Segment(segment.stream, before.start, segment.end)
        elif segment.end > segment.start:
            merged.append(segment)
    return merged


class BlockKeys:
    """Names full blocks by their own tokens and all the tokens before them.

    Block ``i`` has the key of (key of block ``i - 1``, its tokens), as real engines chain their
    hashes, but numbered instead of hashed, so that two contents never collide.
    """

    ROOT = 0

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._numbers: dict[tuple[object, ...], int] = {}

    def extend(self, keys: list[int], content: Content, tokens: int) -> None:
        """Append to ``keys`` until it names every full block of the first ``tokens`` tokens."""
        size, numbers = self.block_size, self._numbers
        parent = keys[-1] if keys else self.ROOT
        position, end = len(keys) * size, tokens // size * size
        while position < end:
            stream, start, stop = content.segment_at(position)
            stop = min(stop, start + end - position)
            if stop - start < size:  # this block takes in several segments
                pieces = content.slices(position, position + size)
                parent = numbers.setdefault((parent, pieces), len(numbers) + 1)
                keys.append(parent)
                position += size
                continue
            whole = (stop - start) // size * size
            for offset in range(start, start + whole, size):
                parent = numbers.setdefault((parent, stream, offset), len(numbers) + 1)
                keys.append(parent)
            position += whole
