"""Build the requests of a case as request objects of SGLang."""

from __future__ import annotations

import importlib
from array import array
from typing import Any

from simkv.core.recording_format import RecordingLine
from simkv.native.import_stubs import ConfigStub, ImportStub, name_of


class RequestTimesStub:
    """Timestamps of a request; only the time of queue entry affects decisions."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.wait_queue_entry_time = scheduler, 0.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ImportStub()

    def set_wait_queue_entry_time(self) -> None:
        """Set the time of queue entry to the current step plus a small unique number."""
        self.scheduler.entries += 1
        self.wait_queue_entry_time = self.scheduler.clock() + self.scheduler.entries / 1e6


class SglangRequestFactory:
    """Builds SGLang's request objects and assigns an id to each distinct token."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def number(self, *what: object) -> int:
        """Return a number that identifies the arguments; equal arguments give the same number."""
        return self._numbers.setdefault(what, len(self._numbers) + 1)

    def make(self, line: RecordingLine, scheduler: Any) -> Any:
        """Build a text request, as ``handle_generate_request`` does."""
        batches = importlib.import_module("sglang.srt.managers.schedule_batch")
        tokens = array(
            "q",
            [
                self.number(s, start + i)
                for s, start, count in line["segments"]
                for i in range(count)
            ],
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
