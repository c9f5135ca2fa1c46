"""Driver of SGLang's own scheduler; reasons for waiting are inferred from its state."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import Batch, Completion, Held, WaitReason
from simkv.native.driver_protocol import (
    Counts,
    NativeDriver,
    NativeEngine,
    newest_before,
    read_options,
)
from simkv.native.sglang.sglang_engine import SglangEngine, computed_prefix
from simkv.native.sglang.sglang_stubs import REAL_MODULES, SETTINGS, stub_sglang_imports
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.loop_state import QUEUE_FULL
from simkv.schedulers.sglang.lora import SglangLoras
from simkv.schedulers.sglang.versions import RELEASES


class NativeSglang(NativeDriver):
    """SGLang's own scheduler as a ``NativeDriver``."""

    def __init__(self, config: SglangConfig, native: Mapping[str, Mapping[str, Any]]) -> None:
        for options in native.values():
            for name, value in options.items():
                setattr(SETTINGS, name, value)
        self.config = config
        self.engine = SglangEngine(config, time.monotonic)
        self.scheduler = self.engine.scheduler
        self.num_blocks = config.max_total_num_tokens // config.page_size
        self.pipeline_depth = 2 if self.engine.overlap else 1
        self._in_flight: deque[Any] = deque()
        self._chosen: Any = None  # the last batch
        self._prompts: dict[int, Prompt] = {}
        self._delivered = 0
        self._loras = SglangLoras(config.max_loras_per_batch, 0.0) if config.enable_lora else None

    def add(self, prompt: Prompt) -> None:
        if not prompt.segments:
            prompt = replace(prompt, segments=(Segment(f"u{prompt.id}", 0, prompt.prompt_tokens),))
        self._prompts[prompt.id] = prompt
        self.engine.add(prompt)

    def abort(self, number: int) -> None:
        if number in self._prompts:
            # without it, requests would continue until the loop receives the abort
            if self.engine.receives is None:
                self.engine.left_early.add(number)
            self.engine.unread.append(number)

    def schedule(self) -> Batch:
        engine, scheduler = self.engine, self.scheduler
        scheduler.last_batch = last = self._chosen
        engine.begin()
        engine.receive()
        chosen = engine.next_batch()
        launched = engine.rows(chosen)
        batch = Batch(launched.rows, launched.contexts)
        batch.kind = launched.kind  # type: ignore[assignment]
        batch.lost = engine.lost(self._prompts)
        for victim in (*batch.lost, *engine.retracted):
            batch.preempt(victim, None)
        batch.refused = dict.fromkeys(engine.ignored, QUEUE_FULL)
        if chosen:
            chunked = scheduler.chunked_req
            batch.emits = [int(r.rid) for r in chosen.reqs if r is not chunked]
            if self._loras:
                rows: Any = [self._prompts[i] for i, _ in launched.rows if i in self._prompts]
                batch.lora_loads = self._loras.load(rows), 0
        elif not (engine.overlap and last):
            engine.rest()
        self._in_flight.append(chosen.copy() if chosen and engine.overlap else chosen)
        self._chosen = chosen
        for i in (*batch.lost, *batch.refused):
            self._forget(i)
        self._explain(batch)
        return batch

    def _explain(self, batch: Batch) -> None:
        """Infer the reasons why requests were not scheduled, and record them in ``batch``."""
        scheduler = self.scheduler
        chunked = scheduler.chunked_req
        if chunked is not None and int(chunked.rid) not in {i for i, _ in batch.scheduled}:
            batch.aside[int(chunked.rid)] = "rule"
        if scheduler.waiting_queue:
            head = int(scheduler.waiting_queue[0].rid)
            batch.held = Held(head, self._infer_reason(batch, head))
        elif unread := self.waiting_ids():
            batch.held = Held(unread[0], "rule")

    def _infer_reason(self, batch: Batch, head: int) -> WaitReason:
        config = self.config
        used = {p.lora for i in self.running_ids() if (p := self._prompts.get(i))}
        full = len(used) >= config.max_loras_per_batch
        if self._loras and full and self._prompts[head].lora not in used:
            return "adapter"
        if len(self.running_ids()) >= config.rows:
            return "slot"
        tokens = sum(n for _, n in batch.scheduled) if batch.kind != "decode" else 0
        if tokens >= min(config.chunk or config.max_prefill_tokens, config.max_prefill_tokens):
            return "budget"
        return "blocks"

    def complete(
        self,
        accepted: Mapping[int, int],  # noqa: ARG002
        ended: Sequence[int],
        copied: Sequence[int],  # noqa: ARG002
    ) -> Completion:
        engine, done = self.engine, Completion([], [])
        batch = self._in_flight.popleft()
        if not batch:
            return done
        last = set(ended)

        def ends(i: int) -> bool:
            if i not in engine.left_early and i not in engine.refused:
                done.delivered.append(i)
                self._delivered += 1
            # a stop string ends a request regardless of other settings
            if i in last and i in engine.received:
                engine.received[i].sampling_params.ignore_eos = False
            return i in last

        for request in engine.process(batch, ends):
            i = int(request.rid)
            if i not in engine.left_early:
                (done.refused if i in engine.refused else done.finished).append(i)
            self._forget(i)
        return done

    def _forget(self, i: int) -> None:
        self._prompts.pop(i, None)
        self.engine.received.pop(i, None)

    def counts(self) -> Counts:
        memory, page = self.engine.memory, self.config.page_size
        free = memory.allocator.available_size()
        if not self.config.disable_radix_cache:
            free += memory.tree.evictable_size()
        waiting = len(self.scheduler.waiting_queue) + len(self.engine.unread)
        return waiting, len(self.running_ids()), free // page, 0

    def waiting_ids(self) -> list[int]:
        unread = [line["id"] for line in self.engine.unread if not isinstance(line, int)]
        return [int(r.rid) for r in self.scheduler.waiting_queue] + unread

    def running_ids(self) -> list[int]:
        scheduler = self.scheduler
        batches = [scheduler.running_batch, self._chosen, *self._in_flight]
        rows = [r for batch in batches if batch for r in batch.reqs]
        rows += [scheduler.chunked_req] if scheduler.chunked_req else []
        held = {int(r.rid) for r in rows if not (r.finished() or r.is_retracted)}
        return [i for i in self.engine.received if i in held]

    def block_tables(self) -> dict[int, list[int]]:
        rows, page = self.engine.memory.rows.req_to_token, self.config.page_size
        found: dict[int, list[int]] = {}
        for i in self.running_ids():
            request = self.engine.received[i]
            kv = getattr(request, "kv", None) or request  # a separate object since 0.5.22
            if kv.req_pool_idx is not None:
                slots = rows[kv.req_pool_idx, : kv.kv_allocated_len].tolist()
                found[i] = list(dict.fromkeys(slot // page for slot in slots))
        return found

    def fingerprint(self) -> Hashable:
        scheduler = self.scheduler
        rows = tuple(
            (i, len(r.output_ids), computed_prefix(r)) for i, r in self.engine.received.items()
        )
        chunked = scheduler.chunked_req
        return (
            self._delivered,
            tuple(self.waiting_ids()),
            rows,
            chunked and chunked.rid,
            scheduler.new_token_ratio_tracker.current,
            self.counts(),
            _counters(scheduler),
            _counters(getattr(scheduler, "prefill_delayer", None)),
            _counters(getattr(self.engine.receives, "__self__", None)),
        )


def _counters(component: Any) -> Hashable:
    """Return the counters that make a component wait, such as the prefill delayer."""
    state = getattr(component, "_curr_state", None)  # counters of the prefill delayer
    left = getattr(component, "_prefill_decode_interval_remaining", None)
    return left, getattr(component, "_counter", None), getattr(state, "delayed_count", None)


def _options(folder: Path) -> dict[str, str]:
    """Return the fields of ``ServerArgs``, which are in files of their own since 0.5.23."""
    fields = sorted((folder / "sglang/srt/arg_groups/fields").glob("*.py"))
    found = read_options([folder / "sglang/srt/server_args.py"], ["ServerArgs"])
    return found | dict.fromkeys(read_options(fields, None), "ServerArgs")


def _refused(config: SglangConfig) -> str | None:
    if config.dp_size > 1:
        return "dp_size"
    return "schedule_policy" if config.schedule_policy == "vtc" else None


NATIVE_SGLANG = NativeEngine(
    title="SGLang",
    package="sglang",
    deciding=REAL_MODULES,
    loaded=[
        f"sglang.srt.managers.{n}" for n in ("scheduler", "schedule_policy", "prefill_delayer")
    ],
    stub_imports=stub_sglang_imports,
    build=lambda knobs, native: NativeSglang(SglangConfig(**knobs), native),
    variant_of=lambda version: newest_before(version, RELEASES),
    refused=_refused,
    options=_options,
    subfolders=(".", "python"),
    entry="get_next_batch_to_run",
)
