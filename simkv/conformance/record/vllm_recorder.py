"""Record the decisions of a released vLLM scheduler (``simkv/native/vllm``) with a fake model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from traceback import extract_tb
from typing import Any

from simkv.conformance.decision_trace import DecisionTrace
from simkv.conformance.record.case_run import CaseRun, record_run
from simkv.conformance.record.recording_case import RecordingCase
from simkv.native.vllm.vllm_driver import resolved
from simkv.native.vllm.vllm_engine import Launched, VllmEngine
from simkv.schedulers.vllm.recording import RECORDING
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.versions import VARIANTS, find_rules, find_variant


class VllmRun(CaseRun):
    """The run of vLLM's scheduler; ``instead`` replaces the scheduler's class, for example."""

    def __init__(
        self, case: RecordingCase, instead: Callable[[type], type] = lambda kind: kind
    ) -> None:
        super().__init__(case)
        self.engine = VllmEngine(self.config, instead, case.header_fields)
        self.scheduler, self.pool = self.engine.scheduler, self.engine.pool
        self.accepts = {r["id"]: r.get("accepts", ()) for r in case.requests}
        self._in_flight: deque[tuple[int, Launched]] = deque()

    def arrive(self, request: dict[str, Any]) -> None:
        self.engine.add(RECORDING.prompt(request), request.get("kv"))

    def abort(self, number: int) -> None:
        """Abort one request; vLLM frees the blocks of several requests in the order of a set."""
        self.engine.abort(number)

    def iterate(self, gone: list[int]) -> tuple[dict[str, Any], int]:
        line, launched = self._schedule(self.step)
        self._in_flight.append((self.step, launched))
        line |= {"delivered": int(len(self._in_flight) == self.config.depth), "finished": []}
        gone += self.leave(2)
        tokens = 0
        if line["delivered"]:
            tokens, line["finished"] = self._deliver(*self._in_flight.popleft(), self.alive)
        line["waiting"] = [int(r.request_id) for r in self.engine.waiting()]
        line["running"] = [int(r.request_id) for r in self.scheduler.running]
        line["free_blocks"] = self.pool.get_num_free_blocks()
        return line, tokens

    def _schedule(self, step: int) -> tuple[dict[str, Any], Launched]:
        engine, scheduler = self.engine, self.scheduler
        before = [int(r.request_id) for r in scheduler.running]
        held = {r.request_id: {*engine.blocks(r.request_id)} for r in scheduler.running}
        launched = engine.launch()
        rows, start = launched.rows, launched.start
        after = [int(r.request_id) for r in scheduler.running]
        new = {i: [b for b in engine.blocks(i) if b not in held.get(i, ())] for i in rows}
        line = {
            "scheduled": [[int(i), n] for i, n in rows.items()],
            "kind": launched.kind,
            "preempted": engine.freed.copy(),
            "ignored": [],
            "hits": [[int(i), start[i]] for i in rows if int(i) not in before],
            "running_after_schedule": after,
            "free_blocks_after_schedule": self.pool.get_num_free_blocks(),
        }
        if self.config.enable_prefix_caching:
            line["new_blocks"] = [[int(i), blocks] for i, blocks in new.items() if blocks]
            cached = sum(b.block_hash is not None for b in self.pool.blocks)
            line["cached_blocks_after_schedule"] = cached
        if launched.output.scheduled_spec_decode_tokens:
            line["drafts"] = [[int(i), n] for i, n in launched.verified.items() if n]
            line["padding"] = sorted(int(i) for i, n in launched.drafts.items() if not n)
        line |= engine.worker.begin(scheduler.connector, launched.output, step)
        return line, launched

    def _deliver(self, step: int, launched: Launched, alive: set[int]) -> tuple[int, list[int]]:
        """Deliver tokens; return the number of requests with new tokens, and the ended requests."""
        engine = self.engine
        had = {i: engine.outputs(i) for i in launched.emits if int(i) in alive}
        counts = {i: self._emitted(i, launched.drafts.get(i, 0)) for i in launched.emits}
        ended = [i for i, n in counts.items() if engine.outputs(i) + n >= self.outputs[int(i)]]
        engine.deliver(launched, counts, ended, engine.worker.report(step))
        counted = sum(engine.is_over(i) or engine.outputs(i) > n for i, n in had.items())
        ids = list(launched.rows)
        return counted, [int(i) for i in ids if int(i) in alive and engine.is_over(i)]

    def _emitted(self, i: str, drafts: int) -> int:
        """Return the number of tokens that a request emits if ``drafts`` drafts were verified."""
        outputs, accepts = self.engine.outputs(i), self.accepts[int(i)]
        accepted = min(accepts[outputs % len(accepts)], drafts) if drafts and accepts else 0
        # vLLM may have discarded tokens of a preempted request, which the model emits again
        left = self.outputs[int(i)] - outputs
        tokens: int = 1 + max(min(accepted, left - 1), 0)
        return tokens


def record(
    case: RecordingCase,
    version: str,
    name: str,
    instead: Callable[[type], type] = lambda kind: kind,
) -> DecisionTrace:
    """Record the decisions of vLLM's scheduler in a case; ``instead`` replaces its class."""
    rules = find_rules(case.config.variant)
    config = resolved(case.config)
    run = VllmRun(case._replace(config=config), instead)

    def reason(error: Exception) -> str | None:
        return f"raised {error!r}" if _dies(rules, error) else None

    return record_run(run, name, describe_source(version), asdict(config), reason)


def _dies(rules: VllmRules, error: Exception) -> bool:
    """Return whether schedulers with these rules are known to raise this error."""
    if isinstance(error, AssertionError):
        where = extract_tb(error.__traceback__)[-1].line or ""
        if "len(offload_keys) == len(offload_block_ids)" in where:
            return rules.stores_at_end and not rules.offers_computed_only
        if "assert (len(scheduled_new_reqs) + len(scheduled_resumed_reqs)" in where:
            return rules.asserts_victims_run
        return not rules.counts_all_loras and "len(scheduled_loras) <=" in where
    unordered = isinstance(error, TypeError) and "'<' not supported" in str(error)
    return unordered and not rules.breaks_ties_by_id


def describe_source(version: str) -> str:
    """Return the repository and location of a release's code, if known."""
    try:
        return VARIANTS[find_variant(version)].source
    except ValueError:
        return f"vllm-project/vllm ({version}, wheel), vllm/v1/core"
