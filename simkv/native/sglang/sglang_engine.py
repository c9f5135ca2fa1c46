"""Drive the unmodified SGLang scheduler as its event loops do, with a fake model."""

from __future__ import annotations

import contextlib
import importlib
from array import array
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from simkv.core.recording_format import RecordingLine
from simkv.core.request import Prompt
from simkv.native.import_stubs import (
    ConfigStub,
    ImportStub,
    Stub,
    accepted_fields,
    name_of,
    numbering,
)
from simkv.native.sglang.sglang_scheduler_setup import (
    SglangReleaseMemory,
    build_sglang_scheduler,
    recv_skipper,
)
from simkv.schedulers.sglang.config import SglangConfig
from simkv.schedulers.sglang.recording import RECORDING


class RequestTimesStub(Stub):
    """Timestamps of a request; only the time of queue entry affects decisions."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.wait_queue_entry_time = scheduler, 0.0

    def _missing(self, _: str) -> Any:
        return ImportStub()

    def set_wait_queue_entry_time(self) -> None:
        """Set the time of queue entry to the current step plus a small unique number."""
        self.scheduler.entries += 1
        self.wait_queue_entry_time = self.scheduler.clock() + self.scheduler.entries / 1e6


def make_request(number: Callable[..., int], line: RecordingLine, scheduler: Any) -> Any:
    """Build a text request, as ``handle_generate_request`` does."""
    batches = importlib.import_module("sglang.srt.managers.schedule_batch")
    tokens = array(
        "q",
        [number(s, start + i) for s, start, count in line["segments"] for i in range(count)],
    )
    sampling = ConfigStub(
        max_new_tokens=line["max_tokens_requested"],
        min_new_tokens=0,
        ignore_eos=line["ignore_eos"],
        stop_strs=[],
        stop_regex_strs=[],
    )
    request = batches.Req(
        name_of(line["id"]),
        "",
        tokens,
        sampling,
        eos_token_ids=set(),  # the last token is added when it is emitted
        vocab_size=1 << 40,
        lora_id=line.get("lora"),
        priority=line.get("priority", 0),
        routing_key=line.get("routing_key"),
        return_logprob=line.get("logprobs_from") is not None,
        top_logprobs_num=0,
    )
    request.time_stats, request.tokenizer = RequestTimesStub(scheduler), None
    scheduler.init_req_max_new_tokens(request)
    _validate(request, line.get("logprobs_from"), scheduler)
    return request


def _validate(request: Any, since: int | None, scheduler: Any) -> None:
    """Truncate a prompt that is too long, or mark the request as rejected, as SGLang does."""
    checks: Any = importlib.import_module("sglang.srt.managers.utils")
    limit, cuts = scheduler.max_req_input_len, scheduler.allow_auto_truncate
    if why := checks.validate_input_length(request, limit, cuts):
        request.set_finish_with_abort(why)
        return
    if since is not None:
        request.logprob_start_len = len(request.origin_input_ids) if since == -1 else since
    if request.logprob_start_len > len(request.origin_input_ids):
        request.logprob_start_len = -1
        request.set_finish_with_abort("logprob_start_len is higher than the number of tokens")


class LaunchedRows(NamedTuple):
    """Requests of a launched batch with their token counts, and the kind of the batch."""

    rows: list[tuple[int, int]]
    contexts: list[int]
    kind: str


class SglangEngine:
    """SGLang's scheduler with the given settings; ``clock`` returns the time in seconds.

    ``received`` has the requests by id; ``refused`` are too long. The current step rejects the
    requests in ``ignored`` and preempts those in ``retracted``. The clients of ``left_early`` have
    left, and SGLang removed those in ``aborted`` from its queue.
    """

    def __init__(self, config: SglangConfig, clock: Callable[[], float]) -> None:
        self.config = config
        self.overlap = not config.disable_overlap_schedule
        self.number = numbering()
        self.received: dict[int, Any] = {}
        self.refused: set[int] = set()
        self.left_early: set[int] = set()
        self.aborted: set[int] = set()
        self.ignored: list[int] = []
        self.retracted: list[int] = []
        self.unread: list[RecordingLine | int] = []
        self.memory = SglangReleaseMemory(config)
        self.scheduler = build_sglang_scheduler(
            config,
            self.memory,
            clock,
            lambda request: self.retracted.append(int(request.rid)),
            self._gave_up,
        )
        self.receives = recv_skipper()

    def begin(self) -> None:
        """Begin a step."""
        self.retracted.clear()
        self.ignored.clear()

    def add(self, prompt: Prompt) -> None:
        """Send a request; the loop receives it at its next check."""
        self.unread.append({"id": prompt.id, **RECORDING.shown(prompt)})

    def lost(self, alive: Collection[int]) -> list[int]:
        """Return the ids of requests that were preempted in this step and are in no queue."""
        waiting = set(map(id, self.scheduler.waiting_queue))
        return [
            i
            for i, r in sorted(self.received.items())
            if r.is_retracted and i in alive and id(r) not in waiting and i not in self.aborted
        ]

    def receive(self) -> None:
        """Process pending arrivals and aborts if SGLang's loop receives messages in this step."""
        if self.receives and not self.receives(self.scheduler.last_batch):
            return
        for message in self.unread:
            if isinstance(message, int):
                self.left_early.add(message)
                self.scheduler.abort_request(ConfigStub(rid=name_of(message)))
            else:
                request = make_request(self.number, message, self.scheduler)
                self.received[message["id"]] = request
                if request.to_finish:
                    self.refused.add(message["id"])
                self.scheduler._add_request_to_queue(request)
        self.unread.clear()

    def next_batch(self) -> Any:
        """Choose the next batch, as SGLang's event loops do before the launch."""
        scheduler = self.scheduler
        held = {"running_batch": scheduler.running_batch, "last_batch": scheduler.last_batch}
        batch = scheduler.get_next_batch_to_run(
            **accepted_fields(scheduler.get_next_batch_to_run, **held)
        )
        if hasattr(batch, "batch_to_run"):  # since 0.5.20; earlier releases set running_batch
            scheduler.running_batch, batch = batch.running_batch, batch.batch_to_run
        scheduler.cur_batch = batch  # where older releases look for requests to abort
        if batch and batch.extend_num_tokens:  # as in ``run_batch``
            scheduler.processed_tokens_counter += batch.extend_num_tokens
        if batch and self.overlap:
            scheduler.result_queue.append((batch.copy(), None))
        return batch

    def rows(self, batch: Any) -> LaunchedRows:
        """Return the rows of a launched batch, which may be None."""
        rows: list[tuple[int, int]] = []
        contexts: list[int] = []
        kind = "idle"
        if batch:
            mixed = batch.forward_mode.is_mixed()
            kind = "mixed" if mixed else "decode" if batch.forward_mode.is_decode() else "prefill"
            decoding = set(map(id, batch.decoding_reqs or ())) if mixed else set()
            for r, end in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
                one = kind == "decode" or id(r) in decoding
                start = end - 1 if one else computed_prefix(r)
                rows.append((int(r.rid), end - start))
                contexts.append(start)
        return LaunchedRows(rows, contexts, kind)

    def process(self, batch: Any, ends: Callable[[int], bool]) -> list[Any]:
        """Deliver tokens and return the requests that finish; ``ends`` detects a last token."""
        import torch

        scheduler, emitted = self.scheduler, []
        going = [r for r in batch.reqs if not r.finished()]
        for r in batch.reqs:
            i = int(r.rid)
            token = self.number(f"o{i}", len(r.output_ids))
            if not (r.finished() or r.is_retracted or r.inflight_middle_chunks > 0) and ends(i):
                r.eos_token_ids.add(token)
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

    def rest(self) -> None:
        """If there are no requests, reset the new-token ratio, as ``on_idle`` does."""
        scheduler = self.scheduler
        if not (scheduler.waiting_queue or scheduler.running_batch.reqs or scheduler.chunked_req):
            scheduler.new_token_ratio_tracker.reset()

    def _gave_up(self, _: Any, request: Any) -> None:
        """Record that SGLang aborted this request, and reject it unless its client has left."""
        self.aborted.add(int(request.rid))
        if int(request.rid) not in self.left_early:
            self.ignored.append(int(request.rid))


@contextlib.contextmanager
def _no_logprobs(batch: Any) -> Iterator[None]:
    """Disable the log probabilities of a batch, because the fake model has none."""
    asking = [x for x in (batch, *batch.reqs) if x.return_logprob]
    for x in asking:
        x.return_logprob = False
    yield
    for x in asking:
        x.return_logprob = True


def computed_prefix(request: Any) -> int:
    """Return the number of cached tokens of a request before this prefill."""
    known = getattr(request, "prefix_len", None)
    return len(getattr(request, "prefix_indices", ())) if known is None else int(known)
