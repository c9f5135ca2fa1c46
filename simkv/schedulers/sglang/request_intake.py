"""Arrival of requests and aborts at SGLang's scheduler loop."""

from __future__ import annotations

from dataclasses import replace

from simkv.core.block_keys import TokenContent
from simkv.core.request import Prompt, Segment
from simkv.core.scheduler_protocol import BatchKind
from simkv.schedulers.sglang.loop_state import LoopState
from simkv.schedulers.sglang.memory import Req

#: Weight of an iteration after a batch other than a decode; after a decode or no batch it is 1.
PREFILL_WEIGHT = 1000


class Receiver:
    """Messages that the scheduler loop has not received: new requests and aborts.

    Each iteration increases a counter by 1, or by 1000 after a prefill. When the counter reaches
    ``--scheduler-recv-interval``, the loop receives all messages and resets the counter. Source:
    ``scheduler_recv_skipper.py`` of the wheel.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        #: Whether every iteration receives messages, so that no message is delayed.
        self.always = interval == 1
        self.counter = 0
        self.unread: list[Prompt | int] = []

    def receive(self, last: BatchKind | None) -> list[Prompt | int]:
        """Begin an iteration and return the received messages in arrival order.

        ``last`` is the kind of the previous batch.
        """
        self.counter += 1 if last in (None, "decode") else PREFILL_WEIGHT
        if self.counter < self.interval:
            return []
        self.counter = 0
        received, self.unread = self.unread, []
        return received

    @property
    def prompts(self) -> list[int]:
        """Ids of the requests that the loop has not received."""
        return [m.id for m in self.unread if isinstance(m, Prompt)] if self.unread else []

    def quiet(self, most: int) -> int:
        """Return the number of decode steps, at most ``most``, until the loop receives messages."""
        return min(most, self.interval - self.counter) if self.unread else most

    def skip(self, steps: int) -> None:
        """Count ``steps`` iterations without messages, each after a decode."""
        self.counter = (self.counter + steps) % self.interval


#: Prompt that the engine computes in place of a rejected request.
REJECTED_PROMPT = (Segment("refused", 0, 1),)


class RequestIntake:
    """Handling of the requests and aborts that the loop receives."""

    def __init__(self, state: LoopState) -> None:
        self.state = state
        self.receiver = Receiver(state.config.scheduler_recv_interval)

    def add(self, prompt: Prompt) -> None:
        if self.receiver.always:
            self._take(prompt)
        else:
            self.receiver.unread.append(prompt)

    def abort(self, request_id: int) -> None:
        if self.receiver.always:
            self._drop(request_id)
        else:
            self.receiver.unread.append(request_id)

    def receive(self) -> None:
        """Process new messages if the receive interval has passed."""
        last = self.state.last
        for message in self.receiver.receive(last.kind if last else None):
            if isinstance(message, Prompt):
                self._take(message)
            else:
                self._drop(message)

    def _take(self, prompt: Prompt) -> None:
        """Queue a request and clip its output limit to the pool size minus the prompt.

        A prompt of at least the pool size minus 6 tokens is truncated or rejected, depending on
        ``allow_auto_truncate``.
        """
        # The limit is computed before the truncation. A rejected request stays in the queue as a
        # prompt of one token, and its first token reports the error. A request is rejected in the
        # same way if it asks for log probabilities of tokens beyond its end.
        config, page = self.state.config, self.state.config.page_size
        pool, length, most = config.max_total_num_tokens, prompt.prompt_tokens, prompt.max_tokens
        fits_alone = pool - self.state.memory.round_up(length) - page - 1
        max_new = max(0, min(most, (pool - 1) - length - 1, fits_alone))
        refused = length >= pool - 6 and not config.allow_auto_truncate
        if config.allow_auto_truncate:
            prompt = _cut(prompt, pool - 6)
            length = prompt.prompt_tokens
        since = length if prompt.logprobs_from == -1 else prompt.logprobs_from
        refused = refused or (since or 0) > length
        if refused:
            prompt, since = replace(prompt, prompt_tokens=1, segments=REJECTED_PROMPT), None
        req = Req(prompt.id, prompt.prompt_tokens, max_new, prompt.ignore_eos, TokenContent(prompt))
        req.lora, req.routing_key, req.priority = prompt.lora, prompt.routing_key, prompt.priority
        req.logprobs_from, req.refused, req.client = since, refused, prompt.client
        self.state.live[req.id] = req
        self.state.queue(req)

    def _drop(self, request_id: int) -> None:
        """Abort a request whose client has disconnected, as ``AbortReq`` does.

        A waiting request or an incomplete prompt is removed at once. A running request computes one
        more token, but this token is not reported.
        """
        state = self.state
        req = state.live.get(request_id)
        if req is None:
            return
        if req is state.chunked:
            state.chunked = None
            state.end(req)
        elif req.id in state.admitted:
            req.aborted = True
        else:
            state.waiting.remove(req)
            state.forget(req, waiting=True)


def _cut(prompt: Prompt, most: int) -> Prompt:
    """Truncate a prompt to its first ``most`` tokens."""
    if prompt.prompt_tokens <= most:
        return prompt
    pieces, left = [], most
    for stream, start, end in prompt.segments:
        pieces.append(Segment(stream, start, min(end, start + left)))
        left -= pieces[-1].end - start
    return replace(prompt, prompt_tokens=most, segments=tuple(p for p in pieces if p.end > p.start))
