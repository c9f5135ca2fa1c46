"""What comes to SGLang's loop: requests, and word of clients that have gone."""

from __future__ import annotations

from dataclasses import replace

from simkv.core.block_keys import TokenContent
from simkv.core.request import Prompt, Segment
from simkv.schedulers.sglang.loop_state import LoopState
from simkv.schedulers.sglang.memory import Req
from simkv.schedulers.sglang.recv_skipper import Receiver

#: What is computed for a request that is refused.
REJECTED_PROMPT = (Segment("refused", 0, 1),)


class RequestIntake:
    """Takes requests and aborts when the loop looks at what came."""

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
        """Look at what came, if it is time to."""
        last = self.state.last
        for message in self.receiver.receive(last.kind if last else None):
            if isinstance(message, Prompt):
                self._take(message)
            else:
                self._drop(message)

    def _take(self, prompt: Prompt) -> None:
        """Queue a request, its output limit clipped to what the pool can hold beside its prompt.

        A prompt of the pool's size less 6 tokens or more is cut after that limit is known, or
        refused: then it waits as a prompt of one token whose answer says so. So does one that asks
        for log probabilities from behind its end.
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
        """The client has gone, as by an AbortReq.

        A waiting request leaves the queue and one in the middle of its prompt is freed, both at
        once. A running one computes one more token and is freed with it; neither that token nor
        its end is reported.
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
    """The first ``most`` tokens of a prompt."""
    if prompt.prompt_tokens <= most:
        return prompt
    pieces, left = [], most
    for stream, start, end in prompt.segments:
        pieces.append(Segment(stream, start, min(end, start + left)))
        left -= pieces[-1].end - start
    return replace(prompt, prompt_tokens=most, segments=tuple(p for p in pieces if p.end > p.start))
