# mypyc: compile
"""vLLM's V1 scheduler with a KV connector: prefill replicas send KV, and decode replicas load it.

Source: vllm-project/vllm, ``vllm/v1/core/sched/scheduler.py`` with the scheduler's side of the NIXL
connector, which reads from the other replica
(``vllm/distributed/kv_transfer/kv_connector/v1/nixl/pull_scheduler.py``). ``VllmRules`` has the
differences of other releases.

- Prefill: a finished request keeps its blocks until the decode replica has read them
  (``request_finished`` returns ``delay_free_blocks``; ``finished_sending`` frees them). An aborted
  request frees its blocks at once.
- Decode: the replica loads the KV of the whole prompt, except for prefix-cache hits. Then the
  decode replica computes the last prompt token, which yields the first output. After a preemption,
  it recomputes the prompt itself.

On replicas that can send KV, the tokens in flight of a preempted request are discarded, and the
request does not wait for them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable

from mypy_extensions import mypyc_attr

from simkv.core.scheduler_protocol import Batch, Completion
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.remote_kv_queue import RemoteKvQueue
from simkv.schedulers.vllm.remote_kv_scheduler import VllmRemoteKvScheduler
from simkv.schedulers.vllm.request_state import RequestState
from simkv.schedulers.vllm.schedule_step import ScheduleStep
from simkv.schedulers.vllm.scheduler import AdmissionStep


@mypyc_attr(allow_interpreted_subclasses=True, serializable=True)
class VllmTransferScheduler(VllmRemoteKvScheduler):
    """Scheduler of replicas that send or load KV.

    ``sends`` are finished requests. Other replicas can read their blocks from the newest step on.
    """

    # Sending: ``keep``, ``sent``. Loading: ``fetch``, ``loaded``. ``_dropped`` maps request ids to
    # the number of tokens in flight to discard.

    def __init__(
        self,
        config: VllmConfig,
        rules: VllmRules | None = None,
        *,
        tables: bool = False,  # noqa: ARG002
    ) -> None:
        super().__init__(config, rules, tables=True)
        if self.rules.queues_loads_apart:
            queue = RemoteKvQueue(config, self.rules)
            self.holding = queue
            self.waiting = queue
        self._loading_reason = "remote"
        self._drops = self.rules.discards_victim_tokens and config.kv_role != "kv_consumer"
        self._dropped: dict[int, int] = {}
        self.sends: list[int] = []
        self._keeps: set[int] = set()
        self._kept: dict[int, RequestState] = {}
        self._ended: list[int] = []
        self._elsewhere: set[int] = set()
        self._loads: list[tuple[int, int]] = []

    # Sending KV.

    def keep(self, request_id: int) -> None:
        """Keep the blocks of a request after its end until ``sent`` is called.

        Must be called before ``add``.
        """
        self._keeps.add(request_id)

    def sent(self, request_id: int) -> None:
        """Free the blocks of a finished request. No other replica needs them any more."""
        self._keeps.discard(request_id)
        if r := self._kept.pop(request_id, None):
            self._free_blocks(r)

    def complete(self, batch: Batch, ended: Collection[int]) -> Completion:
        lost = [i for i, _ in batch.scheduled if i in self._dropped]
        if not lost:
            return super().complete(batch, ended)
        emits = batch.emits
        batch.emits = [i for i in emits if i not in lost]
        completion = super().complete(batch, [i for i in ended if i not in lost])
        batch.emits = emits  # so that the caller sees which tokens were discarded
        return completion

    # Loading KV.

    def fetch(self, request_id: int) -> None:
        """Load the KV of a request from another replica. Must be called before ``add``."""
        self._elsewhere.add(request_id)

    def loaded(self, request_id: int) -> None:
        """Record that the KV of a request is complete."""
        if request_id in self._loading:
            self._arrived.add(request_id)
        elif r := self._gone.pop(request_id, None):
            self._free_blocks(r)

    def _load(self, r: RequestState, step: ScheduleStep) -> AdmissionStep | None:
        if r.id not in self._elsewhere:
            return None
        hits, tokens = self.memory.hits(r), r.length
        turn = self._begin_load(r, hits, tokens, step)
        if r.id in self._loading:
            self._elsewhere.discard(r.id)
            self._loads.append((r.id, tokens - hits.tokens))
        return turn

    def _least(self, r: RequestState) -> int:  # noqa: ARG002
        return 0  # a request with loaded KV already has blocks

    # Preemption and release of blocks.

    def _preempt(self, r: RequestState, by: RequestState, step: ScheduleStep) -> None:
        super()._preempt(r, by, step)
        if self._drops and r.stale:
            self._dropped[r.id], r.stale = r.stale, 0

    def _deliver(self, r: RequestState, n: int, batch: Batch, *, emit: bool) -> bool:
        if r.id not in self._dropped:
            return super()._deliver(r, n, batch, emit=emit)
        r.in_flight -= n
        self._dropped[r.id] -= n
        if not self._dropped[r.id]:
            del self._dropped[r.id]
        return False

    def _sort_out_decodes(self) -> None:
        if not self._drops or self.pipeline_depth == 1:
            super()._sort_out_decodes()  # in other states, any token may be discarded

    def _release(self, r: RequestState, unused: int = 0) -> None:
        if self._ending and r.id in self._keeps:
            self._unfinished.pop(r.id, None)
            self._kept[r.id] = r
            self._ended.append(r.id)
        else:
            super()._release(r, unused)

    def _remove(self, r: RequestState) -> None:
        if r.id in self._elsewhere:
            self._elsewhere.discard(r.id)
            self._loads.append((r.id, 0))  # notify the sending replica
        self._dropped.pop(r.id, None)
        super()._remove(r)

    def _dispatch(self, step: ScheduleStep) -> Batch:
        batch = super()._dispatch(step)
        batch.loads, self._loads = self._loads, []
        self.sends, self._ended = sorted(self._ended), []
        return batch

    # State.

    @property
    def awaits_kv(self) -> bool:
        """Whether a KV transfer is in flight. An empty step is then not a deadlock."""
        return bool(self._kept or self._gone or self._loading.keys() - self._arrived)

    def fingerprint(self) -> Hashable:
        kept = tuple(self._ready), tuple(self._kept), tuple(self._dropped.items())
        return super().fingerprint(), kept
