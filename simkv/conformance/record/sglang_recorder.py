"""Record the unmodified scheduler of a released SGLang package on small workloads, step by step.

Each step makes the same calls as SGLang's event loops: receive requests, choose the next batch, run
it (with a fake model) and process the results (with overlap, the previous batch's results). The
scheduler is set up in ``sglang_scheduler_setup.py``, its requests are built in
``sglang_request_factory.py``, and the stubs for the rest of SGLang are in ``sglang_stubs.py``.
Releases 0.5.15, 0.5.20, 0.5.22 and 0.5.23 are supported. Only the decisions are kept.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from typing import Any

from simkv.conformance.decision_trace import FORMAT, DecisionTrace
from simkv.conformance.record.recording_case import RecordingCase
from simkv.core.recording_format import RecordingLine
from simkv.native.import_stubs import ConfigStub, accepted_arguments
from simkv.native.sglang.sglang_request_factory import EOS_TOKEN, SglangRequestFactory
from simkv.native.sglang.sglang_scheduler_setup import (
    SglangReleaseMemory,
    build_sglang_scheduler,
    recv_skipper,
)
from simkv.schedulers.sglang.recording import RECORDING
from simkv.schedulers.sglang.versions import VARIANTS

#: Number of consecutive steps without a launch after which the case counts as stalled.
MAX_IDLE_STEPS = 50


def record(case: RecordingCase, version: str, name: str) -> DecisionTrace:
    """Record the decisions of SGLang's scheduler in a case."""
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
    lines: list[RecordingLine] = []
    try:
        with contextlib.redirect_stdout(None):  # a failing scheduler prints its tree
            for line in SglangDriver(case).lines():
                lines.append(line)  # keeps the lines before an error
    except RuntimeError as error:
        closing: RecordingLine = {"truncated": True, "why": f"raised {str(error).splitlines()[0]}"}
        return DecisionTrace(name, header, lines, closing)
    truncated = lines.pop() if "truncated" in lines[-1] else None
    return DecisionTrace(name, header, lines, truncated)


class SglangDriver:
    """Runs one case through SGLang's scheduler with a fake model, until no request is left or none
    makes progress."""

    def __init__(self, case: RecordingCase) -> None:
        self.config, self.requests, self.aborts = case.config, case.requests, case.aborts
        self.overlap = not case.config.disable_overlap_schedule
        self.step = 0
        self.made = SglangRequestFactory()
        self.left = {r["id"]: r["output_tokens"] for r in case.requests}
        self.received: dict[int, Any] = {}
        self.refused: set[int] = set()
        self.left_early: set[int] = set()
        self.ignored: list[int] = []
        self.retracted: list[int] = []
        self.unread: list[RecordingLine | int] = []
        self.memory = SglangReleaseMemory(case.config)
        self.scheduler = build_sglang_scheduler(
            case.config,
            self.memory,
            lambda: float(self.step),
            lambda request: self.retracted.append(int(request.rid)),
            self._gave_up,
        )
        self.receives = recv_skipper()

    def lines(self) -> Iterator[RecordingLine]:
        """Yield one line per step, and a closing line if the run ends with unfinished requests."""
        arriving: dict[int, list[RecordingLine]] = {}
        for request in self.requests:
            arriving.setdefault(request["arrival_step"], []).append(request)
        alive = {r["id"] for r in self.requests}
        scheduler, under_way = self.scheduler, deque[Any]()
        still = 0
        lost: list[int] = []
        while alive or under_way:
            self.retracted.clear()
            self.ignored.clear()
            gone = self._leave(0, alive)
            self.unread += arriving.pop(self.step, ())
            gone += self._leave(1, alive)
            alive -= set(gone)
            self._receive()
            batch, last = self._next(), scheduler.last_batch
            line = {"step": self.step, **self._launched(batch)}
            line |= {"aborted": gone} if gone else {}
            lost += self._lost(line, alive)
            line |= {"lost": [*lost]} if lost else {}
            if batch:
                under_way.append(batch.copy() if self.overlap else batch)
            finished: list[int] = []
            if under_way and (last if self.overlap else batch):
                ended = [r for r in self._process(under_way.popleft()) if int(r.rid) in alive]
                finished = [int(r.rid) for r in ended if int(r.rid) not in self.refused]
                line["ignored"] += [int(r.rid) for r in ended if int(r.rid) in self.refused]
            elif (not batch and not self.overlap) or not (batch or last):
                self._rest()
            scheduler.last_batch = batch
            line |= {"finished": finished, **self._left(batch)}
            yield line
            alive -= {*finished, *line["ignored"], *lost}
            leaving = any(at > self.step for at, _, _ in self.aborts)
            still = 0 if batch or arriving or leaving else still + 1
            if still > MAX_IDLE_STEPS:
                yield {"truncated": True, "why": f"no progress: {sorted(alive)}"}
                return
            self.step += 1
        if lost:
            yield {"truncated": True, "why": f"requests left every queue: {lost}"}

    def _lost(self, line: RecordingLine, alive: set[int]) -> list[int]:
        """Return the ids of requests that were preempted in this step and are in no queue.

        Adds them to the preempted requests of ``line``.
        """
        waiting = set(map(id, self.scheduler.waiting_queue))
        lost = [
            i
            for i, r in sorted(self.received.items())
            if r.is_retracted and i in alive and id(r) not in waiting and i not in self.ignored
        ]
        line["preempted"] = [*lost, *line["preempted"]]
        return lost

    def _leave(self, phase: int, alive: set[int]) -> list[int]:
        """Submit the aborts of this phase; return the ids of the requests that had arrived."""
        ids = [i for at, when, i in self.aborts if (at, when) == (self.step, phase)]
        came = {r["id"] for r in self.requests if r["arrival_step"] < self.step + phase}
        there = [i for i in dict.fromkeys(ids) if i in alive & came]
        self.left_early.update(there)
        self.unread += there
        return there

    def _receive(self) -> None:
        """Process pending arrivals and aborts if SGLang's loop receives requests in this step."""
        if self.receives and not self.receives(self.scheduler.last_batch):
            return
        for message in self.unread:
            if isinstance(message, int):
                self.scheduler.abort_request(ConfigStub(rid=f"{message:04}"))
            else:
                request = self.made.make(message, self.scheduler)
                self.received[message["id"]] = request
                if request.to_finish:
                    self.refused.add(message["id"])
                self.scheduler._add_request_to_queue(request)
        self.unread.clear()

    def _next(self) -> Any:
        """Choose the next batch, as ``event_loop_normal`` and ``event_loop_overlap`` do before the
        launch.
        """
        scheduler = self.scheduler
        held = {"running_batch": scheduler.running_batch, "last_batch": scheduler.last_batch}
        batch = scheduler.get_next_batch_to_run(
            **accepted_arguments(scheduler.get_next_batch_to_run, held)
        )
        if hasattr(batch, "batch_to_run"):  # since 0.5.20; earlier releases set running_batch
            scheduler.running_batch, batch = batch.running_batch, batch.batch_to_run
        scheduler.cur_batch = batch  # where older releases look for requests to abort
        if batch and batch.extend_num_tokens:  # as in ``run_batch``
            scheduler.processed_tokens_counter += batch.extend_num_tokens
        if batch and self.overlap:
            scheduler.result_queue.append((batch.copy(), None))
        return batch

    def _launched(self, batch: Any) -> RecordingLine:
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

    def _process(self, batch: Any) -> list[Any]:
        """Deliver the batch's tokens; return the requests that finish, in the order of the
        batch.
        """
        import torch

        scheduler, emitted = self.scheduler, []
        going = [r for r in batch.reqs if not r.finished()]
        for r in batch.reqs:
            i, token = int(r.rid), 0
            if not (r.finished() or r.is_retracted or r.inflight_middle_chunks > 0):
                self.left[i] -= 1
                ends = not self.left[i] and i not in self.refused
                token = EOS_TOKEN if ends else self.made.number(f"o{i}", len(r.output_ids))
            emitted.append(token)
        result = ConfigStub(
            next_token_ids=torch.tensor(emitted, dtype=torch.int64),
            get_num_generated_tokens=lambda size: size,
            logits_output=ConfigStub(),
        )
        processor = scheduler.batch_result_processor
        with _no_logprobs(batch):
            if batch.forward_mode.is_decode():
                processor.process_batch_result_decode(batch, result)
            else:
                processor.process_batch_result_prefill(batch, result)
        if self.overlap:
            scheduler.result_queue.popleft()
        return [r for r in going if r.finished()]

    def _rest(self) -> None:
        """If there are no requests, reset the new-token ratio as ``on_idle`` does."""
        scheduler = self.scheduler
        if not (scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.chunked_req):
            scheduler.new_token_ratio_tracker.reset()

    def _left(self, batch: Any) -> RecordingLine:
        scheduler = self.scheduler
        rows = list(scheduler.running_batch.reqs)
        if batch and not batch.forward_mode.is_decode():
            rows += [r for r in batch.reqs if r is not batch.chunked_req]
        line = {
            "waiting": [int(r.rid) for r in scheduler.waiting_queue],
            "running": [int(r.rid) for r in rows if not r.finished()],
            "free_blocks": self.memory.allocator.available_size() // self.config.page_size,
            "new_token_ratio": scheduler.new_token_ratio_tracker.current,
            "batch_is_full": bool(scheduler.running_batch.batch_is_full),
            "processed_tokens": scheduler.processed_tokens_counter,
        }
        if not self.config.disable_radix_cache:
            line["evictable"] = self.memory.tree.evictable_size()
        return line

    def _gave_up(self, _: Any, request: Any) -> None:
        """Record that SGLang aborted this request, unless its client has left."""
        if int(request.rid) not in self.left_early:
            self.ignored.append(int(request.rid))


@contextlib.contextmanager
def _no_logprobs(batch: Any) -> Iterator[None]:
    """Within the context, disable log probabilities of a batch, because the fake model has none."""
    asking = [x for x in (batch, *batch.reqs) if x.return_logprob]
    for x in asking:
        x.return_logprob = False
    yield
    for x in asking:
        x.return_logprob = True


def _prefix(request: Any) -> int:
    """Return the number of cached tokens before this prefill."""
    known = getattr(request, "prefix_len", None)
    return len(request.prefix_indices) if known is None else int(known)
