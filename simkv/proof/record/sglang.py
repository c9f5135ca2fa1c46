"""Drives the scheduler in a wheel of SGLang, unmodified, through small workloads, step by step.

What is called each step is what the wheel's event loops call: receive, choose the next batch, let
it run (a fake model), process the results, with overlap those of the batch before. What stands in
for the rest of SGLang is in ``sglang_hollow.py``; the prefix cache is its Python core. Wheels of
0.5.15, 0.5.20, 0.5.22 and 0.5.23 can be driven. Nothing of SGLang is kept but what it decided.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from simkv.core.recording import Line
from simkv.proof.conform.trace import FORMAT, DecisionTrace
from simkv.proof.record.case import DrawnCase
from simkv.proof.record.hollow import Hollow, Off, called, taken
from simkv.proof.record.sglang_hollow import PARALLEL, SCHEDULE, Disaggregation
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.recording import RECORDING
from simkv.schedulers.sglang.versions import VARIANTS

#: The token that ends a request.
END = 1
#: A case in which so many steps launch nothing never ends.
STANDSTILL = 50


class LoraName(str):
    """The name of an adapter; a set of them is in the order of the names."""

    def __hash__(self) -> int:
        return ord(self) - ord("a")


class InOrder:
    """An admission that preempts in the order of ids: the engine has them in a set, in none."""

    def preempt_to_schedule(self: Any, *given: Any) -> bool:
        before = len(self.preempt_list)
        done = bool(super().preempt_to_schedule(*given))  # type: ignore[misc]
        self.preempt_list[before:] = sorted(self.preempt_list[before:], key=lambda r: r.rid)
        return done


class Times:
    """The times of a request, by a clock that tells the step; only one of them decides anything."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.wait_queue_entry_time = scheduler, 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Hollow()

    def set_wait_queue_entry_time(self) -> None:
        """No two are put into the queue at the same time."""
        self.scheduler.entries += 1
        self.wait_queue_entry_time = self.scheduler.step + self.scheduler.entries / 1e6


def record(case: DrawnCase, version: str, name: str) -> DecisionTrace:
    """What the scheduler that is driven decides in a case."""
    header = {
        "format": FORMAT,
        "engine": "sglang",
        "variant": case.config.variant,
        "source": VARIANTS[case.config.variant].source,
        "case": name,
        "config": RECORDING.knobs(case.config),
        "requests": case.requests,
    }
    header |= {"aborts": case.aborts} if case.aborts else {}
    if version != case.config.variant:
        header["source"] = f"PyPI sglang=={version}"
    lines: list[Line] = []
    try:
        with contextlib.redirect_stdout(None):  # it prints its tree before it dies
            for line in SglangDriver(case).lines():
                lines.append(line)  # one by one: those before an error count
    except RuntimeError as error:
        closing: Line = {"truncated": True, "why": f"raised {str(error).splitlines()[0]}"}
        return DecisionTrace(Path(f"{name}.jsonl.gz"), header, lines, closing)
    truncated = lines.pop() if "truncated" in lines[-1] else None
    return DecisionTrace(Path(f"{name}.jsonl.gz"), header, lines, truncated)


class SglangDriver:
    """One case: SGLang's scheduler and a fake model, as many steps as it takes."""

    def __init__(self, case: DrawnCase) -> None:
        self.config, self.requests, self.aborts = case.config, case.requests, case.aborts
        self.overlap = not case.config.disable_overlap_schedule
        self.numbers: dict[Any, int] = {}
        self.left = {r["id"]: r["output_tokens"] for r in case.requests}
        self.received: dict[int, Any] = {}
        self.left_early: set[int] = set()
        self.ignored: list[int] = []
        self.retracted: list[int] = []
        self.scheduler = self._scheduler()

    def lines(self) -> Iterator[Line]:
        """One line per step; a closing one if nothing goes on any more."""
        arriving: dict[int, list[Line]] = {}
        for request in self.requests:
            arriving.setdefault(request["arrival_step"], []).append(request)
        alive = {r["id"] for r in self.requests}
        scheduler, under_way = self.scheduler, deque[Any]()
        step = still = 0
        lost: list[int] = []
        while alive or under_way:
            scheduler.step = float(step)
            gone = self._leave(step, 0, alive)
            for request in arriving.pop(step, ()):
                self._receive(request)
            gone += self._leave(step, 1, alive)
            alive -= set(gone)
            self.retracted.clear()
            self.ignored.clear()
            batch, last = self._next(), scheduler.last_batch
            line = {"step": step, **self._launched(batch)}
            line |= {"aborted": gone} if gone else {}
            lost += self._lost(line, alive)
            line |= {"lost": [*lost]} if lost else {}
            if batch:
                under_way.append(batch.copy() if self.overlap else batch)
            finished: list[int] = []
            if under_way and (last if self.overlap else batch):
                finished = [i for i in self._process(under_way.popleft()) if i in alive]
            elif (not batch and not self.overlap) or not (batch or last):
                self._rest()
            scheduler.last_batch = batch
            line |= {"finished": finished, **self._left(batch)}
            yield line
            alive -= {*finished, *line["ignored"], *lost}
            leaving = any(at > step for at, _, _ in self.aborts)
            still = 0 if batch or arriving or leaving else still + 1
            if still > STANDSTILL:
                yield {"truncated": True, "why": f"no progress: {sorted(alive)}"}
                return
            step += 1
        if lost:
            yield {"truncated": True, "why": f"requests left every queue: {lost}"}

    def _lost(self, line: Line, alive: set[int]) -> list[int]:
        """Who was preempted in this step and is in no queue any more; notes the preemption."""
        waiting = set(map(id, self.scheduler.waiting_queue))
        lost = [
            i
            for i, r in sorted(self.received.items())
            if r.is_retracted and i in alive and id(r) not in waiting
        ]
        line["preempted"] = [*lost, *line["preempted"]]
        return lost

    def _leave(self, step: int, phase: int, alive: set[int]) -> list[int]:
        """The loop hears of clients that leave now; returns those who were there."""
        ids = [i for at, when, i in self.aborts if (at, when) == (step, phase)]
        there = [i for i in dict.fromkeys(ids) if i in alive & self.received.keys()]
        self.left_early.update(there)
        for i in there:
            self.scheduler.abort_request(Off(rid=f"{i:04}"))
        return there

    def _next(self) -> Any:
        """What ``event_loop_normal`` and ``event_loop_overlap`` do before the launch."""
        scheduler = self.scheduler
        held = {"running_batch": scheduler.running_batch, "last_batch": scheduler.last_batch}
        batch = scheduler.get_next_batch_to_run(**called(scheduler.get_next_batch_to_run, held))
        if hasattr(batch, "batch_to_run"):  # a plan: before 0.5.20 it put the rest in its place
            scheduler.running_batch, batch = batch.running_batch, batch.batch_to_run
        scheduler.cur_batch = batch  # where an older one looks for whom to abort
        if batch and batch.extend_num_tokens:  # as ``run_batch`` does
            scheduler.processed_tokens_counter += batch.extend_num_tokens
        if batch and self.overlap:
            scheduler.result_queue.append((batch.copy(), None))
        return batch

    def _launched(self, batch: Any) -> Line:
        rows: list[list[int]] = []
        contexts: list[int] = []
        kind = "idle"
        if batch:
            mixed = batch.forward_mode.is_mixed()
            kind = "mixed" if mixed else "decode" if batch.forward_mode.is_decode() else "prefill"
            decoding = set(map(id, batch.decoding_reqs or ())) if mixed else set()
            for r, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
                one = kind == "decode" or id(r) in decoding
                start = end - 1 if one else _prefix(r)
                rows.append([int(r.rid), end - start])
                contexts.append(start)
        chunked = self.scheduler.chunked_req
        return {
            "scheduled": rows,
            "kind": kind,
            "preempted": [*self.retracted],
            "ignored": [*self.ignored],
            "chunked": None if chunked is None else int(chunked.rid),
            "prefix_lens": contexts,
        }

    def _process(self, batch: Any) -> list[int]:
        """Give the batch its tokens; who has ended by them, in the order of its rows."""
        import torch

        scheduler, emitted = self.scheduler, []
        going = [r for r in batch.reqs if not r.finished()]
        for r in batch.reqs:
            i, token = int(r.rid), 0
            if not (r.finished() or r.is_retracted or r.inflight_middle_chunks > 0):
                self.left[i] -= 1
                token = self._number(f"o{i}", len(r.output_ids)) if self.left[i] else END
            emitted.append(token)
        result = Off(
            next_token_ids=torch.tensor(emitted, dtype=torch.int64),
            get_num_generated_tokens=lambda size: size,
            logits_output=Off(),
        )
        processor = scheduler.batch_result_processor
        if batch.forward_mode.is_decode():
            processor.process_batch_result_decode(batch, result)
        else:
            processor.process_batch_result_prefill(batch, result)
        if self.overlap:
            scheduler.result_queue.popleft()
        return [int(r.rid) for r in going if r.finished()]

    def _rest(self) -> None:
        """What ``on_idle`` does to the ratio, if nothing is there at all."""
        scheduler = self.scheduler
        if not (scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.chunked_req):
            scheduler.new_token_ratio_tracker.reset()

    def _left(self, batch: Any) -> Line:
        scheduler = self.scheduler
        rows = list(scheduler.running_batch.reqs)
        if batch and not batch.forward_mode.is_decode():
            rows += [r for r in batch.reqs if r is not batch.chunked_req]
        line = {
            "waiting": [int(r.rid) for r in scheduler.waiting_queue],
            "running": [int(r.rid) for r in rows if not r.finished()],
            "free_blocks": self.allocator.available_size() // self.config.page_size,
            "new_token_ratio": scheduler.new_token_ratio_tracker.current,
            "batch_is_full": bool(scheduler.running_batch.batch_is_full),
            "processed_tokens": scheduler.processed_tokens_counter,
        }
        if not self.config.disable_radix_cache:
            line["evictable"] = self.tree.evictable_size()
        return line

    def _abort(self, _: Any, request: Any) -> None:
        """The client is told that its request was given up, if it has not left."""
        if int(request.rid) not in self.left_early:
            self.ignored.append(int(request.rid))

    def _number(self, *what: object) -> int:
        """The same token for the same thing; none ends a request."""
        return self.numbers.setdefault(what, len(self.numbers) + END + 1)

    def _receive(self, line: Line) -> None:
        """What ``handle_generate_request`` does to a request of text."""
        batches = importlib.import_module("sglang.srt.managers.schedule_batch")
        tokens = array(
            "q",
            [
                self._number(s, start + i)
                for s, start, count in line["segments"]
                for i in range(count)
            ],
        )
        sampling = Off(
            max_new_tokens=line["max_tokens_requested"],
            min_new_tokens=0,
            ignore_eos=line["ignore_eos"],
            stop_strs=[],
            stop_regex_strs=[],
        )
        lora = line.get("lora")
        request = batches.Req(
            f"{line['id']:04}",
            "",
            tokens,
            sampling,
            eos_token_ids={END},
            vocab_size=1 << 40,
            lora_id=None if lora is None else LoraName(lora),
            priority=line.get("priority", 0),
        )
        request.time_stats, request.tokenizer = Times(self.scheduler), None
        self.received[line["id"]] = request
        self.scheduler.init_req_max_new_tokens(request)
        self.scheduler._add_request_to_queue(request)

    def _scheduler(self) -> Any:
        config = self.config
        _set(config)
        module: Any = importlib.import_module("sglang.srt.managers.scheduler")
        policies: Any = importlib.import_module("sglang.srt.managers.schedule_policy")
        policies.CLIP_MAX_NEW_TOKENS = config.clip_max_new_tokens_estimation
        for name in ("check", "deprioritize"):
            limit = getattr(config, f"in_batch_prefix_caching_{name}_threshold")
            setattr(policies, f"IN_BATCH_PREFIX_CACHING_{name.upper()}_THRESHOLD", limit)

        class Bare(module.Scheduler):  # type: ignore[misc]
            """The scheduler before anything was set up; what is not given is None."""

            def __init__(self) -> None: ...

            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)

            def _add_request_to_queue(inner, request: Any, is_retracted: bool = False) -> None:
                if is_retracted or request.is_retracted:
                    self.retracted.append(int(request.rid))
                super()._add_request_to_queue(request, is_retracted)

            def send_abort_output(inner, output: Any, request: Any) -> None:
                self._abort(output, request)

        module.PrefillAdder = type("Adder", (InOrder, policies.PrefillAdder), {})
        scheduler = Bare()
        self._give_memory()
        for name, value in self._parts().items():
            setattr(scheduler, name, value)
        for part in ("running_status", "chunked_prefill", "schedule_policy"):
            getattr(module.Scheduler, f"init_{part}")(scheduler)
        scheduler.result_queue = deque()
        scheduler.enable_skip_finishing_decode = self.overlap  # as the overlap loop begins
        results = "sglang.srt.managers.scheduler_components.batch_result_processor"
        kind = importlib.import_module(results).SchedulerBatchResultProcessor
        given = dict.fromkeys(kind.__dataclass_fields__) | {
            name: getattr(scheduler, name) for name in kind.__dataclass_fields__
        }
        scheduler.batch_result_processor = kind(**given)
        return scheduler

    def _give_memory(self) -> None:
        """The wheel's own row table, token pool and prefix cache, of this case's sizes."""
        import torch

        config, pools = self.config, "sglang.srt.mem_cache."
        size, page = config.max_total_num_tokens, config.page_size
        rest = (torch.float16, "cpu", Hollow(), False)
        if page == 1:
            tokens = importlib.import_module(pools + "allocator.token")
            self.allocator = tokens.TokenToKVPoolAllocator(size, *rest)
        else:
            paged = importlib.import_module(pools + "allocator.paged")
            self.allocator = paged.PagedTokenToKVPoolAllocator(size, page, *rest)
            self.allocator.use_triton_kernels = False
        rows = importlib.import_module(pools + "memory_pool").ReqToTokenPool
        self.rows = rows(config.rows, size + 64, "cpu", False)
        params = importlib.import_module(pools + "cache_init_params").CacheInitParams
        given = {
            "disable": config.disable_radix_cache,
            "req_to_token_pool": self.rows,
            "token_to_kv_pool_allocator": self.allocator,
            "page_size": page,
            **taken(params, tree_core_backend="python", eviction_policy="lru"),
        }
        chunks = _real(pools + "chunk_cache", "ChunkCache")
        if not _real("sglang.srt.mem_cache.unified_cache.components", "ComponentType"):
            radix = importlib.import_module(pools + "radix_cache").RadixCache
            kind = chunks if config.disable_radix_cache and config.chunk > 0 else radix
        else:
            parts = importlib.import_module(pools + "unified_cache.components").ComponentType
            given["tree_components"] = (parts.FULL,)
            unified = importlib.import_module(pools + "unified_radix_cache").UnifiedRadixCache
            kind = chunks if chunks and config.disable_radix_cache else unified
        self.tree = kind(params(**given))

    def _delayer(self) -> Any:
        """The wheel's own, of whom waits for free rows."""
        module = importlib.import_module("sglang.srt.managers.min_free_slots_delayer")
        config = self.config
        least = module.resolve_min_free_slots(config.min_free_slots_delay, config.rows)
        return least and module.MinFreeSlotsDelayer(least)

    def _drainer(self) -> Any:
        """The wheel's own drainer of adapters, whose clock tells the step."""
        config = self.config
        if not config.lora_drain_wait_threshold:
            return None
        module = importlib.import_module("sglang.srt.lora.lora_drainer")
        module.time = Off(monotonic=lambda: self.scheduler.step)  # type: ignore[attr-defined]
        return module.LoRADrainer(config.max_loras_per_batch, config.lora_drain_wait_threshold)

    def _parts(self) -> dict[str, Any]:
        """What the scheduler is set up with, and the parts of it that decide nothing here."""
        config = self.config
        return {
            "server_args": SCHEDULE,
            "ps": PARALLEL,
            "tree_cache": self.tree,
            "req_to_token_pool": self.rows,
            "token_to_kv_pool_allocator": self.allocator,
            "page_size": config.page_size,
            "max_total_num_tokens": config.max_total_num_tokens,
            "max_req_len": config.max_total_num_tokens - 1,
            "max_running_requests": config.rows,
            "max_prefill_tokens": config.max_prefill_tokens,
            "schedule_policy": config.schedule_policy,
            "enable_overlap": self.overlap,
            "enable_overlap_mlx": False,
            "enable_metrics": False,
            "kv_shard_widening": 1,
            "processed_tokens_counter": 0,
            "max_prefill_bs": 0,
            "entries": 0,
            "enable_priority_scheduling": config.enable_priority_scheduling,
            "schedule_low_priority_values_first": config.schedule_low_priority_values_first,
            "priority_scheduling_preemption_threshold": (
                config.priority_scheduling_preemption_threshold
            ),
            "min_free_slots_delayer": self._delayer(),
            "enable_lora": config.enable_lora,
            "lora_drainer": self._drainer(),
            "is_generation": True,
            "device": "cpu",
            "disaggregation_mode": Disaggregation.NULL,
            "spec_algorithm": SimpleNamespace(is_none=lambda: True),
            "model_config": Off(is_encoder_decoder=False, vocab_size=1 << 40),
            "beam_coordinator": Off(
                pending_member_rows=lambda _: 0,
                commit_decode=lambda _: set(),
                retire_group=lambda _: None,
            ),
            "dp_attn_adapter": Off(
                maybe_prepare_mlp_sync_batch=lambda batch, **_: batch,
                maybe_convert_decode_to_extend=lambda batch: batch,
            ),
            "ngram_embedding_manager": Off(prepare_for_forward=lambda batch, **_: batch),
            "grammar_manager": Off(
                has_waiting_grammars=lambda: False, abort_requests=lambda _: None
            ),
            "load_inquirer": Off(_get_num_pending_tokens=lambda **_: 0),
            "tp_worker": Off(
                model_runner=Off(
                    attn_backend=object(),
                    prefill_aware_swa=False,
                    lora_manager=Off(
                        validate_lora_batch=lambda ids: len(ids) <= config.max_loras_per_batch
                    ),
                )
            ),
            "output_streamer": Hollow(),
            "ipc_channels": Off(send_to_tokenizer=Off(send_output=self._abort)),
            "metrics_reporter": Off(
                num_retracted_reqs=0,
                num_generated_tokens=0,
                forward_ct_decode=0,
                report_decode_stats=lambda *_, **__: None,
                report_prefill_stats=lambda *_, **__: None,
            ),
        }


def _set(config: SglangConfig) -> None:
    """Put the knobs where SGLang looks for them."""
    knobs = (
        "schedule_conservativeness prefill_max_requests enable_mixed_chunk max_prefill_tokens "
        "chunked_prefill_size prefill_decode_interval prefill_decode_interval_min_bs "
        "schedule_low_priority_values_first disable_priority_preemption retraction_policy"
    )
    for knob in knobs.split():
        setattr(SCHEDULE, knob, getattr(config, knob))
    SCHEDULE.page_size = config.page_size
    for place in (PARALLEL, SCHEDULE):
        place.pp_max_micro_batch_size = config.rows
    for name, value in {
        "INIT_NEW_TOKEN_RATIO": config.init_new_token_ratio,
        "MIN_NEW_TOKEN_RATIO_FACTOR": config.min_new_token_ratio_factor,
        "NEW_TOKEN_RATIO_DECAY_STEPS": config.new_token_ratio_decay_steps,
        "RETRACT_DECODE_STEPS": config.retract_decode_steps,
        "CLIP_MAX_NEW_TOKENS_ESTIMATION": config.clip_max_new_tokens_estimation,
    }.items():
        os.environ[f"SGLANG_{name}"] = str(value)


def _real(module: str, name: str) -> Any:
    """What the wheel has under this name, or None."""
    found = getattr(importlib.import_module(module), name, None)
    return found if isinstance(found, type) and not issubclass(found, Hollow) else None


def _prefix(request: Any) -> int:
    """Tokens that had KV before this prefill; before 0.5.22 a request had their places."""
    known = getattr(request, "prefix_len", None)
    return len(request.prefix_indices) if known is None else int(known)
