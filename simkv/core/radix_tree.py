"""A radix tree of cached prefixes, in whole pages, with locks, recency and eviction.

   tree = RadixTree(page_size=1)
   tree.insert(content, 100)           # (0, node): none of the 100 tokens was cached
   length, node = tree.match(other, 80)
   tree.lock(node)                     # protects `node` and its ancestors
   tree.evict(50)                      # evicts unlocked leaves, least recent first

The tree reproduces SGLang 0.5.23 (``mem_cache/unified_radix_cache.py``), with KV in GPU memory
only.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from itertools import count

from simkv.core.block_keys import TokenContent


class RadixNode:
    """Node with the tokens ``start`` to ``end`` of ``content``.

    The tokens before ``start`` are in its ancestors.
    """

    # ``matched`` is another content that is known to have all tokens of the node, and ``last`` the
    # child that was used last.

    __slots__ = (
        "children",
        "content",
        "end",
        "last",
        "locks",
        "matched",
        "parent",
        "queued",
        "recency",
        "start",
    )

    def __init__(
        self, content: TokenContent | None, start: int, end: int, parent: RadixNode | None
    ) -> None:
        self.content, self.start, self.end, self.parent = content, start, end, parent
        self.children: dict[Hashable, RadixNode] = {}
        self.matched: TokenContent | None = None
        self.last: RadixNode | None = None
        self.locks = 0
        self.recency = 0
        self.queued = False

    @property
    def tokens(self) -> int:
        """Number of tokens in the node, without its ancestors."""
        return self.end - self.start


class RadixTree:
    """Tree of cached prefixes. All lengths are numbers of tokens and multiples of ``page_size``.

    ``evictable`` is the number of tokens in unlocked nodes.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = RadixNode(None, 0, 0, None)
        self.evictable = 0
        self._clock = 0
        self._serial = count()
        # Heap of all unlocked leaves, each with its recency at the time it was pushed.
        self._leaves: list[tuple[int, int, RadixNode]] = []

    def match(self, content: TokenContent, tokens: int) -> tuple[int, RadixNode]:
        """Find the longest cached prefix of the first ``tokens`` tokens.

        Returns its length and its last node. The matched nodes become the most recently used.
        """
        # If only a part of the last node matches, the node is split.
        end = tokens // self.page_size * self.page_size
        node = self.root
        if end == 0:
            return 0, node
        while node.end < end and (found := self._follow(node, content, end)):
            child, shared = found
            if shared < child.tokens:
                node = self._split(child, shared)
                break
            node = child
        # The engine makes each ancestor 1e-5 older than its child. This has no effect: a node and
        # its ancestor are never leaves at the same time, and all other clock readings are whole
        # numbers.
        now = self._tick()
        for seen in self.path_to_root(node):
            seen.recency = now
        return node.end, node

    def insert(self, content: TokenContent, tokens: int) -> tuple[int, RadixNode]:
        """Cache the first ``tokens`` tokens.

        Returns the number of tokens that were cached before, and the last node.
        """
        end = tokens // self.page_size * self.page_size
        node = self.root
        while node.end < end and (found := self._follow(node, content, end)):
            child, shared = found
            child.recency = self._tick()
            if shared < child.tokens:
                node = self._split(child, shared)
                break
            node = child
        present = node.end
        if present < end:
            node = self._adopt(node, RadixNode(content, present, end, node))
            node.recency = self._tick()
            self.evictable += node.tokens
            self._offer(node)
        return present, node

    def lock(self, node: RadixNode) -> None:
        """Protect ``node`` and its ancestors from eviction until ``unlock`` is called."""
        # ``unlock`` must be called as often as ``lock``.
        for held in self.path_to_root(node):
            if held.locks == 0:
                self.evictable -= held.tokens
            held.locks += 1

    def unlock(self, node: RadixNode) -> None:
        """Undo one ``lock`` of ``node``."""
        for held in self.path_to_root(node):
            held.locks -= 1
            if held.locks == 0:
                self.evictable += held.tokens
                self._offer(held)

    def evict(self, tokens: int) -> int:
        """Evict unlocked leaves until at least ``tokens`` tokens are freed.

        The least recently used leaf is evicted first. Returns the number of freed tokens. It is
        lower than ``tokens`` if no unlocked leaf is left.
        """
        # The number may be larger than ``tokens``, or smaller if no unlocked leaf remains.
        freed = 0
        while freed < tokens and self._leaves:
            recency, _, node = heapq.heappop(self._leaves)
            node.queued = False
            if recency != node.recency:  # the leaf was used again after it was queued
                self._offer(node)
            elif not node.children and not node.locks:
                assert node.parent is not None
                del node.parent.children[self._first_page(node)]
                if node.parent.last is node:
                    node.parent.last = None
                self._evicted(node)
                freed += node.tokens
                self.evictable -= node.tokens
                self._offer(node.parent)
        return freed

    def _evicted(self, node: RadixNode) -> None:
        """Hook for subclasses, called when a leaf has left the tree."""

    def fingerprint(self) -> Hashable:
        """Return the state that determines future behavior."""
        # The value contains the order of the nodes' last uses, but no clock readings.
        nodes = sorted(self.nodes(), key=lambda node: node.recency)
        return tuple((self._name(node), node.start, node.locks) for node in nodes)

    def order(self) -> Hashable:
        """Return the order of the nodes as a hashable value."""
        # Siblings are in insertion order.
        return tuple((self._name(node), node.start) for node in self.nodes())

    def nodes(self) -> Iterator[RadixNode]:
        """Yield all nodes except the root. Parents come before their children."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _name(self, node: RadixNode) -> Hashable:
        assert node.content is not None
        return node.content.slices(0, node.end)

    def path_to_root(self, node: RadixNode) -> Iterator[RadixNode]:
        """Yield ``node`` and its ancestors except the root. ``node`` comes first."""
        while node.parent is not None:
            yield node
            node = node.parent

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _follow(
        self, node: RadixNode, content: TokenContent, end: int
    ) -> tuple[RadixNode, int] | None:
        """Return the child that continues ``content`` after ``node`` and the number of shared
        tokens, or None.
        """
        # The tokens are counted up to ``end``. A request walks the same path several times, so that
        # the child used last is tried first.
        child = node.last
        if child is None or not (
            len(node.children) == 1 or child.matched is content or child.content is content
        ):
            child = node.children.get(content.slices(node.end, node.end + self.page_size))
        if child is None or not (shared := self._shared(child, content, end)):
            return None
        node.last = child
        if shared == child.tokens:
            child.matched = content
        return child, shared

    def _first_page(self, node: RadixNode) -> Hashable:
        assert node.content is not None
        return node.content.slices(node.start, node.start + self.page_size)

    def _adopt(self, parent: RadixNode, node: RadixNode) -> RadixNode:
        node.parent = parent
        parent.children[self._first_page(node)] = node
        parent.last = node
        return node

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        """Move the first ``tokens`` tokens of ``node`` into a new parent and return the parent."""
        # ``node`` keeps its end, so locks and references to it stay valid. The two nodes count as
        # just used, the lower one last, although only the upper one was requested.
        assert node.parent is not None
        upper = RadixNode(node.content, node.start, node.start + tokens, node.parent)
        upper.locks = node.locks
        upper.matched = node.matched
        self._adopt(node.parent, upper)
        node.start = upper.end
        self._adopt(upper, node)
        upper.recency = self._tick()
        node.recency = self._tick()
        return upper

    def _shared(self, node: RadixNode, content: TokenContent, end: int) -> int:
        """Return the number of tokens up to ``end`` that ``node`` shares with ``content``, in whole
        pages.
        """
        end = min(end, node.end)
        assert node.content is not None
        if node.content is content or node.matched is content:
            return end - node.start
        position = node.start
        while position < end:
            mine, start, stop = node.content.segment_at(position)
            other, its_start, its_stop = content.segment_at(position)
            if mine != other or start != its_start:
                break
            position = min(end, position + min(stop, its_stop) - start)
        return (position - node.start) // self.page_size * self.page_size

    def _offer(self, node: RadixNode) -> None:
        """Queue ``node`` for eviction if it is an unlocked leaf and not queued yet."""
        if not (node.queued or node.children or node.locks or node.parent is None):
            node.queued = True
            heapq.heappush(self._leaves, (node.recency, next(self._serial), node))
