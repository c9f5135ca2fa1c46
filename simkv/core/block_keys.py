# mypyc: compile
"""Keys that identify the contents of blocks, for prefix caching."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from mypy_extensions import mypyc_attr

from simkv.core.request import Prompt, Segment


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class TokenContent:
    """Token sequence of a request: its prompt, followed by its output."""

    def __init__(self, prompt: Prompt) -> None:
        segments = prompt.segments or (Segment(f"u{prompt.id}", 0, prompt.prompt_tokens),)
        own = f"o{prompt.id}"
        # the output tokens were emitted on another replica
        emitted = segments[-1].end if segments[-1].stream == own else 0
        self._segments = _merged((*segments, Segment(own, emitted, 1 << 62)))
        if prompt.lora is not None:  # the KV of equal tokens differs between adapters
            self._segments = [
                piece._replace(stream=f"{prompt.lora}/{piece.stream}") for piece in self._segments
            ]
        lengths = (segment.end - segment.start for segment in self._segments)
        self._starts = [0, *accumulate(lengths)][:-1]

    @property
    def output(self) -> str:
        """Stream of the output."""
        return self._segments[-1].stream

    def find_answers(self) -> list[str]:
        """Return the output streams of other requests that the prompt contains, last one first."""
        streams = [segment.stream for segment in self._segments[-2::-1]]
        return [stream for stream in streams if stream.rpartition("/")[2].startswith("o")]

    def count_repeated(self, other: TokenContent) -> int:
        """Return the number of leading tokens that are the same in ``other``.

        The result is 0 if they do not contain the whole prompt of ``other`` and some of its output.
        """
        last = len(other._segments) - 1
        if last >= len(self._segments) - 1 or self._segments[:last] != other._segments[:last]:
            return 0
        answer, (stream, start, _) = self._segments[last], other._segments[last]
        if answer.stream != stream or answer.start != start:
            return 0
        return self._starts[last] + answer.end - answer.start

    def slices(self, start: int, end: int) -> tuple[Segment, ...]:
        """Return tokens ``start`` to ``end`` as segments.

        Two results are equal if and only if the tokens are equal.
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

    def segment_at(self, position: int) -> tuple[str, int, int]:
        """Return the stream, offset and end of the segment that contains token ``position``.

        The offset is the position of the token in the stream.
        """
        starts = self._starts
        index = -1 if position >= starts[-1] else bisect_right(starts, position) - 1
        stream, start, end = self._segments[index]
        return stream, start + position - starts[index], end


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Join adjacent segments of the same stream."""
    merged: list[Segment] = []
    for segment in segments:
        before = merged[-1] if merged else None
        if before and before.stream == segment.stream and before.end == segment.start:
            merged[-1] = Segment(segment.stream, before.start, segment.end)
        elif segment.end > segment.start:
            merged.append(segment)
    return merged


#: Number of consecutive keys reserved for a run, which is a series of blocks that follow each other
#: in a stream.
KEYS_PER_RUN = 32
#: Number of requests whose keys later turns of their sessions can copy.
REMEMBERED_REQUESTS = 1024


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class BlockKeys:
    """Keys of full blocks. A key identifies the tokens of a block and all tokens before them.

    With ``ahead``, a key also identifies the ``ahead`` tokens after the block.
    """

    # The key of block ``i`` depends on the key of block ``i - 1`` and on the block's tokens, like
    # the chained hashes of real engines. Keys are numbers instead of hashes, so that different
    # contents never have the same key. Only the first block of a run (consecutive blocks of one
    # token stream) is looked up by its content; the keys of the other blocks are consecutive
    # numbers.

    ROOT = 0

    def __init__(self, block_size: int, ahead: int = 0) -> None:
        self.block_size = block_size
        self.ahead = ahead
        self._runs: dict[tuple[object, ...], int] = {}
        # Stream and offset at which each run begins; None for a run of one block that spans several
        # segments.
        self._heads: list[tuple[str, int] | None] = [None]
        # The latest requests by the stream of their output, with their keys.
        self._remembered: dict[str, tuple[TokenContent, list[int] | array[int]]] = {}

    def extend(self, keys: list[int] | array[int], content: TokenContent, tokens: int) -> None:
        """Append the missing keys of the full blocks in the first ``tokens`` tokens."""
        size = self.block_size
        if not keys:
            self._copy(keys, content, tokens)
        position, end = len(keys) * size, tokens // size * size
        if self.ahead:
            for start in range(position, end, size):
                parent = keys[-1] if keys else self.ROOT
                covered = content.slices(start, start + size + self.ahead)
                keys.append(self._run(None, parent, covered))
            return
        while position < end:
            parent = keys[-1] if keys else self.ROOT
            stream, start, stop = content.segment_at(position)
            blocks = min(stop - start, end - position) // size
            if blocks:
                key = self._following(parent, stream, start)
                if blocks == 1:  # the common case: a block filled by decodes
                    keys.append(key)
                else:
                    keys.extend(range(key, key + min(blocks, KEYS_PER_RUN - key % KEYS_PER_RUN)))
            else:  # the block spans several segments
                keys.append(self._run(None, parent, content.slices(position, position + size)))
            position = len(keys) * size

    def _copy(self, keys: list[int] | array[int], content: TokenContent, tokens: int) -> None:
        """Copy the keys of the request whose prompt and answer the prompt repeats, if any, and
        remember the request.
        """
        for stream in content.find_answers():
            if (found := self._remembered.get(stream)) is not None:
                repeated = min(content.count_repeated(found[0]) - self.ahead, tokens)
                if repeated > 0:
                    keys.extend(found[1][: repeated // self.block_size])
                break
        if len(self._remembered) >= REMEMBERED_REQUESTS:
            del self._remembered[next(iter(self._remembered))]
        self._remembered[content.output] = content, keys

    def run_left(self, keys: array[int], content: TokenContent) -> int:
        """Return the number of full blocks after ``keys`` whose keys continue the last run.

        A run is a series of consecutive keys.
        """
        run, place = divmod(keys[-1] + 1 if keys else 0, KEYS_PER_RUN)
        stream, start, stop = content.segment_at(len(keys) * self.block_size)
        if not place or self._heads[run] != (stream, start - place * self.block_size):
            return 0
        return min(KEYS_PER_RUN - place, (stop - start) // self.block_size)

    def _following(self, parent: int, stream: str, start: int) -> int:
        """Return the key of the block that begins at offset ``start`` of ``stream``, after
        ``parent``.
        """
        run, place = divmod(parent + 1, KEYS_PER_RUN)
        if place and self._heads[run] == (stream, start - place * self.block_size):
            return parent + 1
        return self._run((stream, start), parent, stream, start)

    def _run(self, head: tuple[str, int] | None, *name: object) -> int:
        """Return the first key of the run with the given name."""
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = len(self._heads)
            self._heads.append(head)
        return run * KEYS_PER_RUN
