"""Record decisions of the unmodified scheduler of a released vLLM package on small workloads.

The driver and its stubs are in ``simkv/native``. The model is a fake: when the last known token of
a request is computed, the request emits one token, and one more for each draft that it accepts.
Releases from 0.9.0 to 0.33.0 are supported. Only the decisions are kept.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from traceback import extract_tb
from types import MappingProxyType
from typing import Any

from simkv.conformance.decision_trace import FORMAT, DecisionTrace
from simkv.conformance.record.recording_case import RecordingCase
from simkv.core.request import Prompt, Segment
from simkv.native.import_stubs import name_of
from simkv.native.vllm.vllm_engine import Launched, VllmEngine
from simkv.schedulers.vllm.config import VllmConfig
from simkv.schedulers.vllm.release_rules import VllmRules
from simkv.schedulers.vllm.versions import VARIANTS, find_rules, find_variant

#: Number of consecutive steps without a delivery after which the case counts as stalled. It exceeds
#: the number of tokens of the longest sequence.
MAX_IDLE_STEPS = 400


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
        self.engine = VllmEngine(config, instead, copying)
        self.scheduler, self.pool = self.engine.scheduler, self.engine.pool
        self.left = {r["id"]: r["output_tokens"] for r in requests}
        self.accepts = {r["id"]: r.get("accepts", ()) for r in requests}

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield one line per ``schedule`` call, and a closing line if the run ends with unfinished
        requests.
        """
        arriving: dict[int, list[dict[str, Any]]] = {}
        for request in self.requests:
            arriving.setdefault(request["arrival_step"], []).append(request)
        alive = {r["id"] for r in self.requests}
        depth = 2 if self.config.async_scheduling else 1
        under_way: deque[tuple[int, Launched]] = deque()
        step = still = 0
        while alive:
            gone = self._abort(step, 0)
            for request in arriving.pop(step, ()):
                self.engine.add(prompt_of(request), request)
                still = 0
            gone += self._abort(step, 1)
            line, launched = self._schedule(step)
            under_way.append((step, launched))
            line |= {"step": step, "delivered": int(len(under_way) == depth), "finished": []}
            gone += self._abort(step, 2)
            if gone:
                line["aborted"], still = gone, 0
                alive -= set(gone)
            if line["delivered"]:
                tokens, line["finished"] = self._deliver(*under_way.popleft(), alive)
                still = 0 if tokens else still + 1
            alive -= set(line["finished"])
            line["waiting"] = [int(r.request_id) for r in self.engine.waiting()]
            line["running"] = [int(r.request_id) for r in self.scheduler.running]
            line["free_blocks"] = self.pool.get_num_free_blocks()
            yield line
            if still >= MAX_IDLE_STEPS and not arriving:
                yield {"truncated": True, "why": f"no progress: {sorted(alive)}"}
                return
            step += 1

    def _abort(self, step: int, phase: int) -> list[int]:
        """Abort the requests of this phase; return the ids of the requests that had not ended.

        Requests are aborted one at a time, because 0.33.0 frees the blocks of jointly aborted
        requests in the order of a set.
        """
        ids = [i for at, when, i in self.aborts if (at, when) == (step, phase)]
        there = [i for i in dict.fromkeys(ids) if not self.engine.is_over(name_of(i))]
        for i in there:
            self.engine.abort(i)
        return there

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
        """Deliver the batch's tokens.

        Returns the number of requests that received tokens, and the ids of the requests that ended.
        """
        engine = self.engine
        had = {i: engine.outputs(i) for i in launched.emits if int(i) in alive}
        counts = {i: self._emitted(i, launched.drafts.get(i, 0)) for i in launched.emits}
        ended = [i for i in counts if self.left[int(i)] == 0]
        engine.deliver(launched, counts, ended, engine.worker.report(step))
        counted = sum(engine.is_over(i) or engine.outputs(i) > n for i, n in had.items())
        ids = list(launched.rows)
        return counted, [int(i) for i in ids if int(i) in alive and engine.is_over(i)]

    def _emitted(self, i: str, drafts: int) -> int:
        """Return the number of tokens that a request emits after its newest token and ``drafts``
        drafts.
        """
        outputs, accepts = self.engine.outputs(i), self.accepts[int(i)]
        accepted = min(accepts[outputs % len(accepts)], drafts) if drafts and accepts else 0
        tokens: int = 1 + max(min(accepted, self.left[int(i)] - 1), 0)
        self.left[int(i)] -= tokens
        return tokens


def prompt_of(line: dict[str, Any]) -> Prompt:
    """Return the prompt of a case's request."""
    segments = tuple(Segment(*segment) for segment in line["prompt_segments"])
    return Prompt(
        line["id"],
        sum(s.end - s.start for s in segments),
        line["max_tokens"],
        arrival=line["timestamp"],
        priority=line["priority"],
        segments=segments,
        lora=line.get("lora"),
    )


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
