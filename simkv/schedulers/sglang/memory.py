"""State of a request in SGLang, and the KV pool with its prefix tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from simkv.core.block_keys import TokenContent
from simkv.core.radix_tree import RadixNode, RadixTree
from simkv.schedulers.sglang.versions import NEWEST, RULES, SglangRules


class EngineCrash(Exception):
    """Raised if the engine crashes in a scheduling call.

    ``why`` is the error message. ``rows`` are the requests of the failed prefill.
    """

    def __init__(self, why: str, rows: Sequence[Req]) -> None:
        super().__init__(why)
        self.why = why
        self.rows = rows


@dataclass(slots=True, eq=False)
class Req:
    """A request in the engine. All lengths are in tokens.

    - ``max_new``: output limit, clipped at arrival.
    - ``out``: number of emitted tokens.
    - ``prefix``: index of the first token to prefill. ``end``: index after the last one.
    - ``kv``: number of tokens that have a KV slot.
    - ``owned``: number of tokens whose slots are in the prefix tree. ``node``: tree node of the
      last such token.
    - ``hit``: number of cached tokens when the queue was last sorted. ``ended``: tree node of the
      last cached token.
    - ``looked``: number of tokens to prefill when a pass last considered the request. ``matched``:
      number of cached tokens at that time.
    - ``stamp``: number of tokens that the engine had processed when the request was queued.
    - ``passes``: number of prefill passes spent in the queue (only for
      ``lpm_aging_tokens_per_pass``).
    - ``queued_at``: time in seconds of the last entry into the queue. ``entry``: sequence number of
      the entry.
    - ``pending``: number of tokens that launched batches will emit.
    - ``aborted``: whether the client has disconnected.
    - ``refused``: whether the request was rejected and runs as a prompt of one token.
    - ``logprobs_from``: index of the first token whose log probability is requested.
    """

    # Tokens that arrive while ``pending`` is 0 are discarded. The first token of a refused request
    # reports the reason.

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
    client: str | None = None
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
        """Number of tokens to prefill: prompt and, after a retraction, outputs."""
        return self.prompt_tokens + self.out

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of tokens to take from the prefix cache.

        The last token is always computed, and so are tokens whose log probabilities are requested.
        """
        most = self.fill - 1
        return most if self.logprobs_from is None else min(most, self.logprobs_from)

    @property
    def work(self) -> int:
        """Number of uncached tokens when the queue was last sorted, at least 1."""
        return max(1, self.fill - self.hit)


class SglangMemory:
    """KV pool and prefix tree of one replica.

    ``free`` is the number of free tokens. ``tree`` is None without prefix caching.
    """

    def __init__(
        self, tokens: int, page_size: int, prefix_cache: bool, rules: SglangRules = RULES[NEWEST]
    ) -> None:
        self.page_size = page_size
        self.rules = rules
        self.free = tokens
        self.tree = RadixTree(page_size) if prefix_cache else None

    def round_up(self, tokens: int) -> int:
        """Round a number of tokens up to whole pages."""
        return -(-tokens // self.page_size) * self.page_size

    @property
    def evictable(self) -> int:
        """Number of cached tokens that can be evicted."""
        return self.tree.evictable if self.tree else 0

    @property
    def room(self) -> int:
        """Number of tokens that are free or evictable."""
        return self.free + self.evictable

    def reclaim(self, target: int) -> bool:
        """Evict cached prefixes until ``target`` tokens are free.

        Returns False if too few can be evicted.
        """
        # Older releases evict ``target`` tokens instead of only the missing number.
        if self.free < target and self.tree:
            short = target - self.free if self.rules.evicts_shortfall else target
            self.free += self.tree.evict(short)
        return self.free >= target

    def match(self, req: Req, tokens: int) -> tuple[int, RadixNode | None]:
        """Return the number of cached tokens among the first ``tokens`` tokens.

        Also returns the last matching node of the prefix tree.
        """
        # The matched nodes become the most recently used.
        return self.tree.match(req.content, tokens) if self.tree else (0, None)

    def lock(self, node: RadixNode | None) -> None:
        """Protect a matched prefix from eviction."""
        if self.tree and node:
            self.tree.lock(node)

    def unlock(self, node: RadixNode | None) -> None:
        """Undo one ``lock``."""
        if self.tree and node:
            self.tree.unlock(node)

    def extend(self, rows: Sequence[Req]) -> None:
        """Allocate the slots for the prefills of the requests ``rows``.

        Raises EngineCrash if too few pages are free.
        """
        # With pages of more than one token, more cached prefixes than necessary are evicted, as in
        # the engine: the eviction target is one page per request too high.
        tokens = sum(r.end - r.prefix for r in rows)
        self.reclaim(tokens if self.page_size == 1 else tokens + self.page_size * len(rows))
        for r in rows:
            self.free -= self.round_up(r.end) - self.round_up(r.prefix)
            r.kv = r.end
        if self.free < 0:
            raise EngineCrash(f"prefill out of memory: {tokens} tokens requested", rows)

    def fits(self, rows: Sequence[Req]) -> bool:
        """Return whether each of the requests ``rows`` can decode one token.

        Evicts prefixes if necessary.
        """
        # Prefixes are evicted even if too few can be evicted.
        page = self.page_size
        starting_a_page = len(rows) if page == 1 else sum(1 for r in rows if r.kv % page == 0)
        return self.reclaim(page * starting_a_page)

    def grow(self, rows: Sequence[Req]) -> None:
        """Allocate a slot for the next token of each of the requests ``rows``."""
        # Eviction frees memory for one new page per request, even if a request needs no new page.
        page = self.page_size
        self.reclaim(page * len(rows))
        for r in rows:
            if r.kv % page == 0:
                self.free -= page
            r.kv += 1

    def growth(self, rows: Sequence[Req], steps: int) -> list[int]:
        """Return the number of tokens that ``grow`` allocates in each of the next steps."""
        page = self.page_size
        starting = [0] * page
        for r in rows:
            starting[-r.kv % page] += 1
        return [page * starting[step % page] for step in range(steps)]

    def publish(self, req: Req, tokens: int, *, ended: bool = False) -> None:
        """Insert the first ``tokens`` tokens of ``req`` into the prefix tree.

        Only whole pages are inserted. Slots of tokens that were already cached are freed. Outputs
        get a separate node, so that they are evicted before the prompt.
        """
        # Older releases give outputs a separate node only if ``req`` has ``ended``, or never.
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
        """Free the slots of ``req`` that are not in the prefix tree."""
        # The tokens in flight of ``req`` are discarded.
        self.free += self.round_up(req.kv) - req.owned
        self.unlock(req.node)
        req.node = None
        req.prefix = req.end = req.kv = req.owned = req.pending = req.matched = 0
