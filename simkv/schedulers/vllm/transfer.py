"""vLLM's V1 scheduler with a KV connector: a prefill replica keeps blocks, a decode replica loads.

Rules of vllm-project/vllm 0.19.0, ``vllm/v1/core/sched/scheduler.py`` and
``vllm/distributed/kv_transfer`` (the NIXL connector, which reads from the other side):

- Prefill: a request that has ended keeps its blocks until they have been read
  (``request_finished`` returns ``delay_free_blocks``; ``finished_sending`` frees them).
- Decode: a request whose KV is elsewhere is taken when there are blocks for it; then it stands
  aside as ``WAITING_FOR_REMOTE_KVS`` until all is there, and its last token is computed here.
  Should it be preempted later, it computes all of it here.

Here the KV of all tokens but the last is fetched, less what the prefix cache has.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping

from mypy_extensions import mypyc_attr

from simkv.core.errors import InputError
from simkv.core.scheduler import Batch, Completion
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.memory import Hits
from simkv.schedulers.vllm.requests import RequestState
from simkv.schedulers.vllm.rules import VllmRules
from simkv.schedulers.vllm.scheduler import Turn, VllmScheduler
from simkv.schedulers.vllm.step import Step


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmTransferScheduler(VllmScheduler):
    """``keep`` and ``sent`` are for the side that sends KV, ``fetch`` and ``loaded`` for the other.

    ``loading`` requests have blocks and wait for their KV, ``loaded`` ones have it and do not run
    yet.
    """

    def __init__(
        self, config: VllmConfig, rules: VllmRules | None = None, *, tables: bool = False
    ) -> None:
        if config.kv_cache_groups != (0,):
            raise InputError("kv_cache_groups: KV is sent of one group of layers only; say [0]")
        if config.offloads:
            raise InputError("num_cpu_blocks: KV is sent without offloading only; say 0")
        if config.num_speculative_tokens:
            raise InputError("num_speculative_tokens: KV is sent without drafts only; say 0")
        super().__init__(config, rules, tables=tables)
        self._keeps: set[int] = set()
        self._kept: dict[int, RequestState] = {}
        self._ending = False
        self._elsewhere: set[int] = set()
        self._loading: dict[int, RequestState] = {}
        self._gone: dict[int, RequestState] = {}
        self._ready: dict[int, RequestState] = {}
        self._loads: list[tuple[int, int]] = []

    # The side that sends.

    def keep(self, request_id: int) -> None:
        """When this request ends, which is about to be added, its blocks stay until ``sent``."""
        self._keeps.add(request_id)

    def sent(self, request_id: int) -> None:
        """The blocks of a request that has ended have been read, or nobody wants them."""
        self._keeps.discard(request_id)
        if r := self._kept.pop(request_id, None):
            super()._release(r)

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        self._ending = True
        completion = super().complete(batch, ended)
        self._ending = False
        return completion

    def _release(self, r: RequestState, unused: int = 0) -> None:
        if self._ending and r.id in self._keeps:
            self._kept[r.id] = r
        else:
            super()._release(r, unused)

    # The side that loads.

    def fetch(self, request_id: int) -> None:
        """The KV of this request, which is about to be added, is to come from elsewhere."""
        self._elsewhere.add(request_id)

    def loaded(self, request_id: int) -> None:
        """The KV of a request is there."""
        if r := self._gone.pop(request_id, None):
            super()._release(r)
        elif r := self._loading.pop(request_id, None):
            self._ready[r.id] = r
            self.waiting.put_back(r)

    def _load(self, r: RequestState, step: Step) -> Turn | None:
        if r.id not in self._elsewhere:
            return None
        hits, tokens = self.memory.hits(r), r.length - 1
        missing = tokens - hits.tokens
        if missing <= 0:
            self._elsewhere.discard(r.id)
            self._loads.append((r.id, 0))  # so that the other side knows
            return None
        if not self._fits(r, hits, tokens):
            step.pass_over("blocks")
            return "stops"
        self._elsewhere.discard(r.id)
        self.waiting.remove(r)
        self.memory.share(r, hits)
        self.memory.take(r, self.memory.missing(hits, tokens), tokens)
        r.computed = tokens
        self._loading[r.id] = r
        self._loads.append((r.id, missing))
        return "is taken"

    def _least(self, r: RequestState) -> int:  # noqa: ARG002
        return 0  # one whose KV is there has blocks

    def _fits(self, r: RequestState, hits: Hits, end: int) -> bool:
        if r.id not in self._ready:
            return super()._fits(r, hits, end)
        return self.memory.to_grow(r.computed, r.length - r.computed) <= self.memory.pool.free

    def _grant(self, r: RequestState, n: int, blocks: int, step: Step) -> None:
        if self._ready.pop(r.id, None):
            blocks -= self.memory.held(r.computed)
        super()._grant(r, n, blocks, step)

    def _dispatch(self, step: Step) -> Batch:
        batch = super()._dispatch(step)
        batch.loads, self._loads = self._loads, []
        return batch

    def abort(self, request_id: int) -> None:
        if r := self._loading.pop(request_id, None):  # its blocks are being written to
            self._gone[request_id] = r
            del self._live[request_id]
        else:
            super().abort(request_id)

    def _remove(self, r: RequestState) -> None:
        self._elsewhere.discard(r.id)
        ready = self._ready.pop(r.id, None)
        super()._remove(r)
        if ready:
            super()._release(r)

    # What can be seen of both.

    @property
    def longest(self) -> int:
        """Tokens that a request can have, prompt and output together."""
        return self.config.max_model_len

    @property
    def awaits_kv(self) -> bool:
        """Whether KV is on its way, so that a standstill will end by itself."""
        return bool(self._kept or self._loading or self._gone)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._loading)

    def waiting_ids(self) -> list[int]:
        return [*self._loading, *super().waiting_ids()]

    def blocks_held(self) -> Mapping[int, int]:
        others = (*self._kept.values(), *self._loading.values(), *self._ready.values())
        held = {r.id: self.memory.held(r.computed) for r in others}
        return {**super().blocks_held(), **held}

    def fingerprint(self) -> Hashable:
        return super().fingerprint(), tuple(self._loading), tuple(self._ready), tuple(self._kept)
