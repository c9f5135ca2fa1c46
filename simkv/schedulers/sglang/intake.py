"""What comes to SGLang's loop: requests, and word of clients that have gone."""

from __future__ import annotations

from simkv.core.prefix import Content
from simkv.core.request import Prompt
from simkv.schedulers.sglang.memory import Req
from simkv.schedulers.sglang.receive import Receiver
from simkv.schedulers.sglang.state import LoopState


class Intake:
    """Takes requests and aborts when the loop looks at what came.

    ``refused`` are requests that were too long, since the last batch.
    """

    def __init__(self, state: LoopState) -> None:
        self.state = state
        self.receiver = Receiver(state.config.scheduler_recv_interval)
        self.refused: list[int] = []

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

    def refusals(self) -> list[int]:
        """Ids that were refused since this was asked last."""
        refused, self.refused = self.refused, []
        return refused

    def _take(self, prompt: Prompt) -> None:
        """Queue a request, its output limit clipped to what the pool can hold beside its prompt.

        A prompt of the pool's size less 6 tokens or more is refused with the next batch.
        """
        state = self.state
        pool, page = state.config.max_total_num_tokens, state.config.page_size
        length = prompt.prompt_tokens
        if length >= pool - 6:
            self.refused.append(prompt.id)
            return
        fits_alone = pool - state.memory.up(length) - page - 1
        max_new = max(0, min(prompt.max_tokens, (pool - 1) - length - 1, fits_alone))
        req = Req(prompt.id, length, max_new, prompt.ignore_eos, Content(prompt), prompt.lora)
        req.priority = prompt.priority
        state.live[req.id] = req
        state.queue(req)

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
