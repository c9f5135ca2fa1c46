"""Record decisions of the unmodified scheduler of a released vLLM package on small workloads.

The stubs for the rest of vLLM are in ``import_stubs.py``. The model is a fake: when the last known
token of a request is computed, the request emits one token, and one more for each draft that it
accepts. Releases from 0.9.0 to 0.33.0 are supported. Only the decisions are kept.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import gcd, lcm
from traceback import extract_tb
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

from simkv.conformance.decision_trace import FORMAT, DecisionTrace
from simkv.conformance.record.import_stubs import (
    CORE,
    ConfigStub,
    ImportStub,
    accepted_fields,
)
from simkv.conformance.record.recording_case import RecordingCase
from simkv.conformance.record.vllm_disk_tier import BLOCK_BYTES
from simkv.conformance.record.vllm_nixl_worker import NixlWorker, sampling_extra_args
from simkv.conformance.record.vllm_offloading_worker import FakeOffloadingWorker
from simkv.conformance.record.vllm_speculation import Speculation
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.layer_group_parser import LayerKind
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.versions import VARIANTS, find_rules, find_variant

#: Number of consecutive steps without a delivery after which the case counts as stalled. It exceeds
#: the number of tokens of the longest sequence.
MAX_IDLE_STEPS = 400

#: Constructor arguments of text requests, for releases that require them.
NO_IMAGES = dict.fromkeys(
    f"multi_modal_{what}" for what in ("inputs", "kwargs", "hashes", "placeholders")
)


class Tokens(list[int]):
    """Sampled tokens of a request, with the method ``tolist`` that 0.11.1 and 0.11.2 expect."""

    def tolist(self) -> list[int]:
        """Return the tokens as a plain list."""
        return [*self]


class RecordedBatch(NamedTuple):
    """A batch: vLLM's ``output``, the requests that emit, and the ``step`` of the decision.

    ``drafts`` are the draft tokens that the model may accept.
    """

    output: Any
    emits: list[str]
    drafts: dict[str, int]
    step: int


class VllmDriver:
    """Runs one case through vLLM's scheduler with a fake model, until no request is left or none
    makes progress."""

    def __init__(
        self,
        config: VllmConfig,
        requests: list[dict[str, Any]],
        aborts: Sequence[tuple[int, int, int]] = (),
        instead: Callable[[type], type] = lambda kind: kind,
        copying: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        self.config, self.requests, self.aborts = config, requests, aborts
        self.instead = instead
        worker = NixlWorker if config.kv_connector else FakeOffloadingWorker
        self.worker = worker(config, copying)
        self.numbers: dict[Any, int] = {}
        self.speculation = Speculation(config)
        self.scheduler = self._scheduler()
        self.worker.attach(self.scheduler)
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.left = {r["id"]: r["output_tokens"] for r in requests}
        self.accepts = {r["id"]: r.get("accepts", ()) for r in requests}
        self.drafted: set[str] = set()  # requests with drafts that the model may accept
        self.freed: list[int] = []
        manager = self.scheduler.kv_cache_manager
        manager.free = self._noting(manager.free)
        if hasattr(manager, "pop_blocks_for_free"):  # blocks are freed after the steps in flight
            manager.pop_blocks_for_free = self._noting(manager.pop_blocks_for_free)

    def _noting(self, free: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Wrap ``free`` so that the requests whose blocks it frees are recorded."""

        def noting(request: Any) -> Any:
            self.freed.append(int(request.request_id))
            return free(request)

        return noting

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield one line per ``schedule`` call, and a closing line if the run ends with unfinished
        requests.
        """
        arriving: dict[int, list[dict[str, Any]]] = {}
        for request in self.requests:
            arriving.setdefault(request["arrival_step"], []).append(request)
        alive = {r["id"] for r in self.requests}
        depth = 2 if self.config.async_scheduling else 1
        under_way: deque[Any] = deque()
        step = still = 0
        while alive:
            gone = self._abort(step, 0)
            for request in arriving.pop(step, ()):
                self.scheduler.add_request(self._request(request))
                still = 0
            gone += self._abort(step, 1)
            line, batch = self._schedule(step)
            under_way.append(batch)
            line |= {"step": step, "delivered": int(len(under_way) == depth), "finished": []}
            gone += self._abort(step, 2)
            if gone:
                line["aborted"], still = gone, 0
                alive -= set(gone)
            if line["delivered"]:
                tokens, line["finished"] = self._deliver(under_way.popleft(), alive)
                still = 0 if tokens else still + 1
            alive -= set(line["finished"])
            line["waiting"] = [int(r.request_id) for r in self._waiting()]
            line["running"] = [int(r.request_id) for r in self.scheduler.running]
            line["free_blocks"] = self.pool.get_num_free_blocks()
            yield line
            if still >= MAX_IDLE_STEPS and not arriving:
                yield {"truncated": True, "why": f"no progress: {sorted(alive)}"}
                return
            step += 1

    def _waiting(self) -> list[Any]:
        """Return the waiting requests in the order in which vLLM considers them."""
        waiting = [*self.scheduler.waiting]
        skipped = [*getattr(self.scheduler, "skipped_waiting", ())]  # 0.18 to 0.30
        holding = [*getattr(self.scheduler, "kv_holding_waiting", ())]
        if holding:
            return [*holding, *waiting]
        if self.config.policy == "priority" and skipped:
            return sorted([*skipped, *waiting])
        return [*skipped, *waiting]

    def _abort(self, step: int, phase: int) -> list[int]:
        """Abort the requests of this phase; return the ids of the requests that had not ended.

        Requests are aborted one at a time, because 0.33.0 frees the blocks of jointly aborted
        requests in the order of a set.
        """
        ids = [i for at, when, i in self.aborts if (at, when) == (step, phase)]
        there = [i for i in dict.fromkeys(ids) if not self._is_over(f"{i:04}")]
        status = importlib.import_module("vllm.v1.request").RequestStatus.FINISHED_ABORTED
        for i in there:
            self.scheduler.finish_requests(f"{i:04}", status)
        return there

    def _schedule(self, step: int) -> tuple[dict[str, Any], RecordedBatch]:
        scheduler = self.scheduler
        before = [int(r.request_id) for r in scheduler.running]
        held = {r.request_id: {*self._blocks(r.request_id)} for r in scheduler.running}
        lengths = {i: r.num_tokens for i, r in scheduler.requests.items()}
        self.freed.clear()
        if self.worker.works:
            scheduler.finished_req_ids = sorted(scheduler.finished_req_ids)
        output = scheduler.schedule()
        rows = output.num_scheduled_tokens
        live = scheduler.requests
        verified = output.scheduled_spec_decode_tokens

        def drafts(i: str) -> int:
            return len(verified.get(i, ()))

        start = {i: live[i].num_computed_tokens - n for i, n in rows.items()}
        emits = [
            i
            for i, n in rows.items()
            if start[i] + n >= lengths[i] + max(_placeholders(live[i]) - 1 - drafts(i), 0)
        ]
        # One token and its drafts, following the newest emitted token.
        decodes = [
            n - drafts(i) == 1 and start[i] >= live[i].num_prompt_tokens and i in emits
            for i, n in rows.items()
        ]
        kind = "mixed" if any(decodes) else "prefill"
        if all(decodes):
            kind = "decode" if decodes else "idle"
        after = [int(r.request_id) for r in scheduler.running]
        new = {i: [b for b in self._blocks(i) if b not in held.get(i, ())] for i in rows}
        line = {
            "scheduled": [[int(i), n] for i, n in rows.items()],
            "kind": kind,
            "preempted": self.freed.copy(),
            "ignored": [],
            "hits": [[int(i), start[i]] for i in rows if int(i) not in before],
            "running_after_schedule": after,
            "free_blocks_after_schedule": self.pool.get_num_free_blocks(),
        }
        if self.config.enable_prefix_caching:
            line["new_blocks"] = [[int(i), blocks] for i, blocks in new.items() if blocks]
            cached = sum(b.block_hash is not None for b in self.pool.blocks)
            line["cached_blocks_after_schedule"] = cached
        self.drafted -= {f"{i:04}" for i in self.freed}
        real = {i: drafts(i) if i in self.drafted else 0 for i in rows if drafts(i)}
        if verified:
            line["drafts"] = [[int(i), drafts(i)] for i in rows if drafts(i)]
            line["padding"] = sorted(int(i) for i, n in real.items() if not n)
        self.drafted = {*emits} | (self.drafted - rows.keys())
        line |= self.worker.begin(self.scheduler.connector, output, step)
        return line, RecordedBatch(output, emits, real, step)

    def _deliver(self, launched: RecordedBatch, alive: set[int]) -> tuple[int, list[int]]:
        """Deliver the batch's tokens.

        Returns the number of requests that received tokens, and the ids of the requests that ended.
        """
        output, emits, drafts, step = launched
        ids = list(output.num_scheduled_tokens)
        tokens, had = [], {i: self._outputs(i) for i in emits if int(i) in alive}
        for i in ids:
            emitted: list[int] = []
            if i in emits:
                emitted = self._emitted(i, drafts.get(i, 0))
            tokens.append(Tokens(emitted))
        self.scheduler.update_from_output(
            output,
            ConfigStub(
                sampled_token_ids=tokens,
                req_id_to_index={i: k for k, i in enumerate(ids)},
                prompt_logprobs_dict={},
                prompt_token_id_logprobs_dict={},
                kv_connector_output=self.worker.report(step),
            ),
        )
        if self.config.num_speculative_tokens and self.config.depth == 1:
            self._propose(ids, emits)
        counted = sum(self._is_over(i) or self._outputs(i) > n for i, n in had.items())
        return counted, [int(i) for i in ids if int(i) in alive and self._is_over(i)]

    def _is_over(self, i: str) -> bool:
        """Whether a request has ended; vLLM still lists it until another replica has read its
        blocks.
        """
        request = self.scheduler.requests.get(i)
        return request is None or request.is_finished()

    def _emitted(self, i: str, drafts: int) -> list[int]:
        """Return the tokens that a request emits after its newest token and ``drafts`` drafts."""
        outputs, accepts = self._outputs(i), self.accepts[int(i)]
        accepted = min(accepts[outputs % len(accepts)], drafts) if drafts and accepts else 0
        tokens = 1 + max(min(accepted, self.left[int(i)] - 1), 0)
        self.left[int(i)] -= tokens
        return [self._number(f"o{int(i)}", outputs + n) for n in range(tokens)]

    def _propose(self, ids: list[str], emits: list[str]) -> None:
        """Propose drafts for the requests in a step; with n-grams, only for requests that emit a
        token.
        """
        ngrams = self.config.speculative_method == "ngram"
        drafts = [-2] * self.config.num_speculative_tokens
        proposed = [[] if ngrams and i not in emits else drafts[:] for i in ids]
        self.scheduler.update_draft_token_ids(ConfigStub(req_ids=ids, draft_token_ids=proposed))

    def _outputs(self, i: str) -> int:
        request = self.scheduler.requests.get(i)
        return request.num_output_tokens if request else 0

    def _blocks(self, i: str) -> list[int]:
        """Return the ids of a request's blocks, one layer group after another, without freed
        blocks.
        """
        manager = self.scheduler.kv_cache_manager
        coordinator = getattr(manager, "coordinator", None)  # 0.9.0 has only one layer group
        managers = (
            coordinator.single_type_managers if coordinator else [manager.single_type_manager]
        )
        tables = [manager.req_to_blocks.get(i, []) for manager in managers]
        null = self.pool.null_block
        return [block.block_id for table in tables for block in table if block is not null]

    def _number(self, *what: object) -> int:
        """Return a number for these arguments; equal arguments give the same number."""
        return self.numbers.setdefault(what, len(self.numbers) + 1)

    def _hashes(self, request: Any) -> list[bytes]:
        """Return the keys of full blocks of ``request`` that have no key yet."""
        size, keys = self.config.block_size, list(request.block_hashes)
        known, ahead = len(keys), self.speculation.hash_lookahead
        lora = request.lora_request.lora_name if request.lora_request else ""
        for index in range(known, (request.num_tokens - ahead) // size):
            tokens = tuple(request.all_token_ids[index * size : (index + 1) * size + ahead])
            number = self._number(keys[-1] if keys else b"", tokens, lora)
            keys.append(number.to_bytes(8, "big"))
        return keys[known:]

    def _request(self, line: dict[str, Any]) -> Any:
        tokens = [
            self._number(stream, position)
            for stream, start, end in line["prompt_segments"]
            for position in range(start, end)
        ]
        last = self._number(f"o{line['id']}", line["output_tokens"] - 1)
        sampling = ConfigStub(
            max_tokens=line["max_tokens"],
            min_tokens=0,
            eos_token_id=-1,
            ignore_eos=False,
            # A proxy requests a number of tokens from the prefill replica.
            stop_token_ids=() if line.get("kv") == "send" else (last,),
            structured_outputs=None,
            extra_args=sampling_extra_args(line, self.config.block_size),
            prompt_logprobs=None,
            logprobs=None,
            repetition_detection=None,
            skip_reading_prefix_cache=False,
        )
        kind = importlib.import_module("vllm.v1.request").Request
        name, lora = line.get("lora"), None
        if name is not None:  # vLLM numbers adapters from 1
            number = 1 + sorted({r.get("lora") or name for r in self.requests}).index(name)
            lora = ConfigStub(lora_int_id=number, adapter_id=number, lora_name=name, name=name)
        return kind(
            request_id=f"{line['id']:04}",
            prompt_token_ids=tokens,
            sampling_params=sampling,
            lora_request=lora,
            **accepted_fields(
                kind,
                arrival_time=line["timestamp"],
                priority=line["priority"],
                eos_token_id=-1,
                pooling_params=None,
                block_hasher=self._hashes,
                **NO_IMAGES,
            ),
        )

    def _scheduler(self) -> Any:
        config = self.config
        knobs = {
            k: v for k, v in dataclasses.asdict(config).items() if k not in ("name", "variant")
        }
        # vLLM settings that simkv does not have are off.
        off = dict.fromkeys(("max_num_encoder_input_tokens", "encoder_cache_size"), 0)
        rules = find_rules(config.variant)
        if rules.reserves_draft_slots and config.num_speculative_tokens:
            off["max_num_scheduled_tokens"] = config.most_scheduled(rules)
        scheduler_config = ConfigStub(
            knobs | off | {"chunked_prefill_enabled": config.enable_chunked_prefill}
        )
        interface = importlib.import_module("vllm.v1.kv_cache_interface")
        groups = [
            interface.KVCacheGroupSpec(
                layer_names=[f"layer {g}"], kv_cache_spec=_layers(interface, config, kind)
            )
            for g, kind in enumerate(config.layer_kinds)
        ]
        sizes = {group.kv_cache_spec.block_size for group in groups}
        kind = interface.KVCacheConfig
        default = accepted_fields(
            kind, prefix_cache_retention_interval=0
        )  # as in vllm/config/cache.py
        tensors = (
            [ConfigStub(size=BLOCK_BYTES * config.num_gpu_blocks)] if self.worker.works else []
        )
        cache = kind(config.num_gpu_blocks, tensors, groups, **default)
        managers = importlib.import_module(CORE + "single_type_kv_cache_manager")
        if hasattr(managers, "register_all_kvcache_specs"):
            managers.register_all_kvcache_specs(ImportStub())
        name = (
            "async_scheduler.AsyncScheduler" if config.async_scheduling else "scheduler.Scheduler"
        )
        module, cls = name.split(".")
        kind = self.instead(getattr(importlib.import_module(CORE + "sched." + module), cls))
        return kind(
            vllm_config=ConfigStub(
                scheduler_config=scheduler_config,
                cache_config=ConfigStub(
                    knobs | {"mamba_cache_mode": _mode(config), "cache_dtype": "auto"}
                ),
                model_config=ConfigStub(
                    model="any", max_model_len=config.max_model_len, get_total_num_kv_heads=int
                ),
                lora_config=ConfigStub(max_loras=config.max_loras) if config.enable_lora else None,
                parallel_config=ConfigStub(
                    decode_context_parallel_size=1,
                    prefill_context_parallel_size=1,
                    pipeline_parallel_size=1,
                    data_parallel_size=1,
                    data_parallel_rank=0,
                    data_parallel_index=0,
                    tensor_parallel_size=1,
                    world_size=1,
                    rank=0,
                ),
                observability_config=ConfigStub(per_request_spec_decode_metrics="none"),
                aux_output_config=ConfigStub(),
                ec_manager_config=ConfigStub(get_encoder_cache_manager_obj=lambda: None),
                max_in_flight_tokens=config.depth * config.max_num_batched_tokens,
                **self.speculation.given,
                **self.worker.given,
            ),
            kv_cache_config=cache,
            structured_output_manager=ConfigStub(
                should_advance=lambda *_, **__: False,
                accept_tokens=lambda *_, **__: True,
                validate_tokens=lambda _, tokens: tokens,
                grammar_bitmask=lambda *_, **__: None,
            ),
            log_stats=False,
            **accepted_fields(kind, block_size=lcm(*sizes), hash_block_size=gcd(*sizes)),
            mm_registry=SimpleNamespace(supports_multimodal_inputs=lambda _: False),
        )


def _mode(config: VllmConfig) -> str:
    """Return the caching mode for recurrent states that vLLM determines at start-up."""
    return config.states(find_rules(config.variant)) if config.has_states else "none"


def _layers(interface: Any, config: VllmConfig, group: LayerKind) -> Any:
    """Return vLLM's KV cache specification of a layer group."""
    window, chunk, states, size = group
    kind = interface.SlidingWindowSpec if window else interface.FullAttentionSpec
    kind = interface.MambaSpec if states else kind
    kind = interface.ChunkedLocalAttentionSpec if chunk else kind
    spec = kind.__new__(kind)
    for known in dataclasses.fields(kind):
        unset = known.default is dataclasses.MISSING
        object.__setattr__(spec, known.name, None if unset else known.default)
    mode = _mode(config)
    size = config.max_model_len if states and mode == "none" else size
    given: dict[str, Any] = {"block_size": size, "sliding_window": window or None}
    given |= {"attention_chunk_size": chunk or None}
    if states:  # the same size as a block of the other groups
        given = {"block_size": size, "mamba_cache_mode": mode, "shapes": (), "dtypes": ()}
        given["num_speculative_blocks"] = config.num_speculative_tokens
        if config.mamba_prefill_checkpoints:
            given |= {"num_prefill_checkpoint_blocks": 1, "prefill_checkpoint_alignment": 1}
    for name, value in given.items():
        object.__setattr__(spec, name, value)
    return spec


def _placeholders(request: Any) -> int:
    """Return the number of tokens in flight; 0 in releases without asynchronous scheduling."""
    return getattr(request, "num_output_placeholders", 0)


def record(
    case: RecordingCase,
    version: str,
    name: str,
    instead: Callable[[type], type] = lambda kind: kind,
) -> DecisionTrace:
    """Record the decisions of vLLM's scheduler in a case.

    ``instead`` maps the scheduler's class to the class to record, such as a subclass.
    """
    rules = find_rules(case.config.variant)
    knobs = dataclasses.asdict(case.config)
    for knob in ("async_scheduling", "scheduler_reserve_full_isl", "enable_prefix_caching"):
        if knobs[knob] is None:
            knobs[knob] = getattr(rules, knob)
    header = {
        "format": FORMAT,
        "engine": "vllm",
        "variant": case.config.variant,
        "source": describe_source(version),
        "case": name,
        "config": knobs,
        "requests": case.requests,
    }
    header |= {"aborts": case.aborts} if case.aborts else {}
    header |= case.header_fields
    lines: list[dict[str, Any]] = []
    config = dataclasses.replace(case.config, **knobs)
    driver = VllmDriver(config, case.requests, case.aborts, instead, case.header_fields)
    try:
        for line in driver.lines():
            lines.append(line)  # keeps the lines before an error
    except (TypeError, AssertionError) as error:
        if not _dies(rules, error):
            raise
        lines.append({"truncated": True, "why": f"raised {error!r}"})
    closing = lines.pop() if "truncated" in lines[-1] else None
    return DecisionTrace(name, header, lines, closing)


def _dies(rules: VllmRules, error: Exception) -> bool:
    """Return whether schedulers with these rules are known to raise this error."""
    if isinstance(error, AssertionError):
        where = extract_tb(error.__traceback__)[-1].line or ""
        if "len(offload_keys) == len(offload_block_ids)" in where:
            return rules.stores_at_end and not rules.offers_computed_only
        if "assert (len(scheduled_new_reqs) + len(scheduled_resumed_reqs)" in where:
            return rules.asserts_victims_run
        return not rules.counts_all_loras and "len(scheduled_loras) <=" in where
    return not rules.breaks_ties_by_id and "'<' not supported" in str(error)


def describe_source(version: str) -> str:
    """Return the repository and location of a release's code, if known."""
    try:
        return VARIANTS[find_variant(version)].source
    except ValueError:
        return f"vllm-project/vllm ({version}, wheel), vllm/v1/core"
