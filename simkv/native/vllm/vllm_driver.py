"""Driver of vLLM's own scheduler; reasons for waiting are inferred from its state."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from simkv.core.engine_version import plain_release
from simkv.core.recording_format import RecordingLine
from simkv.core.request import Prompt
from simkv.core.scheduler_protocol import (
    Batch,
    Completion,
    DiskTransfers,
    DraftedTokens,
    Held,
    KvCopies,
    KvCopy,
    PreemptionCause,
    WaitReason,
)
from simkv.native.driver_protocol import (
    Counts,
    NativeDriver,
    NativeEngine,
    newest_before,
    read_options,
)
from simkv.native.import_stubs import name_of
from simkv.native.vllm.vllm_engine import Launched, VllmEngine
from simkv.native.vllm.vllm_kv_workers import worker_report
from simkv.native.vllm.vllm_stubs import CORE, REAL_MODULES, stub_vllm_imports
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.lora import VllmLoras
from simkv.schedulers.vllm.versions import RELEASED, find_rules, find_variant

#: Modules that contain classes of options.
OPTION_FILES = ("vllm/config/scheduler.py", "vllm/config/cache.py", "vllm/config.py")
OPTION_CLASSES = ("SchedulerConfig", "CacheConfig")


class NativeVllm(NativeDriver):
    """vLLM's own scheduler as a ``NativeDriver``."""

    def __init__(self, config: VllmConfig, native: Mapping[str, Mapping[str, Any]]) -> None:
        self.config = config
        self.rules = find_rules(config.variant)
        self.engine = VllmEngine(config, native=native)
        self.scheduler = self.engine.scheduler
        self.num_blocks = config.num_gpu_blocks - 1
        self.pipeline_depth = config.depth
        self._in_flight: deque[Launched] = deque()
        self._refused: list[int] = []
        self._prompts: dict[str, Prompt] = {}
        self._running: dict[str, None] = {}
        self._delivered = 0
        self._passes = 0 if config.speculative_method == "ngram" else config.num_speculative_tokens
        self._loras = VllmLoras(config.max_loras, config.max_cpu_loras or config.max_loras)
        self._failed: dict[str, None] = {}
        self._causes: dict[int, int] = {}
        manager = self.scheduler.kv_cache_manager
        self._allocate, manager.allocate_slots = manager.allocate_slots, self._observe
        if hasattr(manager, "can_fit_full_sequence"):  # 0.19
            self._fits, manager.can_fit_full_sequence = manager.can_fit_full_sequence, self._check
        self._freed = self.engine.freed
        self._asks = 0  # the request that last asked for blocks

    def _observe(self, request: Any, *given: Any, **named: Any) -> Any:
        """Call ``allocate_slots``, and record a failure and the preemptions that it causes."""
        for victim in self._freed[len(self._causes) :]:
            self._causes.setdefault(victim, self._asks)
        found = self._allocate(request, *given, **named)
        self._asks = int(request.request_id)
        if found is None:
            self._failed[request.request_id] = None
        return found

    def _check(self, request: Any, *given: Any, **named: Any) -> bool:
        """Call vLLM's ``can_fit_full_sequence``, and record a prompt that does not fit."""
        if not (fits := bool(self._fits(request, *given, **named))):
            self._failed[request.request_id] = None
        return fits

    def add(self, prompt: Prompt, transfer: str | None = None) -> None:
        """Add a request; the API server rejects prompts of ``max_model_len`` or more tokens."""
        if prompt.prompt_tokens >= self.config.max_model_len:
            self._refused.append(prompt.id)
            return
        self._prompts[name_of(prompt.id)] = prompt
        self.engine.add(prompt, transfer)

    def sent(self, number: int) -> None:
        self._report((), [name_of(number)])

    def loaded(self, number: int) -> None:
        self._report([name_of(number)], ())

    def _report(self, loaded: Sequence[str], sent: Sequence[str]) -> None:
        """Report transfers to vLLM, which otherwise receives the report with a batch's result."""
        self.scheduler._update_from_kv_xfer_finished(worker_report(loaded, sent))

    def finish_disk_transfers(self, jobs: Sequence[int], looks: Sequence[int]) -> None:
        self.engine.worker.disk.finish(jobs, looks)

    def abort(self, number: int) -> None:
        if not self.engine.is_over(name_of(number)):
            self.engine.abort(number)
            self._forget(name_of(number))

    def schedule(self) -> Batch:
        self._failed.clear()
        self._causes.clear()
        launched = self.engine.launch()
        self._in_flight.append(launched)
        rows = launched.rows
        batch = Batch([(int(i), n) for i, n in rows.items()], list(launched.start.values()))
        batch.emits = [int(i) for i in launched.emits]
        batch.kind = launched.kind  # type: ignore[assignment]
        for victim in self.engine.freed:
            batch.preempted.append(victim)
            batch.causes.append(PreemptionCause(self._causes.get(victim, self._asks)))
        batch.ignored, self._refused = self._refused, []
        if self.config.num_speculative_tokens and rows:
            batch.drafted = DraftedTokens(
                self._passes,
                {int(i): n for i, n in launched.verified.items() if n},
                {int(i) for i, n in launched.drafts.items() if not n},
            )
        tokens, most = sum(rows.values()), self.config.max_num_batched_tokens
        most = max(most, self.config.max_num_scheduled_tokens or 0)
        if tokens > most:
            batch.fatal = (
                f"the scheduler scheduled {tokens} tokens, more than max_num_batched_tokens {most}"
            )
        line = self.engine.worker.begin(self.scheduler.connector, launched.output, 0)
        if self.config.offloads:
            batch.moves = self._copies(line)
        elif self.config.kv_connector:
            batch.loads = [(i, self._loaded_tokens(i, blocks)) for i, blocks in line["loads"]]
        self._explain(batch, launched)
        return batch

    def _copies(self, line: RecordingLine) -> KvCopies | None:
        """Return the copies that start with a step, or None."""
        size = self.config.block_size
        loads, stores, reads, writes = (
            [KvCopy(job, i, *(n * size for n in sizes)) for job, i, *sizes in line.get(name, ())]
            for name in ("loads", "stores", "reads", "writes")
        )
        disk = None
        if reads or writes or line.get("look"):
            number = self.engine.worker.disk.looked - 1
            disk = DiskTransfers(reads, writes, (number, line["look"]) if line["look"] else None)
        return KvCopies(loads, stores, line["flush"], disk) if any(line.values()) else None

    def _loaded_tokens(self, number: int, blocks: int) -> int:
        """Return the number of prompt tokens in the last ``blocks`` blocks of a prompt."""
        if not blocks:
            return 0
        length, size = self._prompts[name_of(number)].prompt_tokens, self.config.block_size
        return length - (-(-length // size) - blocks) * size

    def _explain(self, batch: Batch, launched: Launched) -> None:
        """Infer why requests were not scheduled and which adapters are copied."""
        scheduler, rows = self.scheduler, launched.rows
        limit = getattr(scheduler, "max_num_scheduled_tokens", self.config.max_num_batched_tokens)
        spent = sum(rows.values()) >= limit
        used = self._note_running(batch)
        if len(rows) < len(self._running):
            self._explain_running(batch, rows, spent=spent)
        waiting = self.engine.waiting() if len(self._prompts) > len(self._running) else ()
        if not waiting:
            return
        loading = {r.request_id for r in waiting if r.status.name == "WAITING_FOR_REMOTE_KVS"}
        copied: WaitReason = "remote" if self.config.kv_connector else "kv"
        batch.aside.update((int(i), copied) for i in loading)
        head = next((r.request_id for r in waiting if r.request_id not in loading), None)
        if head is None:
            batch.held = Held(int(waiting[0].request_id), copied)
            return
        full = len(self._running) >= (self.config.max_num_active_seqs or self.config.max_num_seqs)
        why: WaitReason = "budget" if spent else "slot" if full else "rule"
        if self.config.enable_lora and not (full or batch.preempted):
            self._explain_adapters(batch, waiting, used)
        if head in self._failed or batch.preempted:
            why = "blocks"
        elif int(head) in batch.aside:
            why = batch.aside[int(head)]
        elif not full and self._failed:
            why = "blocks"
        batch.held = Held(int(head), why)

    def _note_running(self, batch: Batch) -> set[str | None]:
        """Record the running requests and copies of adapters; return the adapters in use."""
        before, loras = self._running, self._loras
        self._running = {r.request_id: None for r in self.scheduler.running}
        if not self.config.enable_lora:
            return set()
        loras.begin(())
        for i in before:
            if i not in self._running:
                loras.leave(self._lora(i))
        for i in self._running:
            if i not in before:
                loras.enter(self._lora(i))
        batch.lora_loads = loras.load()
        return {self._lora(i) for i in self._running} - {None}

    def _explain_adapters(self, batch: Batch, waiting: Any, used: set[str | None]) -> None:
        """Record the requests whose adapter has no slot, up to the first one without blocks."""
        for request in waiting:
            i = request.request_id
            if i in self._failed:
                break
            lora = self._lora(i)
            if lora and lora not in used and len(used) >= self.config.max_loras:
                batch.aside[int(i)] = "adapter"

    def _explain_running(self, batch: Batch, rows: Mapping[str, int], *, spent: bool) -> None:
        for r in self.scheduler.running:
            if r.request_id in rows:
                continue
            unfinished = r.num_computed_tokens < r.num_tokens
            if spent or unfinished or batch.preempted:
                batch.aside[int(r.request_id)] = "budget" if spent else "rule"

    def _lora(self, i: str) -> str | None:
        prompt = self._prompts.get(i)
        return prompt.lora if prompt else None

    def complete(
        self, accepted: Mapping[int, int], ended: Sequence[int], copied: Sequence[int]
    ) -> Completion:
        engine, launched = self.engine, self._in_flight.popleft()
        had = {i: engine.outputs(i) for i in launched.emits if not engine.is_over(i)}
        counts = {i: 1 + accepted.get(int(i), 0) for i in launched.emits}
        engine.deliver(
            launched, counts, [name_of(i) for i in ended], engine.worker.report_done(copied)
        )
        completion = Completion([], [])
        live = self.scheduler.requests
        for i, outputs in had.items():
            request = live.get(i)
            over = request is None or request.is_finished()
            if request is None or over or request.num_output_tokens > outputs:
                completion.delivered.append(int(i))
                self._delivered += 1
            if over:
                completion.finished.append(int(i))
        for number in completion.finished:
            self._forget(name_of(number))
        return completion

    def _forget(self, i: str) -> None:
        if i in self._running:
            del self._running[i]
            self._loras.leave(self._lora(i))
        self._prompts.pop(i, None)

    def counts(self) -> Counts:
        scheduler = self.scheduler
        running = len(scheduler.running)
        waiting = len(self._prompts) - running
        free = self.engine.pool.get_num_free_blocks()
        return waiting, running, free, self.engine.worker.pending_writes

    def waiting_ids(self) -> list[int]:
        return [int(r.request_id) for r in self.engine.waiting()]

    def running_ids(self) -> list[int]:
        return [int(r.request_id) for r in self.scheduler.running]

    def block_tables(self) -> dict[int, list[int]]:
        return {int(r.request_id): self.engine.blocks(r.request_id) for r in self.scheduler.running}

    def fingerprint(self) -> Hashable:
        requests = tuple(
            (int(i), r.num_computed_tokens, r.num_tokens, int(r.status))
            for i, r in self.scheduler.requests.items()
        )
        tables = tuple((i, *blocks) for i, blocks in self.block_tables().items())
        order = (*self.waiting_ids(), -1, *self.running_ids())
        return self._delivered, requests, order, tables


def resolved(config: VllmConfig) -> VllmConfig:
    """Return a config whose unset settings have the defaults of its release."""
    rules = find_rules(config.variant)
    knobs = ("async_scheduling", "scheduler_reserve_full_isl")
    return replace(
        config,
        enable_prefix_caching=config.caches(rules),
        **{knob: getattr(rules, knob) for knob in knobs if getattr(config, knob) is None},
    )


def _refused(config: VllmConfig) -> str | None:
    if config.rule:
        return "rule"
    if config.retains:
        return "request_retention" if config.request_retention else "pin_priority"
    return "policy" if config.policy == "vtc" else None


def _variant_of(version: str | None) -> str:
    """Return ``version`` if its rules are known, otherwise the newest known release before it."""
    release = plain_release(version or "") or ""
    with contextlib.suppress(ValueError):
        find_variant(release)
        return release
    return newest_before(version, RELEASED)


NATIVE_VLLM = NativeEngine(
    title="vLLM",
    package="vllm",
    deciding=REAL_MODULES,
    loaded=(CORE + "sched.scheduler", CORE + "sched.async_scheduler"),
    stub_imports=stub_vllm_imports,
    build=lambda knobs, native: NativeVllm(resolved(VllmConfig(**knobs)), native),
    variant_of=_variant_of,
    refused=_refused,
    options=lambda folder: read_options([folder / name for name in OPTION_FILES], OPTION_CLASSES),
)
