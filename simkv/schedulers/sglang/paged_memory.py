"""SGLang's memory with numbered pages, for execution on a device."""

from __future__ import annotations

from collections.abc import Sequence

from simkv.core.block_keys import TokenContent
from simkv.core.radix_tree import RadixNode, RadixTree
from simkv.schedulers.sglang.memory import Req, SglangMemory
from simkv.schedulers.sglang.versions import NEWEST, RULES, SglangRules


class PagedMemory(SglangMemory):
    """``SglangMemory`` with a block table for each request."""

    # Token counts and scheduling decisions are the same.

    def __init__(
        self, tokens: int, page_size: int, prefix_cache: bool, rules: SglangRules = RULES[NEWEST]
    ) -> None:
        super().__init__(tokens, page_size, prefix_cache, rules)
        self.tables: dict[int, list[int]] = {}
        self.free_pages = list(range(tokens // page_size, 0, -1))
        self.pages: PagedRadixTree | None = None
        if prefix_cache:
            self.tree = self.pages = PagedRadixTree(page_size, self.free_pages)

    def extend(self, rows: Sequence[Req]) -> None:
        super().extend(rows)
        for r in rows:
            if r.id not in self.tables:
                self.tables[r.id] = self.pages.path(r.node) if self.pages and r.node else []
            self._fill(r)

    def grow(self, rows: Sequence[Req]) -> None:
        super().grow(rows)
        for r in rows:
            self._fill(r)

    def publish(self, req: Req, tokens: int, *, ended: bool = False) -> None:
        if self.pages is None:
            return
        table = self.tables[req.id]
        self.pages.offered = table
        super().publish(req, tokens, ended=ended)
        assert req.node is not None
        cached = self.pages.path(req.node)
        own = table[: len(cached)]
        if own != cached:  # another request computed the same tokens first
            self.free_pages += [a for a, b in zip(own, cached, strict=True) if a != b]
            self.tables[req.id] = cached + table[len(cached) :]

    def release(self, req: Req) -> None:
        self.free_pages += self.tables.pop(req.id, [])[req.owned // self.page_size :]
        super().release(req)

    def _fill(self, r: Req) -> None:
        table = self.tables[r.id]
        for _ in range(self.round_up(r.kv) // self.page_size - len(table)):
            table.append(self.free_pages.pop())


class PagedRadixTree(RadixTree):
    """Radix tree that records the pages of its nodes.

    ``offered`` is the block table from which ``insert`` takes pages. Evicted pages go to
    ``free_pages``.
    """

    def __init__(self, page_size: int, free_pages: list[int]) -> None:
        super().__init__(page_size)
        self.offered: Sequence[int] = ()
        self._free_pages = free_pages
        self._pages: dict[RadixNode, list[int]] = {}

    def path(self, node: RadixNode) -> list[int]:
        """Return the pages of all tokens from the root to the end of ``node``."""
        pieces = [self._pages[part] for part in self.path_to_root(node)]
        return [page for piece in reversed(pieces) for page in piece]

    def insert(self, content: TokenContent, tokens: int) -> tuple[int, RadixNode]:
        present, node = super().insert(content, tokens)
        if node.end > present:
            self._pages[node] = list(self.offered[self._page(present) : self._page(node.end)])
        return present, node

    def _split(self, node: RadixNode, tokens: int) -> RadixNode:
        upper = super()._split(node, tokens)
        pages, cut = self._pages[node], self._page(tokens)
        self._pages[upper], self._pages[node] = pages[:cut], pages[cut:]
        return upper

    def _evicted(self, node: RadixNode) -> None:
        self._free_pages += self._pages.pop(node)

    def _page(self, tokens: int) -> int:
        return tokens // self.page_size
