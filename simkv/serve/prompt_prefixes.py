"""Find the tokens that a prompt shares with earlier prompts, as segments of named token streams.

known = PromptTree()
known.segments_of(array("q", [1, 2, 3]), "u0")  # []: no shared prefix
known.segments_of(array("q", [1, 2, 9]), "u1")  # [Segment("u0", 0, 2), Segment("u1", 0, 1)]
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from simkv.core.request import Segment

#: Maximum number of stored tokens, which exceeds the caches of several GPUs; the least recently
#: used are dropped first.
MAX_TOKENS = 8_000_000


class PrefixNode:
    """Node of the prefix tree: tokens of ``stream`` from offset ``start`` on."""

    __slots__ = ("children", "last_used", "parent", "start", "stream", "tokens")

    def __init__(
        self, tokens: array[int], stream: str, start: int, above: PrefixNode | None
    ) -> None:
        self.tokens, self.stream, self.start, self.parent = tokens, stream, start, above
        self.children: dict[int, PrefixNode] = {}
        self.last_used = 0


class PromptTree:
    """Prefix tree of the tokens of prompts and replies. It stores at most ``most`` tokens."""

    def __init__(self, most: int = MAX_TOKENS) -> None:
        self.most = most
        self.size = 0
        self._root = PrefixNode(array("q"), "", 0, None)
        self._clock = 0

    def segments_of(self, tokens: array[int], own: str) -> list[Segment]:
        """Return the segments of a prompt, and add the prompt to the tree.

        New tokens become a stream with the name ``own``. The list is empty if all tokens are new.
        """
        node, found = self._walk(tokens)
        shared = sum(len(one.tokens) for one in found)
        segments = [Segment(one.stream, one.start, one.start + len(one.tokens)) for one in found]
        if shared < len(tokens):
            self._add(node, tokens[shared:], own, 0)
        if 0 < shared < len(tokens):
            segments.append(Segment(own, 0, len(tokens) - shared))
        return segments

    def add_reply(self, prompt: array[int], emitted: array[int], own: str) -> None:
        """Add the tokens emitted after a prompt to the tree. New tokens become a stream named
        ``own``.
        """
        tokens = prompt + emitted
        node, found = self._walk(tokens)
        shared = sum(len(one.tokens) for one in found)
        if len(prompt) <= shared < len(tokens):
            self._add(node, tokens[shared:], own, shared - len(prompt))

    def _walk(self, tokens: array[int]) -> tuple[PrefixNode, list[PrefixNode]]:
        """Return the last node and all nodes of the longest prefix of ``tokens`` in the tree."""
        self._clock += 1
        node, place, found = self._root, 0, []
        while place < len(tokens) and (child := node.children.get(tokens[place])):
            shared = _common(child.tokens, tokens, place)
            if shared < len(child.tokens):
                child = self._split(child, shared)
            child.last_used = self._clock
            found.append(child)
            node, place = child, place + shared
        return node, found

    def _add(self, node: PrefixNode, tokens: array[int], stream: str, start: int) -> None:
        new = PrefixNode(tokens, stream, start, node)
        new.last_used = self._clock
        node.children[tokens[0]] = new
        self.size += len(tokens)
        if self.size > self.most:
            self._forget()

    def _split(self, node: PrefixNode, at: int) -> PrefixNode:
        """Split a node at token ``at`` and return the upper part."""
        assert node.parent is not None
        upper = PrefixNode(node.tokens[:at], node.stream, node.start, node.parent)
        upper.last_used = node.last_used
        upper.children[node.tokens[at]] = node
        node.parent.children[node.tokens[0]] = upper
        node.tokens, node.start, node.parent = node.tokens[at:], node.start + at, upper
        return upper

    def _forget(self) -> None:
        """Drop the least recently used leaves until a tenth of the limit is free."""
        for leaf in sorted(self._leaves(), key=lambda leaf: leaf.last_used):
            if self.size <= 0.9 * self.most or leaf.last_used == self._clock:
                return
            assert leaf.parent is not None
            del leaf.parent.children[leaf.tokens[0]]
            self.size -= len(leaf.tokens)

    def _leaves(self) -> Iterator[PrefixNode]:
        stack = [self._root]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if not node.children and node is not self._root:
                yield node


def _common(known: array[int], tokens: array[int], place: int) -> int:
    """Return the length of the common prefix of ``known`` and ``tokens[place:]``."""
    low, high = 0, min(len(known), len(tokens) - place)
    if known[:high] == tokens[place : place + high]:
        return high
    # Invariant: the first ``low`` tokens are equal, and the first ``high`` tokens are not.
    while low + 1 < high:
        middle = (low + high) // 2
        if known[low:middle] == tokens[place + low : place + middle]:
            low = middle
        else:
            high = middle
    return low
