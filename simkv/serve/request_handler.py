"""Convert validated bodies of API calls to requests of the engine, and track the calls
in flight.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import quote

import numpy as np

from simkv.core.outcome import Outcome
from simkv.core.request import Request, Segment
from simkv.core.scheduler_protocol import Refusal
from simkv.serve.error_responses import RequestError
from simkv.serve.live_simulation import ClientRequest, LiveSimulation, ServerStoppedError
from simkv.serve.partial_reply import Reply
from simkv.serve.prompt_prefixes import PromptTree
from simkv.serve.request_bodies import Body
from simkv.serve.served_scenario import SampleLength
from simkv.serve.text_tokenizers import TextTokenizer
from simkv.workload.workload_base import MAX_TOKEN_COUNT

#: Status and message for each reason why a request does not finish.
ERROR_OUTCOMES = {
    Outcome.REJECTED: (400, "the engine rejected the request"),
    Outcome.STALLED: (503, "the engine is dead"),
    Outcome.LOST: (503, "the replica of the request has failed or was removed"),
    Outcome.CUT_OFF: (503, "the server was stopped before the reply was complete"),
}
#: Maximum number of characters of an unknown model's name that the error message repeats.
LONGEST_NAME = 256
#: Maximum length of a request id in characters, because each chunk of a stream repeats the id.
LONGEST_ID = 16_384
#: Maximum size in bytes of the response header with the id, because clients reject long headers
#: (aiohttp: 8,190).
LONGEST_HEADER = 4096
#: Characters that are sent unchanged in a header; all others are percent-encoded.
_PRINTABLE = bytes(range(ord("!"), ord("~") + 1)).decode()


@dataclass(frozen=True)
class ServedModel:
    """Properties of the simulated engine that the HTTP application needs.

    ``longest`` is the maximum number of prompt and output tokens, or None. ``lengths`` samples the
    output length of requests that may end before their limit. ``loras`` lists the adapters. Clients
    select an adapter by name or, with ``lora_by_model``, as ``model:adapter``.
    """

    engine: str
    variant: str
    model: str
    texts: TextTokenizer
    longest: int | None
    lengths: SampleLength | None
    seed: int = 0
    by_priority: bool = True
    loras: Sequence[str] = ()
    lora_by_model: bool = False

    def adapter(self, model: str | None) -> str | None:
        """Return the LoRA adapter that a model name selects, or None for the base model.

        Raises RequestError if the name is unknown.
        """
        if not model or model == self.model:
            return None
        name = model.removeprefix(f"{self.model}:") if self.lora_by_model else model
        if name not in self.loras:
            shown = model if len(model) <= LONGEST_NAME else f"{model[:LONGEST_NAME]}…"
            raise RequestError(404, f"The model `{shown}` does not exist.", "model")
        return name


class Generation:
    """An API call of a client, with its prompts and the replies.

    ``request_id`` is the id from the client, or a generated id. ``response_id`` and ``model`` are
    the id and the model name in the response.
    """

    def __init__(
        self,
        prefix: str,
        called: str,
        model: str,
        prompts: list[array[int]],
        answers: list[Reply],
    ) -> None:
        self.request_id, self.response_id, self.model = called, prefix + called, model
        self.prompts = prompts
        self.replies = answers

    @property
    def headers(self) -> dict[str, str]:
        """The header ``x-request-id``, unless the id is too long for a header."""
        header = quote(self.request_id, safe=_PRINTABLE)
        return {"x-request-id": header} if len(header) <= LONGEST_HEADER else {}

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of all prompts."""
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens of all replies so far."""
        return sum(answer.tokens for answer in self.replies)

    def usage(self) -> dict[str, int]:
        """Return the token usage in the format of the API."""
        asked, given = self.prompt_tokens, self.completion_tokens
        return {
            "prompt_tokens": asked,
            "total_tokens": asked + given,
            "completion_tokens": given,
        }


@dataclass
class RequestHandler:
    """Send the prompts of API calls to the engine, and find calls by name.

    A call becomes one request per prompt. ``names`` contains the numbers of a call's requests, by
    request id. ``on_token_delay`` is called for each written token with its delay in seconds.
    """

    live: LiveSimulation
    served: ServedModel
    names: dict[str, list[int]] = field(default_factory=dict)
    on_token_delay: Callable[[float], None] = lambda _: None

    def __post_init__(self) -> None:
        self.streamed: set[int] = set()
        self._prompts: dict[int, array[int]] = {}
        self._known = PromptTree()
        self._random = np.random.default_rng(self.served.seed)
        self.in_flight = 0

    async def begin(
        self, prefix: str, name: str | None, body: Body, prompts: Sequence[array[int]]
    ) -> Generation:
        """Send the prompts of a call to the engine, and wait until the engine has received them.

        Raises RequestError if the API rejects the call. If the queue limit rejects one prompt, the
        whole call is rejected.
        """
        lora = self.served.adapter(body.model)
        if self.live.dead:
            raise RequestError(503, f"the engine is dead: {self.live.dead}")
        called = name or body.request_id or uuid.uuid4().hex
        if len(called) > LONGEST_ID:
            said = f"request_id: expected at most {LONGEST_ID} characters, got {len(called)}"
            raise RequestError(400, said, "request_id")
        await self._preflight(called, body, prompts[0], lora)
        if body.n is not None and body.n > 1:
            raise RequestError(400, "n: simkv does not model parallel sampling; expected 1", "n")
        if body.priority and not self.served.by_priority:
            said = "Got priority {} but priority scheduling is not enabled."
            raise RequestError(400, said.format(body.priority), "priority")
        limits = [self._limit(body, len(prompt)) for prompt in prompts]
        with _report_end_of_server():
            answers = await asyncio.gather(
                *(
                    self.live.submit(self._ask(body, prompt, limit, lora))
                    for prompt, limit in zip(prompts, limits, strict=True)
                )
            )
        self._name(called, answers)
        if refusals := [answer.refusal for answer in answers if answer.refusal]:
            for answer in answers:
                self.live.disconnect(answer)
                self._forget(answer.request.id)
            raise _turned_away(refusals[0])
        self.in_flight += 1
        model = lora or self.served.model
        return Generation(prefix, called, model, list(prompts), answers)

    async def _preflight(
        self, called: str, body: Body, prompt: array[int], lora: str | None
    ) -> None:
        """Raise RequestError if the queue limit would reject the call.

        A full queue is reported before an invalid prompt, as in vLLM 0.33.0 (``_preflight``).
        """

        def ask() -> ClientRequest:
            try:
                limit = self._limit(body, len(prompt))
            except RequestError:
                limit = 1
            return self._ask(body, prompt, limit, lora)

        if not len(prompt):
            return
        with _report_end_of_server():
            answer = await self.live.reject_if_full(ask)
        if answer:
            self._name(called, [answer])
            self._forget(answer.request.id)
            assert answer.refusal
            raise _turned_away(answer.refusal)

    def _name(self, called: str, answers: Sequence[Reply]) -> None:
        """Store the numbers of a call's requests for explanations."""
        if self.live.history_ended:
            self.names.clear()
        else:
            self.names[called] = [answer.request.id for answer in answers]

    def end(self, call: Generation) -> None:
        """End a call. Cancel its unfinished requests, and add its prompts and replies to the prefix
        tree.
        """
        self.in_flight -= 1
        for answer in call.replies:
            self.live.disconnect(answer, partial(self._keep_reply, answer))

    def _keep_reply(self, answer: Reply) -> None:
        number = answer.request.id
        emitted = self.served.texts.emitted(number, answer.tokens)
        self._known.add_reply(self._forget(number), emitted, f"o{number}")

    def _forget(self, number: int) -> array[int]:
        """Remove request ``number`` and return its prompt."""
        self.streamed.discard(number)
        return self._prompts.pop(number)

    def tokens(self, number: int, count: int) -> array[int]:
        """Return the first ``count`` tokens of the prompt and the output of a request in flight."""
        prompt = self._prompts.get(number, array("q"))
        emitted = self.served.texts.emitted(number, max(count - len(prompt), 0))
        return (prompt + emitted)[:count]

    def record_delay(self, due: float) -> None:
        """Record the delay of a token that was due at ``due`` and has just been written."""
        self.on_token_delay(time.monotonic() - due)

    def find(self, name: str) -> list[int]:
        """Return the numbers of the requests of a call.

        ``name`` is the id of the response, the request id, or the number of one request.
        """
        for prefix in ("", "cmpl-", "chatcmpl-"):
            if name.startswith(prefix) and (known := self.names.get(name.removeprefix(prefix))):
                return known
        number = int(name) if name.isdecimal() and len(name) < 12 else -1
        return [number] if 0 <= number < self.live.received else []

    def _limit(self, body: Body, prompt: int) -> int:
        """Return the maximum number of output tokens. Raises RequestError for invalid limits."""
        if prompt == 0:
            raise RequestError(400, "The prompt is empty.", "prompt")
        limit, longest = body.limit, self.served.longest
        if longest is not None:
            limit = max_output_tokens(longest, prompt, limit, body.limit_param)
        elif limit is None:
            limit = self._draw() if self.served.lengths else 16
        if limit < 1:
            raise RequestError(400, f"max_tokens must be at least 1, got {limit}.", "max_tokens")
        if limit > MAX_TOKEN_COUNT:
            said = f"max_tokens must be at most {MAX_TOKEN_COUNT}, got {limit}."
            raise RequestError(400, said, "max_tokens")
        if body.min_tokens > limit:
            said = f"min_tokens must be less than or equal to max_tokens={limit}, "
            raise RequestError(400, f"{said}got {body.min_tokens}.", "min_tokens")
        return limit

    def _ask(self, body: Body, prompt: array[int], limit: int, lora: str | None) -> ClientRequest:
        emits = limit
        if body.simkv.output_tokens is not None:
            emits = body.simkv.output_tokens
        elif not body.ignore_eos and self.served.lengths:
            emits = self._draw()
        return ClientRequest(
            prompt_tokens=len(prompt),
            max_tokens=limit,
            output_tokens=min(max(emits, body.min_tokens, 1), limit),
            segments=partial(self._register, prompt, bool(body.stream)),
            priority=body.priority,
            ignore_eos=body.ignore_eos,
            lora=lora,
        )

    def _register(self, prompt: array[int], streamed: bool, number: int) -> list[Segment]:
        """Store the prompt of request ``number`` and return its segments."""
        self._prompts[number] = prompt
        if streamed:
            self.streamed.add(number)
        return self._known.segments_of(prompt, f"u{number}")

    def _draw(self) -> int:
        assert self.served.lengths is not None
        return self.served.lengths(self._random)


@contextmanager
def _report_end_of_server() -> Iterator[None]:
    """Context that raises an error with status 503 if the engine dies or the server stops."""
    try:
        yield
    except ServerStoppedError as error:
        raise RequestError(503, str(error)) from None


def _turned_away(refusal: Refusal) -> RequestError:
    return RequestError(503, refusal.words, kind="Service Unavailable")


def max_output_tokens(longest: int, prompt: int, wanted: int | None, param: str) -> int:
    """Return the maximum number of output tokens.

    ``longest`` is the limit of prompt and output tokens together. Raises RequestError with the
    messages of vLLM 0.33.0 (``vllm/renderers/params.py``).
    """
    if wanted is not None and wanted > longest:
        said = f"{param}={wanted} cannot be greater than max_model_len={longest}. "
        raise RequestError(400, f"{said}Please request fewer output tokens.", param)
    if prompt > longest:
        said = (
            f"This model's maximum context length is {longest} tokens. However, your prompt "
            f"contains {prompt} input tokens, which exceeds this limit even without any output "
            "tokens. Please reduce the length of the input prompt."
        )
        raise RequestError(400, said, "input_tokens")
    return longest - prompt if wanted is None else min(wanted, longest - prompt)


def id_of(header: str | None) -> str | None:
    """Return the request id in the header ``x-request-id``."""
    if header is None:
        return None
    try:
        return header.encode("latin-1").decode()
    except UnicodeDecodeError:
        return header


def finish_reason(request: Request, tokens: int, longest: int | None) -> str:
    """Return the finish reason of a finished reply with the given number of tokens."""
    full = longest is not None and request.prompt_tokens + tokens >= longest
    return "length" if full or tokens >= request.max_tokens else "stop"
