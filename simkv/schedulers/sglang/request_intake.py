"""Arrival of requests and aborts at SGLang's loop."""

from __future__ import annotations

from dataclasses import replace

from simkv.core.block_keys import TokenContent
from simkv.core.request import Prompt, Segment
from simkv.schedulers.sglang.loop_state import LoopState
from simkv.schedulers.sglang.memory import Req
from simkv.schedulers.sglang.recv_skipper import Receiver

#: Prompt computed in place of a rejected request.
REJECTED_PROMPT = (Segment("refused", 0, 1),)


class RequestIntake:
    """Intake of requests and aborts at the loop's checks."""

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
        """Queue a request; clip its output limit to the room beside its prompt in the pool.

        A prompt of at least the pool's size less 6 tokens is truncated after that limit is
        computed, or rejected. A rejected request waits as a prompt of one token whose answer is the
        error. A request for log probabilities from beyond its end is rejected in the same way.
        """
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
        req.logprobs_from, req.refused = since, refused
        self.state.live[req.id] = req
        self.state.queue(req)

    def _drop(self, request_id: int) -> None:
        """Abort a request whose client disconnected, as AbortReq does.

        A waiting request leaves the queue and a partly computed prompt is freed, both at once. A
        running request computes one more token and is then freed; neither that token nor its end is
        reported.
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
            del state.live[req.id]


def _cut(prompt: Prompt, most: int) -> Prompt:
    """Truncate a prompt to its first ``most`` tokens."""
    if prompt.prompt_tokens <= most:
        return prompt
    pieces, left = [], most
    for stream, start, end in prompt.segments:
        pieces.append(Segment(stream, start, min(end, start + left)))
        left -= pieces[-1].end - start
    return replace(prompt, prompt_tokens=most, segments=tuple(p for p in pieces if p.end > p.start))
