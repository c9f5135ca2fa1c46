"""What SGLang 0.5.23 keeps of a request, and who owns which tokens of the KV pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simkv.core.block_keys import TokenContent
from simkv.core.radix_tree import RadixNode, RadixTree
from simkv.schedulers.sglang.versions import LATEST, SglangRules


class EngineCrash(Exception):
    """The engine raises inside its scheduling call: ``why``, and over whose prefill."""

    def __init__(self, why: str, rows: Sequence[Req]) -> None:
        super().__init__(why)
        self.why = why
        self.rows = rows


@dataclass(slots=True, eq=False)
class Req:
    """A request in the engine; all lengths in tokens.

    ``max_new`` is the limit on emitted tokens after the clip at arrival and ``out`` how many were
    emitted. A prefill covers ``prefix`` (computed or cached before it) to ``end``. ``kv`` tokens
    own a slot; the first ``owned`` of them belong to the tree, whose ``node`` is locked. ``hit``
    is what the last ordering of the queue found cached, ``stamp`` the engine's count of processed
    tokens when the request was queued, ``passes`` the passes that found it there (if they count).
    ``pending`` counts tokens that launched batches will emit for it; a token that arrives when it
    is 0 is dropped. ``aborted``: the client has gone. A ``refused`` one is a prompt of one token,
    and its first token tells the client why. Log probabilities are asked for of the tokens from
    ``logprobs_from`` on. It asks for the adapter ``lora`` and was put
    into the queue last at ``queued_at`` (s), as the ``entry``-th that was. When a prefill
    pass looked at it last it had ``looked`` tokens, of which it found ``matched`` cached. What the
    last ordering found cached ``ended`` at that node; ``routing_key`` says to whom it belongs.
    """

    id: int
    prompt_tokens: int
    max_new: int
    ignore_eos: bool
    content: TokenContent
    lora: str | None = None
    logprobs_from: int | None = None
    refused: bool = False
    queued_at: float = 0.0
    priority: int = 0
    entry: int = 0
    looked: int = 0
    matched: int = 0
    routing_key: str | None = None
    ended: RadixNode | None = field(default=None, repr=False)
    out: int = 0
    prefix: int = 0
    end: int = 0
    kv: int = 0
    owned: int = 0
    node: RadixNode | None = field(default=None, repr=False)
    hit: int = 0
    stamp: int = 0
    passes: int = 0
    pending: int = 0
    finished: bool = False
    aborted: bool = False

    @property
    def fill(self) -> int:
        """Tokens that a prefill must have: the prompt, after a retraction the outputs too."""
        return self.prompt_tokens + self.out

    @property
    def max_cached_tokens(self) -> int:
        """So many tokens may come from the cache: not the last, none of log probabilities."""
        most = self.fill - 1
        return most if self.logprobs_from is None else min(most, self.logprobs_from)

    @property
    def work(self) -> int:
        """Tokens of it that were not cached when the queue was ordered last, at least 1."""
        return max(1, self.fill - self.hit)


class SglangMemory:
    """The token pool of one replica, in pages of ``page_size`` tokens, and its prefix tree.

    ``free`` tokens are owned by nobody; ``tree`` is None with the prefix cache off.
    """

    def __init__(
        self, tokens: int, page_size: int, prefix_cache: bool, rules: SglangRules = LATEST
    ) -> None:
        self.page_size = page_size
        self.rules = rules
        self.free = tokens
        self.tree = RadixTree(page_size) if prefix_cache else None

    def round_up(self, tokens: int) -> int:
        """``tokens`` rounded up to whole pages."""
        return -(-tokens // self.page_size) * self.page_size

    @property
    def evictable(self) -> int:
        """Tokens of cached prefixes that no request has locked."""
        return self.tree.evictable if self.tree else 0

    @property
    def room(self) -> int:
        """Tokens that can be had, by eviction if need be."""
        return self.free + self.evictable

    def reclaim(self, target: int) -> bool:
        """Evict cached prefixes until ``target`` tokens are free; whether they are.

        Older releases evict ``target`` tokens whatever is free.
        """
        if self.free < target and self.tree:
            short = target - self.free if self.rules.evicts_shortfall else target
            self.free += self.tree.evict(short)
        return self.free >= target

    def match(self, req: Req, tokens: int) -> tuple[int, RadixNode | None]:
        """How many of the first ``tokens`` tokens of ``req`` are cached, and the node they end at.

        Refreshes what it finds, as a use would.
        """
        return self.tree.match(req.content, tokens) if self.tree else (0, None)

    def lock(self, node: RadixNode | None) -> None:
        """Keep a matched prefix from eviction."""
        if self.tree and node:
            self.tree.lock(node)

    def unlock(self, node: RadixNode | None) -> None:
        """Undo one ``lock``."""
        if self.tree and node:
            self.tree.unlock(node)

    def extend(self, rows: Sequence[Req]) -> None:
        """Give each of ``rows`` the slots of its prefill. Raises EngineDies.

        With pages of more than one token the eviction aims a page per request too high; that
        costs cached prefixes, but only too few free pages are fatal.
        """
        tokens = sum(r.end - r.prefix for r in rows)
        self.reclaim(tokens if self.page_size == 1 else tokens + self.page_size * len(rows))
        for r in rows:
            self.free -= self.round_up(r.end) - self.round_up(r.prefix)
            r.kv = r.end
        if self.free < 0:
            raise EngineCrash(f"prefill out of memory: {tokens} tokens asked for", rows)

    def fits(self, rows: Sequence[Req]) -> bool:
        """Whether ``rows`` can decode one token each; evicts what that takes, even in vain."""
        page = self.page_size
        starting_a_page = len(rows) if page == 1 else sum(1 for r in rows if r.kv % page == 0)
        return self.reclaim(page * starting_a_page)

    def grow(self, rows: Sequence[Req]) -> None:
        """Give each of ``rows``, which fit, a slot for its next token.

        The eviction assumes a new page for every row, needed or not.
        """
        page = self.page_size
        self.reclaim(page * len(rows))
        for r in rows:
            if r.kv % page == 0:
                self.free -= page
            r.kv += 1

    def growth(self, rows: Sequence[Req], steps: int) -> list[int]:
        """Tokens that ``grow`` would take in each of the next ``steps`` steps."""
        page = self.page_size
        starting = [0] * page
        for r in rows:
            starting[-r.kv % page] += 1
        return [page * starting[step % page] for step in range(steps)]

    def publish(self, req: Req, tokens: int, *, ended: bool = False) -> None:
        """Hand the first ``tokens`` tokens of ``req`` to the tree, in whole pages.

        Where the tree has them already, the request's own copies become free. A key that is
        longer than the prompt is split at the end of the prompt, so that outputs can go first; in
        older releases if ``req`` has ``ended``, or never.
        """
        if self.tree is None:
            return
        present, node = self.tree.insert(req.content, tokens)
        self.free += max(0, present - req.owned)
        whole = tokens // self.page_size * self.page_size
        prompt = req.prompt_tokens // self.page_size * self.page_size
        splits = self.rules.splits_outputs if ended else self.rules.splits_retracted
        if splits and 0 < prompt < whole:
            self.tree.insert(req.content, prompt)
        self.unlock(req.node)
        self.lock(node)
        req.node, req.owned = node, whole

    def release(self, req: Req) -> None:
        """Take back all that ``req`` has and the tree has not; its in-flight tokens are void."""
        self.free += self.round_up(req.kv) - req.owned
        self.unlock(req.node)
        req.node = None
        req.prefix = req.end = req.kv = req.owned = req.pending = req.matched = 0
